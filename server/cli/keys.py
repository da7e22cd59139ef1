"""API keys as the command line and the key file give them. The file has one key a line; words behind it say whose it
is and what it may do: `KEY name=alice max-jobs=4 priority=-5`. `#` begins a comment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from server.api.options import ApiKey
from server.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_RULES = {
    "name": "1 to 64 letters, digits or one of ._@+- and begin with a letter or digit",
    "max-jobs": "a whole number from 0 to 1000000; 0 means no limit",
    "priority": "a whole number from -1000000 to 1000000; lower goes first",
}
_MOST = 10**6


@dataclass(slots=True)
class _Line:
    secret: str
    settings: dict[str, str]
    where: str


def api_keys(given: Sequence[str], text: str, where: str, max_jobs: int) -> tuple[ApiKey, ...]:
    """The keys of the command line, then those of the file, each once; what the file says of a key wins. `where` names
    the file in errors. `max_jobs` is for keys without a limit of their own. Raises ConfigError, with no key in it."""
    lines: dict[str, _Line] = {secret: _Line(secret, {}, "") for secret in given}
    for line in _lines(text, where):
        known = lines.get(line.secret)
        if known is not None and known.settings and line.settings and line.settings != known.settings:
            raise ConfigError(f"{line.where} gives the key of {known.where} other settings; keep one of the two lines")
        if known is None or line.settings:
            lines[line.secret] = line
    return tuple(_key(line, number, max_jobs) for number, line in enumerate(lines.values(), 1))


def _lines(text: str, where: str) -> Iterator[_Line]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        yield _Line(words[0], _settings(words[1:], f"{where}, line {number},"), f"{where}, line {number},")


def _settings(words: Sequence[str], where: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        if word.startswith("#"):
            break
        setting, equals, value = word.partition("=")
        if not equals or setting not in _RULES:
            raise ConfigError(
                f"{where} has something behind its key that is none of name=, max-jobs= and priority=; a key has no "
                f"blanks, and a comment begins with #"
            )
        if setting in settings:
            raise ConfigError(f"{where} has {setting}= twice; keep one")
        if not _is_valid(setting, value):
            raise ConfigError(f"{where} says {setting}={value}, but {setting} must be {_RULES[setting]}")
        settings[setting] = value
    return settings


def _is_valid(setting: str, value: str) -> bool:
    if setting == "name":
        return _NAME.fullmatch(value) is not None
    if re.fullmatch(r"-?[0-9]{1,7}", value) is None:
        return False
    return (0 if setting == "max-jobs" else -_MOST) <= int(value) <= _MOST


def _key(line: _Line, number: int, max_jobs: int) -> ApiKey:
    return ApiKey(
        secret=line.secret,
        name=line.settings.get("name", f"key {number}"),
        max_jobs=int(line.settings.get("max-jobs", max_jobs)),
        priority=int(line.settings.get("priority", 0)),
    )
