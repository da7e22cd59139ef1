"""What the user gave: one entry for every mention of a flag, whatever it was mentioned in, with its value read and
checked. Names that are not the server's own get their answer here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from server.cli.flag import Flag
from server.cli.names import Named, Names
from server.cli.removed import Answer, Foreign, Spelling
from server.cli.values import BadValue, Kind, Switch
from server.errors import ConfigError


class Rank(IntEnum):
    """A higher rank wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True, slots=True)
class Given:
    """`where` names the place as the user wrote it: "--ctx-size", "LLAMA_ARG_CTX_SIZE", "ctx-size in glm.toml"."""

    flag: Flag
    value: Any
    rank: Rank
    where: str


@dataclass(slots=True)
class Collector:
    """Takes mentions in any order; `given` and `warnings` are its results."""

    names: Names
    given: list[Given] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def take(self, named: Named, text: str | None, rank: Rank, where: str) -> None:
        """One mention; `text` None: none was given. Raises ConfigError when it cannot be."""
        match named.target:
            case Flag() as flag:
                self._take_flag(flag, named.on, text, rank, where)
            case Spelling() as spelling:
                self._take_spelling(spelling, named.on, text, rank, where)
            case Foreign() as foreign:
                self._answer(foreign, named.on, text, where)

    def _take_flag(self, flag: Flag, on: bool, text: str | None, rank: Rank, where: str) -> None:
        value = read_value(flag.kind, "on" if text is None else text, where, secret=flag.secret)
        if isinstance(flag.kind, Switch) and not on:
            value = not value
        self.given.append(Given(flag, value, rank, where))

    def _take_spelling(self, spelling: Spelling, on: bool, text: str | None, rank: Rank, where: str) -> None:
        flag = self.names.flags[spelling.sets]
        if spelling.convert:
            self.given.append(Given(flag, read_value(spelling.convert, text or "", where), rank, where))
            return
        if text is not None and not read_value(Switch(), text, where):
            on = not on
        setting = spelling.text if on else spelling.off_text
        if setting is None:
            return
        if spelling.warning:
            self.warnings.append(f"{where} stands for {flag.long_name} {setting}; {spelling.warning}")
        self.given.append(Given(flag, read_value(flag.kind, setting, where), rank, where))

    def _answer(self, foreign: Foreign, on: bool, text: str | None, where: str) -> None:
        answer = foreign.answer if on else foreign.off_answer
        if foreign.takes_value:
            if text is not None and text.strip().lower() in foreign.same_values:
                return
        elif text is not None and not read_value(Switch(), text, where):
            answer = foreign.off_answer if on else foreign.answer
        match answer:
            case Answer.SAME:
                return
            case Answer.IGNORED:
                self.warnings.append(f"{where} has no effect here: {foreign.why}")
            case Answer.REFUSED:
                raise ConfigError(f"{where} cannot be used: {foreign.why}")


def read_value(kind: Kind, text: str, where: str, *, secret: bool = False) -> Any:
    try:
        return kind.parse(text)
    except BadValue as bad:
        shown = "…" if secret and text else text
        raise ConfigError(f"{where} is '{shown}', but must be {bad}; for example {kind.sample}") from None
