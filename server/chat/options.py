"""Options of the chat room: which template writes the prompt, and how thoughts are shown. Plain values, no flag names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ReasoningFormat(StrEnum):
    """Where the text between think tags goes; names are llama.cpp's."""

    AUTO = "auto"  # the same as DEEPSEEK
    NONE = "none"  # left in content, tags and all
    DEEPSEEK = "deepseek"  # into reasoning_content
    DEEPSEEK_LEGACY = "deepseek-legacy"  # into reasoning_content and, tags and all, into content too


@dataclass(frozen=True, slots=True)
class ChatOptions:
    template: str | None = None  # Jinja source that replaces the model's own; None: the model's
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # a request's chat_template_kwargs are put over them
    reasoning_format: ReasoningFormat = ReasoningFormat.AUTO
