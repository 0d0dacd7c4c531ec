"""
What collects behind a saver: what its run need not keep goes while training goes on.

A thread waits for commits, and a process of its own does the work: to mark what a whole store needs takes seconds of an
interpreter, and the training process has only one. It runs at the lowest priority, so it computes when others do not.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

from layerstore.errors import Locked
from layerstore.gc.collect import Request, has_work
from layerstore.live.log import LOG
from layerstore.policy.keep import Best, Keep
from layerstore.storage.rooms import Rooms

GRACE: str | None = None
"""How old an object is at least that goes; None for the command's own word."""

_LEAST_URGENT = 19

# Where this package is, last of all: it was imported from there, however training finds its modules.
_PACKAGE = str(Path(__file__).parents[2])
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from layerstore.cli.entry import main; sys.exit(main())"


class Collector:
    """Collects after a commit; those that come while it is at it are one more reason, not one each."""

    def __init__(self, rooms: Rooms, keep: Keep, *, run: str) -> None:
        self._rooms = rooms
        self._request = Request(keep=keep, runs=(run,))
        self._command = _command(rooms.layout.root, keep, run)
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
            if has_work(self._rooms, self._request):
                self._tell(*_run_aside(self._command))
        except Exception as exc:  # noqa: BLE001  # training goes on, whatever happens here
            self._warn(str(exc))

    def _tell(self, code: int, said: dict[str, object]) -> None:
        error = said.get("error")
        if code == 0 and said.get("commits_removed"):
            LOG.info("%s commits collected, %s bytes freed", said["commits_removed"], said["bytes_freed"])
        elif code == Locked.exit_code:
            LOG.info("another collection is under way: the next save tries again")
        elif code:
            self._warn(str(error["message"]) if isinstance(error, dict) else f"layerstore gc ended with {code}")

    def _warn(self, why: str) -> None:
        # Once: before the first evaluation there is no best commit, after every save.
        if why != self._told:
            LOG.warning("not all was collected: %s", why)
        self._told = why


def _command(root: Path, keep: Keep, run: str) -> list[str]:
    """Return what a person would type behind ``layerstore`` to collect as *keep* says."""
    rules = {
        "--keep-last": keep.last,
        "--keep-every": keep.every,
        "--keep-within": f"{keep.within.total_seconds():f}s" if isinstance(keep.within, timedelta) else keep.within,
        "--keep-best": str(keep.best) if isinstance(keep.best, Best) else keep.best,
        "--drop-optimizer-older-than": keep.drop_optimizer_older_than,
        "--grace": GRACE,
    }
    options = [f"{name}={value}" for name, value in rules.items() if value is not None]
    return ["gc", "--store", str(root.absolute()), "--json", "--yes", *options, "--", run]


def _run_aside(words: list[str]) -> tuple[int, dict[str, object]]:
    """Run the command *words* where it disturbs nobody; return how it ended, and the object that it printed last."""
    # Files, not pipes: a process that training forks just now would hold a pipe open for as long as it lives.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        # -P: what lies in training's folder shadows no module.
        command = [sys.executable, "-P", "-c", _PROGRAM, _PACKAGE, *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        with contextlib.suppress(OSError):  # it has ended, or may not
            os.setpriority(os.PRIO_PROCESS, process.pid, _LEAST_URGENT)
        code = process.wait()
        said = out if code == 0 else errors
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        found = {"error": {"message": lines[-1]}}
    return code, found if isinstance(found, dict) else {}
