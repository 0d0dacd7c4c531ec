"""The thread that collects behind a saver: what its run need not keep goes while training goes on."""

import queue
import threading

from layerstore.errors import Locked
from layerstore.live.log import LOG
from layerstore.ops.gc import Request, execute_gc, has_work
from layerstore.ops.progress import Silent
from layerstore.ops.rooms import Rooms
from layerstore.policy.keep import Keep


class Collector:
    """Collects after a commit; those that come while it is at it are one more reason, not one each."""

    def __init__(self, rooms: Rooms, keep: Keep, *, run: str) -> None:
        self._rooms = rooms
        self._request = Request(keep=keep, runs=(run,))
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ends_at_once = False
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="layerstore-collect", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Collect soon: something was committed."""
        self._wishes.put(True)

    def close(self, *, at_once: bool) -> None:
        """End the thread after one more collection, or *at_once*, which is after the one that is under way."""
        self._ends_at_once = at_once
        self._wishes.put(False)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            is_open = self._wishes.get()
            while not self._wishes.empty():
                is_open = self._wishes.get() and is_open
            if not self._ends_at_once:
                self._collect()

    def _collect(self) -> None:
        try:
            if not has_work(self._rooms, self._request):
                return  # to mark what a whole store needs takes this process's time from training
            outcome = execute_gc(self._rooms, self._request, progress=Silent())
            if outcome.removed:
                LOG.info("%d commits collected, %d bytes freed", len(outcome.removed), outcome.bytes_freed)
        except Locked:
            LOG.info("another collection is under way: the next save tries again")
        except Exception as exc:  # noqa: BLE001  # training goes on, whatever happens here
            # Once: before the first evaluation there is no best commit, after every save.
            if str(exc) != self._told:
                LOG.warning("nothing was collected: %s", exc)
            self._told = str(exc)
