"""
The threads behind a saver: one copies, one writes, and on the first rank one commits. None speaks to other ranks.

What goes wrong here never reaches training: it is noted with the save, which is then given up.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from layerstore.errors import LayerstoreError, Locked
from layerstore.history.place import Place
from layerstore.history.references import Resolved
from layerstore.limits import LOAD_WAIT_SECONDS
from layerstore.live.clock import Clock, Hold
from layerstore.live.collector import Collector
from layerstore.live.council import SAVES_MAX
from layerstore.live.files import Files
from layerstore.live.log import LOG, words_of
from layerstore.live.pool import Pool
from layerstore.live.snapshot import Copier, Snapshot
from layerstore.model import Commit, LayerEntry, Part
from layerstore.policy.keep import Keep
from layerstore.publish.joining import BaseLost, GivenUp, Joint, join, parts_of
from layerstore.publish.pins import pin
from layerstore.publish.shares import Frozen, ShareWork, fail_share, write_share
from layerstore.storage.rooms import Rooms

_OPEN: list["Background"] = []
"""Those of this process that are not closed."""

POLL_SECONDS = 0.02
"""How often the first rank looks for the others' parts; they come over a filesystem, which tells nobody."""


@dataclass(slots=True, kw_only=True)
class Timing:
    """What one save took, as training sees it and as the disk does."""

    held: list[Hold] = field(default_factory=list)
    """Inside ``save`` and at the gate."""
    written_bytes: int = 0
    durable_seconds: float | None = None
    """From ``save`` until this rank's share was on disk."""
    visible_seconds: float | None = None
    """On the rank that commits: until the commit was there."""
    queued: int = 0
    """Earlier saves that were still on their way."""

    def hold(self, clock: Clock) -> Hold:
        """Hold training for this save, from now on."""
        self.held.append(clock.hold())
        return self.held[-1]

    @property
    def blocked_seconds(self) -> float:
        """How long training was held."""
        return sum(hold.seconds for hold in self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one save of this rank."""

    step: int
    failure: str
    blocked_seconds: float
    durable_seconds: float | None
    copied_bytes: int
    written_bytes: int


@dataclass(slots=True, kw_only=True)
class Job:
    """One save of this rank, on its way."""

    step: int
    number: int
    work: ShareWork
    snapshot: Snapshot
    joint: Joint | None
    """On the rank that commits."""
    files: Files
    begun: float = field(default_factory=time.monotonic)
    timing: Timing = field(default_factory=Timing)
    is_written: threading.Event = field(default_factory=threading.Event)
    is_resolved: threading.Event = field(default_factory=threading.Event)
    """On the rank that commits."""
    failure: str = ""
    commit: Commit | None = None

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing left to do for it."""
        return self.is_written.is_set() and (self.joint is None or self.is_resolved.is_set())

    def result(self) -> Result:
        """Return what is known of it by now."""
        return Result(
            step=self.step,
            failure=self.failure,
            blocked_seconds=self.timing.blocked_seconds,
            durable_seconds=self.timing.durable_seconds,
            copied_bytes=self.snapshot.size_bytes,
            written_bytes=self.timing.written_bytes,
        )


def wait_for_saves(store_id: str, run: str) -> None:
    """
    Return once what savers of this process write of *run* is there, or given up; asks no other rank.

    Only the rank that commits waits; on the others nothing holds their parts back any more.

    Raises:
        Locked: They are still writing after `LOAD_WAIT_SECONDS`.
    """
    for background in _OPEN:
        if background.writes(store_id, run):
            background.publish(LOAD_WAIT_SECONDS)


class _Worker:
    """A thread with a queue of jobs."""

    def __init__(self, name: str, work: Callable[[Job], None]) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A process that ends without a word takes its threads along; a saver that is closed waits for them.
        self._thread = threading.Thread(target=self._run, name=f"layerstore-{name}", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work(job)


class Background:
    """One rank's threads."""

    def __init__(
        self, rooms: Rooms, pool: Pool, copier: Copier, *, is_first: bool, run: str, keep: Keep | None
    ) -> None:
        self._rooms = rooms
        self._run = run
        self._jobs: list[Job] = []
        """Those that were not over when the last one began."""
        self._pool = pool
        self._copier = copier
        self._frozen: Frozen = {}
        self._inherited: dict[str, LayerEntry] = {}
        """What the next commit inherits; changed by the committing thread, and where nothing is on its way."""
        """What the attempt's first record says of how it began, until there is one."""
        self._given_up: set[int] = set()
        self._stop = threading.Event()
        self._copying = _Worker("copy", self._copy)
        self._writing = _Worker("write", self._write)
        self._committing = _Worker("commit", self._commit) if is_first else None
        self._collector = Collector(rooms, keep, run=run) if is_first and keep is not None else None
        self.has_lost_base = False
        """Whether a layer was collected that the next commit was to inherit: none can be before all are saved."""
        _OPEN.append(self)

    def writes(self, store_id: str, run: str) -> bool:
        """Whether this is what saves *run* to the store *store_id*."""
        return (self._rooms.identity.store_id, self._run) == (store_id, run)

    def publish(self, seconds: float) -> None:
        """Let every save be complete as it is, and wait *seconds* for their commits, on the rank that makes them."""
        end = time.monotonic() + seconds
        for job in self._jobs:
            job.files.seal()
        for job in self._jobs:
            if job.joint is not None and not job.is_resolved.wait(max(end - time.monotonic(), 0)):
                raise Locked(
                    f"step {job.step} of run {self._run!r} is still being saved after {seconds:.0f} s",
                    hint="wait() of its saver returns once it is there; then load it",
                )

    def add(self, job: Job) -> None:
        """Begin with *job*."""
        self._jobs = [*(earlier for earlier in self._jobs if not earlier.is_over), job]
        self._copying.add(job)
        self._writing.add(job)
        if self._committing is not None:
            self._committing.add(job)

    def begin_at(self, place: Place) -> None:
        """Go on from *place*, with nothing on its way; frozen weights are read again."""
        self._inherited = dict(place.inherited)
        self._frozen.clear()
        self._given_up.clear()  # numbers are counted again from there

    def give_up(self, number: int) -> None:
        """Stop waiting for parts of the save *number*: a rank has said that it failed."""
        # Anew each time: the committing thread looks into it meanwhile. Of older saves everything is known.
        self._given_up = {other for other in self._given_up if other > number - SAVES_MAX} | {number}

    def close(self, *, at_once: bool) -> None:
        """End the threads, when their work is done or *at_once*."""
        _OPEN.remove(self)
        if at_once:
            self._stop.set()
            self._pool.close()
        self._copying.close()
        self._writing.close()
        if self._committing is not None:
            self._committing.close()
        if self._collector is not None:
            self._collector.close(at_once=at_once)
        self._pool.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _copy(self, job: Job) -> None:
        job.snapshot.fill(self._pool, self._copier)

    def _write(self, job: Job) -> None:
        try:
            job.timing.written_bytes = write_share(self._rooms, job.work, job.snapshot, frozen=self._frozen)
        except BaseException as exc:  # noqa: BLE001  # training goes on, whatever happens here
            job.failure = words_of(exc)
            LOG.error("step %d was not saved: %s; training goes on", job.step, job.failure)  # one line
            self._tell_failure(job)
        finally:
            try:
                job.snapshot.discard()
            finally:
                job.timing.durable_seconds = time.monotonic() - job.begun
                job.is_written.set()

    def _tell_failure(self, job: Job) -> None:
        try:
            fail_share(self._rooms, job.work, job.failure)
        except Exception as exc:  # noqa: BLE001  # the thread must live: training waits for it
            # The disk does not even take this: the next exchange tells it.
            LOG.warning("nor could that be noted in the store: %s", exc)

    def _commit(self, job: Job) -> None:
        try:
            job.commit = self._joined(job)
            job.timing.visible_seconds = time.monotonic() - job.begun
            self._pin(job.commit, job.joint)
            if self._collector is not None:
                self._collector.wake()
        except BaseException as exc:  # noqa: BLE001  # training goes on, whatever happens here
            job.failure = job.failure or words_of(exc)
            LOG.error("%s", job.failure)  # one line
            if isinstance(exc, BaseLost):
                self._inherited, self.has_lost_base = {}, True
        finally:
            try:
                self._clean_up(job)
            finally:
                job.is_resolved.set()

    def _joined(self, job: Job) -> Commit:
        assert job.joint is not None
        found: dict[int, Part] = {}
        while (parts := parts_of(self._rooms, job.joint, found)) is None:
            if job.number in self._given_up or (job.failure and job.is_written.is_set()):
                raise GivenUp(f"step {job.step} is given up: a rank could not write its share")
            if self._stop.wait(POLL_SECONDS):
                raise GivenUp(f"step {job.step} is given up: the saver was closed before all ranks had written")
        commit = join(self._rooms, job.joint, parts, inherited=self._inherited)
        self._inherited = {entry.layer: entry for entry in commit.record.layers}
        return commit

    def _pin(self, commit: Commit, joint: Joint | None) -> None:
        """Give *commit* its name, if it was to have one; it is there whether or not that can be done."""
        if joint is None or joint.pin is None:
            return
        try:
            pin(self._rooms, joint.pin, Resolved.of_commit(commit))
        except LayerstoreError as exc:
            LOG.warning("step %d is saved, but not pinned as %s: %s", joint.step, joint.pin, exc)

    def _clean_up(self, job: Job) -> None:
        try:
            self._rooms.parts.remove(job.work.session, job.work.save, world_size=job.work.share.world_size)
        except Exception as exc:  # noqa: BLE001  # likewise
            LOG.warning("parts of step %d are left for a collection: %s", job.step, exc)
