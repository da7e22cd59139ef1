"""The nouns of a chat: what a client says (Conversation) and what a model's text means (deltas).

Values only: no HTTP, no model. Argument strings of tool calls are JSON text, exactly as the OpenAI wire carries them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from server.chat.forms import ToolChoice
from server.chat.options import ReasoningFormat, Thinking


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history. `arguments` is JSON text as the client sent it; it may be invalid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is flattened text, or None where the client sent null; `reasoning` is reasoning_content."""

    role: str
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `wire` is the client's own tool object, unchanged: templates print it."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments; {} when the client gave none
    wire: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # stronger than `thinking`
    thinking: Thinking = field(default_factory=Thinking)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    # how the answer is read
    reasoning_format: ReasoningFormat | None = None  # None: the server's
    parallel_tool_calls: bool = True  # False: the answer ends after its first call
    parse_tool_calls: bool = True  # False: calls are left in the content, as the model wrote them


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A piece of the rendered prompt. `literal`: text of a message, where control-token texts are mere characters."""

    text: str
    literal: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    spans: tuple[PromptSpan, ...]
    opens_in_reasoning: bool = False  # the prompt's tail has an open think tag

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


# ── what the model's text means ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """`takes_back` > 0: that many characters sent last as content were reasoning, and `text` says them again. A fold
    takes them out of the content; a stream cannot, and sends `text` like any other."""

    text: str
    takes_back: int = 0


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """`takes_back` > 0: that many characters sent last as reasoning were the answer, and `text` says them again. A fold
    takes them out of the reasoning; a stream cannot, and sends `text` like any other."""

    text: str
    takes_back: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """First delta of a call; its argument text so far is empty. `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of the JSON text of the arguments of call `index`.

    `abandons`: the text ended inside a long argument that was already being sent. The arguments stay incomplete JSON,
    which nobody can run; a fold forgets the call.
    """

    index: int
    fragment: str
    abandons: bool = False


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


class Place(Enum):
    """Where in its turn a text has come to."""

    REASONING = auto()
    UNDECIDED = auto()  # in a call inside reasoning: a draft, or the end of the reasoning
    ANSWER = auto()


class EndOfText(StrEnum):
    """Why the text ended; a parser treats an unfinished call differently when it was cut."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The fold of a turn's deltas: what a non-streaming answer shows."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ParsedCall, ...] = ()


def fold(deltas: Sequence[Delta]) -> ParsedTurn:
    """Join deltas in order. Deltas of one call carry the index that its ToolCallStart announced."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: dict[int, list[str]] = {}
    abandoned: set[int] = set()
    for delta in deltas:
        match delta:
            case ReasoningDelta(text, takes_back):
                _take_back(content, takes_back)
                reasoning.append(text)
            case ContentDelta(text, takes_back):
                _take_back(reasoning, takes_back)
                content.append(text)
            case ToolCallStart():
                starts.append(delta)
            case ToolCallArguments(index, fragment, abandons):
                arguments.setdefault(index, []).append(fragment)
                if abandons:
                    abandoned.add(index)
    calls = tuple(
        ParsedCall(start.id, start.name, "".join(arguments.get(start.index, [])))
        for start in starts
        if start.index not in abandoned
    )
    return ParsedTurn("".join(reasoning), "".join(content), calls)


def _take_back(parts: list[str], n_characters: int) -> None:
    while n_characters > 0 and parts:
        last = parts.pop()
        if len(last) > n_characters:
            parts.append(last[:-n_characters])
        n_characters -= len(last)
