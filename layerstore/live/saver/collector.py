"""
After each commit of a saver: send the commit to the next levels, and remove commits that retention does not keep.

A thread of the committing rank waits for commits, and a helper process calls `Store.push` and `Store.gc` at the lowest
priority. A thread alone would slow training down, because marking a store holds Python's interpreter lock: on a store
of 100,000 objects, training steps of 10 ms took 270 ms during the 17 s of a collection in a thread, but 9 ms with a
separate process.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from layerstore.disk import Files
from layerstore.errors import AlreadyExists, IntegrityError, LayerstoreError, Locked
from layerstore.gc import NOT_PUSHED, Facts, has_work
from layerstore.layout import url_of
from layerstore.live.log import LOG, one_line
from layerstore.policy import Best, Keep
from layerstore.progress import Silent
from layerstore.storage import RecordName
from layerstore.store import Store
from layerstore.threads import start
from layerstore.units import size

BUCKET_SECONDS = 3600.0
"""The minimum time between two collections of a store in a bucket."""

GRACE_SECONDS: float | None = None
"""The grace period of the collections; None for the library's default."""

# The helper process imports layerstore from the same path as this process, however training finds its modules. That
# path comes last, so that nothing in it shadows another module. One line, since ps shows the program.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from layerstore.live.saver.collector import answer_question; answer_question()"
)
_PROCESS_NAME = "layerstore-bg"
"""What ps, top and pgrep call the helper process; the kernel keeps 15 bytes."""


