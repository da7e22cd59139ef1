"""Every name that may appear in a command line, an environment or a file, and what it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from server.cli.flag import Flag
from server.cli.flags import all_flags
from server.cli.removed import FOREIGN, SPELLINGS, Foreign, Spelling

Target = Flag | Spelling | Foreign


@dataclass(frozen=True, slots=True)
class Named:
    """What a name stands for; `on` is False for the negation of a switch."""

    target: Target
    on: bool = True

    @property
    def takes_value(self) -> bool:
        match self.target:
            case Flag(kind=kind):
                return kind.takes_value
            case Spelling() | Foreign():
                return self.on and self.target.takes_value


class Names:
    def __init__(self) -> None:
        self.flags = {flag.key: flag for flag in all_flags()}
        self.targets: tuple[Target, ...] = (*self.flags.values(), *SPELLINGS, *FOREIGN)
        self._by_name: dict[str, Named] = {}
        for target in self.targets:
            for name in target.names:
                self._by_name[name] = Named(target)
            for name in target.off:
                self._by_name[name] = Named(target, on=False)

    def find(self, name: str) -> Named | None:
        """The meaning of a name as written on a command line. As in llama.cpp, `_` counts as `-` in long names."""
        return self._by_name.get(name.replace("_", "-") if name.startswith("--") else name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def nearest(self, name: str) -> list[str]:
        """Up to three names like this one, the closest first."""
        return close_to(name.replace("_", "-"), self._by_name)


def close_to(word: str, words: Iterable[str], cutoff: float = 0.6) -> list[str]:
    import difflib  # only for a message on the way out

    return difflib.get_close_matches(word, list(words), n=3, cutoff=cutoff)


def did_you_mean(words: list[str]) -> str:
    """ "; did you mean A, B or C?", or nothing."""
    if not words:
        return ""
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f"; did you mean {listed}?"
