"""Reads a Python literal (dict, list, tuple, string, number, True, False, None) and writes it as JSON text.

Models print an object now and then the way Python does. Not `ast`: its warnings and its limits on depth are the
interpreter's, not ours. Also read: JSON's own words and trailing commas.
"""

from __future__ import annotations

import re

from server.chat.json_text import quote

_MAX_DEPTH = 100
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])")
_WORD = re.compile(r"True|False|None|true|false|null")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}


class _Unreadable(Exception):
    pass


def python_to_json(text: str) -> str | None:
    """The JSON text of the literal, or None when `text` is not exactly one. Numbers keep their digits."""
    try:
        reader = _Reader(text)
        reader.value(0)
        return "".join(reader.out) if reader.at_end() else None
    except _Unreadable:
        return None


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.out: list[str] = []

    def at_end(self) -> bool:
        self._skip()
        return self._at == len(self._text)

    def value(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _Unreadable
        match self._peek():
            case "{":
                self._members(depth)
            case "[":
                self._items("]", depth)
            case "(":
                self._items(")", depth)
            case "'" | '"':
                self.out.append(quote(self._string()))
            case _:
                self._scalar()

    def _members(self, depth: int) -> None:
        self._at += 1
        self.out.append("{")
        first = True
        while self._peek() != "}":
            if not first:
                self._expect(",")
                if self._peek() == "}":
                    break
                self.out.append(", ")
            first = False
            self._key()
            self._expect(":")
            self.out.append(": ")
            self.value(depth + 1)
        self._at += 1
        self.out.append("}")

    def _items(self, closer: str, depth: int) -> None:
        self._at += 1
        self.out.append("[")
        first = True
        while self._peek() != closer:
            if not first:
                self._expect(",")
                if self._peek() == closer:
                    break
                self.out.append(", ")
            first = False
            self.value(depth + 1)
        self._at += 1
        self.out.append("]")

    def _key(self) -> None:
        if self._peek() in ("'", '"'):
            self.out.append(quote(self._string()))
            return
        start = len(self.out)
        self._scalar()  # JSON keys are strings, so a number or a word becomes one
        self.out[start:] = [quote("".join(self.out[start:]))]

    def _scalar(self) -> None:
        if found := _NUMBER.match(self._text, self._at):
            self.out.append(found.group())
        elif found := _WORD.match(self._text, self._at):
            self.out.append(_WORDS[found.group()])
        else:
            raise _Unreadable
        self._at = found.end()

    def _string(self) -> str:
        mark = self._text[self._at]
        self._at += 1
        parts: list[str] = []
        while True:
            found = _PLAIN[mark].match(self._text, self._at)
            if found is None or found.end() == len(self._text):
                raise _Unreadable
            parts.append(found.group())
            self._at = found.end()
            if self._text[self._at] == mark:
                self._at += 1
                return "".join(parts)
            parts.append(self._escape())

    def _escape(self) -> str:
        letter = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        if n_digits := _CODE_LENGTHS.get(letter):
            digits = self._text[self._at : self._at + n_digits]
            self._at += n_digits
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError) as error:
                raise _Unreadable from error
        # Python keeps the backslash of an escape that it does not know.
        return _ESCAPES.get(letter, "\\" + letter)

    def _peek(self) -> str:
        self._skip()
        return self._text[self._at : self._at + 1]

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            raise _Unreadable
        self._at += 1

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
