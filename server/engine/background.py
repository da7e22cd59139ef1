"""Work beside the step loop: one thread, and what follows from its results happens on the thread that owns the loop."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Background(Protocol):
    def start(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Do `work` after all that was started before; `then` gets its result, or what it raised, in `collect`."""
        ...

    def collect(self, timeout_s: float = 0.0) -> None:
        """Follow up what is done; wait up to `timeout_s` for something to be."""
        ...

    def close(self) -> None: ...


class Worker:
    """A thread. `wake` is called from it when something is ready to be collected."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._wake = wake
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def start(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        def finished(future: Future[T]) -> None:
            self._done.put(lambda: then(future))
            self._wake()

        self._pool.submit(work).add_done_callback(finished)

    def collect(self, timeout_s: float = 0.0) -> None:
        try:
            follow = self._done.get(timeout=timeout_s) if timeout_s > 0 else self._done.get_nowait()
            while True:
                follow()
                follow = self._done.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Inline:
    """Everything at once: where a thread would be in the way."""

    def start(self, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  it is handed on
            future.set_exception(error)
        then(future)

    def collect(self, timeout_s: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass
