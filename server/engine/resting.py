"""What idle slots hold, taken out, put in or given up on request."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.backend import State
from server.engine.cache import Cache
from server.engine.slots import Slot
from server.errors import Conflict, EngineFailure, InvalidRequest


class RestingSlots:
    """Between steps only. Each verb raises InvalidRequest for a slot that is not there, Conflict for one that runs."""

    def __init__(self, slots: Sequence[Slot], cache: Cache) -> None:
        self._slots = slots
        self._cache = cache

    def check(self, slot_id: int) -> Slot:
        if not 0 <= slot_id < len(self._slots):
            raise InvalidRequest(f"there is no slot {slot_id}; there are 0 to {len(self._slots) - 1}")
        slot = self._slots[slot_id]
        if slot.run is not None:
            raise Conflict(f"slot {slot_id} is at work; wait until its request is done, or take another slot")
        return slot

    def take(self, slot_id: int) -> tuple[list[int], State]:
        """A copy of what the slot's last job has left: tokens and state. Raises EngineFailure when llama.cpp gives no
        state."""
        slot = self.check(slot_id)
        sequence = slot.sequence
        if not slot.left:
            raise InvalidRequest(f"slot {slot_id} holds nothing; send a request to it first (id_slot)")
        if sequence is None or sequence.live or sequence.tokens != slot.left:
            # It has made room for others, or serves them: what is left of it comes from cells and host memory.
            sequence = slot.sequence = self._cache.finished(slot.left)
        if sequence.is_gone or not sequence.tokens:
            raise InvalidRequest(f"slot {slot_id} holds nothing any more: its tokens were given up to make room")
        state = self._cache.state_of(sequence)
        if state is None:
            raise EngineFailure(f"llama.cpp gave no state of slot {slot_id}; send it a request and try again")
        return list(sequence.tokens), state

    def put(self, slot_id: int, tokens: list[int], state: State) -> None:
        """Let the slot hold this in place of what it held."""
        slot = self.check(slot_id)
        if not 0 < len(tokens) < slot.n_ctx:
            raise InvalidRequest(
                f"the file holds {len(tokens)} tokens, but one request may use {slot.n_ctx} here; start the server "
                f"with a larger --ctx-size or a smaller --parallel"
            )
        self.erase(slot_id)
        sequence = self._cache.adopt(tokens, state)
        if sequence is None:
            raise InvalidRequest(
                f"the {len(tokens)} tokens of the file were not taken into the cache: running requests leave no room "
                f"for them; try again later, or start the server with a larger --ctx-size"
            )
        slot.sequence = sequence
        slot.left = tokens

    def erase(self, slot_id: int) -> int:
        """Give up what the slot holds: how many tokens that were. What others share with it stays."""
        slot = self.check(slot_id)
        sequence, n_tokens = slot.sequence, len(slot.left)
        if sequence is not None and not sequence.live and not sequence.is_gone:
            self._cache.discard(sequence)
        slot.sequence = None
        slot.left = []
        return n_tokens
