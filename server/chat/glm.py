"""GLM's dialect: one tolerant, streaming parser for every generation.

A turn is reasoning, then text and tool calls, in tags. Where the turn starts comes from the prompt's tail; what a tag
means comes from where it stands. The state machine reads each token once; `HELD` is the one place where tokens wait.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from enum import Enum, auto

from server.chat.call_writer import CallWriter
from server.chat.glm_answer import BLANKS, AnswerReader
from server.chat.glm_generation import Generation
from server.chat.glm_reasoning import ReasoningWriter, Retained
from server.chat.messages import ContentDelta, Delta, EndOfText, Place, Prompt, ReasoningDelta, Tool
from server.chat.tags import BOX_TAGS, CALL_TAGS, TEXT_TAGS, TURN_TAGS, Tag, TagScanner, Token
from server.chat.toolbox import Toolbox

_LIKELY_TEXT = ("<", "</")  # kept at a cut, unless behind a call; a longer start of a tag is dropped


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class GlmDialect:
    """For every GLM from 4.5 on. `generation` decides whether blanks around reasoning are layout, nothing else."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    @property
    def name(self) -> str:
        return "glm"

    @property
    def shows_special_tokens(self) -> bool:
        return True

    @property
    def can_force_calls(self) -> bool:
        return True

    @property
    def turn_tags(self) -> tuple[str, ...]:
        return tuple(sorted(tag.value for tag in TURN_TAGS))

    def own_tags(self, *, with_calls: bool) -> tuple[str, ...]:
        return tuple(sorted(tag.value for tag in (TEXT_TAGS | CALL_TAGS if with_calls else TEXT_TAGS)))

    def parser(self, prompt: Prompt, tools: Sequence[Tool]) -> GlmParser:
        return GlmParser(tools, start_in_reasoning=prompt.opens_in_reasoning, generation=self.generation)


class _State(Enum):
    REASONING = auto()
    HELD = auto()  # a call has begun inside reasoning: a draft if </think> still comes, else the end of reasoning
    ANSWER = auto()
    ENDED = auto()


class _Held:
    """Tokens since a <tool_call> inside reasoning, and what they amount to should the reasoning have ended there."""

    def __init__(self, answer: AnswerReader) -> None:
        self.deltas: list[Delta] = []
        self.answer = answer.fork(self.deltas)
        self.tokens: list[Token] = []
        self.closer_at: int | None = None  # a </think> inside a value: data, unless that value never closes
        self.n_open = 0  # <think> inside the value

    def raw(self, end: int | None = None) -> str:
        return "".join(text for _, text in self.tokens[:end])


