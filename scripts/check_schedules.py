"""Does every request get the text it would have had alone? Random schedules, each text compared with a fresh engine's.

    python scripts/check_schedules.py --schedules 200 [--model small|glm|PATH] [--seed N]

Each schedule draws a cache layout, a cache type, few cells (so that sequences are evicted, swapped and brought back), a
host budget, prompts with shared beginnings, several choices of a prompt, and clients that leave. Greedy texts only. For
every difference it prints how close the two best tokens were where the texts part, alone. Exit status 1 if any differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from scripts.tiny_glm.corpus import MODEL_DIRECTORY, ChatTemplate, answers_of, read_dialogues
from server.engine.backend import DecodeStatus, Logits, Piece
from server.engine.engine import Engine
from server.engine.llama import LlamaBackend
from server.engine.messages import Failed, Finished, Job, SamplingOptions, Span, Text
from server.engine.options import EngineOptions, ModelOptions, SchedulerOptions
from server.store.source import demo_model, resolve_model, tiny_glm_model

N_CTX = 256
PLACES = """France Spain Italy Germany Japan China India Egypt Kenya Brazil Chile Peru Cuba Canada Norway Sweden Finland
Poland Greece Turkey Iran Iraq Nepal Vietnam Austria Hungary Portugal Ireland Denmark Russia""".split()
RULES = """Answer in one short sentence. Name the source of what you say. Do not repeat the question. Numbers are
written with digits. Units follow the number. If you do not know the answer, say so. Dates have the form day, month,
year. Names of places are written as their people write them. Lists have at most five points. Never mention these
rules.""".split(". ")


@dataclass
class Wanted:
    tokens: list[int]
    max_tokens: int
    got: list[int] = field(default_factory=list)
    ended: Finished | Failed | None = None


@dataclass(frozen=True)
class Setting:
    """One context to load; the schedules with it run one after the other on fresh engines."""

    unified: bool
    cache_type: str

    def load(self, path: str, n_slots: int) -> LlamaBackend:
        model = ModelOptions(
            path,
            n_ctx=N_CTX if self.unified else N_CTX * n_slots,
            n_slots=n_slots,
            kv_unified=self.unified,
            n_batch=256,
            n_ubatch=128,
            n_threads=1,
            n_threads_batch=1,
            cache_type_k=self.cache_type,
            cache_type_v=self.cache_type,
            flash_attn="off" if self.cache_type == "f16" else "on",
            warmup=False,
        )
        return LlamaBackend.load(EngineOptions(model, log_level="error"), lambda phase, progress: None)


def prompts(backend: LlamaBackend, chance: random.Random, n: int, dialogues: list[str]) -> list[list[int]]:
    """Few different ones, so that they meet in the cache."""
    if dialogues:
        fitting = [t for t in (tokens_of(backend, text, special=True) for text in dialogues) if len(t) <= N_CTX // 2]
        return chance.choices(chance.sample(fitting, 5), k=n)
    stems = [". ".join(chance.choices(RULES, k=chance.choice([0, 4, 10]))) for _ in range(3)]
    texts = [f"{chance.choice(stems)}\n\nQuestion: What is the capital of {place}?\nAnswer:" for place in PLACES]
    return [tokens_of(backend, text, special=False)[: N_CTX // 2] for text in chance.choices(texts, k=n)]


def tokens_of(backend: LlamaBackend, text: str, *, special: bool) -> list[int]:
    return backend.tokenize([Span(text, special=special)], add_special=True)


def dialogue_prompts() -> list[str]:
    """What tiny-glm was trained to answer: random words it has no opinion on."""
    template = ChatTemplate((MODEL_DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8"))
    return [answer.prompt for dialogue in read_dialogues() for answer in answers_of(dialogue, template)]


def alone(backend: LlamaBackend, wanted: Wanted) -> list[int]:
    """On an empty cache, with an engine of its own."""
    clear(backend)
    engine = Engine(backend, SchedulerOptions(cache_ram_bytes=0))
    engine.submit(Job(0, wanted.tokens, SamplingOptions(temperature=0.0), wanted.max_tokens))
    got: list[int] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Text):
                got += event.tokens
    clear(backend)
    return got


def clear(backend: LlamaBackend) -> None:
    for sequence in range(max(backend.facts.n_sequences, backend.facts.n_slots)):
        backend.keep(sequence, 0)


def run(backend: LlamaBackend, chance: random.Random, counts: Counter[str], dialogues: list[str]) -> list[Wanted]:
    clear(backend)
    budget = chance.choice([0, 4 << 20, 64 << 20])
    engine = Engine(backend, SchedulerOptions(cache_ram_bytes=budget, cache_idle_slots=chance.random() < 0.7))
    drawn = prompts(backend, chance, chance.randint(6, 12), dialogues)
    jobs = [Wanted(tokens, chance.randint(1, 60)) for tokens in drawn]
    waiting = list(enumerate(jobs))
    while waiting or engine.has_work:
        while waiting and chance.random() < 0.6:
            job_id, wanted = waiting.pop(0)
            engine.submit(Job(job_id, wanted.tokens, SamplingOptions(temperature=0.0), wanted.max_tokens))
        if chance.random() < 0.02:
            engine.cancel(chance.randrange(len(jobs)))
        for event in engine.step():
            match event:
                case Text():
                    jobs[event.job_id].got += event.tokens
                case Finished() | Failed():
                    jobs[event.job_id].ended = event
    snapshot = engine.snapshot()
    for name in ("preempted", "swapped", "evicted", "follower_waits", "prompt_cached_tokens", "cached_tokens_host"):
        counts[name] += getattr(snapshot.counters, name)
    counts["mismatches"] += snapshot.counters.cache_mismatches
    counts["refused"] += snapshot.counters.states_refused
    return jobs


def margin(backend: LlamaBackend, wanted: Wanted, expected: list[int], at: int) -> float:
    """How far apart the two best tokens are where the texts part."""
    clear(backend)
    tokens = [*wanted.tokens, *expected[:at]]
    for start in range(0, len(tokens), 128):
        part = tokens[start : start + 128]
        assert backend.decode([Piece(0, start, part, Logits.LAST)]) is DecodeStatus.OK
    best = np.sort(backend._source.logits(len(tokens) - 1 - (len(tokens) - 1) // 128 * 128))[-2:]
    return float(best[1] - best[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--model", default="small")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    named = {"small": demo_model, "glm": tiny_glm_model}
    path = str(resolve_model(named[options.model]() if options.model in named else options.model).first)
    settings = [Setting(unified, cache_type) for unified in (True, False) for cache_type in ("f16", "q8_0")]
    dialogues = dialogue_prompts() if options.model == "glm" else []
    counts: Counter[str] = Counter()
    asked: Counter[Setting] = Counter()
    equal: Counter[Setting] = Counter()
    margins: list[float] = []
    began = time.monotonic()
    for number, setting in enumerate(settings):
        backend = setting.load(path, options.slots)
        for schedule in range(number, options.schedules, len(settings)):
            chance = random.Random(f"{options.seed} {schedule}")
            for job_id, wanted in enumerate(run(backend, chance, counts, dialogues)):
                if wanted.ended is None:
                    counts["lost"] += 1
                expected = alone(backend, wanted)
                cut = expected[: len(wanted.got)] if isinstance(wanted.ended, Failed) else expected
                counts["requests"] += 1
                asked[setting] += 1
                if wanted.got == cut:
                    counts["equal"] += 1
                    equal[setting] += 1
                    continue
                at = next(
                    (i for i, (a, b) in enumerate(zip(wanted.got, cut, strict=False)) if a != b),
                    min(len(wanted.got), len(cut)),
                )
                margins.append(margin(backend, wanted, expected, min(at, len(expected))))
                print(f"schedule {schedule} {setting} job {job_id}: differs at token {at}, margin {margins[-1]:.6f}")
        backend.close()
    print(f"{options.schedules} schedules, {options.model}, {time.monotonic() - began:.0f} s: {dict(counts)}")
    for setting in settings:
        print(f"{setting}: {equal[setting]} of {asked[setting]} texts equal")
    print(
        f"{counts['equal']} of {counts['requests']} texts equal" + (f"; margins {sorted(margins)}" if margins else "")
    )
    return int(counts["equal"] != counts["requests"] or counts["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
