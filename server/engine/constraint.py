"""Compiles constraints with llguidance: one tokenizer for the vocabulary, one parser for each grammar in use.

Compiling takes milliseconds to seconds and happens where no step waits for it (`prepare`, any thread), without the
interpreter lock. A job then gets a copy of the compiled parser, which takes microseconds.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from server.engine.messages import Constraint
from server.errors import InvalidRequest

# Parsers that are kept; agents send the same tools with every request.
MOST_KEPT = 64
_LONGEST_TAIL = 2200  # bytes of text that a forbidden pattern can reach over
_LONGEST_MESSAGE = 300  # characters
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")  # in a grammar that nobody has seen
_BLANKS = b" \t\r\n"


@dataclass(frozen=True)
class TokenTable:
    """A vocabulary as constraints see it. `special` tokens stand for themselves and never for their text.

    `make` builds llguidance's tokenizer of it, which takes up to a second.
    """

    pieces: Sequence[bytes]  # the text of a special token is its name
    special: frozenset[int]
    end_tokens: frozenset[int]
    make: Callable[[TokenTable], LLTokenizer]

    @property
    def n_tokens(self) -> int:
        return len(self.pieces)

    @cached_property
    def ends(self) -> NDArray[np.intp]:
        return np.array(sorted(self.end_tokens), dtype=np.intp)

    @cached_property
    def blanks(self) -> NDArray[np.intp]:
        """Tokens of nothing but blanks."""
        return np.array([i for i, piece in enumerate(self.pieces) if self.is_blank(i, piece)], dtype=np.intp)

    def is_blank(self, token: int, piece: bytes | None = None) -> bool:
        piece = self.pieces[token] if piece is None else piece
        return bool(piece) and not piece.strip(_BLANKS) and token not in self.special


class Forbidden:
    """Patterns that ordinary tokens must not spell, over the borders of tokens too; each begins with `<`, or with
    `\\A<` for the start of a text between special tokens."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in patterns).encode())

    def is_spelt(self, tail: bytes, piece: bytes) -> bool:
        """By `piece` behind `tail`."""
        return b"<" in (tail or piece) and self._pattern.search(tail + piece) is not None

    def tail_of(self, tail: bytes, piece: bytes) -> bytes:
        """What has to be kept of the text so far: from the first `<` that can still count, and a byte before it."""
        text = (tail + piece)[-_LONGEST_TAIL:]
        at = text.find(b"<")
        return text[max(at - 1, 0) :] if at >= 0 else text[-1:]


@dataclass(frozen=True, slots=True)
class Compiled:
    """`parser` is never advanced, only copied."""

    parser: LLMatcher
    warnings: tuple[str, ...]
    first_mask: NDArray[np.bool_]
    forbidden: Forbidden | None


class ConstraintCompiler:
    """Of one vocabulary. `table` is called once, when the first constraint comes or at `warm_up`."""

    def __init__(self, table: Callable[[], TokenTable]) -> None:
        self._read_table = table
        self._compiled: OrderedDict[Constraint, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # of the tokenizer and what is kept
        self._tokenizer: LLTokenizer | None = None
        self._table: TokenTable | None = None

    def warm_up(self) -> None:
        """Build the tokenizer now, so that the first constraint need not wait for it."""
        self._tools()

    def prepare(self, constraint: Constraint) -> Compiled:
        """Raises InvalidRequest, in llguidance's words, for a grammar that cannot be used."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
                return found
        compiled = self._compile(constraint)
        with self._lock:
            self._compiled[constraint] = compiled
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    @property
    def table(self) -> TokenTable:
        return self._tools()[0]

    def _tools(self) -> tuple[TokenTable, LLTokenizer]:
        with self._lock:
            if self._table is None or self._tokenizer is None:
                self._table = self._read_table()
                self._tokenizer = self._table.make(self._table)
            return self._table, self._tokenizer

    def _compile(self, constraint: Constraint) -> Compiled:
        table, tokenizer = self._tools()
        limits = LLParserLimits(verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(constraint.grammar)
        parser = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if parser.is_error():
            raise InvalidRequest(_in_short(parser.get_error()))
        warnings = tuple(map(_in_short, parser.get_grammar_warnings()))
        mask = MaskBuffer(table.n_tokens).fill(parser.deep_copy())
        forbidden = Forbidden(constraint.forbidden) if constraint.forbidden else None
        return Compiled(parser, warnings, mask, forbidden)


class MaskBuffer:
    """Room for one mask as llguidance writes it: a bit for each token."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self._bits = np.zeros((n_tokens + 31) // 32, dtype=np.int32)

    def fill(self, parser: LLMatcher) -> NDArray[np.bool_]:
        """The tokens that may come next, as a fresh array, shape [n_tokens]."""
        parser.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return np.unpackbits(self._bits.view(np.uint8), count=self._n_tokens, bitorder="little").view(np.bool_)


def _in_short(message: str) -> str:
    """One line. A regular expression's fault is drawn over several, the last of which says what it is."""
    lines = [line.strip() for line in _PLACE.sub("", message.strip()).splitlines()] or [""]
    reasons = [line for line in lines if line.startswith("error: ")]
    text = f"{lines[0]} {reasons[0].removeprefix('error: ')}" if reasons and lines[0].endswith(":") else lines[0]
    return text[:_LONGEST_MESSAGE] or "llguidance gave no reason"
