"""API keys from the command line and the key file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.options import ApiKey
from server.cli.keys import api_keys
from server.errors import ConfigError
from tests.cli.reading import config_of

FILE = """
# the team's keys
s3cret-a name=alice
s3cret-b   name=batch max-jobs=1 priority=10   # the nightly run
s3cret-c
"""


def test_a_key_may_have_a_name_a_limit_and_a_priority(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    arguments = ["--api-key-file", str(file), "--api-key", "first", "--max-jobs-per-key", "3"]
    assert config_of(model, *arguments).http.api_keys == (
        ApiKey("first", "key 1", max_jobs=3),
        ApiKey("s3cret-a", "alice", max_jobs=3),
        ApiKey("s3cret-b", "batch", max_jobs=1, priority=10),
        ApiKey("s3cret-c", "key 4", max_jobs=3),
    )


def test_what_the_file_says_of_a_key_wins() -> None:
    assert api_keys(["k"], "k name=alice\nk\nk name=alice\n", "f", 0) == (ApiKey("k", "alice"),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("s3cret alice", "f, line 2, has something behind its key"),
        ("s3cret owner=alice", "f, line 2, has something behind its key"),
        ("s3cret name=a name=b", "has name= twice"),
        ("s3cret name=", "name must be 1 to 64 letters"),
        ("s3cret name=ä", "name must be 1 to 64 letters"),
        ("s3cret max-jobs=-1", "max-jobs must be a whole number from 0"),
        ("s3cret max-jobs=all", "max-jobs must be a whole number from 0"),
        ("s3cret priority=1.5", "priority must be a whole number"),
        ("s3cret priority=99999999", "priority must be a whole number"),
        ("known name=b", "f, line 2, gives the key of f, line 1, other settings"),
    ],
)
def test_a_wrong_line_is_told_by_its_number_and_never_shows_the_key(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        api_keys([], f"known name=a\n{line}\n", "f", 0)
    assert words in caught.value.message
    assert "s3cret" not in caught.value.message


@given(st.text(max_size=80))
def test_any_text_is_keys_or_an_error(text: str) -> None:
    try:
        keys = api_keys([], text, "f", 0)
    except ConfigError:
        return
    assert len({key.secret for key in keys}) == len(keys)
    assert all(key.secret == key.secret.strip() != "" for key in keys)
