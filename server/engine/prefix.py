"""A radix tree over the tokens of sequences: how much of a prompt somebody holds already, and who.

An edge carries a run of tokens; a node stands where sequences part or end. Looking a prompt up costs what the prompt is
long, however many sequences there are. Holders are small integers; what they stand for is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Match:
    """The first `n_tokens` of the prompt are held by `holder`."""

    holder: int
    n_tokens: int


def common_length(a: Sequence[int], b: Sequence[int], start_a: int = 0) -> int:
    """Length of the longest common prefix of a[start_a:] and b. Compares slices, so that the work is done in C."""
    n = min(len(a) - start_a, len(b))
    low, width = 0, 64
    while low < n and a[start_a + low : start_a + low + width] == b[low : low + width]:
        low += width
        width *= 2
    high = min(low + width, n)
    # Everything before `low` is equal; the first difference, if any, lies before `high`.
    while low < high:
        middle = (low + high + 1) // 2
        if a[start_a + low : start_a + middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return min(low, n)


@dataclass(slots=True, eq=False)
class _Node:
    """`edge`: the tokens from the parent to here; `depth`: tokens from the root to here. `holders`: all that pass here
    or end here, in order of arrival; `ends`: those that end exactly here."""

    edge: Sequence[int] = ()
    depth: int = 0
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    holders: dict[int, None] = field(default_factory=dict)
    ends: dict[int, None] = field(default_factory=dict)


class PrefixTree:
    """A holder has one path at a time. Tokens are copied."""

    def __init__(self) -> None:
        self._root = _Node()
        self._end_of: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._end_of)

    def length(self, holder: int) -> int:
        """Tokens on the holder's path; 0 for one that is not in the tree."""
        node = self._end_of.get(holder)
        return node.depth if node is not None else 0

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, holder: int, tokens: Sequence[int]) -> None:
        """Give a new holder this path, or let one that is there grow: its path must be a prefix of `tokens` then."""
        node = self._end_of.get(holder)
        if node is None:
            node = self._root
            node.holders[holder] = None
        else:
            assert node.depth <= len(tokens), "to shorten a path, cut it"
            node.ends.pop(holder)
        self._extend(holder, node, tokens)

    def remove(self, holder: int) -> None:
        node = self._end_of.pop(holder, None)
        if node is None:
            return
        node.ends.pop(holder)
        at: _Node | None = node
        while at is not None:
            del at.holders[holder]
            at = at.parent
        while node.parent is not None and not node.holders:
            node.parent.children.pop(node.edge[0])
            node = node.parent
        self._join(node)

    def cut(self, holder: int, n_tokens: int) -> None:
        """Let the holder's path end after `n_tokens`."""
        node = self._end_of.get(holder)
        if node is None or node.depth <= n_tokens:
            return
        path: list[int] = []
        parts: list[Sequence[int]] = []
        while node is not None:
            parts.append(node.edge)
            node = node.parent
        for part in reversed(parts):
            path += part
        self.remove(holder)
        if n_tokens > 0:
            self.put(holder, path[:n_tokens])

    def _extend(self, holder: int, node: _Node, tokens: Sequence[int]) -> None:
        """Lead the holder's path from `node`, which it holds already, to the end of `tokens`."""
        while node.depth < len(tokens):
            child = node.children.get(tokens[node.depth])
            if child is None:
                child = _Node(list(tokens[node.depth :]), len(tokens), node)
                node.children[child.edge[0]] = child
            else:
                n = common_length(tokens, child.edge, node.depth)
                if n < len(child.edge):
                    child = self._split(child, n)
            child.holders[holder] = None
            node = child
        node.ends[holder] = None
        self._end_of[holder] = node

    def _split(self, node: _Node, n: int) -> _Node:
        """Put a node in the middle of the edge to `node`, `n` tokens along it, and return it."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.edge[:n], parent.depth + n, parent, {node.edge[n]: node}, dict(node.holders))
        parent.children[upper.edge[0]] = upper
        node.edge = node.edge[n:]
        node.parent = upper
        return upper

    def _join(self, node: _Node) -> None:
        """Undo a split that nobody needs any more: one child, nobody ends here."""
        if node.parent is None or node.ends or len(node.children) != 1:
            return
        (child,) = node.children.values()
        child.edge = [*node.edge, *child.edge]
        child.parent = node.parent
        node.parent.children[child.edge[0]] = child

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def match(self, prompt: Sequence[int]) -> Match | None:
        """The longest prefix of the prompt that somebody holds; of several holders the first to come. None when
        nothing matches."""
        best: Match | None = None
        for node, depth in self._walk(prompt):
            best = Match(next(iter(node.holders)), depth)
        return best

    def matches(self, prompt: Sequence[int]) -> list[tuple[int, list[int]]]:
        """For each place along the prompt where holders part or end: (tokens up to there, all who hold them)."""
        return [(depth, list(node.holders)) for node, depth in self._walk(prompt)]

    def ends(self, prompt: Sequence[int]) -> list[Match]:
        """Everybody whose whole path is a prefix of the prompt, shortest first."""
        return [Match(h, node.depth) for node, depth in self._walk(prompt) if depth == node.depth for h in node.ends]

    def _walk(self, prompt: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """Nodes along the prompt with the depth to which it agrees with them; only the last may agree in part."""
        node = self._root
        while node.depth < len(prompt):
            child = node.children.get(prompt[node.depth])
            if child is None:
                return
            n = common_length(prompt, child.edge, node.depth)
            yield child, node.depth + n
            if n < len(child.edge):
                return
            node = child
