"""JSON text that is always valid: strings quoted in pieces, values written out, numbers left as they were spelt."""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NoReturn

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"true": "boolean", "false": "boolean", "null": "null"}


def quote(text: str) -> str:
    """`text` as a JSON string. Non-ASCII stays as it is, but half a surrogate pair is escaped: UTF-8 has none."""
    if text.isascii() or not _SURROGATE.search(text):
        return encode_basestring(text)
    return encode_basestring_ascii(text)


def quote_part(text: str) -> str:
    """Like `quote`, without the quotation marks: parts of a text may be quoted one after the other."""
    return quote(text)[1:-1]


def write(value: Any) -> str:
    """The JSON text of a decoded value. Raises ValueError for what JSON has no words for, or nested too deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return json.dumps(value) if _SURROGATE.search(text) else text
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read(text: str, *, strict: bool = True) -> Any:
    """Decode. `strict` False also takes raw control characters in strings. Raises ValueError, whatever is wrong."""
    try:
        return json.loads(text, strict=strict, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def kind_of(text: str) -> str | None:
    """The JSON type of `text` if it is exactly one JSON value without blanks around it, else None.

    Numbers are not converted, so any length will do; "integer" only where written without fraction and exponent.
    """
    if not text:
        return None
    match text[0]:
        case "t" | "f" | "n":
            return _WORDS.get(text)
        case "-" | "0" | "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9":
            if _INTEGER.fullmatch(text):
                return "integer"
            return "number" if _NUMBER.fullmatch(text) else None
        case "{" | "[" | '"' as opener:
            try:
                json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)
            except (ValueError, RecursionError):
                return None
            return {"{": "object", "[": "array"}.get(opener, "string") if text[-1] in '}]"' else None
        case _:
            return None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
