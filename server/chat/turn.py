"""Reads one answer the way its request asked for: the dialect's parser, then where reasoning is shown, how many calls
are taken, and which of the tokens were reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from server.chat.dialects import Parser
from server.chat.messages import (
    ContentDelta,
    Delta,
    EndOfText,
    Place,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.chat.options import ReasoningFormat
from server.chat.tags import Tag

_THINK_OPEN, _THINK_CLOSE = Tag.THINK_OPEN.value, Tag.THINK_CLOSE.value


class TurnReader:
    """Feed text with the number of its tokens, then finish. `n_reasoning` counts tokens of reasoning, without the tags
    around it."""

    def __init__(
        self,
        parser: Parser,
        *,
        reasoning_format: ReasoningFormat = ReasoningFormat.DEEPSEEK,
        parallel_tool_calls: bool = True,
    ) -> None:
        self.n_reasoning = 0
        self._parser = parser
        self._format = reasoning_format
        self._parallel = parallel_tool_calls
        self._shows_think_tags = reasoning_format in (ReasoningFormat.NONE, ReasoningFormat.DEEPSEEK_LEGACY)
        self._calls: set[int] = set()
        self._has_first_call = False
        self._cut = False
        self._in_block = False  # an opening tag was written into the content
        self._n_tokens = 0
        self._n_undecided = 0  # tokens of a call inside reasoning

    @property
    def has_tool_calls(self) -> bool:
        """Calls that were begun and not given up."""
        return bool(self._calls)

    @property
    def is_over(self) -> bool:
        """Nothing more that the model writes is wanted."""
        return self._cut or self._parser.ended

    def feed(self, text: str, n_tokens: int) -> list[Delta]:
        if self._cut:
            return []
        before = self._parser.place
        deltas = self._parser.feed(text)
        self._count(text, n_tokens, before, deltas)
        deltas = self._shown(deltas)
        if not self._parallel and self._parser.opens_another_call:
            self._cut = True
        return deltas

    def finish(self, end: EndOfText) -> list[Delta]:
        if self._cut:
            return []
        undecided = self._parser.place is Place.UNDECIDED
        deltas = self._parser.finish(end)
        if undecided and not any(isinstance(delta, ToolCallStart) for delta in deltas):
            self.n_reasoning += self._n_undecided
        if any(isinstance(delta, ContentDelta) and delta.takes_back for delta in deltas):
            self.n_reasoning = 0
        return self._shown(deltas)

    # ── which tokens were reasoning ──────────────────────────────────────────────────────────────────────────────────

    def _count(self, text: str, n_tokens: int, before: Place, deltas: Sequence[Delta]) -> None:
        after = self._parser.place
        self._n_tokens += n_tokens
        if after is Place.UNDECIDED:
            self._n_undecided += n_tokens
        elif before is Place.ANSWER:
            if after is Place.REASONING:
                self.n_reasoning += n_tokens - _n_up_to(_THINK_OPEN, text, n_tokens) - 1
            elif any(isinstance(delta, ReasoningDelta) and delta.takes_back for delta in deltas):
                self.n_reasoning = self._n_tokens - n_tokens + _n_up_to(_THINK_CLOSE, text, n_tokens)
        elif not any(isinstance(delta, ToolCallStart) for delta in deltas) or before is Place.REASONING:
            n = n_tokens if after is Place.REASONING else _n_up_to(_THINK_CLOSE, text, n_tokens)
            self.n_reasoning += self._n_undecided + n
            self._n_undecided = 0

    # ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        if not self._parallel:
            deltas = self._up_to_second_call(deltas)
        for delta in deltas:
            match delta:
                case ToolCallStart(index):
                    self._calls.add(index)
                case ToolCallArguments(index, abandons=True):
                    self._calls.discard(index)
        return self._with_think_tags(deltas) if self._shows_think_tags else deltas

    def _up_to_second_call(self, deltas: list[Delta]) -> list[Delta]:
        for i, delta in enumerate(deltas):
            if isinstance(delta, ToolCallStart):
                if self._has_first_call:
                    self._cut = True
                    return deltas[:i]
                self._has_first_call = True
        return deltas

    def _with_think_tags(self, deltas: list[Delta]) -> list[Delta]:
        shown: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self._reasoning_in_content(delta, shown)
            elif isinstance(delta, ContentDelta) and delta.takes_back and self._format is ReasoningFormat.NONE:
                pass  # it stands in the content already
            else:
                if self._in_block:
                    self._in_block = False
                    shown.append(ContentDelta(_THINK_CLOSE))
                shown.append(delta)
        return shown

    def _reasoning_in_content(self, delta: ReasoningDelta, shown: list[Delta]) -> None:
        if delta.takes_back:  # it stands in the content already, and its closing tag has come
            shown.append(ContentDelta(_THINK_CLOSE))
        else:
            shown.append(ContentDelta(delta.text if self._in_block else _THINK_OPEN + delta.text))
            self._in_block = True
        if self._format is ReasoningFormat.DEEPSEEK_LEGACY:
            shown.append(ReasoningDelta(delta.text))


def _n_up_to(tag: str, text: str, n_tokens: int) -> int:
    """How many of the tokens of `text` stand before `tag`, which is a token itself. The engine sends tokens together
    where it held text back; then by their share of the text."""
    at = text.find(tag)
    if at < 0 or n_tokens <= 1:
        return max(0, n_tokens - 1)
    return min(n_tokens - 1, round(at / (len(text) - len(tag) or 1) * (n_tokens - 1)))
