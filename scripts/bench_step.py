"""Measures what a step of the engine costs in Python: everything but llama_decode and llama.cpp's sampler.

    PYTHONPATH=. python scripts/bench_step.py [--slots 8 64] [--steps 2000] [--context 4000] [--waiting 256] [--profile]

Every slot generates, `--waiting` jobs of several keys are in the queue, and the backend answers at once. Times are
processor time of the thread, so that other work on the machine does not count: the median, the mean and the 99th
percentile of `engine.step()`, and the mean of encoding the step's events for the HTTP process.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

from server.engine.backend import DecodeStatus, Piece, State
from server.engine.engine import Engine
from server.engine.messages import Event, Job, ModelFacts, SlotState, Span, TokenLogprob
from server.engine.options import SchedulerOptions
from server.engine.wire import encode_frame

TOKEN = 65
N_SEQUENCES = 256


class NoSampler:
    def sample(self, row: int) -> int:
        return TOKEN

    def force(self, row: int, token: int) -> None:
        pass

    def logprobs(self, row: int, token: int, n_top: int) -> TokenLogprob:
        return TokenLogprob(token, b"A", 0.0)

    def close(self) -> None:
        pass


class NoModel:
    """A backend that takes every batch and says A."""

    def __init__(self, n_slots: int, n_ctx: int) -> None:
        self._lengths = [0] * N_SEQUENCES
        self.facts = ModelFacts(
            description="none",
            architecture="none",
            n_ctx=n_ctx * n_slots,
            n_ctx_seq=n_ctx,
            n_ctx_train=n_ctx,
            n_slots=n_slots,
            n_sequences=N_SEQUENCES,
            n_batch=2048,
            n_ubatch=512,
            n_vocab=256,
            vocab_type=1,
            n_embd=1,
            n_params=1,
            size_bytes=1,
            ftype="F32",
            kv_unified=True,
            split_mode="layer",
            n_gpu_layers=0,
            devices=[],
            chat_template=None,
            bos_text="",
            eos_text="",
            adds_bos=False,
            control_texts=[],
            build_info="none",
        )

    def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]:
        return [TOKEN for span in spans for _ in span.text]

    def detokenize(self, tokens: list[int], *, show_special: bool) -> str:
        return "A" * len(tokens)

    def piece(self, token: int, *, show_special: bool) -> bytes:
        return b"A"

    def is_end(self, token: int) -> bool:
        return False

    def is_control(self, token: int) -> bool:
        return False

    def decode(self, pieces: list[Piece]) -> DecodeStatus:
        for piece in pieces:
            self._lengths[piece.sequence] = piece.start + len(piece.tokens)
        return DecodeStatus.OK

    def sampler(self, job: Job) -> NoSampler:
        return NoSampler()

    def keep(self, sequence: int, n_tokens: int) -> bool:
        self._lengths[sequence] = min(self._lengths[sequence], n_tokens)
        return True

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        self._lengths[target] = n_tokens
        return True

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def save(self, sequence: int, start: int, max_bytes: int) -> State | None:
        return None

    def is_settled(self, sequence: int) -> bool:
        return True

    def restore(self, sequence: int, state: State, start: int, end: int) -> bool:
        return False

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def busy_engine(n_slots: int, context: int, n_waiting: int, n_steps: int) -> Engine:
    """All slots generate, and will go on for `n_steps`."""
    engine = Engine(NoModel(n_slots, context + n_steps + 1000), SchedulerOptions())
    for i in range(n_slots + n_waiting):
        prompt = [i % 251, i // 251, *[TOKEN] * context] if i < n_slots else [i % 251] * 20
        engine.submit(Job(i, prompt, stop=("</end>",), owner=f"key {i % 10}"))
    while sum(view.state is SlotState.GENERATING for view in engine.snapshot().slots) < n_slots:
        engine.step()
    return engine


def measure(n_slots: int, context: int, n_waiting: int, n_steps: int) -> str:
    engine = busy_engine(n_slots, context, n_waiting, n_steps)
    times_ms: list[float] = []
    encoding_ms = 0.0
    clock: Callable[[], float] = time.thread_time
    for _ in range(n_steps):
        began = clock()
        events: list[Event] = list(engine.step())
        stepped = clock()
        encode_frame(events)
        encoding_ms += (clock() - stepped) * 1e3
        times_ms.append((stepped - began) * 1e3)
    times_ms.sort()
    return (
        f"{n_slots:3d} slots: step median {statistics.median(times_ms):.3f} ms, "
        f"mean {statistics.mean(times_ms):.3f} ms, p99 {times_ms[int(len(times_ms) * 0.99)]:.3f} ms; "
        f"events encoded in {encoding_ms / n_steps:.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--context", type=int, default=4000, help="tokens of each prompt")
    parser.add_argument("--waiting", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for n_slots in options.slots:
        if options.profile:
            engine = busy_engine(n_slots, options.context, options.waiting, options.steps)
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(options.steps):
                engine.step()
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        else:
            print(measure(n_slots, options.context, options.waiting, options.steps), flush=True)


if __name__ == "__main__":
    main()
