"""Calls that are not written in GLM's own markup, but stand between its call tags all the same.

Read are a JSON object with name and arguments (or a list of such), a name with a JSON object behind it, and a name with
`key=value` pairs. Anything else is no call: better none than one with arguments that were guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.chat import json_text
from server.chat.python_literals import python_to_json
from server.chat.toolbox import Toolbox, is_plausible_name, strip_gap

_NAME_KEYS = ("name", "tool_name", "tool", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "params")
_WORD = re.compile(r"[\w.\-/:@]+")
_FENCE = re.compile(r"```\w*\n?(.*?)\n?```", re.DOTALL)
_PAIR_KEY = re.compile(r"[\s,]*([\w.\-]+)\s*=\s*")
_NEXT_KEY = re.compile(r"(?<=[\s,])[\w.\-]+\s*=")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
_MAX_PAIRS_TEXT = 1 << 16
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class BodyCall:
    """`arguments` is JSON text of an object."""

    name: str
    arguments: str


def read_body(body: str, toolbox: Toolbox) -> list[BodyCall] | None:
    """The calls that all of `body` amounts to; None if it is not clearly calls."""
    text = strip_gap(body)
    if (fenced := _FENCE.fullmatch(text)) is not None:
        text = strip_gap(fenced.group(1))
    if text.startswith(("{", "[")):
        return _read_json_calls(text, toolbox)
    name = toolbox.clean_name(text)
    if name in toolbox:
        return [BodyCall(name, "{}")]
    call = _read_named(text, toolbox)
    return None if call is None else [call]


def read_pairs(text: str) -> dict[str, str] | None:
    """Raw values of `key=value` pairs, blanks or commas between them; None unless that is all the text."""
    pairs: dict[str, str] = {}
    at = 0
    while found := _PAIR_KEY.match(text, at):
        value, at = _pair_value(text, found.end())
        pairs[found.group(1)] = value
    return pairs if pairs and not text[at:].strip(" \t\r\n,") else None


def is_complete(body: str) -> bool:
    """Ends in a way that no cut text would by chance, so it may be read although its closing tag is missing."""
    return body.rstrip().endswith(("}", "]", ")", '"', "'"))


def _read_named(text: str, toolbox: Toolbox) -> BodyCall | None:
    split = toolbox.split_body(text)
    if split is not None:
        name, rest = split
    elif (glued := toolbox.split_glued(text)) is not None:
        split = name, rest = glued
    elif (word := _WORD.match(text)) is not None and is_plausible_name(word.group()):
        name, rest = word.group().rstrip(":"), text[word.end() :]
    else:
        return None
    rest = strip_gap(rest)
    if rest[:1] in (">", ":", "="):
        rest = strip_gap(rest[1:])
    if rest.startswith("(") and rest.endswith(")"):
        rest = strip_gap(rest[1:-1])
        if not rest:
            return BodyCall(name, "{}")
    if rest.startswith("{"):
        arguments = _as_object(rest)
        return None if arguments is None else BodyCall(name, arguments)
    if split is None:
        return BodyCall(name, "{}") if not rest else None
    pairs = read_pairs(rest) if len(rest) <= _MAX_PAIRS_TEXT else None
    if pairs is None:
        return None
    return BodyCall(name, "{" + toolbox.schema(name).write_members(pairs) + "}")


def _pair_value(text: str, at: int) -> tuple[str, int]:
    quoted = _QUOTED.match(text, at)
    if quoted is not None:
        body = quoted.group(1) if quoted.group(1) is not None else quoted.group(2)
        return re.sub(r"\\([\"'\\])", r"\1", body), quoted.end()
    if text[at : at + 1] in ("{", "["):
        try:
            end = _DECODER.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            pass
        else:
            return text[at:end], end
    following = _NEXT_KEY.search(text, at)
    end = following.start() if following is not None else len(text)
    return text[at:end].strip(" \t\r\n,"), end


def _read_json_calls(text: str, toolbox: Toolbox) -> list[BodyCall] | None:
    value = _decode(text)
    entries = value if isinstance(value, list) else [value]
    calls = [_read_entry(entry, toolbox) for entry in entries]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _read_entry(entry: object, toolbox: Toolbox) -> BodyCall | None:
    if not isinstance(entry, Mapping):
        return None
    inner = entry.get("function")
    if isinstance(inner, Mapping):
        return _read_entry(inner, toolbox)
    name_key = next((key for key in _NAME_KEYS if isinstance(entry.get(key), str)), None)
    if name_key is None:
        if len(entry) == 1 and (only := next(iter(entry))) in toolbox and isinstance(entry[only], Mapping):
            return _body_call(only, entry[only])
        return None
    name = toolbox.clean_name(entry[name_key])
    if name not in toolbox and not is_plausible_name(name):
        return None
    for key in _ARGUMENT_KEYS:
        if key in entry:
            return _body_call(name, entry[key])
    rest = {key: value for key, value in entry.items() if key not in (name_key, "type", "id")}
    return _body_call(name, rest) if rest.keys() <= toolbox.schema(name).declared else None


def _body_call(name: str, arguments: object) -> BodyCall | None:
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _decode(arguments)
    if not isinstance(arguments, Mapping):
        return None
    try:
        return BodyCall(name, json_text.write(arguments))
    except ValueError:
        return None


def _as_object(text: str) -> str | None:
    """JSON text of the object that `text` is, spelling mended where it is close to JSON."""
    value = _decode(text)
    try:
        return json_text.write(value) if isinstance(value, Mapping) else None
    except ValueError:
        return None


def _decode(text: str) -> Any:
    """The value of JSON, or of something close to it; None if it cannot be read."""
    for attempt in _spellings(text):
        try:
            return json_text.read(attempt, strict=False)
        except ValueError:
            continue
    return None


def _spellings(text: str) -> Iterator[str]:
    yield text
    try:
        end = _DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        pass
    else:
        if not text[end:].strip("}] \t\r\n"):  # closed once too often
            yield text[:end]
    mended = python_to_json(text)
    if mended is not None:
        yield mended
