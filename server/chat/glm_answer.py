"""Reads what GLM writes outside its reasoning: text, and tool calls between it."""

from __future__ import annotations

from typing import Self

from server.chat.call_writer import CallWriter
from server.chat.glm_calls import CallReader, Status
from server.chat.messages import ContentDelta, Delta, EndOfText
from server.chat.tags import BOX_TAGS, TURN_TAGS, Tag, Token
from server.chat.toolbox import Toolbox

# What str.isspace means, and the mark of a character that was cut in half. Kept back at the end of the text so far:
# blanks next to a call or at the end of the turn are layout, and half a character at the end is dropped.
BLANKS = (
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
)
BLANKS += "\u2028\u2029\u202f\u205f\u3000\ufffd"
BROKEN = "\ufffd"
_BLANK_SET = frozenset(BLANKS)


class AnswerReader:
    """Feed tokens, but no think tags outside a value. `ended` is set by a tag that ends the turn."""

    def __init__(self, toolbox: Toolbox, writer: CallWriter) -> None:
        self.ended = False
        self.n_content = 0  # characters sent
        self.call: CallReader | None = None
        self.writer = writer
        self._toolbox = toolbox
        self._offers_tools = bool(toolbox)
        self._first_call = writer.n_calls
        self._drops_breaks = True
        self._last = ""  # the text sent last
        self._held = ""  # may become the name of a call whose opener is lost; blanks before it included
        self._blanks: list[str] = []
        self.after_call = False  # nothing but blanks has come since a call
        self.was_cut = False  # the text was cut inside a call or a tag, which was dropped

    @property
    def in_value(self) -> bool:
        return self.call is not None and self.call.in_value

    @property
    def has_calls(self) -> bool:
        return self.writer.n_complete > self._first_call

    def fork(self, out: list[Delta]) -> Self:
        """A reader in the same state between calls, that writes to `out`. Its `has_calls` counts its own calls."""
        writer = self.writer
        twin = type(self)(self._toolbox, CallWriter(out, writer.new_id, writer.n_calls))
        twin.n_content = self.n_content
        twin._drops_breaks = self._drops_breaks
        twin._last = self._last
        twin._held = self._held
        twin._blanks = list(self._blanks)
        twin.after_call = self.after_call
        return twin

    def drop_breaks(self) -> None:
        """The next line breaks are layout."""
        self._drops_breaks = True

    def forget_content(self) -> None:
        """What was written so far turned out to be reasoning."""
        self.n_content = 0
        self._last = self._held = ""
        self._blanks = []
        self._drops_breaks = True

    def plain(self, text: str) -> list[Delta] | None:
        """The fast path for text without tags: what is to be sent, or None if it needs thought and nothing was done."""
        if self.call is not None:
            return self.call.plain(text)
        if (
            text[-1] in _BLANK_SET
            or self._held
            or self._blanks
            or self._drops_breaks
            or self.after_call
            or (self._offers_tools and self._toolbox.held_from(text, self._last) != len(text))
        ):
            return None
        self.n_content += len(text)
        self._last = text
        return [ContentDelta(text)]

    def token(self, tag: Tag | None, text: str) -> None:
        call = self.call
        if call is None:
            self._outside(tag, text)
            return
        call.token(tag, text)
        if call.status is Status.OPEN:
            return
        todo = self._leave(call)[::-1]
        while todo and not self.ended:
            tag, text = todo.pop()
            if self.call is None:
                self._outside(tag, text)
                continue
            self.call.token(tag, text)
            if self.call.status is not Status.OPEN:
                todo += self._leave(self.call)[::-1]

    def finish(self, end: EndOfText) -> None:
        while self.call is not None:
            call = self.call
            call.finish(end)
            for tag, text in self._leave(call):
                self.token(tag, text)
        self._release_name()
        if end is EndOfText.LENGTH and self.n_content and not self.after_call and not self.was_cut:
            self._send("".join(self._blanks).rstrip(BROKEN))
        self._blanks = []

    def _leave(self, call: CallReader) -> list[Token]:
        self.call = None
        match call.status:
            case Status.TEXT:
                self._text(call.given_back)
            case Status.CUT:
                self.was_cut = True
            case _:
                self.after_call = True
        return call.rest

    def _outside(self, tag: Tag | None, text: str) -> None:
        if tag is None:
            self._text(text)
        elif tag in TURN_TAGS:
            self.ended = True
        elif tag in BOX_TAGS:
            pass
        elif tag is Tag.CALL_OPEN:
            self._release_name()
            self.call = CallReader(self._toolbox, self.writer, text)
        elif tag is Tag.RESPONSE_OPEN and self.writer.n_calls:
            self.ended = True  # the model invents the result of its call
        elif tag is Tag.KEY_OPEN and (name := self._toolbox.name_at_end(self._held)) is not None:
            self._start_without_opener(name, text)
        elif not self.after_call:
            self._text(text)

    def _start_without_opener(self, name: str, key_opener: str) -> None:
        lead, blanks = self._held[: -len(name)], "".join(self._blanks)
        self._held, self._blanks = "", []
        if lead:
            self._text(lead)
            self._release_name()
        self.call = CallReader(self._toolbox, self.writer, "", name + blanks)
        self.call.token(Tag.KEY_OPEN, key_opener)

    def _text(self, text: str) -> None:
        if self._drops_breaks:
            text = text.lstrip("\r\n")
            if not text:
                return
            self._drops_breaks = False
        if not text.strip(BLANKS):
            if self._held and self._toolbox.name_at_end(self._held) is None:
                self._release_name()
            self._blanks.append(text)
            return
        text = f"{self._held}{''.join(self._blanks)}{text}"
        if self.after_call:
            self.after_call = False
            if not self.n_content:
                text = text.lstrip()
        body = text.rstrip(BLANKS)
        after = text[len(body) :]
        cut = self._toolbox.held_from(body, self._last) if self._offers_tools else len(body)
        if after and self._toolbox.name_at_end(body[cut:]) is None:
            cut = len(body)  # with blanks behind it, only a whole name may still belong to a call
        if cut < len(body):
            sent = body[:cut].rstrip(BLANKS)
            self._held = body[len(sent) :]
        else:
            sent, self._held = body, ""
        self._blanks = [after] if after else []
        self._send(sent)

    def _release_name(self) -> None:
        self._send(self._held)
        self._held = ""

    def _send(self, text: str) -> None:
        if text:
            self.n_content += len(text)
            self._last = text
            self.writer.out.append(ContentDelta(text))
