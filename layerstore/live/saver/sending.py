"""
Sending from a node's own first level: each rank copies its shares to the next level.

Once all ranks have copied their shares, rank 0 makes the commit in the next level. Saves are sent in order; if sending
a save fails, it is retried. Until a save is sent, its bytes stay in the first level, not in memory.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from layerstore.errors import Conflict, IntegrityError, LayerstoreError
from layerstore.history import Resolved
from layerstore.live.log import LOG, one_line
from layerstore.live.ranks import GroupParts
from layerstore.live.saver.results import Job
from layerstore.model import Commit, CommitId
from layerstore.parts import Part
from layerstore.publish import GivenUp, JointCommit, copy_commit, copy_share, fail_share, make_pin, parts_of
from layerstore.storage import RecordName, Repository
from layerstore.threads import Worker

_POLL_SECONDS, _POLL_SECONDS_MAX = 0.02, 1.0
_PAUSE_SECONDS_MAX = 60.0


class Sender:
    """Sends one rank's saves from the first level, *near*, to the next one."""

    def __init__(
        self,
        near: Repository,
        repo: Repository,
        *,
        commits: bool,
        copied: Callable[[], None],
        committed: Callable[[], None],
    ) -> None:
        """*copied* is called once this rank's share of a save is in *repo*; *committed*, once the commit is."""
        self._near = near
        self._repo = repo
        self._copied = copied
        self._committed = committed
        self._is_stopping, self._at_once = threading.Event(), threading.Event()
        self._is_last = False
        """Whether no rank will write any more parts."""
        self._changed = threading.Condition()
        self._to_copy = self._pending = 0
        self._why_waiting = {"copy": "", "commit": ""}
        self._own: set[CommitId] = set()
        """The commits that this job has tried to publish in the next level."""
        self.lost: list[str] = []
        """The saves that will never reach the next level, and why."""
        self.sent_step: int | None = None
        """On the rank that commits: the newest step in the next level."""
        self.has_lost_base = False
        """Whether a save will never reach the next level, so that the following save must be full."""
        self._copying = _in_order("send")
        self._committing = _in_order("publish") if commits else None

    @property
    def error(self) -> str:
        """Why a save has not reached the next level yet; empty if nothing is wrong."""
        return next(filter(None, self._why_waiting.values()), "")

    def send(self, job: Job, part: Part) -> None:
        """Copy *part*, which is written; then, on the rank that commits, make the commit of *job*."""
        with self._changed:
            self._pending += 1
            self._to_copy += 1
        self._copying.add(partial(self._copy, job, part))

    def after_commits(self, write: Callable[[], None], step: int) -> None:
        """On the rank that commits, call *write*, which writes to the next level, after the commits so far."""
        assert self._committing is not None
        # Goes through the copying queue, so that it comes after the commits of shares that are still being copied.
        self._copying.add(partial(self._committing.add, partial(self._write, write, step)))

    def wait(self, seconds: float) -> bool:
        """Wait at most *seconds* until every save is sent or given up; return whether all are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    def has_copied(self, seconds: float) -> bool:
        """Wait at most *seconds* until all of this rank's shares are copied or given up; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._to_copy, seconds)

    def stop_retrying(self) -> None:
        """Stop retrying: give up each save whose next try fails; the next resume sends it."""
        self._is_stopping.set()

    def expect_no_more(self) -> None:
        """Give up saves that some rank has not copied yet: no rank copies anything from now on."""
        self._is_last = True

    def close(self, *, at_once: bool) -> None:
        """End once every save was sent or given up, or *at_once*."""
        self._is_stopping.set()
        if at_once:
            self._at_once.set()
        self._copying.close()
        if self._committing is not None:
            self._committing.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _copy(self, job: Job, part: Part) -> None:
        try:
            if self._repeated(lambda: copy_share(self._near, self._repo, part), job, "copy"):
                assert isinstance(self._near.parts, GroupParts)
                # Only now: until the next level has the part, the node's part protects the objects in its store.
                self._near.parts.forget(part.session, part.save, part.rank)
                self._copied()
        except Exception as exc:  # noqa: BLE001  # training continues
            self._fail(job, exc)
            self._repeated(partial(fail_share, self._repo, job.joint, one_line(exc)), job, "copy")
        finally:
            with self._changed:
                self._to_copy -= 1
                self._changed.notify_all()
            # Also after a failure: the committing thread then gives the save up and counts it as done.
            if self._committing is not None:
                self._committing.add(partial(self._commit, job))
            else:
                self._end_one()

    def _commit(self, job: Job) -> None:
        try:
            job.is_resolved.wait()  # the record is copied from the first level, where it must be visible
            commit = job.commit
            if commit is not None and (parts := self._parts(job)) is not None:
                after = job.joint.place.after
                copy = partial(copy_commit, self._near, self._repo, commit, parts, own=self._own, after=after)
                if not self._repeated(copy, job, "commit"):
                    return
                self.sent_step = job.joint.step
                pin(self._repo, commit, job.joint)
                self._committed()
            # Not while the save waits for its record in the next level: its parts protect what the ranks have copied.
            if commit is None or self.sent_step == job.joint.step:
                self._repo.parts.remove(job.joint.session, job.joint.save, world_size=job.joint.share.world_size)
        except Exception as exc:  # noqa: BLE001  # training continues
            self._fail(job, exc)
            if job.commit is not None:  # the record in *near* needs objects of other nodes, and can never be complete
                forget_record(self._near, self._near.records.name_of(job.commit))
        finally:
            self._end_one()

    def _parts(self, job: Job) -> list[Part] | None:
        """Wait until all ranks have copied their shares; return their parts, or None if the sender stops first."""
        parts: dict[int, Part] = {}
        begun = time.monotonic()
        while True:
            is_last = self._is_last  # read before looking for parts: a part may still arrive while this looks
            if not self._repeated(lambda: parts_of(self._repo, job.joint, parts), job, "commit"):
                return None
            if len(parts) == job.joint.share.world_size:
                return [parts[rank] for rank in sorted(parts)]
            if is_last:
                self._why_waiting["commit"] = f"step {job.joint.step} is incomplete in {self._repo.name}"
                return None
            waited_seconds = time.monotonic() - begun
            if self._at_once.wait(min(max(waited_seconds / 10, _POLL_SECONDS), _POLL_SECONDS_MAX)):
                return None

    def _repeated(self, do: Callable[[], object], job: Job, what: str) -> bool:
        """Call *do*, and retry while a retry may help; return False if the sender stops before *do* succeeds."""
        pause_seconds = 1.0
        while not self._at_once.is_set():
            try:
                do()
            except LayerstoreError as exc:
                if isinstance(exc, IntegrityError | GivenUp | Conflict):
                    raise  # no retry helps; anything else may be a server or a disk that comes back
                if not self._why_waiting[what]:
                    LOG.warning("step %d has not reached %s yet: %s", job.joint.step, self._repo.name, one_line(exc))
                self._why_waiting[what] = one_line(exc)
                if self._is_stopping.wait(pause_seconds):
                    return False
                pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)
            else:
                self._why_waiting[what] = ""
                return True
        return False

    def _write(self, write: Callable[[], None], step: int) -> None:
        # Tried only once: no promise depends on timings, and the next commits wait for this thread.
        try:
            write()
        except Exception as exc:  # noqa: BLE001  # training continues
            LOG.warning("could not record the timing of step %d: %s", step, one_line(exc))

    def _fail(self, job: Job, exc: Exception) -> None:
        self.lost.append(f"step {job.joint.step}: {one_line(exc)}")
        self.has_lost_base = True
        LOG.error("step %d cannot reach %s: %s; training continues", job.joint.step, self._repo.name, one_line(exc))

    def _end_one(self) -> None:
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()


def _in_order(name: str) -> Worker[Callable[[], None]]:
    """Return a thread that calls the functions in its queue, one after the other."""
    return Worker(name, lambda do: do())


def forget_record(near: Repository, name: RecordName) -> None:
    """Remove the record *name* from a node's own store, bypassing the trash: such a store is often in memory."""
    near.trash.take_record(name)
    near.trash.remove_record(name)
    near.catalog.forget([name])


def pin(repo: Repository, commit: Commit, joint: JointCommit) -> None:
    """Pin *commit* if a pin was requested in *joint*; if pinning fails, only log that."""
    if joint.pin is None:
        return
    try:
        make_pin(repo, joint.pin, Resolved.of_commit(commit))
    except LayerstoreError as exc:
        LOG.warning("step %d is saved, but not pinned as %s: %s", joint.step, joint.pin, exc)
