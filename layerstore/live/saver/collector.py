"""
The collection behind a saver: commits that its run need not keep are removed while training goes on.

A thread of the committing rank waits for commits, and a helper process calls `Store.gc`, at the lowest priority. A
thread alone would hold training up, because marking a store takes Python's interpreter lock: on a store of 100,000
objects, training steps of 10 ms became 270 ms for the 17 s of a collection in a thread, and stayed at 9 ms beside a
process.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from layerstore.errors import LayerstoreError, Locked
from layerstore.gc import GcRequest, has_work
from layerstore.live.log import LOG, words_of
from layerstore.policy import Best, Keep
from layerstore.store import Store

GRACE_SECONDS: float | None = None
"""The age from which unneeded objects are removed; None for the library's own."""

# The process imports layerstore from where this one did, however training finds its modules; last: it shadows nothing.
_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from layerstore.live.saver.collector import answer_question
answer_question()
"""


class Collector:
    """Collects after commits; several commits during one collection cause one more, not one each."""

    def __init__(self, store: Store, keep: Keep, *, run: str) -> None:
        self._store = store
        self._keep = keep
        self._run_name = run
        self._wishes: SimpleQueue[bool] = SimpleQueue()
        self._ends_at_once = False
        self.error = ""
        """Why the last collection removed nothing; empty if it worked, or none has run."""
        self._warned = ""
        self._thread = threading.Thread(target=self._run, name="layerstore-collect", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Collect soon: there is a new commit."""
        self._wishes.put(True)

    def close(self, *, at_once: bool) -> None:
        """End the thread after one more collection, or *at_once*: after the one under way."""
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
            # Cheap, so most commits start no process.
            if has_work(self._store.repo, GcRequest(keep=self._keep, runs=(self._run_name,))):
                self._note(_run_process(self._question()))
        except Exception as exc:  # noqa: BLE001  # a collection never stops training
            self._warn(words_of(exc))

    def _question(self) -> dict[str, Any]:
        keep = self._keep
        rules = {
            "last": keep.last,
            "every": keep.every,
            "within": f"{keep.within.total_seconds():f}s" if isinstance(keep.within, timedelta) else keep.within,
            "best": str(keep.best) if isinstance(keep.best, Best) else keep.best,
            "drop_optimizer_older_than": keep.drop_optimizer_older_than,
        }
        return {
            "store": str(self._store.path),
            "run": self._run_name,
            "keep": rules,
            "grace_seconds": GRACE_SECONDS,
        }

    def _note(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._warn(answer["error"])
            return
        self.error = self._warned = ""
        if "is_locked" in answer:
            LOG.info("another collection is under way: the next save tries again")
        elif answer["commits_removed"]:
            LOG.info("%d commits collected, %d bytes freed", answer["commits_removed"], answer["bytes_freed"])

    def _warn(self, why: str) -> None:
        self.error = why
        # Once: before the first evaluation, say, there is no best commit after every save.
        if why != self._warned:
            LOG.warning("not all was collected: %s", why)
        self._warned = why


def _run_process(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the helper process to *question*."""
    # Files, not pipes: a child that training forks meanwhile would hold a pipe open.
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:
        asked.write(json.dumps(question).encode())
        asked.seek(0)
        # -P: modules are not looked for in the folder that training runs in.
        command = [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[3])]
        code = subprocess.run(command, stdin=asked, stdout=said, stderr=subprocess.STDOUT, check=False).returncode
        said.seek(0)
        last = (said.read().decode(errors="replace").splitlines() or ["it said nothing"])[-1]
    if code:
        raise LayerstoreError(f"the collecting process ended with {code}: {last}")
    answer: dict[str, Any] = json.loads(last)
    return answer


def answer_question() -> None:
    """Collect as the question on stdin says, and print the answer: the helper process."""
    question = json.load(sys.stdin)
    os.nice(19)  # it computes when training does not
    answer: dict[str, Any] = {}
    try:
        with Store(question["store"]) as store:
            found = store.gc(Keep(**question["keep"]), runs=[question["run"]], grace_seconds=question["grace_seconds"])
        answer = {"commits_removed": len(found.removed), "bytes_freed": found.bytes_freed}
    except Locked:
        answer = {"is_locked": True}
    except LayerstoreError as exc:
        answer = {"error": words_of(exc)}
    sys.stdout.write(json.dumps(answer) + "\n")
