"""docs/flags.md and the flag table say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.flags import all_flags
from server.cli.names import Names
from server.cli.reference import tables, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m server.cli.reference docs/flags.md"


def test_every_flag_has_its_row() -> None:
    of_server = tables().partition("### `python -m server")[0]  # sub-commands may have flags of the same name
    rows = [line for line in of_server.splitlines() if line.startswith("| `")]
    for flag in all_flags():
        (row,) = [row for row in rows if f"`--{flag.key}`" in row.split(" | ")[0].replace("| ", "", 1).split(", ")[-1]
                  or f"`--{flag.key}`" in row.split(" | ")[0]]  # fmt: skip
        assert flag.help.replace("|", "\\|") in row
        assert flag.action or f"`{flag.env}`" in row


def test_every_known_name_is_on_the_page() -> None:
    text = tables()
    assert [name for name in Names() if f"`{name}`" not in text] == []


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        with_tables("# Flags\n")
