"""Tables of sub-commands: in columns for files and pipes, with rich's lines and colors on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO


def size_text(n_bytes: int) -> str:
    """1,000 bytes are a kB, as on the hub and on disks."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]


def rich_table(heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None) -> str:
    """`styles`: by the text of a cell."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    with StringIO() as out:
        Console(file=out, force_terminal=True).print(table)
        return out.getvalue().strip("\n")
