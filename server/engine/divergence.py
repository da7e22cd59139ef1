"""Where a prompt stops being what the cache holds, and with which text: so that an operator finds the clock in a system
prompt. Looked for only where a job asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.engine.messages import Divergence
from server.engine.prefix import common_length

_N_BEFORE = 12  # tokens that both have, shown before the first that differs
_N_SHOWN = 16  # tokens shown of either from there on
# Something that changes with each request is short, and what follows it is the same again for long.
_LONGEST_VALUE = 40
_N_SAME = 16

Detokenize = Callable[[Sequence[int]], str]


def find_divergence(prompt: Sequence[int], cached: Sequence[int], text_of: Detokenize) -> Divergence | None:
    """None: one of the two just goes on where the other ends, or they have nothing in common."""
    at = common_length(prompt, cached)
    if at == 0 or at == min(len(prompt), len(cached)):
        return None
    return Divergence(
        at,
        text_of(prompt[max(0, at - _N_BEFORE) : at]),
        text_of(prompt[at : at + _N_SHOWN]),
        text_of(cached[at : at + _N_SHOWN]),
        _rejoins_after(prompt[at : at + _LONGEST_VALUE + _N_SAME], cached[at : at + _LONGEST_VALUE + _N_SAME]),
    )


def _rejoins_after(prompt: Sequence[int], cached: Sequence[int]) -> int | None:
    """After so many tokens of the prompt both are alike again for a while; None: they are not."""
    starts = {tuple(cached[i : i + _N_SAME]) for i in range(len(cached) - _N_SAME + 1)}
    for i in range(len(prompt) - _N_SAME + 1):
        if tuple(prompt[i : i + _N_SAME]) in starts:
            return i
    return None
