"""Bodies of the chat routes: OpenAI's messages and tools become a Conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from server.api.schemas.fields import (
    Body,
    CountOrAll,
    Int32,
    first_given,
    first_problem,
    refuse,
    refuse_unsupported,
    shown,
)
from server.api.schemas.generation import MAX_LOGPROBS, GenerationFields
from server.api.schemas.tool_choice import TOOL_CHOICE_SCHEMA, read_tool_choice
from server.chat.forms import CallMode, ToolChoice
from server.chat.messages import Conversation, Message, Tool, ToolCall
from server.chat.options import EFFORTS, ReasoningFormat, Thinking

DEFAULT_TOP_LOGPROBS = 20  # llama.cpp's, where logprobs is true and top_logprobs absent

UNSUPPORTED_IN_CHAT = {
    "functions": "is long deprecated; use 'tools'",
    "function_call": "is long deprecated; use 'tool_choice'",
    "web_search_options": "is not supported; this server searches nothing",
    "modalities": "only text can be generated",
    "audio": "only text can be generated",
    "echo": "is not supported for chats",
    "chat_template": "a template cannot be sent with a request; the server's is set with --chat-template",
    "documents": "is not supported; put documents into a message",
}
HARMLESS_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
}

_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}
_INSTEAD_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")


def _content(value: Any) -> Any:
    """Text, or a list of text parts, which are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a text or a list of parts, but got {shown(value)}")
    return "\n".join(_part(part) for part in value)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS or kind == "refusal":
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise ValueError(f"a part of type {shown(kind)} must have a text, but got {shown(part)}")
    if isinstance(kind, str):
        raise ValueError(f"parts of type {shown(kind)} are not supported; this server reads text only")
    raise ValueError(f"a part must be an object with a type, but got {shown(part)}")


def _arguments(value: Any) -> Any:
    """JSON text. Objects are taken as well, since some clients send them; anything else is refused."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value


class FunctionCall(Body):
    name: str
    arguments: Annotated[
        str,
        BeforeValidator(_arguments),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
    ] = Field("", description="JSON text of the arguments.")


class MessageToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    # No others: templates that meet a role they do not know may write it down with the rank of the system.
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            if raw.get("function_call"):
                raise ValueError("'function_call' is long deprecated; use 'tool_calls'")
            silent = raw.get("role") == "assistant" and any(raw.get(field) for field in _INSTEAD_OF_CONTENT)
            if "content" not in raw and not silent:
                raise ValueError("a message needs 'content'; only an assistant's with 'tool_calls' may do without")
        return raw

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def to_domain(self) -> Message:
        return Message(
            # Templates know no developers; what OpenAI calls so is their system role.
            role="system" if self.role == "developer" else self.role,
            content=self.content,
            reasoning=self.thoughts,
            tool_calls=tuple(
                ToolCall(call.id or "", call.function.name, call.function.arguments) for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


_TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"


class ToolFunction(Body):
    name: Annotated[str, Field(pattern=_TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")


class ChatTool(Body):
    type: Literal["function"] = "function"
    function: ToolFunction


def _tools(value: Any) -> tuple[Tool, ...]:
    """Checked tools, each with the client's own object beside it: templates print that one, unchanged."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"must be a list of tools, but got {shown(value)}")
    tools = []
    for i, wire in enumerate(value):
        try:
            function = ChatTool.model_validate(wire).function
        except ValidationError as error:
            raise first_problem(error, f"tools[{i}]") from error
        tools.append(Tool(function.name, function.parameters or {}, wire))
    return tuple(tools)


_TOOL_SCHEMA = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": _TOOL_NAME},
                "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
        },
    },
}
_TOOLS_SCHEMA = {
    "anyOf": [{"type": "array", "items": _TOOL_SCHEMA}, {"type": "null"}],
    "description": "Functions the model may call.",
}


class ThinkingFields(Body):
    type: Literal["enabled", "disabled"] | None = None
    clear_thinking: bool | None = None
    budget_tokens: CountOrAll | None = None


