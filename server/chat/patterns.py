"""JSON Schema's regular expressions (ECMAScript's, found anywhere in a text) as Rust's, which match a whole text; and
what the formats of JSON Schema look like."""

from __future__ import annotations

import re

_DOT = r"[^\n\r\u2028\u2029]"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}
_CUT = re.compile(r"(\\(?:u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)|\[\^?\]?|\]|[()|.])", re.DOTALL)

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?"  # a name may have 253 characters in all
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]"
_DAYS = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

# Never too wide; some rare spellings are left out (29 February, comments in mail addresses).
FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "email": rf"[A-Za-z0-9_+-]{{1,30}}(?:\.[A-Za-z0-9_+-]{{1,15}}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": rf"(?:{_GROUP}:){{7}}{_GROUP}|::(?:{_GROUP}:){{0,5}}{_GROUP}|{_GROUP}::(?:{_GROUP}:){{0,4}}{_GROUP}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]{{0,15}}://{_HOST}(?::[0-9]{{1,4}})?(?:/{_PATH}*)?(?:\?{_PATH}*)?(?:#{_PATH}*)?",
}


def whole_match(pattern: str) -> str:
    """A pattern that matches just the texts in which `pattern` is found. Look-around, back-references and anchors in
    the middle stay as they are: whoever compiles the result refuses them."""
    parts = []
    for branch in _branches(_translated(pattern)):
        start = "" if branch.startswith("^") else "(?s:.*)"
        end = "" if _ends_anchored(branch) else "(?s:.*)"
        parts.append(f"{start}(?:{branch[not start : len(branch) - (not end)]}){end}")
    return "|".join(parts)


def _ends_anchored(branch: str) -> bool:
    before = branch[:-1]
    return branch.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def _branches(pattern: str) -> list[str]:
    """Cut at every `|` that stands outside of groups and classes."""
    branches, start, depth, in_class = [], 0, 0, False
    for found in _CUT.finditer(pattern):
        text = found.group()
        if in_class:
            in_class = text != "]"
        elif text.startswith("["):
            in_class = True
        elif text in "()":
            depth += 1 if text == "(" else -1
        elif text == "|" and depth == 0:
            branches.append(pattern[start : found.start()])
            start = found.end()
    return [*branches, pattern[start:]]


def _translated(pattern: str) -> str:
    parts, at, in_class = [], 0, False
    for found in _CUT.finditer(pattern):
        between, text, at = pattern[at : found.start()], found.group(), found.end()
        parts.append(_plain(between, in_class=in_class))
        if text.startswith("\\"):
            parts.append(_escape(text[1:], in_class=in_class))
        elif text.startswith("["):
            opened = _class_start(text, in_class=in_class)
            parts.append(opened)
            in_class = not text.endswith("]")
        elif in_class:
            parts.append(text)
            in_class = text != "]"
        else:
            parts.append(_DOT if text == "." else text)
    parts.append(_plain(pattern[at:], in_class=in_class))
    return "".join(parts)


def _class_start(text: str, *, in_class: bool) -> str:
    """`[`, `[^` or, where that is all of the class, `[]` (nothing) and `[^]` (anything)."""
    if in_class:
        return "\\" + text
    if text.endswith("]"):
        return r"(?s:.)" if "^" in text else r"[^\s\S]"
    return text


def _plain(text: str, *, in_class: bool) -> str:
    """In a class, Rust gives a meaning to some characters that ECMAScript does not."""
    return re.sub(r"[&~]", r"\\\g<0>", text) if in_class else text


def _escape(text: str, *, in_class: bool) -> str:
    """What follows a backslash."""
    if text in _CLASSES:
        return _CLASSES[text] if in_class else f"[{_CLASSES[text]}]"
    if text.lower() in _CLASSES and not in_class:
        return f"[^{_CLASSES[text.lower()]}]"
    if text[0] in "ux" and len(text) > 1:
        return rf"\x{{{text[1:].strip('{}')}}}"
    return text if text in "/<>" else f"\\{text}"
