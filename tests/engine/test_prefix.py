from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.engine.prefix import Match, PrefixTree, common_length

tokens = st.lists(st.integers(0, 2), max_size=300)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def plain_common_length(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(tokens, tokens, tokens)
def test_common_length_is_what_a_plain_loop_counts(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    assert common_length(left, right) == plain_common_length(left, right)


@given(tokens, tokens, st.integers(0, 300))
def test_common_length_from_a_place_on(a: list[int], b: list[int], start: int) -> None:
    start = min(start, len(a))
    assert common_length(a, b, start) == plain_common_length(a[start:], b)


def test_the_longest_wins_and_the_first_of_equals() -> None:
    tree = PrefixTree()
    for holder, path in enumerate([[1], [1, 2, 9], [1, 2, 3, 4], [1, 2, 3]]):
        tree.put(holder, path)
    assert tree.match([1, 2, 3]) == Match(2, 3)
    assert tree.match([1, 2, 3, 4, 5]) == Match(2, 4)
    assert tree.ends([1, 2, 3, 4, 5]) == [Match(0, 1), Match(3, 3), Match(2, 4)]
    assert tree.matches([1, 2, 7]) == [(1, [0, 1, 2, 3]), (2, [1, 2, 3])]


def test_nothing_in_common_is_no_match() -> None:
    tree = PrefixTree()
    assert tree.match([1, 2]) is None
    tree.put(0, [2, 1])
    assert tree.match([1, 2]) is None
    assert tree.match([]) is None


class TreeMachine(RuleBasedStateMachine):
    """The tree beside a plain dictionary of paths."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.paths: dict[int, list[int]] = {}

    @rule(path=paths)
    def put(self, path: list[int]) -> None:
        holder = max(self.paths, default=-1) + 1
        self.tree.put(holder, path)
        self.paths[holder] = path

    @rule(data=st.data(), more=paths)
    @precondition(lambda self: self.paths)
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        holder = data.draw(st.sampled_from(sorted(self.paths)))
        self.paths[holder] = self.paths[holder] + more
        self.tree.put(holder, self.paths[holder])

    @rule(data=st.data(), n=st.integers(0, 20))
    @precondition(lambda self: self.paths)
    def cut(self, data: st.DataObject, n: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.paths)))
        self.tree.cut(holder, n)
        if n == 0:
            del self.paths[holder]
        else:
            self.paths[holder] = self.paths[holder][:n]

    @rule(data=st.data())
    @precondition(lambda self: self.paths)
    def remove(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.paths)))
        self.tree.remove(holder)
        del self.paths[holder]

    @rule(prompt=st.lists(st.integers(0, 1), max_size=30))
    def ask(self, prompt: list[int]) -> None:
        shared = {holder: plain_common_length(prompt, path) for holder, path in self.paths.items()}
        longest = max(shared.values(), default=0)
        match = self.tree.match(prompt)
        if longest == 0:
            assert match is None
        else:
            assert match is not None
            assert match.n_tokens == longest == shared[match.holder]
        whole = sorted((len(p), h) for h, p in self.paths.items() if shared[h] == len(p))
        assert sorted((m.n_tokens, m.holder) for m in self.tree.ends(prompt)) == whole
        for n_tokens, holders in self.tree.matches(prompt):
            assert sorted(holders) == [h for h in sorted(shared) if shared[h] >= n_tokens]

    @invariant()
    def lengths(self) -> None:
        assert len(self.tree) == len(self.paths)
        assert {holder: self.tree.length(holder) for holder in self.paths} == {h: len(p) for h, p in self.paths.items()}


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestTree = TreeMachine.TestCase
