"""
Threads, and pools of them, that fail cleanly when memory is short.

CPython waits forever for a thread that runs out of memory while it starts, and a pool keeps the work submitted for a
thread that could not start. So a thread is started only if there is room for it; a pool needs only its first thread.
"""

import mmap
import queue
import resource
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_STACK_BYTES = resource.getrlimit(resource.RLIMIT_STACK)[0]
_ROOM_BYTES = (32 << 20) + (_STACK_BYTES if _STACK_BYTES != resource.RLIM_INFINITY else 8 << 20)
"""
The address space required for a new thread: its stack, and far more than a thread allocates while it starts.

Other threads may take some of it in the meantime: several buffers of 4 MiB in a pool of requests.
"""


class Threads(ThreadPoolExecutor):
    """A pool of threads that starts fewer than its maximum if there is no room for more."""

    def _adjust_thread_count(self) -> None:
        if len(self._threads) >= self._max_workers:
            return  # nothing to start, and each check for room is two system calls
        try:
            check_room()
            super()._adjust_thread_count()
        except (MemoryError, RuntimeError):
            if not self._threads:
                self._work_queue.get_nowait()  # the submitted work, which no thread would do
                raise


def start(thread: threading.Thread) -> None:
    """Start *thread*; raises MemoryError if there is no room for it."""
    check_room()
    thread.start()


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


def check_room() -> None:
    """Raise MemoryError unless there is room for one more thread."""
    try:
        mmap.mmap(-1, _ROOM_BYTES).close()
    except OSError as exc:
        raise MemoryError("there is no room for a thread's stack") from exc


def run_all(pool: Executor, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results in order; on an error, start nothing more, wait for what is running, and raise the error."""
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException:
        # Wait for the rest: the caller may close files or discard drafts that running work still uses.
        # But not for cancelled work, which a pool that another thread shuts down never reports as done.
        wait([future for future in futures if not future.cancel()])
        raise
