"""From the moments at which pieces of answers came to the numbers of a report. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer as the client saw it. Moments are seconds of one monotonic clock."""

    sent_s: float
    ended_s: float
    deltas_s: tuple[float, ...]  # arrival of each piece of text
    n_prompt: int  # tokens, by the server's own count
    n_cached: int
    n_generated: int
    text: str = field(default="", repr=False)

    @property
    def ttft_ms(self) -> float:
        """Sending to first piece; to the end when there was no text."""
        return ((self.deltas_s[0] if self.deltas_s else self.ended_s) - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token after the first; None when there was but one."""
        if self.n_generated < 2 or len(self.deltas_s) < 2:
            return None
        return (self.deltas_s[-1] - self.deltas_s[0]) * 1e3 / (self.n_generated - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Between neighbouring pieces. A piece that holds several tokens makes one gap."""
        return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(self.deltas_s)]


@dataclass(frozen=True, slots=True)
class Run:
    """One passage of a workload. `late` is the long prompt that comes into running streams (workload mix)."""

    answers: tuple[Answer, ...]
    wall_s: float
    late: Answer | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all passages of one workload through one server. None where there is nothing to measure."""

    workload: str
    server: str
    rounds: int
    requests: int
    wall_s: float  # of one passage, the median
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_ms: float | None  # median over requests
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    late_ttft_ms: float | None = None  # of the long prompt in workload mix, the median


def summarize(workload: str, server: str, runs: Sequence[Run]) -> Summary:
    """Pool the answers of several passages; `runs` is not empty."""
    answers = [answer for run in runs for answer in run.answers]
    late = [run.late for run in runs if run.late is not None]
    everything = answers + late
    ttft = [answer.ttft_ms for answer in answers]
    tpot = [tpot_ms for answer in answers if (tpot_ms := answer.tpot_ms) is not None]
    gaps = [gap for answer in answers for gap in answer.gaps_ms]
    n_generated = sum(answer.n_generated for answer in everything)
    median_wall = quantile([run.wall_s for run in runs], 0.5)
    assert median_wall is not None
    return Summary(
        workload=workload,
        server=server,
        rounds=len(runs),
        requests=len(everything),
        wall_s=median_wall,
        prompt_tokens=sum(answer.n_prompt for answer in everything),
        cached_tokens=sum(answer.n_cached for answer in everything),
        generated_tokens=n_generated,
        tokens_per_s=n_generated / sum(run.wall_s for run in runs),
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p95_ms=quantile(ttft, 0.95),
        tpot_ms=quantile(tpot, 0.5),
        itl_p50_ms=quantile(gaps, 0.5),
        itl_p95_ms=quantile(gaps, 0.95),
        itl_p99_ms=quantile(gaps, 0.99),
        itl_max_ms=quantile(gaps, 1.0),
        late_ttft_ms=quantile([answer.ttft_ms for answer in late], 0.5),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest ranks; `share` is 0..1. None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
