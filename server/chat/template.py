"""Chat templates: a conversation becomes the text of a prompt, the way Hugging Face renders it.

Jinja2 in its sandbox, blocks trimmed, with the helpers that published templates expect (`raise_exception`,
`strftime_now`, `tojson` that keeps non-ASCII, loop controls, the `generation` block). Control-token texts that a client
typed come out as literal spans (`literals.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.chat.literals import ControlTexts, Marker, strings_of
from server.chat.messages import Conversation, Message, Prompt, PromptSpan, ToolCall
from server.errors import ConfigError, InvalidRequest

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class ChatTemplate:
    """One template, compiled. `name` is how messages call it: "the model's chat template", say. `newline_layout`: of a
    template whose generation prompt leaves it to the model to open its reasoning on the next line (GLM-4.5).

    Raises ConfigError, with the line, when the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        bos_text: str = "",
        eos_text: str = "",
        control_texts: Sequence[str] = (),
        default_kwargs: Mapping[str, Any] | None = None,
        newline_layout: bool = False,
    ) -> None:
        self.source = source
        self.name = name
        self._newline_layout = newline_layout
        self._variables = {"bos_token": bos_text, "eos_token": eos_text, **(default_kwargs or {})}
        self._controls = ControlTexts(control_texts)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name} is not valid Jinja: {error.message} (line {error.lineno})") from error

    @property
    def description(self) -> str:
        """Name and hash, for the log: which of the many versions of a model's template this is."""
        digest = hashlib.sha256(self.source.encode("utf-8", "replace")).hexdigest()
        return f"{self.name}, {len(self.source)} characters, sha256 {digest[:16]}"

    def render(self, conversation: Conversation) -> Prompt:
        """Raises InvalidRequest when the template refuses the messages or cannot cope with them."""
        messages, prefill = _split(conversation)
        wire = [_wire(message) for message in messages]
        tools = [dict(tool.wire) for tool in conversation.tools]
        marker = self._marker(conversation, wire, tools)
        if marker is not None:
            wire = [_mark_message(message, marker) for message in wire]
            tools = marker.mark_tree(tools)
        kwargs = dict(conversation.template_kwargs)
        text = self._run(
            wire,
            tools,
            kwargs if marker is None else marker.mark_tree(kwargs),
            add_generation_prompt=conversation.add_generation_prompt or prefill is not None,
        )
        opens = text.rstrip().endswith(THINK_OPEN)
        if prefill is not None:
            mark = (lambda part: marker.mark(part, own_turn=True)) if marker is not None else str
            reasoning, content = mark(prefill.reasoning or ""), mark(prefill.content or "")
            tail, opens = self._prefill(reasoning, content, text, opens_in_reasoning=opens)
            text += tail
        spans = marker.spans(text) if marker is not None else [PromptSpan(text, literal=False)]
        return Prompt(tuple(spans), opens_in_reasoning=opens)

    def _prefill(self, reasoning: str, content: str, prompt: str, *, opens_in_reasoning: bool) -> tuple[str, bool]:
        """What follows the generation prompt when an assistant turn is continued, and whether it ends in reasoning."""
        line_break = "\n" if self._newline_layout else ""
        # In that layout the prompt has no think tag yet with thinking on, and both with thinking off.
        needs_block = self._newline_layout and bool(content) and not prompt.endswith(THINK_CLOSE)
        if not opens_in_reasoning and (reasoning or needs_block):
            reasoning, opens_in_reasoning = f"{line_break}{THINK_OPEN}{reasoning}", True
        if opens_in_reasoning and content:
            return f"{reasoning}{THINK_CLOSE}{line_break}{content}", False
        return f"{reasoning}{line_break}{content}" if content else reasoning, opens_in_reasoning

    def _marker(
        self, conversation: Conversation, wire: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> Marker | None:
        """None in the ordinary case: no message, tool or argument has the text of a control token."""
        own = [m.content or "" for m in conversation.messages if m.role == "assistant"]
        own += [m.reasoning or "" for m in conversation.messages if m.role == "assistant"]
        others = list(strings_of(([_foreign_part(message) for message in wire], tools, conversation.template_kwargs)))
        texts = own + others
        if (
            any(self._controls.found_in(text, own_turn=True) for text in own)
            or any(self._controls.found_in(text, own_turn=False) for text in others)
            or self._controls.open_ends(texts)
        ):
            try:
                return Marker(self._controls, texts)
            except ValueError as error:
                raise InvalidRequest(str(error), param="messages") from error
        return None

    def _run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], kwargs: Any, *, add_generation_prompt: bool
    ) -> str:
        variables = {
            **self._variables,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except TemplateRefusal as refusal:
            raise InvalidRequest(f"{self.name} refuses these messages: {refusal}", param="messages") from refusal
        except Exception as error:  # whatever a template trips over, these messages led it there
            raise InvalidRequest(
                f"{self.name} cannot render these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return _without_half_pairs(text)


class TemplateRefusal(Exception):
    """A template called raise_exception; the text is its own."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call: a mapping for templates that walk it, JSON text for those that print it."""

    def __str__(self) -> str:
        return _to_json(self)


# ── what templates are given ─────────────────────────────────────────────────────────────────────────────────────────


def _split(conversation: Conversation) -> tuple[tuple[Message, ...], Message | None]:
    """The history, and the assistant turn that is to be continued, if any."""
    messages = conversation.messages
    if not messages:
        raise InvalidRequest("there are no messages; send at least one", param="messages")
    if not conversation.continue_final_message:
        return messages, None
    final = messages[-1]
    if final.role != "assistant" or final.tool_calls:
        raise InvalidRequest(
            "only a final assistant message without tool calls can be continued; leave continue_final_message out",
            param="continue_final_message",
        )
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise InvalidRequest("two assistant messages stand at the end; only one can be continued", param="messages")
    return messages[:-1], final


def _wire(message: Message) -> dict[str, Any]:
    """The dictionary a template sees. Keys the client left out stay out: some templates print what they find."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
    }


def read_arguments(text: str) -> Arguments:
    """The object that the JSON text of arguments holds. Text that is no JSON object is kept whole under one key: the
    model sees what it wrote, and templates that walk the arguments still can."""
    if not text.strip():
        return Arguments()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Arguments(raw_arguments=text)
    return Arguments(value) if isinstance(value, dict) else Arguments(raw_arguments=text)


def _foreign_part(wire: dict[str, Any]) -> dict[str, Any]:
    """What of a message is not the model's own text."""
    if wire["role"] != "assistant":
        return wire
    return {key: value for key, value in wire.items() if key not in ("content", "reasoning_content")}


def _mark_message(wire: dict[str, Any], marker: Marker) -> dict[str, Any]:
    own = wire["role"] == "assistant"
    return {
        key: marker.mark(value, own_turn=own) if key in ("content", "reasoning_content") else marker.mark_tree(value)
        for key, value in wire.items()
    }


def _without_half_pairs(text: str) -> str:
    """The JSON text of arguments can hold half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────────────


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own text for training; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
