"""Slots saved to files and restored from them: `--slot-save-path` and the actions of POST /slots/{id}.

States move between steps; files are written and read by a thread of their own, and the answer follows when that is
done.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from server.engine import state_file
from server.engine.backend import State
from server.engine.background import Background
from server.engine.identity import Identity
from server.engine.messages import ActOnSlot, SlotAction, SlotDone, SlotRefusal, SlotRefused
from server.engine.resting import RestingSlots
from server.engine.state_file import Head, StateFileError
from server.errors import Conflict, EngineFailure, GlmserveError, InvalidRequest

Answer = SlotDone | SlotRefused

_LONGEST_NAME = 200  # bytes; the temporary file's name is longer
# Nothing that means something to a path: no separator of any system, no dot in front, none that look like them.
_NAME = re.compile(r"\w[\w .,;=+@~()\[\]{}!#%&'^-]*")


def check_name(name: str) -> str:
    """The name of a file in the folder. Raises InvalidRequest for one that is none, or could leave it."""
    fits = _NAME.fullmatch(name) and len(name.encode()) <= _LONGEST_NAME and ".." not in name and name[-1] not in " ."
    if not fits:
        raise InvalidRequest(
            f"the filename {name[:100]!r} is not allowed: it must be 1 to {_LONGEST_NAME} bytes of letters, digits, "
            f"spaces and signs, begin with a letter, a digit or _, have no slash, no colon and no '..', and end in no "
            f"dot or space",
            param="filename",
        )
    return name


class SlotFiles:
    """`tell` sends an answer; every action gets exactly one."""

    def __init__(
        self,
        slots: RestingSlots,
        folder: Path,
        identity: Identity,
        worker: Background,
        tell: Callable[[Answer], None],
    ) -> None:
        self._slots = slots
        self._folder = folder
        self._identity = identity
        self._worker = worker
        self._tell = tell

    def act(self, wish: ActOnSlot) -> None:
        began = time.perf_counter()
        try:
            match wish.action:
                case SlotAction.ERASE:
                    n_tokens = self._slots.erase(wish.slot)
                    self._tell(SlotDone(wish.call_id, n_tokens))
                case SlotAction.SAVE:
                    path = self._folder / check_name(wish.filename)
                    tokens, state = self._slots.take(wish.slot)
                    work = partial(state_file.write, path, self._identity, tokens, 0, state)
                    self._worker.start(work, partial(self._saved, wish, len(tokens), began))
                case SlotAction.RESTORE:
                    path = self._folder / check_name(wish.filename)
                    self._slots.check(wish.slot)
                    self._worker.start(partial(_read, path, self._identity), partial(self._restored, wish, began))
        except GlmserveError as error:
            self._refuse(wish, error)

    def collect(self) -> None:
        self._worker.collect()

    def close(self) -> None:
        self._worker.close()

    def _saved(self, wish: ActOnSlot, n_tokens: int, began: float, future: Future[int]) -> None:
        try:
            n_bytes = future.result()
        except OSError as error:
            what = error.strerror or str(error)
            self._refuse(wish, EngineFailure(f"'{wish.filename}' could not be written to --slot-save-path: {what}"))
        else:
            self._tell(SlotDone(wish.call_id, n_tokens, n_bytes, (time.perf_counter() - began) * 1e3))

    def _restored(self, wish: ActOnSlot, began: float, future: Future[tuple[Head, State]]) -> None:
        try:
            head, state = future.result()
            self._slots.put(wish.slot, head.tokens.tolist(), state)
        except StateFileError as error:
            self._refuse(wish, InvalidRequest(f"'{wish.filename}' cannot be restored: {error}", param="filename"))
        except FileNotFoundError:
            self._refuse(wish, InvalidRequest(f"there is no file '{wish.filename}' to restore", param="filename"))
        except OSError as error:
            what = error.strerror or str(error)
            self._refuse(wish, InvalidRequest(f"'{wish.filename}' cannot be read: {what}", param="filename"))
        except GlmserveError as error:
            self._refuse(wish, error)
        else:
            n_tokens, ms = len(head.tokens), (time.perf_counter() - began) * 1e3
            self._tell(SlotDone(wish.call_id, n_tokens, head.n_bytes, ms))

    def _refuse(self, wish: ActOnSlot, error: GlmserveError) -> None:
        match error:
            case Conflict():
                reason = SlotRefusal.BUSY
            case InvalidRequest():
                reason = SlotRefusal.INVALID
            case _:
                reason = SlotRefusal.FAILED
        self._tell(SlotRefused(wish.call_id, reason, error.message, getattr(error, "param", None)))


def _read(path: Path, identity: Identity) -> tuple[Head, State]:
    head, state = state_file.read(path, identity)
    if head.start:
        raise StateFileError(f"it holds only the tokens from {head.start} on; take one that was saved from a slot")
    return head, state
