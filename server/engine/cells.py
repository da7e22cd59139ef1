"""Who holds which cells of the cache: counts of cells, exact where sequences share them.

llama.cpp tells neither how many cells are in use nor which are shared. They follow from what was done: decoding adds
cells to one sequence, a copy in a unified cache shares those of a prefix, cutting frees what nobody else holds. The
ledger is a tree of runs of cells; a sequence is a path from the root to the node where it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Run:
    """`n_cells` cells, after those of `parent`. `n_users`: sequences that end here plus runs that continue it."""

    parent: _Run | None
    n_cells: int = 0
    n_users: int = 0


class CellLedger:
    """Sequences are ids. One that was never added to holds nothing."""

    def __init__(self) -> None:
        self._end: dict[int, _Run] = {}
        self._n_used = 0

    @property
    def n_used(self) -> int:
        """Cells that hold something; shared ones count once."""
        return self._n_used

    def length(self, sequence: int) -> int:
        run, n = self._end.get(sequence), 0
        while run is not None:
            n += run.n_cells
            run = run.parent
        return n

    def n_unique(self, sequence: int) -> int:
        """Cells that would be free if the sequence were dropped."""
        run, n = self._end.get(sequence), 0
        while run is not None and run.n_users == 1:
            n += run.n_cells
            run = run.parent
        return n

    def n_union(self, sequences: Iterable[int]) -> int:
        """Cells that at least one of the sequences holds."""
        seen: set[int] = set()
        n = 0
        for sequence in sequences:
            run = self._end.get(sequence)
            while run is not None and id(run) not in seen:
                seen.add(id(run))
                n += run.n_cells
                run = run.parent
        return n

    def n_shared(self) -> int:
        """Cells that more than one sequence holds."""
        seen: set[int] = set()
        n = 0
        for end in self._end.values():
            run: _Run | None = end
            shared = False
            while run is not None and id(run) not in seen:
                shared = shared or run.n_users > 1
                if shared:
                    seen.add(id(run))
                    n += run.n_cells
                run = run.parent
        return n

    def add(self, sequence: int, n_cells: int) -> None:
        if n_cells <= 0:
            return
        run = self._end.get(sequence)
        if run is None or run.n_users > 1:
            if run is not None:
                run.n_users -= 1
            run = self._continue(run)
            self._end[sequence] = run
        run.n_cells += n_cells
        self._n_used += n_cells

    def share(self, source: int, target: int, n_cells: int) -> None:
        """`target`, which holds nothing, shares the first `n_cells` of `source`."""
        assert target not in self._end, f"sequence {target} holds cells already"
        upper = self._prefix(source, n_cells)
        if upper is not None:
            upper.n_users += 1
            self._end[target] = upper

    def cut(self, sequence: int, n_cells: int) -> None:
        """Free what the sequence holds beyond `n_cells` and nobody else does."""
        upper = self._prefix(sequence, n_cells)
        if upper is not None:
            upper.n_users += 1
        run = self._end.pop(sequence, None)
        self._release(run)
        if upper is not None:
            self._end[sequence] = upper

    def _continue(self, parent: _Run | None) -> _Run:
        if parent is not None:
            parent.n_users += 1
        return _Run(parent, n_users=1)

    def _prefix(self, sequence: int, n_cells: int) -> _Run | None:
        """The run that ends exactly after `n_cells` of the sequence, made by a split where there is none."""
        if n_cells <= 0:
            return None
        run, end = self._end.get(sequence), self.length(sequence)
        assert n_cells <= end, f"sequence {sequence} holds {end} cells, not {n_cells}"
        while run is not None:
            start = end - run.n_cells
            if n_cells > start:
                break
            run, end = run.parent, start
        assert run is not None
        if n_cells < end:
            upper = _Run(run.parent, run.n_cells - (end - n_cells), n_users=1)
            run.parent = upper
            run.n_cells = end - n_cells
            return upper
        return run

    def _release(self, run: _Run | None) -> None:
        while run is not None:
            run.n_users -= 1
            if run.n_users:
                return
            self._n_used -= run.n_cells
            run = run.parent