class Collector:
    """Pushes and collects after commits; commits that arrive during one round share the next round."""

    def __init__(
        self, store: Store, keep: Keep | None, *, run: str, places: Sequence[str], origin: str | None = None
    ) -> None:
        """
        *places* are the destinations of commits, nearest first: remotes by name or URL, and folders.

        *origin*, for a node's own store, is the URL of the next level, which has all commits; only commits that are in
        *origin* may be removed from the node's store.
        """
        self._store = store
        self._keep = keep
        self._facts = None if keep is None else Facts(store.repo, keep)
        self._places = tuple(places)
        self._origin = origin
        self._run_name = run
        self._wishes: SimpleQueue[bool] = SimpleQueue()
        self._ends_at_once = False
        self.error = ""
        """Why the last push or collection failed; empty if both succeeded, or none has run yet."""
        self.push_error = ""
        """Why the newest commit has not reached every destination; empty if it has. Collections do not change this."""
        self.pushed_step: int | None = None
        """The newest step that has reached the last destination."""
        self._warned = ""
        self._collected_at = -math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answered = 0
        self._is_answered = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="layerstore-collect", daemon=True)
        start(self._thread)

    def wake(self) -> None:
        """Push and collect soon, because there is a new commit."""
        with self._is_answered:
            self._requests += 1
        self._wishes.put(True)

    def retry(self) -> None:
        """Retry a failed push soon."""
        if self.push_error:
            self.wake()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most *seconds* until all requests so far are processed; return whether they are."""
        with self._is_answered:
            requests = self._requests
            return self._is_answered.wait_for(lambda: self._answered >= requests, seconds)

    def close(self, *, at_once: bool) -> None:
        """End the thread after one more push and collection, or *at_once*."""
        self._ends_at_once = at_once
        self._wishes.put(False)
        process = self._process
        if at_once and process is not None:
            process.terminate()  # it is safe to kill a push or a collection at any time
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            is_open = self._wishes.get()
            while not self._wishes.empty():
                is_open = self._wishes.get() and is_open
            requests = self._requests  # before the work: commits that arrive during it need another round
            if not self._ends_at_once:
                self._collect(is_new=requests > self._answered)
            with self._is_answered:
                self._answered = requests
                self._is_answered.notify_all()

    def _collect(self, *, is_new: bool) -> None:
        try:
            # Checked here, which is cheap, so that most commits start no process.
            if (self._places and (is_new or self.error)) or (self._is_time() and self._has_work()):
                self._collected_at = time.monotonic()
                self._note(self._answer(self._question()))
        except Exception as exc:  # noqa: BLE001  # a collection never stops training
            self.push_error = one_line(exc) if self._places else ""
            self._warn(one_line(exc))

    def _is_time(self) -> bool:
        """Whether a collection is worth its requests: in a bucket, objects stay for a day anyway."""
        is_remote = self._store.repo.remote is not None
        return not is_remote or time.monotonic() > self._collected_at + BUCKET_SECONDS

    @property
    def has_places(self) -> bool:
        """Whether commits are sent to other stores."""
        return bool(self._places)

    def _has_work(self) -> bool:
        if self._origin is not None:
            return True  # only the origin knows which commits exist
        return self._facts is not None and has_work(self._facts, self._run_name)

    def _question(self) -> dict[str, Any]:
        keep = self._keep
        rules = keep and {
            "last": keep.last,
            "every": keep.every,
            "within": f"{keep.within.total_seconds():f}s" if isinstance(keep.within, timedelta) else keep.within,
            "best": str(keep.best) if isinstance(keep.best, Best) else keep.best,
            "drop_optimizer_older_than": keep.drop_optimizer_older_than,
        }
        return {
            "store": self._store.repo.name,
            "run": self._run_name,
            "places": self._places,
            "origin": self._origin,
            "keep": rules,
            "grace_seconds": GRACE_SECONDS,
        }

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the helper process to *question*."""
        # Files, not pipes: a child that training forks in the meantime would inherit a pipe and keep it open.
        with tempfile.TemporaryFile() as question_file, tempfile.TemporaryFile() as answer_file:
            question_file.write(json.dumps(question).encode())
            question_file.seek(0)
            # -P: do not look for modules in training's working folder.
            command = [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[3])]
            self._process = subprocess.Popen(command, stdin=question_file, stdout=answer_file, stderr=subprocess.STDOUT)
            if self._ends_at_once:  # `close` may have looked for the process before it existed
                self._process.terminate()
            code = self._process.wait()
            self._process = None
            answer_file.seek(0)
            last = (answer_file.read().decode(errors="replace").splitlines() or ["no output"])[-1]
        if code:
            raise LayerstoreError(f"the collection process exited with {code}: {last}")
        answer: dict[str, Any] = json.loads(last)
        return answer

    def _note(self, answer: dict[str, Any]) -> None:
        self.pushed_step = answer.get("pushed_step", self.pushed_step)
        self.push_error = answer.get("push_error", answer.get("error", "") if self._places else "")
        if "error" in answer:
            self._warn(answer["error"])
            return
        self.error = self._warned = ""
        if "is_locked" in answer:
            LOG.info("another collection is under way: the next save tries again")
        elif answer.get("commits_removed"):
            commits = answer["commits_removed"]
            # Young objects stay for the grace period, since unfinished saves may use them.
            freed = f", {size(answer['bytes_freed'])} freed" if answer["bytes_freed"] else "; bytes are freed later"
            LOG.info("%d commit%s collected%s", commits, "" if commits == 1 else "s", freed)
        for note in answer.get("notes", ()):
            LOG.warning("%s", note)

    def _warn(self, why: str) -> None:
        self.error = why
        # Once per reason: before the first evaluation, for example, every save would warn that there is no best commit.
        if why != self._warned:
            LOG.warning("could not %s everything: %s", "push or collect" if self._places else "collect", why)
        self._warned = why


def answer_question() -> None:
    """Run the helper process: push and collect as the question on stdin asks, and print the answer."""
    question = json.load(sys.stdin)
    os.nice(19)  # use only the CPU time that training does not need
    with suppress(OSError):  # if /proc is not writable, the process is called python
        Path("/proc/self/comm").write_text(_PROCESS_NAME)
    answer: dict[str, Any] = {}
    try:
        with Store(question["store"]) as store:
            run, places, origin = question["run"], question["places"], question["origin"]
            if origin is not None and not _has_caught_up(store, origin, run):
                question["keep"] = None  # what only this node has is incomplete: collect after the next save
            view = store.repo.catalog.find(run)
            newest = None if view is None else view.newest
            # Sent before collecting: only commits that have reached the next destination may be removed.
            if newest is not None:
                answer |= _sent(store, newest.name, places)
            if newest is not None and question["keep"] is not None:
                keep, grace_seconds = Keep(**question["keep"]), question["grace_seconds"]
                answer |= _collected(store, run, places, keep, grace_seconds)
    except Locked:
        answer["is_locked"] = True
    except LayerstoreError as exc:
        answer.setdefault("error", one_line(exc))
    sys.stdout.write(json.dumps(answer) + "\n")


