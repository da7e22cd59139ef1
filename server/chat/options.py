"""Options of the chat room: which template writes the prompt, how thoughts are asked for, and how they are shown. Plain
values, no flag names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# From no thinking at all to the most; OpenAI's words, and "max", which GLM's templates know.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ReasoningFormat(StrEnum):
    """Where the text between think tags goes; names are llama.cpp's."""

    AUTO = "auto"  # the same as DEEPSEEK
    NONE = "none"  # left in content, tags and all
    DEEPSEEK = "deepseek"  # into reasoning_content
    DEEPSEEK_LEGACY = "deepseek-legacy"  # into reasoning_content and, tags and all, into content too


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much thinking is asked for. None: nothing is said, so the template decides."""

    enabled: bool | None = None  # stronger than what `effort` says
    effort: str | None = None  # of EFFORTS; other models than GLM may have words of their own
    clear: bool | None = None  # leave the reasoning of turns before the last question out of the prompt
    budget: int | None = None  # most tokens of reasoning; -1: no limit, whatever the server's
    budget_message: str | None = None  # put at the end of reasoning that the budget cuts


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Requests say the same things, and win. Template variables win over `thinking`."""

    template: str | None = None  # Jinja source that replaces the model's own; None: the model's
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    reasoning_format: ReasoningFormat = ReasoningFormat.AUTO
    normalize: bool = True  # leave out what changes with each request and means nothing (chat/volatile.py)
    tool_grammar: bool = True  # hold the calls that a model makes to what was offered
