"""Hands out step results in order of submission, also those that still wait for a device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["OutputQueue"]


class OutputQueue:
    """Runs deliveries one after the other: at once where possible, else on one thread that may wait.

    For one submitting thread. A delivery may not raise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_open = 0
        self._thread: threading.Thread | None = None

    def deliver(self, delivery: Callable[[], None], *, waits: bool) -> None:
        """Run ``delivery`` after all earlier ones; in the calling thread if it does not wait and none is open."""
        with self._lock:
            is_immediate = not waits and self._num_open == 0
            self._num_open += not is_immediate
        if is_immediate:
            delivery()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._waiting.put(delivery)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open, so that what does not wait can be handed out without asking. For the thread that
        submits: only its own deliveries could change that."""
        return self._num_open == 0

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what is open, for at most ``timeout_s`` seconds. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _run(self) -> None:
        while (delivery := self._waiting.get()) is not None:
            delivery()
            with self._lock:
                self._num_open -= 1
