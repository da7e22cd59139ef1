"""Decides what an answer is held to: a form that was asked for, calls that must be made, calls that may be.

The result is a grammar for the engine and where it begins. A call that the model is free to make is held to the grammar
from its opening tag on; everything else begins behind the reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.chat.dialects import Dialect
from server.chat.forms import AnswerForm, CallMode, ChoiceForm, JsonForm, LarkForm, RegexForm, ToolChoice
from server.chat.glm_call_grammar import FORBIDDEN_IN_CALLS, write_calls
from server.chat.lark import Lark, either, literal, regex
from server.chat.messages import Conversation, Tool
from server.chat.schema_limits import Limits, enforceable
from server.chat.tags import Tag
from server.errors import InvalidRequest

_BREAK = regex(r"\n?")  # parsers drop a line break before the answer and between calls


@dataclass(frozen=True, slots=True)
class Steering:
    """`trigger`: the tag from which on the grammar holds, each time; None: for the whole answer. `simpler` is to be
    used, with a warning, where `grammar` cannot be compiled; None: that is an error in `field`. `relaxed`: what of
    schemas is not enforced."""

    grammar: str
    field: str
    trigger: str | None = None
    forbidden: tuple[str, ...] = ()
    simpler: str | None = None
    relaxed: tuple[str, ...] = ()


def steer_text(form: AnswerForm | None) -> Steering | None:
    """For raw completions. Raises InvalidRequest for a form that cannot be enforced."""
    if form is None:
        return None
    if isinstance(form, LarkForm):
        return Steering(form.grammar, form.field)
    lark, relaxed = _lark_of(form), _Relaxed()
    lark.rule("start", _form(lark, form, relaxed, forbidden=()))
    return Steering(lark.text(), form.field, relaxed=relaxed.said())


def steer_chat(
    conversation: Conversation, form: AnswerForm | None, dialect: Dialect, *, tool_grammar: bool
) -> Steering | None:
    """None: the answer is free. `tool_grammar`: hold calls that the model makes of its own accord to their schemas.
    Raises InvalidRequest for what cannot be enforced."""
    choice = conversation.tool_choice
    tools = _callable_tools(conversation.tools, choice)
    forced = choice.mode is CallMode.REQUIRED
    if (forced or choice.names is not None) and not dialect.can_force_calls:
        raise InvalidRequest(
            "Field 'tool_choice': this server knows no form of tool calls for this model, so it cannot force or choose "
            "them; use 'auto' or 'none'",
            param="tool_choice",
        )
    if forced:
        return _forced(conversation, tools)
    steered = tools and dialect.can_force_calls and conversation.parse_tool_calls
    if form is not None:
        return _formed(form, conversation, tools if steered else [], dialect)
    if steered and (tool_grammar or choice.names is not None):
        return _free(tools)
    return None


def _callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    by_name = {tool.name: tool for tool in tools if choice.names is None or tool.name in choice.names}
    return list(by_name.values())


def _forced(conversation: Conversation, tools: list[Tool]) -> Steering:
    """At least one call, and nothing else."""

    def write(lark: Lark, relaxed: _Relaxed, *, simple: bool) -> None:
        calls = _calls(lark, conversation, tools, relaxed, simple=simple)
        lark.rule("start", f"{lark.terminal(_BREAK)} {calls}")

    return _of_calls(write, "tool_choice", forbidden=FORBIDDEN_IN_CALLS)


def _free(tools: list[Tool]) -> Steering:
    """The rest of any call that is opened."""

    def write(lark: Lark, relaxed: _Relaxed, *, simple: bool) -> None:
        lark.rule("start", write_calls(lark, tools, relaxed.by_tool(tools), simple=simple))

    return _of_calls(write, "tools", trigger=Tag.CALL_OPEN.value, forbidden=FORBIDDEN_IN_CALLS)


def _formed(form: AnswerForm, conversation: Conversation, tools: list[Tool], dialect: Dialect) -> Steering:
    """An answer in the form, or calls instead where there are tools."""
    forbidden = tuple(map(re.escape, dialect.own_tags(with_calls=bool(tools))))
    if isinstance(form, LarkForm):
        if tools:
            raise InvalidRequest(f"Field '{form.field}': is not supported together with 'tools'", param=form.field)
        return Steering(form.grammar, form.field, forbidden=forbidden)
    lark, relaxed = _lark_of(form), _Relaxed()
    wanted = _form(lark, form, relaxed, forbidden)
    if tools:
        wanted = f"({wanted} | {_calls(lark, conversation, tools, relaxed, simple=False)})"
    lead = lark.terminal(_BREAK) if dialect.can_force_calls else ""
    lark.rule("start", f"{lead} {wanted}")
    return Steering(lark.text(), form.field, forbidden=forbidden, relaxed=relaxed.said())


class _Relaxed:
    """What was left out of schemas, by the field they came in."""

    def __init__(self) -> None:
        self._limits: list[Limits] = []

    def limits(self, name: str, *, strict: bool) -> Limits:
        limits = Limits(name, strict)
        self._limits.append(limits)
        return limits

    def by_tool(self, tools: Sequence[Tool]) -> dict[str, Limits]:
        """Tools are schemas of somebody else, which other servers do not enforce either: never refused."""
        return {tool.name: self.limits(f"tool {tool.name}", strict=False) for tool in tools}

    def said(self) -> tuple[str, ...]:
        return tuple(f"{limits.field}: {each}" for limits in self._limits for each in dict.fromkeys(limits.relaxed))


class _Write(Protocol):
    def __call__(self, lark: Lark, relaxed: _Relaxed, *, simple: bool) -> None: ...


def _of_calls(write: _Write, name: str, *, forbidden: tuple[str, ...], trigger: str | None = None) -> Steering:
    grammars = []
    relaxed = _Relaxed()
    for simple in (False, True):
        lark = Lark(lenient=True)
        write(lark, _Relaxed() if simple else relaxed, simple=simple)
        grammars.append(lark.text())
    return Steering(grammars[0], name, trigger, forbidden, simpler=grammars[1], relaxed=relaxed.said())


def _calls(lark: Lark, conversation: Conversation, tools: list[Tool], relaxed: _Relaxed, *, simple: bool) -> str:
    body = write_calls(lark, tools, relaxed.by_tool(tools), simple=simple)
    call = lark.rule("call", f"{Tag.CALL_OPEN.value} {body} {lark.terminal(_BREAK)}")
    only_one = conversation.tool_choice.only_one or not conversation.parallel_tool_calls
    return call if only_one else f"{call}+"


def _lark_of(form: AnswerForm) -> Lark:
    return Lark(lenient=isinstance(form, JsonForm) and not form.strict)


def _form(lark: Lark, form: AnswerForm, relaxed: _Relaxed, forbidden: tuple[str, ...]) -> str:
    """The rule or terminal of the form."""
    match form:
        case JsonForm(schema, name, strict):
            return lark.json(enforceable(schema, relaxed.limits(name, strict=strict)))
        case RegexForm(pattern):
            return lark.terminal(regex(pattern))
        case ChoiceForm(choices, name):
            for choice in choices:
                if any(re.search(tag, choice) for tag in forbidden):
                    raise InvalidRequest(
                        f"Field '{name}': the choice {choice[:80]!r} has a tag of the model's own in it, which ends or "
                        f"starts a part of its answer; take it out",
                        param=name,
                    )
            return lark.terminal(either(map(literal, choices)))
        case LarkForm():
            raise AssertionError("a grammar stands alone")
