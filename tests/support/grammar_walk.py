"""Writes a text that a constraint allows, without a model: at every step some allowed token."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from server.engine.constraint import ConstraintCompiler, TokenTable
from server.engine.guide import Guide
from server.engine.messages import Constraint, FreeBlock

_CLOSING = b"\"'}]),:0123456789"


class Walker:
    """One vocabulary and its compiled constraints."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.compiler = ConstraintCompiler(lambda: table)
        self._executor = ThreadPoolExecutor(1)
        self._specials = np.array(sorted(table.special))
        self._closing = np.array([i for i, piece in enumerate(table.pieces) if piece and piece in _CLOSING])

    def guide(self, constraint: Constraint, block: FreeBlock | None = None) -> Guide:
        return Guide(self.compiler, constraint, block, self._executor)

    def walk(self, constraint: Constraint, seed: int, most_tokens: int = 4000) -> str:
        """The whole answer, end token left out. From 60 tokens on it comes to an end as soon as it may."""
        draw = random.Random(seed)
        guide = self.guide(constraint)
        text = b""
        never = self.table.n_tokens  # no token
        for n in range(most_tokens):
            guide.refuses(never - 1)
            allowed = guide.allowed()
            ends = [token for token in self.table.end_tokens if allowed[token]]
            if ends and (n > 60 or draw.random() < 0.3):
                return text.decode()
            token = self._choose(np.flatnonzero(allowed), n, draw)
            while guide.forbids(token):
                allowed[token] = False
                token = self._choose(np.flatnonzero(allowed), n, draw)
            if token in self.table.end_tokens:
                return text.decode()
            assert not guide.refuses(token), (text, token)
            guide.note(token)
            text += self.table.pieces[token]
        raise AssertionError(f"no end in sight: {text[-200:]!r}")

    def _choose(self, tokens: np.ndarray[tuple[int], np.dtype[np.intp]], n: int, draw: random.Random) -> int:
        for wanted in (self._specials, self._closing) if n > 60 or draw.random() < 0.3 else ():
            preferred = np.intersect1d(tokens, wanted)
            if len(preferred) and draw.random() < 0.8:
                return int(draw.choice(preferred))
        return int(draw.choice(tokens))
