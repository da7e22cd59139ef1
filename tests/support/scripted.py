"""A backend without a model: bytes are tokens, the cache is a list of cells, and the next token is scripted.

Without a script the next token is a checksum of what the cache holds for the sequence, so that any mistake in
bookkeeping (a lost cell, a wrong position, a prefix of another chat) changes the text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from server.engine.backend import DecodeStatus, Logits, Piece, State
from server.engine.constraint import ConstraintCompiler, TokenTable
from server.engine.messages import Constraint, Job, ModelFacts, Span, TokenLogprob, TopToken
from server.errors import InvalidRequest
from tests.support.token_tables import byte_table

END = 256
SPECIALS = {"<|user|>": 257, "<|assistant|>": 258, "<think>": 259, "</think>": 260}
TEXT_OF = {token: text for text, token in SPECIALS.items()}


def token_table() -> TokenTable:
    return byte_table(SPECIALS, {END: "<|end|>"})


@dataclass(eq=False, slots=True)
class Cell:
    """One cell of the cache; sequences of a unified cache may share it."""

    position: int
    token: int


@dataclass
class ScriptedSampler:
    backend: ScriptedBackend
    job: Job
    n_sampled: int = 0
    closed: bool = False

    def sample(self, row: int) -> int:
        assert not self.closed, "sampled after close"
        sequence = self.backend.row_sequences[row]
        assert sequence is not None, "this row has no logits"
        self.n_sampled += 1
        if self.backend.reply is None:
            held = self.backend.held(sequence)
            return 97 + zlib.crc32(repr(held).encode()) % 26
        reply = self.backend.replies.setdefault(
            self.job.id, tokens_of(self.backend.reply(self.backend.text_of(self.job.tokens)))
        )
        return reply[self.n_sampled - 1] if self.n_sampled <= len(reply) else END

    def force(self, row: int, token: int) -> None:
        """The script does not see forced tokens, so it goes on where it was."""
        assert not self.closed, "forced after close"
        assert token < END + 1 + len(SPECIALS)

    def logprobs(self, row: int, token: int, n_top: int) -> TokenLogprob:
        piece = self.backend.piece(token, show_special=True)
        top = [TopToken(token, piece, -0.25), *(TopToken(65 + i, bytes([65 + i]), -2.0 - i) for i in range(n_top))]
        return TokenLogprob(token, piece, -0.25, top[:n_top])

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.backend.n_open_samplers -= 1


def tokens_of(text: str, *, special: bool = True) -> list[int]:
    tokens: list[int] = []
    while text:
        name = next((name for name in SPECIALS if special and text.startswith(name)), None)
        if name is not None:
            tokens.append(SPECIALS[name])
            text = text[len(name) :]
        else:
            tokens += text[0].encode("utf-8", "replace")
            text = text[1:]
    return tokens


@dataclass
class ScriptedBackend:
    """`reply` maps the prompt's text to the answer's text; None: checksums without end. `on_decode` runs first in every
    decode and may raise, block or return a status to be answered instead."""

    reply: Callable[[str], str] | None = None
    n_slots: int = 4
    n_ctx: int = 4096
    n_batch: int = 64
    n_ubatch: int = 16
    unified: bool = True
    partial_removal: bool = True
    chat_template: str | None = None
    on_decode: Callable[[list[Piece]], DecodeStatus | None] | None = None
    cells: dict[int, list[Cell]] = field(default_factory=dict)
    batches: list[list[Piece]] = field(default_factory=list)
    row_sequences: list[int | None] = field(default_factory=list)
    replies: dict[int, list[int]] = field(default_factory=dict)
    n_open_samplers: int = 0
    n_sequences: int = 0
    n_saved: int = 0
    n_restored: int = 0
    closed: bool = False
    constraints: ConstraintCompiler = field(default_factory=lambda: ConstraintCompiler(token_table))

    @property
    def n_ctx_seq(self) -> int:
        return self.n_ctx if self.unified else self.n_ctx // self.n_slots

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            description="scripted",
            architecture="scripted",
            n_ctx=self.n_ctx,
            n_ctx_seq=self.n_ctx_seq,
            n_ctx_train=self.n_ctx,
            n_slots=self.n_slots,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            n_vocab=END + 1 + len(SPECIALS),
            vocab_type=1,
            n_embd=8,
            n_params=1000,
            size_bytes=4000,
            ftype="F32",
            kv_unified=self.unified,
            split_mode="layer",
            n_gpu_layers=0,
            devices=[],
            chat_template=self.chat_template,
            bos_text="",
            eos_text="<|end|>",
            adds_bos=False,
            control_texts=list(SPECIALS),
            build_info="b0-scripted",
            n_sequences=self.n_sequences,
            can_cut=self.partial_removal,
        )

    # vocabulary

    def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]:
        return [token for span in spans for token in tokens_of(span.text, special=span.special)]

    def detokenize(self, tokens: list[int], *, show_special: bool) -> str:
        return b"".join(self.piece(token, show_special=show_special) for token in tokens).decode("utf-8", "replace")

    def text_of(self, tokens: list[int]) -> str:
        return self.detokenize(tokens, show_special=True)

    def piece(self, token: int, *, show_special: bool) -> bytes:
        if token < END:
            return bytes([token])
        return TEXT_OF.get(token, "<|end|>").encode() if show_special else b""

    def is_end(self, token: int) -> bool:
        return token == END

    def is_control(self, token: int) -> bool:
        return token > END

    def warm_up_constraints(self) -> None:
        self.constraints.warm_up()

    def prepare(self, constraint: Constraint) -> tuple[str, ...]:
        return self.constraints.prepare(constraint).warnings

    # one step

    def decode(self, pieces: list[Piece]) -> DecodeStatus:
        n_rows = sum(len(piece.tokens) for piece in pieces)
        assert 0 < n_rows <= self.n_batch, f"{n_rows} rows in a batch of {self.n_batch}"
        assert len({piece.sequence for piece in pieces}) == len(pieces), "one piece a sequence"
        for piece in pieces:
            assert piece.tokens, "empty piece"
            assert piece.start == self.length(piece.sequence), "positions must be consecutive"
            assert piece.start + len(piece.tokens) <= self.n_ctx_seq, "a sequence may not outgrow its context"
        if self.on_decode is not None and (status := self.on_decode(pieces)) is not None:
            return status
        if self.unified and self.n_used() + n_rows > self.n_ctx:
            return DecodeStatus.NO_ROOM
        self.batches.append(pieces)
        self.row_sequences = []
        for piece in pieces:
            held = self.cells.setdefault(piece.sequence, [])
            for i, token in enumerate(piece.tokens):
                held.append(Cell(piece.start + i, token))
                last = i == len(piece.tokens) - 1
                wanted = piece.logits is Logits.ALL or (piece.logits is Logits.LAST and last)
                self.row_sequences.append(piece.sequence if wanted else None)
        return DecodeStatus.OK

    def sampler(self, job: Job) -> ScriptedSampler:
        if job.sampling.grammar == "bad":
            raise InvalidRequest("the grammar cannot be parsed: expecting ::= at bad", param="grammar")
        self.n_open_samplers += 1
        return ScriptedSampler(self, job)

    # the cache

    def held(self, sequence: int) -> list[int]:
        return [cell.token for cell in self.cells.get(sequence, [])]

    def n_used(self) -> int:
        return len({id(cell) for held in self.cells.values() for cell in held})

    def keep(self, sequence: int, n_tokens: int) -> bool:
        held = self.cells.get(sequence, [])
        if 0 < n_tokens < len(held) and not self.partial_removal:
            return False
        self.cells[sequence] = held[:n_tokens]
        return True

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        held = self.cells.get(source, [])
        assert n_tokens <= len(held), "copies what is not there"
        if n_tokens < len(held) and not self.partial_removal:
            return False
        shared = held[:n_tokens]
        self.cells[target] = list(shared) if self.unified else [Cell(cell.position, cell.token) for cell in shared]
        return True

    def length(self, sequence: int) -> int:
        held = self.cells.get(sequence, [])
        assert [cell.position for cell in held] == list(range(len(held))), "holes in a sequence"
        return len(held)

    # states

    def save(self, sequence: int, start: int, max_bytes: int) -> State | None:
        held = self.cells.get(sequence, [])
        assert start == 0 or (self.unified and self.partial_removal), "only whole states in this memory"
        assert start <= len(held), "saves what is not there"
        numbers = [number for cell in held[start:] for number in (cell.position, cell.token)]
        state = np.frombuffer(np.asarray(numbers, dtype=np.int32).tobytes(), dtype=np.uint8).copy()
        if state.nbytes > max_bytes:
            return None
        self.n_saved += 1
        return state

    def is_settled(self, sequence: int) -> bool:
        return True

    def restore(self, sequence: int, state: State, start: int, end: int) -> bool:
        held = self.cells.setdefault(sequence, [])
        assert len(held) == start, "restored behind a gap"
        cells = [Cell(position, token) for position, token in state.view(np.int32).reshape(-1, 2).tolist()]
        assert self.partial_removal or len(cells) == end, "a state that cannot be cut"
        if self.unified and self.n_used() + len(cells) > self.n_ctx:
            return False
        self.n_restored += 1
        held += [cell for cell in cells if start <= cell.position < end]
        assert [cell.position for cell in held] == list(range(end)), "a state with holes"
        return True

    def warm_up(self) -> None:
        self.cells.clear()

    def close(self) -> None:
        self.closed = True
