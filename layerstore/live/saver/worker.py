"""A thread that processes a queue."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from layerstore.threads import start

Item = TypeVar("Item")


class Worker(Generic[Item]):
    """A thread with a queue of items."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        # A daemon thread: a process that exits without closing its saver must not be kept alive.
        self._thread = threading.Thread(target=self._run, name=f"layerstore-{name}", daemon=True)
        start(self._thread)

    def add(self, item: Item) -> None:
        """Queue *item*."""
        self._items.put(item)

    def close(self) -> None:
        """End the thread once its queue is empty."""
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            self._work(item)