class ConversationFields(Body):
    """What decides the prompt of a chat."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[tuple[Tool, ...], PlainValidator(_tools), WithJsonSchema(_TOOLS_SCHEMA)] = ()
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = Field(
        None, description="none: the tools are left out of the prompt. Forced calls begin right behind the reasoning."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: the answer ends after its first call.")
    parse_tool_calls: bool | None = Field(
        None, description="False: calls stay in the content, as the model wrote them."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    reasoning_effort: str | None = Field(
        None, description=f"For GLM one of {', '.join(EFFORTS)}; given to other templates as it is."
    )
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = Field(
        None, description="none: reasoning stays in the content, in think tags. Absent: the server's."
    )
    thinking: ThinkingFields | None = Field(None, description="Whether to think, and what of earlier thoughts to keep.")
    enable_thinking: bool | None = Field(None, description="The same as thinking.type.")
    thinking_budget_tokens: CountOrAll | None = Field(
        None, description="Most tokens of reasoning, which is then closed by force; -1: no limit."
    )
    reasoning_budget_tokens: CountOrAll | None = Field(None, description="Another name of thinking_budget_tokens.")
    thinking_token_budget: CountOrAll | None = Field(None, description="Another name of thinking_budget_tokens.")
    reasoning_budget_message: str | None = Field(
        None, description="Written at the end of reasoning that the budget closes."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Continue the last message. Absent: if it is an assistant's."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported_in_chat(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            refuse_unsupported(raw, UNSUPPORTED_IN_CHAT, HARMLESS_IN_CHAT)
        return raw

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        read_tool_choice(self.tool_choice, [tool.name for tool in self.tools])
        if isinstance((self.chat_template_kwargs or {}).get("enable_thinking"), str):
            raise refuse("chat_template_kwargs.enable_thinking", "must be true or false, not a text")
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse("continue_final_message", "cannot be true together with 'add_generation_prompt'")
        if self._continues and [message.role for message in self.messages[-2:]] == ["assistant", "assistant"]:
            raise refuse("messages", "two assistant messages stand at the end; only one can be continued")
        return self

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        return () if self.tool_choice == "none" else self.tools

    @property
    def _choice(self) -> ToolChoice:
        return read_tool_choice(self.tool_choice, [tool.name for tool in self.tools]) or ToolChoice()

    @property
    def _continues(self) -> bool:
        final = self.messages[-1]
        if self.continue_final_message is None:
            return final.role == "assistant" and not final.tool_calls and self.add_generation_prompt is not True
        return self.continue_final_message

    def conversation(self) -> Conversation:
        continues = self._continues
        return Conversation(
            messages=tuple(message.to_domain() for message in self.messages),
            tools=self.offered_tools,
            template_kwargs=self.chat_template_kwargs or {},
            thinking=self._thinking(),
            tool_choice=self._choice,
            add_generation_prompt=not continues and self.add_generation_prompt is not False,
            continue_final_message=continues,
            reasoning_format=None if self.reasoning_format is None else ReasoningFormat(self.reasoning_format),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            parse_tool_calls=self.parse_tool_calls is not False,
        )

    def _thinking(self) -> Thinking:
        asked = self.thinking or ThinkingFields()
        return Thinking(
            enabled=self.enable_thinking if asked.type is None else asked.type == "enabled",
            effort=self.reasoning_effort or None,
            clear=asked.clear_thinking,
            budget=first_given(
                asked.budget_tokens,
                self.thinking_budget_tokens,
                self.reasoning_budget_tokens,
                self.thinking_token_budget,
            ),
            budget_message=self.reasoning_budget_message,
        )


class ChatRequest(ConversationFields, GenerationFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: Annotated[Int32, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "needs 'logprobs' to be true")
        if self.logprobs and self.stream and self.offered_tools:
            raise refuse("logprobs", "is not supported together with 'tools' and 'stream'")
        if self.ignore_eos and self.offered_tools and self._choice.mode is CallMode.REQUIRED:
            raise refuse("tool_choice", "cannot force calls together with 'ignore_eos'")
        if self.gbnf is not None and self.offered_tools:
            raise refuse("grammar", "is not supported together with 'tools'")
        return self

    @property
    def n_logprobs(self) -> int | None:
        if self.logprobs:
            return DEFAULT_TOP_LOGPROBS if self.top_logprobs is None else self.top_logprobs
        return self.n_probs or None


class PromptRequest(ConversationFields):
    """POST /apply-template and /v1/chat/completions/input_tokens; the other fields of a chat request are ignored."""

    model: str | None = None


class PromptAnswer(Body):
    prompt: str


class TokenCount(Body):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
