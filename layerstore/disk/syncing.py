"""
Complete files on their way to disk: threads sync and close them while their writer continues.

An fsync takes a disk a millisecond, and several at once take no longer, so small files wait together.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from layerstore.disk.handles import NewFile
from layerstore.limits import SYNCING_MAX, SYNCS_AT_ONCE
from layerstore.threads import Threads

Item = TypeVar("Item")


class Syncing:
    """Syncs files and folders, several at a time, or not at all unless *durable*. Thread-safe."""

    def __init__(self, *, durable: bool = True) -> None:
        self._durable = durable
        self._pool = Threads(SYNCS_AT_ONCE, thread_name_prefix="fsync")
        self._guard = threading.Lock()
        self._under_way: deque[Future[None]] = deque()

    def add(self, files: Iterable[NewFile]) -> None:
        """
        Take *files*, which are complete; waits if too many are pending.

        Raises:
            StorageIO: An earlier file could not be synced.
        """
        for file in files:
            if self._durable:
                file.start_writing()
            self._under_way.append(self._begun(self._sync, file))
        self._wait(SYNCING_MAX)

    def wait(self) -> None:
        """Return once all files are durable; raises as `add` does."""
        self._wait(0)

    def each(self, sync: Callable[[Path], None], directories: Iterable[Path]) -> None:
        """*sync* each of *directories*, several at a time."""
        for done in [self._begun(sync, directory) for directory in directories]:
            done.result()  # raises if one cannot be synced

    def close(self) -> None:
        """Close the pending files without syncing them."""
        self._durable = False
        self._pool.shutdown()

    def _begun(self, work: Callable[[Item], None], item: Item) -> Future[None]:
        try:
            return self._pool.submit(work, item)
        except (RuntimeError, MemoryError):  # memory is short, or the interpreter exits during a save
            work(item)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _wait(self, left_max: int) -> None:
        with self._guard:
            done = [self._under_way.popleft() for _ in range(len(self._under_way) - left_max)]
        for future in done:
            future.result()

    def _sync(self, file: NewFile) -> None:
        with file:
            if self._durable:
                file.sync()
