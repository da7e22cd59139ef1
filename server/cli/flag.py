"""What a flag is: its names, its environment variable, its kind of value, its default and its line of help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.cli.values import Kind

LLAMA_PREFIX = "LLAMA_ARG_"
OWN_PREFIX = "GLMSERVE_"


@dataclass(frozen=True, slots=True)
class Flag:
    """`key` is the first long name without its dashes: the name in files, in printed configurations and in Settings.
    `off` are the names that switch a switch off. `default` None: unset."""

    key: str
    names: tuple[str, ...]
    kind: Kind
    default: Any
    help: str  # one line: it must fit beside the names
    env: str
    note: str = ""  # what only docs/flags.md says
    off: tuple[str, ...] = ()
    main: bool = False  # part of the short help
    secret: bool = False  # never shown
    bare: str | None = None  # the value where none follows
    bare_is_old: bool = True  # leaving the value out is an old command line's way, and warned of
    action: bool = False  # does something and ends, or steers the command line itself; not part of a configuration

    @property
    def long_name(self) -> str:
        return f"--{self.key}"


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    flags: tuple[Flag, ...]


def flag(
    names: str,
    kind: Kind,
    default: Any,
    help: str,
    *,
    note: str = "",
    llama: str | None = None,
    env: str | None = None,
    off: str = "",
    main: bool = False,
    secret: bool = False,
    bare: str | None = None,
    bare_is_old: bool = True,
    action: bool = False,
) -> Flag:
    """`names` and `off` are separated by spaces; `llama` is what follows LLAMA_ARG_ in llama.cpp's variable, if any."""
    all_names = tuple(names.split())
    key = next(name for name in all_names if name.startswith("--"))[2:]
    own = OWN_PREFIX + key.replace("-", "_").upper()
    variable = env or (LLAMA_PREFIX + llama if llama else own)
    return Flag(
        key, all_names, kind, default, help, variable, note, tuple(off.split()), main, secret, bare, bare_is_old, action
    )