class GlmParser:
    """Reads one answer. `tools` empty: call tags are text. `new_id` makes the ids of calls.

    Deltas of any cutting of the same text fold to the same turn. Pass EndOfText.STOP only where the model itself ended
    its turn; a stop string or a limit is LENGTH, because more was meant.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        start_in_reasoning: bool,
        generation: Generation,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        toolbox = Toolbox(tools)
        self._offers_tools = bool(toolbox)
        self._out: list[Delta] = []
        self._scanner = TagScanner(TEXT_TAGS | CALL_TAGS if toolbox else TEXT_TAGS)
        self._trims = generation.trims_reasoning
        self._reasoning = ReasoningWriter(self._out, trims=self._trims)
        self._answer = AnswerReader(toolbox, CallWriter(self._out, new_id))
        self._state = _State.REASONING if start_in_reasoning else _State.ANSWER
        # Reasoning that may be the answer, while its block is open; or an answer that may be reasoning, while no think
        # tag and no call has come.
        self._retained: Retained | None = Retained()
        self._held = _Held(self._answer)

    @property
    def ended(self) -> bool:
        """The turn is over: further text is ignored."""
        return self._state is _State.ENDED

    @property
    def place(self) -> Place:
        match self._state:
            case _State.REASONING:
                return Place.REASONING
            case _State.HELD:
                return Place.UNDECIDED
            case _:
                return Place.ANSWER

    @property
    def opens_another_call(self) -> bool:
        """A call is complete, and the text has begun the next one."""
        return self._answer.has_calls and self._answer.call is not None

    def feed(self, text: str) -> list[Delta]:
        if not text:
            return []
        if "<" not in text and not self._scanner.held and (deltas := self._plain(text)) is not None:
            return deltas
        for tag, part in self._scanner.scan(text):
            self._token(tag, part)
        return self._drain()

    def finish(self, end: EndOfText) -> list[Delta]:
        tail = self._scanner.flush()
        answer = self._held.answer if self._state is _State.HELD else self._answer
        if tail and end is EndOfText.LENGTH and (tail not in _LIKELY_TEXT or answer.after_call):
            answer.was_cut = True
        elif tail:
            self._token(None, tail)
        self._end(end)
        return self._drain()

    def _drain(self) -> list[Delta]:
        if not self._out:
            return []
        deltas = self._out[:]
        self._out.clear()
        return deltas

    def _plain(self, text: str) -> list[Delta] | None:
        """The fast path for text without tags, as most is: None if it needs thought and nothing was done."""
        if self._state is _State.REASONING:
            deltas = self._reasoning.plain(text)
        elif self._state is _State.ANSWER:
            deltas = self._answer.plain(text)
        else:
            return None
        if deltas is not None and self._retained is not None:
            self._retained.add(text)
        return deltas

    def _token(self, tag: Tag | None, text: str) -> None:
        state = self._state
        if state is _State.ANSWER:
            self._in_answer(tag, text)
        elif state is _State.REASONING:
            self._in_reasoning(tag, text)
        elif state is _State.HELD:
            self._in_held(tag, text)

    # ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _in_reasoning(self, tag: Tag | None, text: str) -> None:
        if tag is Tag.THINK_CLOSE:
            self._close_reasoning()
        elif tag is Tag.CALL_OPEN:
            self._state = _State.HELD
            self._held = _Held(self._answer)
            self._in_held(tag, text)
        elif tag in TURN_TAGS:
            self._end(EndOfText.STOP)
        elif tag is not Tag.THINK_OPEN and tag not in BOX_TAGS:
            self._reason(text)

    def _reason(self, text: str) -> None:
        self._reasoning.text(text)
        if self._retained is not None:
            self._retained.add(text)

    def _open_reasoning(self) -> None:
        self._state = _State.REASONING
        self._retained = Retained()

    def _close_reasoning(self) -> None:
        self._reasoning.end_block()
        self._retained = None
        self._state = _State.ANSWER
        self._answer.drop_breaks()

    # ── a call inside reasoning ──────────────────────────────────────────────────────────────────────────────────────

    def _in_held(self, tag: Tag | None, text: str) -> None:
        held = self._held
        in_value = held.answer.in_value
        if tag is Tag.THINK_CLOSE:
            if not in_value:
                self._was_draft(len(held.tokens))
                return
            if held.n_open:
                held.n_open -= 1
            elif held.closer_at is None:
                held.closer_at = len(held.tokens)
        elif tag is Tag.THINK_OPEN:
            if not in_value:
                return
            held.n_open += 1
        held.tokens.append((tag, text))
        if tag is Tag.CALL_OPEN and held.closer_at is not None:
            self._was_draft(held.closer_at)  # the real call after a draft that was left open
            return
        held.answer.token(tag, text)
        if in_value:
            if held.answer.in_value:
                return
            held.closer_at, held.n_open = None, 0
        if held.answer.ended:
            self._end(EndOfText.STOP)
        elif held.answer.call is None and not held.answer.has_calls:
            self._state = _State.REASONING  # only a mention of the tag
            self._reason(held.raw())

    def _was_draft(self, closer_at: int) -> None:
        """Reasoning ends at this token, so the call before it was only thought of."""
        following = self._held.tokens[closer_at + 1 :]
        self._state = _State.REASONING
        self._reason(self._held.raw(closer_at))
        self._close_reasoning()
        for tag, text in following:
            self._token(tag, text)

    # ── answer ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _in_answer(self, tag: Tag | None, text: str) -> None:
        answer = self._answer
        if tag is not None and (tag is Tag.THINK_OPEN or tag is Tag.THINK_CLOSE) and not answer.in_value:
            if answer.call is not None:
                return  # noise inside a call
            if tag is Tag.THINK_OPEN:
                self._open_reasoning()
            else:
                self._stray_closer()
            return
        if self._retained is not None:
            self._retained.add(text)
        answer.token(tag, text)
        if answer.ended:
            self._end(EndOfText.STOP)

    def _stray_closer(self) -> None:
        """Thinking was off, yet the model thought first and closed what nobody had opened; or a closer too many."""
        retained, self._retained = self._retained, None
        raw = retained.text() if retained is not None and not self._answer.writer.n_calls else None
        if raw is not None:
            if raw.strip():
                text = raw.strip() if self._trims else raw
                self._out.append(ReasoningDelta(text, takes_back=self._answer.n_content))
            self._answer.forget_content()
        elif not self._answer.n_content:
            self._answer.drop_breaks()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, end: EndOfText) -> None:
        while self._state is _State.HELD:
            self._end_held(end)
        if self._state is _State.REASONING:
            if end is EndOfText.STOP:
                self._answer_was_reasoning()
        elif self._state is _State.ANSWER:
            self._answer.finish(end)
        self._state = _State.ENDED

    def _end_held(self, end: EndOfText) -> None:
        held = self._held
        if held.closer_at is not None:
            self._was_draft(held.closer_at)
            return
        held.answer.finish(end)
        if held.answer.has_calls:
            self._reasoning.end_block()
            self._out += held.deltas
            self._state = _State.ENDED
            return
        self._state = _State.REASONING
        if end is EndOfText.STOP or not held.answer.was_cut:
            self._reason(held.raw())

    def _answer_was_reasoning(self) -> None:
        """Thinking was on, yet the model answered at once: it ended its turn without closing the block, and there is
        nothing else to show."""
        answer = self._answer
        raw = self._retained.text() if self._retained is not None else None
        if raw is None or answer.n_content or answer.has_calls:
            return
        text = raw.lstrip("\r\n").rstrip(BLANKS)
        if text:
            self._out.append(ContentDelta(text, takes_back=self._reasoning.n_block))
