"""The kinds that belong to one flag each: proportions, tensor overrides, token biases, samplers, JSON, levels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from server.cli.values import BadValue, Kind, Words
from server.engine.sampler_names import LETTER_OF_SAMPLER, SAMPLER_OF_LETTER

MAX_DEVICES = 16  # llama_max_devices()

_BIAS = re.compile(r"\s*([0-9]+)\s*([+-])\s*(.+)")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+")
_ENDPOINT = re.compile(r"[^\s,:]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")

_OTHER_SAMPLER_NAMES = {
    "nucleus": "top_p",
    "typical_p": "typ_p",
    "typical": "typ_p",
    "typ": "typ_p",
    "temp": "temperature",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportions(Kind):
    metavar: str = "A,B"
    sample: str = "3,1"

    @property
    def rule(self) -> str:
        return f"up to {MAX_DEVICES} proportions of 0 or more, separated by commas, not all 0"

    def parse(self, text: str) -> tuple[float, ...]:
        try:
            parts = tuple(float(part) for part in re.split(r"[,/]+", text))
        except ValueError:
            raise BadValue(self.rule) from None
        usable = all(math.isfinite(part) and part >= 0 for part in parts) and any(parts)
        if not usable or len(parts) > MAX_DEVICES:
            raise BadValue(self.rule)
        return parts

    def plain(self, value: Any) -> Any:
        return ",".join(f"{part}".removesuffix(".0") for part in value)

    def join(self, items: list[str]) -> list[str]:
        return [",".join(items)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Kind):
    """MiB for each device."""

    metavar: str = "MIB,…"
    sample: str = "2048"

    @property
    def rule(self) -> str:
        return f"one size in MiB, or up to {MAX_DEVICES} separated by commas, whole numbers of 0 or more"

    def parse(self, text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts) or len(parts) > MAX_DEVICES:
            raise BadValue(self.rule)
        return tuple(int(part) for part in parts)

    def plain(self, value: Any) -> Any:
        return ",".join(str(part) for part in value)

    def join(self, items: list[str]) -> list[str]:
        return [",".join(items)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides(Kind):
    """Pairs (name pattern, buffer type)."""

    repeats: ClassVar[bool] = True

    metavar: str = "RE=BUF"
    sample: str = "'ffn_.*_exps=CPU'"

    @property
    def rule(self) -> str:
        return "PATTERN=BUFFER pairs separated by commas, PATTERN being a regular expression for tensor names"

    def parse(self, text: str) -> tuple[tuple[str, str], ...]:
        pairs = []
        for part in text.split(","):
            pattern, equals, buffer = part.partition("=")
            if not equals or not pattern.strip() or not buffer.strip():
                raise BadValue(self.rule)
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadValue(f"{self.rule}, but '{pattern}' is none: {error}") from None
            pairs.append((pattern, buffer.strip()))
        return tuple(pairs)

    def plain(self, value: Any) -> Any:
        return [f"{pattern}={buffer}" for pattern, buffer in value]

    def join(self, items: list[str]) -> list[str]:
        return [",".join(items)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints(Kind):
    repeats: ClassVar[bool] = True

    metavar: str = "H:P,…"
    sample: str = "10.0.0.2:50052"

    @property
    def rule(self) -> str:
        return "HOST:PORT pairs separated by commas"

    def parse(self, text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(","))
        if not all(_ENDPOINT.fullmatch(part) and int(part.rpartition(":")[2]) < 1 << 16 for part in parts):
            raise BadValue(self.rule)
        return parts

    def plain(self, value: Any) -> Any:
        return list(value)

    def join(self, items: list[str]) -> list[str]:
        return [",".join(items)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases(Kind):
    """Pairs (token id, bias); `-inf` bans a token."""

    repeats: ClassVar[bool] = True

    metavar: str = "ID±X"
    sample: str = "15043+1"

    @property
    def rule(self) -> str:
        return "a token id, a sign and a bias, as 15043+1 or 15043-inf"

    def parse(self, text: str) -> tuple[tuple[int, float], ...]:
        match = _BIAS.fullmatch(text)
        try:
            bias = float(match[3]) if match else math.nan
        except ValueError:
            bias = math.nan
        if match is None or math.isnan(bias):
            raise BadValue(self.rule)
        return ((int(match[1]), -bias if match[2] == "-" else bias),)

    def plain(self, value: Any) -> Any:
        return [f"{token}{bias:+}" for token, bias in value]

    def join(self, items: list[str]) -> list[str]:
        return items


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers(Kind):
    """Names of samplers in the order in which they run."""

    metavar: str = "A;B"
    sample: str = "'top_k;top_p;temperature'"

    @property
    def rule(self) -> str:
        return "sampler names separated by semicolons, out of " + ", ".join(LETTER_OF_SAMPLER)

    def parse(self, text: str) -> tuple[str, ...]:
        names = []
        for part in re.split(r"[;,]", text):
            name = part.strip().lower().replace("-", "_")
            name = _OTHER_SAMPLER_NAMES.get(name, name)
            if name not in LETTER_OF_SAMPLER:
                raise BadValue(self.rule)
            names.append(name)
        return tuple(names)

    def plain(self, value: Any) -> Any:
        return ";".join(value)

    def join(self, items: list[str]) -> list[str]:
        return [";".join(items)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLetters(Samplers):
    """The same as one letter each."""

    metavar: str = "LETTERS"
    sample: str = "edskypmxt"

    @property
    def rule(self) -> str:
        return "letters out of " + ", ".join(f"{letter} ({name})" for name, letter in LETTER_OF_SAMPLER.items())

    def parse(self, text: str) -> tuple[str, ...]:
        names = SAMPLER_OF_LETTER
        if not text or not set(text) <= set(names):
            raise BadValue(self.rule)
        return tuple(names[letter] for letter in text)

    def plain(self, value: Any) -> Any:
        return "".join(LETTER_OF_SAMPLER[name] for name in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObject(Kind):
    metavar: str = "JSON"
    sample: str = """'{"enable_thinking": false}'"""

    @property
    def rule(self) -> str:
        return "a JSON object"

    def parse(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadValue(f"{self.rule}, but it cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise BadValue(self.rule)
        return value

    def plain(self, value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level(Kind):
    """A log level by name, or llama.cpp's verbosity number (0 and 1 error, 2 warning, 3 info, 4 and 5 debug)."""

    metavar: str = "LEVEL"
    sample: str = "debug"
    by_number: Mapping[str, str] = field(
        default_factory=lambda: {"0": "error", "1": "error", "2": "warn", "3": "info", "4": "debug", "5": "debug"}
    )

    @property
    def rule(self) -> str:
        return "one of error, warn, info, debug, or a number from 0 to 5"

    def parse(self, text: str) -> str:
        word = text.strip().lower()
        word = {"warning": "warn", "trace": "debug"}.get(word, self.by_number.get(word, word))
        if word not in self.by_number.values():
            raise BadValue(self.rule)
        return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts(Words):
    """Names or addresses to listen on, and paths of unix sockets (they end in .sock)."""

    metavar: str = "HOST"
    sample: str = "0.0.0.0"

    @property
    def rule(self) -> str:
        return "host names or addresses (no http://, no port) or paths that end in .sock, separated by commas"

    def parse(self, text: str) -> tuple[str, ...]:
        hosts = tuple(host[1:-1] if host[:1] + host[-1:] == "[]" else host for host in Words.parse(self, text))
        if not all(host.endswith(".sock") or _HOST.fullmatch(host) for host in hosts):
            raise BadValue(self.rule)
        return hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins(Words):
    metavar: str = "ORIGINS"
    sample: str = "https://chat.example.org"

    @property
    def rule(self) -> str:
        return "'*', 'localhost' or origins as browsers send them (scheme://host[:port], no path), separated by commas"

    def parse(self, text: str) -> tuple[str, ...]:
        origins = Words.parse(self, text)
        if not all(origin in ("*", "localhost", "null") or _ORIGIN.fullmatch(origin) for origin in origins):
            raise BadValue(self.rule)
        return origins


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix(Kind):
    """A path to put before every route: empty, or from the first slash, without a slash at the end."""

    metavar: str = "/PATH"
    sample: str = "/glm"

    @property
    def rule(self) -> str:
        return "a path that starts with a slash and has only letters, digits and -._~/ in it"

    def parse(self, text: str) -> str:
        path = text.strip().rstrip("/")
        if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
            raise BadValue(self.rule)
        return path
