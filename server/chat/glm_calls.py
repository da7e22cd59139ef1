"""Reads one tool call of GLM, from behind its opening tag, in every layout and with the damage that was seen in use.

    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>

Blanks, line breaks and the two characters \\n between the tags are layout.
"""

from __future__ import annotations

import io
from enum import Enum, auto

from server.chat.call_bodies import BodyCall, is_complete, read_body, read_pairs
from server.chat.call_heads import Head, HeadKind
from server.chat.call_writer import CallWriter, PendingCall
from server.chat.glm_values import ValueReader, Verdict
from server.chat.messages import Delta, EndOfText
from server.chat.tags import STOP_TAGS, TURN_TAGS, Tag, Token
from server.chat.toolbox import Toolbox, is_plausible_name, skip_gap, strip_gap


class Status(Enum):
    OPEN = auto()
    DONE = auto()  # read, or an empty one dropped
    TEXT = auto()  # not a call: `given_back` is what it said
    CUT = auto()  # unfinished when the text was cut: dropped


class _Step(Enum):
    NAME = auto()
    OPENED_AGAIN = auto()  # a second <tool_call>: in place of <arg_key>, or of the </tool_call> before the next call
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()
    BETWEEN = auto()


class CallReader:
    """Feed tokens while `status` is OPEN. Afterwards `rest` is what does not belong to the call.

    `opener` is the text of its opening tag; where that is lost, `name` has already been read.
    """

    def __init__(self, toolbox: Toolbox, writer: CallWriter, opener: str, name: str = "") -> None:
        self.status = Status.OPEN
        self.rest: list[Token] = []
        self.given_back = ""
        self._toolbox = toolbox
        self._writer = writer
        self._step = _Step.NAME
        self._opener = opener
        self._raw = io.StringIO()  # what was read, as long as it can be given back
        self._raw.write(name)
        self._head = Head(toolbox)
        self._head.add(name)
        self._call = PendingCall(toolbox, writer)
        self._words: list[str] = []  # the key, or text where a key may be
        self._key = ""
        self._value: ValueReader | None = None
        self._current: Token | None = None

    @property
    def in_value(self) -> bool:
        return self._step is _Step.VALUE

    def plain(self, text: str) -> list[Delta] | None:
        """The fast path for text without tags: what is to be sent, or None if it needs thought and nothing was done."""
        if self._value is None or not self._value.is_plain:
            return None
        deltas = self._call.plain(text)
        if deltas is not None:
            self._value.last = text
            if not self._call.is_sent:
                self._raw.write(text)
        return deltas

    def token(self, tag: Tag | None, text: str) -> None:
        self._current = (tag, text)
        self._read(tag, text)
        if self.status is Status.OPEN and not self._call.is_sent:
            self._raw.write(text)

    def finish(self, end: EndOfText) -> None:
        """The text has ended inside the call. At STOP a call is accepted if all it has is closed; after a cut only what
        its closing tag had ended, because more may have been meant."""
        cut = end is EndOfText.LENGTH
        self._current = None
        if self._value is not None:
            self._after_verdict(self._value.finish(cut=cut))
        if self.status is not Status.OPEN:
            return
        match self._step:
            case _Step.OPENED_AGAIN:
                self._next_call_begins()
            case _Step.NAME:
                self._finish_name(cut=cut)
            case _Step.BETWEEN if not cut:
                self._complete()
            case _:
                self._stop_unfinished(cut=cut)

    # ── by step ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, tag: Tag | None, text: str) -> None:
        if self._value is not None:
            verdict = self._value.token(tag, text)
            if verdict is not Verdict.OPEN:
                self._after_verdict(verdict)
            return
        if tag is not None and tag in TURN_TAGS:
            self.finish(EndOfText.STOP)
            self.rest.append((tag, text))
            return
        match self._step:
            case _Step.NAME:
                self._in_name(tag, text)
            case _Step.AFTER_KEY:
                self._in_gap(tag, text)
            case _ if tag is None:
                self._words.append(text)
            case _Step.KEY:
                self._in_key(tag, text)
            case _Step.BETWEEN:
                self._in_between(tag, text)
            case _:
                self._opened_again(tag, text)

    def _in_name(self, tag: Tag | None, text: str) -> None:
        match tag:
            case None:
                if self._head.add(text) is HeadKind.PROSE:
                    self._refuse(including=text)
            case Tag.CALL_CLOSE:
                calls = [] if self._head.is_empty else read_body(self._head.text, self._toolbox)
                self._write_bodies(calls, including=text)
            case Tag.KEY_OPEN:
                self._name_before_key(tag, text)
            case Tag.KEY_CLOSE | Tag.VALUE_OPEN:
                self._name_glued_to_key(tag, text)
            case Tag.CALL_OPEN:
                if self._head.is_empty:
                    self._raw = io.StringIO()  # a phantom before the real one
                elif self._head.name in self._toolbox:
                    self._call.begin(self._head.name)
                    self._step = _Step.OPENED_AGAIN
                else:
                    self._refuse(replay=(tag, text))
            case _:
                pass  # </arg_value> behind a name, or a tag of another kind: noise

    def _name_before_key(self, tag: Tag, text: str) -> None:
        head = strip_gap(self._head.text)
        name = self._head.name
        if name in self._toolbox or is_plausible_name(name):
            self._call.begin(name)
        elif (split := self._toolbox.split_body(head)) is not None:
            self._call.begin(split[0], read_pairs(split[1]))
        else:
            if self._toolbox.name_at_end(head) is not None:
                self._opener = ""  # prose behind a phantom, then the name
            self._refuse(replay=(tag, text))
            return
        self._start_key()

    def _name_glued_to_key(self, tag: Tag, text: str) -> None:
        is_name = self._head.name in self._toolbox
        if is_name and tag is Tag.KEY_CLOSE:
            return  # noise behind a name
        head = strip_gap(self._head.text)
        split = self._toolbox.split_glued(head)
        if split is None and len(words := head.split()) == 2 and all(map(is_plausible_name, words)):
            split = words[0], words[1]
        if split is None or is_name:
            self._refuse(replay=(tag, text))
            return
        self._call.begin(split[0])
        self._end_key(split[1])
        if tag is Tag.VALUE_OPEN:
            self._start_value()

    def _opened_again(self, tag: Tag, text: str) -> None:
        key = strip_gap("".join(self._words))
        may_be_any = self._call.is_empty and key and key not in self._toolbox
        if tag is Tag.KEY_CLOSE and (key in self._call.declared or may_be_any):
            self._end_key(key)
        elif tag is Tag.CALL_OPEN and not key:
            self._words = []
        else:
            self._next_call_begins(replay=(tag, text))

    def _next_call_begins(self, replay: Token | None = None) -> None:
        """The opener read last belongs to another call. This one ends here; with nothing but a name it was a phantom,
        unless its tool can do without arguments."""
        rest: list[Token] = [(Tag.CALL_OPEN, Tag.CALL_OPEN.value)]
        if word := "".join(self._words):
            rest.append((None, word))
        if replay is not None:
            rest.append(replay)
        if self._call.is_empty and not self._call.is_damaged and self._call.needs_arguments:
            self.status = Status.DONE
        else:
            self._complete()
        self.rest = rest

    def _in_key(self, tag: Tag, text: str) -> None:
        key = strip_gap("".join(self._words))
        match tag:
            case Tag.KEY_OPEN:
                self._call.is_damaged |= bool(key)
                self._words = []
            case Tag.KEY_CLOSE if key:
                self._end_key(key)
            case Tag.VALUE_OPEN:
                self._end_key(key)
                self._start_value()
            case Tag.VALUE_CLOSE:
                self._key_without_middle(key)
            case Tag.CALL_CLOSE:
                if key:
                    self._key_without_middle(key)
                    self._call.is_damaged |= self._step is _Step.AFTER_KEY
                self._complete(including=text)
            case Tag.CALL_OPEN if key:
                self._damaged_before_next_call()
            case _:
                pass

    def _key_without_middle(self, key: str) -> None:
        """`<arg_key>key=value</arg_value>`, both tags between key and value lost, or the wrong closing tag of a key."""
        if key in self._call.declared:
            self._end_key(key)
            return
        name, equals, value = key.partition("=")
        if not equals:
            name = max((known for known in self._call.declared if key.startswith(known)), key=len, default="")
            value = key[len(name) :]
        self._call.add_pair(name.strip(), value)
        self._words = []
        self._step = _Step.BETWEEN

    def _in_gap(self, tag: Tag | None, text: str) -> None:
        match tag:
            case None:
                gap = "".join(self._words) + text
                value = gap[skip_gap(gap) :]
                if value in ("", "\\"):  # a backslash may become the two characters \n
                    self._words = [value]
                else:
                    self._start_value(value)  # its opening tag is lost
            case Tag.VALUE_OPEN:
                self._start_value()
            case Tag.VALUE_CLOSE:
                self._start_value("".join(self._words))
                self._read(tag, text)
            case Tag.KEY_OPEN:
                self._call.is_damaged = True
                self._start_key()
            case Tag.CALL_CLOSE:
                self._call.is_damaged = True
                self._complete(including=text)
            case Tag.CALL_OPEN:
                self._damaged_before_next_call()
            case _:
                pass  # </arg_key> once more, or a tag of another kind

    def _in_between(self, tag: Tag, text: str) -> None:
        word = strip_gap("".join(self._words))
        match tag:
            case Tag.KEY_OPEN:
                self._start_key()
            case Tag.KEY_CLOSE if word:
                self._end_key(word)
            case Tag.CALL_CLOSE:
                self._complete(including=text)
            case Tag.CALL_OPEN:
                self._words = []
                self._step = _Step.OPENED_AGAIN
            case _:
                pass

    def _damaged_before_next_call(self) -> None:
        self._call.is_damaged = True
        self._words = []
        self._next_call_begins()

    def _start_key(self) -> None:
        self._words = []
        self._step = _Step.KEY

    def _end_key(self, key: str) -> None:
        self._key = key
        self._words = []
        self._step = _Step.AFTER_KEY

    def _start_value(self, text: str = "") -> None:
        self._words = []
        self._value = ValueReader(self._call, self._toolbox, self._call.add)
        self._call.start_value(self._key)
        self._step = _Step.VALUE
        if text:
            self._value.token(None, text)

    def _after_verdict(self, verdict: Verdict) -> None:
        if verdict is Verdict.OPEN or self._value is None:
            return
        rest = self._value.rest
        self._value = None
        self._call.end_value(trims=verdict is not Verdict.CLOSED)
        self._step = _Step.BETWEEN
        if verdict is Verdict.CLOSED_BY_CALL:
            current = self._current
            self._complete()
            if self.status is Status.DONE:
                self.rest = rest
            elif current is not None:  # `given_back` has all but the last of the rest
                self.rest = [current]
            return
        for at, (tag, text) in enumerate(rest):
            self._read(tag, text)
            if self.status is not Status.OPEN:
                self.rest += rest[at + 1 :]
                break

    # ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _complete(self, including: str = "") -> None:
        if self._call.complete():
            self.status = Status.DONE
        else:
            self._refuse(including=including)

    def _write_bodies(self, calls: list[BodyCall] | None, *, including: str = "") -> None:
        if calls is None:
            self._refuse(including=including)
            return
        for call in calls:
            self._writer.whole(call.name, call.arguments)
        self.status = Status.DONE

    def _refuse(self, *, including: str = "", replay: Token | None = None) -> None:
        self.given_back = self._opener + self._raw.getvalue() + including
        if replay is not None:
            self.rest = [replay]
        self.status = Status.TEXT

    def _stop_unfinished(self, *, cut: bool) -> None:
        if self._call.is_sent:
            self._call.abandon()
            self.status = Status.CUT
        elif cut:
            self.status = Status.CUT
        else:
            self._refuse()
            for tag in STOP_TAGS:
                self.given_back = self.given_back.removesuffix(tag.value)

    def _finish_name(self, *, cut: bool) -> None:
        head = self._head
        if head.is_empty:
            self.status = Status.CUT if cut else Status.DONE
        elif cut:
            if head.may_be_cut_call:
                self.status = Status.CUT
            else:
                self._refuse()
        elif head.name in self._toolbox and not self._toolbox.schema(head.name).required:
            self._write_bodies([BodyCall(head.name, "{}")])
        elif is_complete(head.text):
            self._write_bodies(read_body(head.text, self._toolbox))
        else:
            self._stop_unfinished(cut=False)
