"""The kinds of values that flags take: how a text becomes a value, what the rule is, and how the value is shown.

A kind's `parse` gets one text as the command line, an environment variable or a file gave it and raises BadValue, whose
message completes the sentence "... must be ...". `plain` turns a value into what TOML can carry, so that a printed
configuration can be read back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

_TRUE = frozenset({"on", "enabled", "true", "1", "yes"})
_FALSE = frozenset({"off", "disabled", "false", "0", "no"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")


class BadValue(Exception):
    """The text breaks the kind's rule; the message says what the value must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A text as it is. Base of the other kinds."""

    repeats: ClassVar[bool] = False  # several occurrences add up instead of the last one counting
    takes_value: ClassVar[bool] = True

    metavar: str = "TEXT"
    sample: str = "TEXT"
    may_be_empty: bool = False

    @property
    def rule(self) -> str:
        return "a text that is not empty"

    def parse(self, text: str) -> Any:
        if not text and not self.may_be_empty:
            raise BadValue(self.rule)
        return text

    def plain(self, value: Any) -> Any:
        return value

    def join(self, items: list[str]) -> list[str]:
        """The texts that a list in a file stands for, to be parsed one after another. Raises BadValue: not a list."""
        raise BadValue(f"{self.rule}, not a list")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(Kind):
    takes_value: ClassVar[bool] = False

    metavar: str = ""
    sample: str = "on"

    @property
    def rule(self) -> str:
        return "on or off (true, 1, enabled; false, 0, disabled)"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise BadValue(self.rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Kind):
    """A whole number within bounds. `words` are further texts allowed, with the value each stands for."""

    metavar: str = "N"
    sample: str = "8"
    least: int = 0
    most: int | None = None
    words: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        bounds = f"from {self.least} to {self.most}" if self.most is not None else f"of at least {self.least}"
        words = "".join(f", or '{word}'" for word in self.words)
        return f"a whole number {bounds}{words}"

    def parse(self, text: str) -> int | None:
        word = text.strip()
        if word.lower() in self.words:
            return self.words[word.lower()]
        if not _WHOLE.fullmatch(word):
            raise BadValue(self.rule)
        number = int(word)
        if number < self.least or (self.most is not None and number > self.most):
            raise BadValue(self.rule)
        return number

    def plain(self, value: Any) -> Any:
        for word, meaning in self.words.items():
            if value == meaning:
                return word
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Kind):
    """A finite number within bounds; `above` excludes the lower bound itself."""

    metavar: str = "X"
    sample: str = "0.5"
    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    @property
    def rule(self) -> str:
        low = f"above {self.least:g}" if self.above else f"of at least {self.least:g}"
        match math.isfinite(self.least), math.isfinite(self.most):
            case True, True if not self.above:
                return f"a number from {self.least:g} to {self.most:g}"
            case True, True:
                return f"a number {low} and at most {self.most:g}"
            case True, False:
                return f"a number {low}"
            case False, True:
                return f"a number of at most {self.most:g}"
            case _:
                return "a finite number"

    def parse(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise BadValue(self.rule) from None
        too_low = number <= self.least if self.above else number < self.least
        if not math.isfinite(number) or too_low or number > self.most:
            raise BadValue(self.rule)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Kind):
    """One of some words. `same` maps other spellings to them."""

    choices: tuple[str, ...] = ()
    same: Mapping[str, str] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        return "one of " + ", ".join(self.choices)

    def parse(self, text: str) -> str:
        word = text.strip().lower()
        word = self.same.get(word, word)
        if word not in self.choices:
            raise BadValue(self.rule)
        return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Words(Kind):
    """A comma-separated list of words. Quotes keep a comma inside a word, as in CSV."""

    repeats: ClassVar[bool] = True

    metavar: str = "A,B"

    @property
    def rule(self) -> str:
        return "a comma-separated list with at least one entry"

    def parse(self, text: str) -> tuple[str, ...]:
        words = tuple(word for word in (field_.strip() for field_ in split_csv(text)) if word)
        if not words:
            raise BadValue(self.rule)
        return tuple(dict.fromkeys(words))

    def plain(self, value: Any) -> Any:
        return list(value)

    def join(self, items: list[str]) -> list[str]:
        return [",".join('"' + item.replace('"', '""') + '"' for item in items)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(Kind):
    """Each occurrence is one entry, taken as it is. `none` stands for an empty list."""

    repeats: ClassVar[bool] = True

    none: str | None = None

    def parse(self, text: str) -> tuple[str, ...]:
        if not text:
            raise BadValue(self.rule)
        return () if text == self.none else (text,)

    def plain(self, value: Any) -> Any:
        return list(value) or self.none

    def join(self, items: list[str]) -> list[str]:
        return items


def split_csv(text: str) -> list[str]:
    """Split at commas outside double quotes; a doubled quote inside quotes is one quote."""
    fields = [""]
    quoted = False
    at = 0
    while at < len(text):
        char = text[at]
        if char == '"' and quoted and text[at + 1 : at + 2] == '"':
            fields[-1] += '"'
            at += 1
        elif char == '"' and (quoted or not fields[-1]):
            quoted = not quoted
        elif char == "," and not quoted:
            fields.append("")
        else:
            fields[-1] += char
        at += 1
    return fields
