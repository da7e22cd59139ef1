from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.engine.cells import CellLedger

N_SEQUENCES = 6


def test_a_prefix_that_is_shared_counts_once() -> None:
    cells = CellLedger()
    cells.add(0, 100)
    cells.share(0, 1, 60)
    cells.add(1, 5)
    assert (cells.n_used, cells.n_shared(), cells.length(1)) == (105, 60, 65)
    assert (cells.n_unique(0), cells.n_unique(1), cells.n_union([0, 1])) == (40, 5, 105)
    cells.cut(0, 0)
    assert (cells.n_used, cells.n_shared(), cells.n_unique(1)) == (65, 0, 65)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger beside lists of single cells."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = CellLedger()
        self.held: dict[int, list[object]] = {i: [] for i in range(N_SEQUENCES)}

    @rule(sequence=st.integers(0, N_SEQUENCES - 1), n=st.integers(0, 9))
    def add(self, sequence: int, n: int) -> None:
        self.ledger.add(sequence, n)
        self.held[sequence] = self.held[sequence] + [object() for _ in range(n)]

    @rule(data=st.data(), source=st.integers(0, N_SEQUENCES - 1))
    @precondition(lambda self: any(not held for held in self.held.values()))
    def share(self, data: st.DataObject, source: int) -> None:
        target = data.draw(st.sampled_from([i for i, held in self.held.items() if not held]))
        n = data.draw(st.integers(0, len(self.held[source])))
        self.ledger.share(source, target, n)
        self.held[target] = self.held[source][:n]

    @rule(sequence=st.integers(0, N_SEQUENCES - 1), data=st.data())
    def cut(self, sequence: int, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.held[sequence])))
        self.ledger.cut(sequence, n)
        self.held[sequence] = self.held[sequence][:n]

    @invariant()
    def counts(self) -> None:
        holders: dict[int, list[int]] = {}
        for sequence, held in self.held.items():
            for cell in held:
                holders.setdefault(id(cell), []).append(sequence)
        assert self.ledger.n_used == len(holders)
        assert self.ledger.n_shared() == sum(1 for by in holders.values() if len(by) > 1)
        for sequence, held in self.held.items():
            assert self.ledger.length(sequence) == len(held)
            assert self.ledger.n_unique(sequence) == sum(1 for by in holders.values() if by == [sequence])
        assert self.ledger.n_union([0, 2, 4]) == sum(1 for by in holders.values() if {0, 2, 4} & set(by))


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase
