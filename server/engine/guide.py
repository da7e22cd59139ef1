"""Follows the tokens of one answer that has a constraint, and says which tokens may come next.

Whether one token is allowed is asked of the parser directly, in microseconds. The mask of all allowed tokens is needed
only where the model wanted another one; then the next few are likely wanted as well, and are computed on a thread of
their own while the batch decodes.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from enum import Enum, auto

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from server.engine.constraint import ConstraintCompiler, MaskBuffer
from server.engine.messages import Constraint, FreeBlock
from server.errors import InvalidRequest

MASKS_AHEAD = 4  # behind a refused choice
MOST_LEADING_BLANKS = 2  # tokens before a block that the answer may begin with


class _State(Enum):
    FREE = auto()  # waiting for the trigger
    BLOCK = auto()  # free text up to the block's closer
    LEAD = auto()  # the constraint begins here, unless a block is opened first
    BOUND = auto()


class Guide:
    """Ask `refuses` about the token that was sampled; where it was refused choose from `allowed`, unless `forbids`;
    then `note` the one that was taken, forced ones included. Not thread-safe."""

    def __init__(
        self, compiler: ConstraintCompiler, constraint: Constraint, block: FreeBlock | None, executor: Executor
    ) -> None:
        self._table = compiler.table
        self._compiled = compiler.prepare(constraint)
        self._trigger = constraint.trigger
        self._block = block
        self._executor = executor
        self._parser: LLMatcher = self._compiled.parser
        self._buffer: MaskBuffer | None = None
        self._ahead: Future[NDArray[np.bool_]] | None = None
        self._is_fresh = True  # the parser has taken nothing
        self._n_ahead = 0  # masks to be computed ahead
        self._n_blanks = 0
        self._tail = b""
        self._state = _State.FREE
        if block is not None and block.is_open:
            self._state = _State.BLOCK
        elif self._trigger is None:
            self._bind()
            if block is not None and block.may_open:
                self._state = _State.LEAD

    def substitute(self, token: int) -> int:
        """What is taken instead of `token` without further ado: an answer that is wanted in a form must not end in its
        reasoning, so that is closed then."""
        block = self._block
        if self._state is not _State.BLOCK or self._trigger is not None or block is None:
            return token
        return block.closer if token in self._table.end_tokens or token in block.enders else token

    def refuses(self, token: int) -> bool:
        if self._state in (_State.FREE, _State.BLOCK) or (self._state is _State.LEAD and self._may_lead(token)):
            return False
        if self._accepts(token):
            return False
        self._n_ahead = MASKS_AHEAD
        return True

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come, shape [n_tokens]; a fresh array. Asked only after `refuses` said so."""
        if self._ahead is not None:
            mask = self._ahead.result()
        elif self._is_fresh:
            mask = self._compiled.first_mask.copy()
        else:
            mask = self._mask()
        parser = self._settled()
        if parser.is_error():
            raise InvalidRequest(f"the constraint cannot be followed any further: {parser.get_error()[:200]}")
        mask[self._table.ends] = self._trigger is None and parser.is_accepting()
        if self._state is _State.LEAD and self._block is not None:
            mask[self._block.opener] = True
            if self._n_blanks < MOST_LEADING_BLANKS:
                mask[self._table.blanks] = True
        return mask

    def forbids(self, token: int) -> bool:
        """Is it one of the few tokens of `allowed` that must not come all the same, for what they spell?"""
        forbidden = self._compiled.forbidden
        if forbidden is None or token in self._table.special:
            return False
        return forbidden.is_spelt(self._tail, self._table.pieces[token])

    def note(self, token: int) -> None:
        block = self._block
        match self._state:
            case _State.FREE:
                if block is not None and token == block.opener:
                    self._state = _State.BLOCK
                elif token == self._trigger:
                    self._bind()
            case _State.BLOCK:
                if block is not None and token == block.closer:
                    self._leave_block()
            case _State.LEAD if block is not None and token == block.opener:
                self._state = _State.BLOCK
            case _State.LEAD if self._may_lead(token) and not self._accepts(token):
                self._n_blanks += 1
            case _:
                self._state = _State.BOUND
                self._advance(token)

    def close(self) -> None:
        """Wait for what runs on the other thread: it must not outlive the parser's owner."""
        self._settled()

    # ── the parser ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _bind(self) -> None:
        self._parser = self._compiled.parser.deep_copy()
        self._state = _State.BOUND
        self._is_fresh = True
        self._n_ahead = 0
        self._tail = b""

    def _leave_block(self) -> None:
        if self._trigger is None:
            self._bind()
        else:
            self._state = _State.FREE

    def _may_lead(self, token: int) -> bool:
        """Before the constraint: the block's opener, or blanks that are not part of the answer itself."""
        if self._block is not None and token == self._block.opener:
            return True
        return self._n_blanks < MOST_LEADING_BLANKS and self._table.is_blank(token)

    def _accepts(self, token: int) -> bool:
        parser = self._settled()
        table = self._table
        if token in table.end_tokens:
            return self._trigger is None and parser.is_accepting()
        return not self.forbids(token) and parser.validate_tokens([token]) == 1

    def _advance(self, token: int) -> None:
        parser = self._settled()
        self._ahead = None
        if token in self._table.end_tokens:
            return
        if parser.try_consume_tokens([token]) != 1:
            raise InvalidRequest(f"the constraint cannot be followed any further: {parser.get_error()[:200]}")
        self._is_fresh = False
        self._follow_tail(token)
        if self._trigger is not None and parser.is_stopped():
            self._state = _State.FREE
            self._n_ahead = 0
        elif self._n_ahead:
            self._n_ahead -= 1
            self._ahead = self._executor.submit(self._mask)

    def _follow_tail(self, token: int) -> None:
        forbidden = self._compiled.forbidden
        if forbidden is not None:
            special = token in self._table.special
            self._tail = b"" if special else forbidden.tail_of(self._tail, self._table.pieces[token])

    def _mask(self) -> NDArray[np.bool_]:
        if self._buffer is None:
            self._buffer = MaskBuffer(self._table.n_tokens)
        return self._buffer.fill(self._parser)

    def _settled(self) -> LLMatcher:
        """The parser, once the other thread is done with it."""
        if self._ahead is not None:
            self._ahead.result()
        return self._parser
