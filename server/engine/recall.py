"""What a waiting run could take from disk: found, weighed against reading the prompt, and fetched into host memory
while the run keeps its place in the queue."""

from __future__ import annotations

from server.engine.cache import MIN_SAVED, Cache
from server.engine.disk_tier import DiskEntry, DiskTier
from server.engine.messages import ModelFacts
from server.engine.run import Run


class Recall:
    """Where cells are shared states come back part by part, else as a whole."""

    def __init__(self, cache: Cache, disk: DiskTier, facts: ModelFacts) -> None:
        self._cache = cache
        self._disk = disk
        self._shares_cells = facts.shares_cells
        self._can_cut = facts.can_cut

    def awaits(self, run: Run) -> bool:
        """Is something for the run on its way? The first time, what it needs is looked up and sent for."""
        if run.reads is None:
            run.reads = []
            if run.job.cache_prompt and not run.preempted:
                run.reads = self._disk.fetch(self._wanted(run.tokens[:-1]))
        return run.waits_for_disk

    def _wanted(self, prompt: list[int]) -> list[DiskEntry]:
        """Files that bring back more of the prompt than is at hand, if that is worth it."""
        at_hand = self._cache.reach(prompt)
        if self._shares_cells:
            entries, end = self._in_parts(prompt)
        else:
            whole = self._disk.at_once(prompt, can_cut=self._can_cut)
            entries, end = ([whole.entry], whole.end) if whole is not None else ([], 0)
        n_gained = end - at_hand
        n_bytes = sum(entry.n_state_bytes for entry in entries)
        if n_gained < MIN_SAVED or not self._cache.pays(n_bytes, n_gained, self._disk.seconds_for(n_bytes)):
            return []
        return entries

    def _in_parts(self, prompt: list[int]) -> tuple[list[DiskEntry], int]:
        """From what is in cells on: through host memory as far as it goes, then a part from disk, and so on."""
        entries: list[DiskEntry] = []
        reached = self._cache.held(prompt)
        while True:
            reached = self._cache.host.covered(prompt, reached)
            part = next(iter(self._disk.way(prompt, reached)), None)
            if part is None:
                return entries, reached
            entries.append(part.entry)
            reached = part.end
