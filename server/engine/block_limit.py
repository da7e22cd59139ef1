"""Ends reasoning that has become too long, by tokens: a text that reads like the closing tag would not be the tag."""

from __future__ import annotations

from server.engine.messages import BlockLimit


class BlockCounter:
    """Follows the tokens of one answer. Ask `forced` before each token, then `note` the one that was taken."""

    def __init__(self, limit: BlockLimit) -> None:
        self._limit = limit
        self._is_open = limit.is_open
        self._n_tokens = 0
        self._to_force: list[int] = []  # the next one last

    def forced(self, *, within_character: bool) -> int | None:
        """The token to take instead of a sampled one. Half a character is finished first."""
        if self._to_force:
            return self._to_force[-1]
        if self._is_open and self._n_tokens >= self._limit.n_tokens and not within_character:
            self._to_force = self._limit.ending[::-1]
            return self._to_force[-1]
        return None

    def note(self, token: int) -> None:
        if self._to_force:
            self._to_force.pop()
        elif self._is_open:
            self._n_tokens += 1
        if token == self._limit.closer:
            self._is_open = False
        elif token == self._limit.opener:
            self._is_open = True
