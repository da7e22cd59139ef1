"""`tool_choice`: which calls the answer may, must or must not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from server.api.schemas.fields import refuse, shown
from server.chat.forms import CallMode, ToolChoice

_FIELD = "tool_choice"
_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"]}},
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": {"type": "object", "required": ["tools"]}},
    "required": ["type", "allowed_tools"],
}
TOOL_CHOICE_SCHEMA: dict[str, Any] = {"anyOf": [{"enum": ["auto", "none", "required", None]}, _NAMED, _ALLOWED]}


def read_tool_choice(value: Any, offered: Collection[str]) -> ToolChoice | None:
    """None: the model must not call, and is not shown the tools. `offered`: their names. Raises InvalidRequest."""
    match value:
        case None | "auto":
            return ToolChoice()
        case "none":
            return None
        case "required" | "any":  # "any" is Anthropic's and Mistral's word
            _require(offered, offered)
            return ToolChoice(CallMode.REQUIRED)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            _require([name], offered)
            return ToolChoice(CallMode.REQUIRED, frozenset({name}), only_one=True)
        case {"type": "allowed_tools"}:
            inner = value.get("allowed_tools")
            return _allowed(inner if isinstance(inner, dict) else value, offered)
        case _:
            words = "auto, none, required, a function by its name, or allowed_tools"
            raise refuse(_FIELD, f"must be {words}, but got {shown(value)}")


def _allowed(allowed: dict[str, Any], offered: Collection[str]) -> ToolChoice:
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{_FIELD}.allowed_tools.mode", f"must be auto or required, but got {shown(mode)}")
    if not isinstance(tools, list) or not tools:
        raise refuse(f"{_FIELD}.allowed_tools.tools", f"must be a list of at least one tool, but got {shown(tools)}")
    names = []
    for i, tool in enumerate(tools):
        match tool:
            case {"function": {"name": str(name)}} | {"name": str(name)}:
                names.append(name)
            case _:
                raise refuse(f"{_FIELD}.allowed_tools.tools[{i}]", f"must name a function, but got {shown(tool)}")
    _require(names, offered)
    return ToolChoice(CallMode(mode), frozenset(names))


def _require(names: Collection[str], offered: Collection[str]) -> None:
    if not offered:
        raise refuse(_FIELD, "needs 'tools' to choose from")
    for name in names:
        if name not in offered:
            known = ", ".join(offered)
            raise refuse(_FIELD, f"there is no tool {shown(name)} in 'tools', which has: {known[:400]}")
