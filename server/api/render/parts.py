"""The pieces that all answers are made of: timings, usage, log-probabilities, event-stream frames."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from server.engine.messages import FinishReason, Timings, TokenLogprob
from server.generation import ChoiceResult, GenerationEvent, Usage

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # stands for minus infinity, as OpenAI has it

to_json = msgspec.json.encode


class Writer(Protocol):
    """Writes one answer in one API's form, in pieces or whole."""

    def chunk(self, event: GenerationEvent) -> bytes:
        """Frames that show the event; empty when it has nothing to show."""
        ...

    def last(self) -> bytes:
        """Frames that come after the last choice has ended."""
        ...

    def whole(self, results: Sequence[ChoiceResult]) -> bytes:
        """The body of a non-streaming answer."""
        ...


@dataclass(frozen=True, slots=True)
class Shows:
    """What an answer shows besides its text."""

    usage: bool = False  # in a last chunk of a stream
    timings_per_token: bool = False
    tokens: bool = False
    probabilities: bool = False  # logprobs hold probabilities (post_sampling_probs)


@dataclass(frozen=True, slots=True)
class Identity:
    """What every chunk of one answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> Identity:
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model, fingerprint)


def frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def finish_reason(reason: FinishReason, *, has_tool_calls: bool) -> str:
    """OpenAI's word. A cut answer is told as such, even where calls were complete before the cut."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"


def timings(t: Timings) -> dict[str, Any]:
    """llama.cpp's fields. The first token comes with the prompt, so rates count the steps after it; a rate whose
    divisor is not known is 0, never infinite."""
    steps = max(0, t.predicted_n - 1)
    shown: dict[str, Any] = {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_ms / t.prompt_n if t.prompt_n else 0.0,
        "prompt_per_second": _per_second(t.prompt_n, t.prompt_ms),
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_ms / steps if steps else 0.0,
        "predicted_per_second": _per_second(steps, t.predicted_ms),
    }
    if t.draft_n:
        shown["draft_n"] = t.draft_n
        shown["draft_n_accepted"] = t.draft_n_accepted
    return shown


def _per_second(n: int, ms: float) -> float:
    return 1e3 / ms * n if ms > 1e-9 else 0.0


def usage(u: Usage) -> dict[str, Any]:
    return {
        "completion_tokens": u.n_generated,
        "prompt_tokens": u.n_prompt,
        "total_tokens": u.n_prompt + u.n_generated,
        "prompt_tokens_details": {"cached_tokens": u.n_cached},
    }


def token_probabilities(entries: Sequence[TokenLogprob], *, probabilities: bool) -> list[dict[str, Any]]:
    """One object for each generated token, in the form that llama.cpp and OpenAI's chat API share."""
    value, top = ("prob", "top_probs") if probabilities else ("logprob", "top_logprobs")

    def one(token: int, piece: bytes, logprob: float) -> dict[str, Any]:
        return {
            "id": token,
            "token": piece.decode("utf-8", "ignore"),
            "bytes": list(piece),
            value: logprob if math.isfinite(logprob) else LEAST_LOGPROB,
        }

    return [
        {
            **one(entry.token, entry.piece, entry.logprob),
            top: [one(other.token, other.piece, other.logprob) for other in entry.top],
        }
        for entry in entries
    ]