def _has_caught_up(store: Store, origin: str, run: str) -> bool:
    """Pull newer commits from *origin*; return whether *store* has no commit newer than those in *origin*."""
    from layerstore.remote import Bucket, Remote, take_over

    with Remote(Bucket(origin), Files()) as remote:
        take_over(remote, store.path, run=run, is_whole=False)
        there, here = remote.repo.catalog.find(run), store.repo.catalog.find(run)
        return here is None or not here.newer_than(None if there is None else there.newest)


def _sent(store: Store, newest: RecordName, places: Sequence[str]) -> dict[str, Any]:
    """
    Send the run of *newest* to all *places*; return the step of *newest* if it reached the last place, and any errors.

    If one place fails, the others still get the run, and *store* keeps every commit that the failed place lacks.
    """
    answer: dict[str, Any] = {"push_error": ""}
    for place in places:
        try:
            _send(store, newest.run, place, is_last=place == places[-1])
        except LayerstoreError as exc:
            answer.setdefault("error", one_line(exc))
            # A damaged older commit or a moved pin is reported, but the newest save may have arrived anyway.
            if not (isinstance(exc, AlreadyExists | IntegrityError) and _has(store, newest, place)):
                answer["push_error"] = answer["push_error"] or one_line(exc)
                continue
        if place == places[-1]:
            answer["pushed_step"] = newest.step
    return answer


def _send(store: Store, run: str, place: str, *, is_last: bool) -> None:
    from layerstore.remote import Bucket, push, send_to_folder

    if Path(place).is_absolute():
        send_to_folder(store.repo, Path(place), run=run, is_whole=is_last)
    else:
        # No comparison after each save: that would take a request for every thousand objects in the bucket.
        bucket = Bucket(store.remotes.url(place), may_make=True)
        push(store.repo, bucket, refs=None, runs=[run], compares=False, progress=Silent())


def _has(store: Store, newest: RecordName, place: str) -> bool:
    from layerstore.remote import Bucket, kept_there

    try:
        return newest.id in kept_there(store.repo, Bucket(_remote(store, place)))
    except LayerstoreError:
        return False  # the destination cannot be read at all, as the first error says


def _collected(
    store: Store, run: str, places: Sequence[str], keep: Keep, grace_seconds: float | None
) -> dict[str, Any]:
    """Apply *keep* to *store* and to the folders in *places*; each loses only commits that the next place has."""
    following = _remote(store, places[0]) if places else None
    outcome = store.gc(keep, runs=[run], grace_seconds=grace_seconds, pushed_to=following)
    if (
        len(places) == 1
        and not Path(places[0]).is_absolute()
        and any(NOT_PUSHED in fate.kept_by for fate in outcome.commits)
    ):
        # The bucket may have records whose objects are missing: push again, now comparing objects.
        with suppress(AlreadyExists, IntegrityError):  # the earlier push has reported this error
            store.push(places[0], runs=[run])
        outcome = store.gc(keep, runs=[run], grace_seconds=grace_seconds, pushed_to=following)
    later = [_remote(store, place) for place in places]
    # A folder in the middle may lack older commits, which only later levels have, so all later levels are checked.
    for following in later[1:]:
        outcome = store.gc(keep, runs=[run], grace_seconds=grace_seconds, pushed_to=following)
    for number, place in enumerate(places[:-1], 1):
        if Path(place).is_absolute():
            with Store(place) as there:
                for following in later[number:]:
                    there.gc(keep, runs=[run], grace_seconds=grace_seconds, pushed_to=following)
    return {"commits_removed": len(outcome.removed), "bytes_freed": outcome.bytes_freed, "notes": outcome.notes}


def _remote(store: Store, place: str) -> str:
    """Return the URL of *place*."""
    return url_of(place) if Path(place).is_absolute() else store.remotes.url(place)
