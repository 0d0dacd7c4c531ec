"""
The threads behind a saver: one copies, one writes and, on rank 0, one commits. None of them calls a collective.

An error in a thread never reaches training: the save is given up, and the saver's status shows the error.
"""

import threading
import time
from collections.abc import Collection
from dataclasses import replace

from layerstore.errors import FULL_DISK_ERRNOS, StorageIO
from layerstore.history import NextCommit
from layerstore.live.log import LOG, one_line
from layerstore.live.ranks import Exchange, own_versions
from layerstore.live.saver.following import Following
from layerstore.live.saver.results import Job
from layerstore.live.saver.snapshot import Copier, Pool
from layerstore.model import Commit, CommitId, LayerEntry, LayerVersion
from layerstore.parts import Part
from layerstore.publish import (
    FrozenWeights,
    GivenUp,
    InheritedLayerLost,
    JointCommit,
    OlderVersions,
    fail_share,
    join,
    parts_of,
    write_share,
)
from layerstore.staging import referable
from layerstore.storage import Repository
from layerstore.threads import Worker

POLL_SECONDS, POLL_SECONDS_MAX = 0.02, 1.0
"""
How often rank 0 looks for the other ranks' parts, which arrive through the filesystem.

Each pause is a tenth of the time waited so far, within these bounds. So polling delays a commit by a tenth at most, and
while a slow disk takes a minute, listing the parts of a thousand ranks costs training little.
"""

EXIT_SECONDS_MAX = 600.0
"""How long an exiting process waits for its own share to reach the disk."""

PATIENCE_SECONDS = 10.0
"""How long rank 0 then waits for the other ranks' parts; longer if writing its own share took longer."""


def wait_at_exit(jobs: Collection[Job], *, commits: bool) -> None:
    """Wait until *jobs* are on disk and, if this rank *commits*, visible; give up if other ranks are far slower."""
    end = time.monotonic() + EXIT_SECONDS_MAX
    for job in jobs:
        job.is_written.wait(max(end - time.monotonic(), 0))
    if commits:
        slowest = max((job.durable_seconds or 0 for job in jobs), default=0)
        end = time.monotonic() + max(PATIENCE_SECONDS, slowest)
        for job in jobs:
            job.is_resolved.wait(max(end - time.monotonic(), 0))


def referable_on_all(
    exchange: Exchange, repo: Repository, place: NextCommit, *, shard: int | None, world_size: int
) -> tuple[dict[str, LayerVersion], list[str]]:
    """
    Return the result of `referable`, limited to layers that are referable on all ranks. Collective.

    Each rank looks only for its own objects: to look for all of them, each of thousands of ranks would make a million
    calls.
    """
    layers = [(entry,) for entry in place.inherited.values()]
    # If *shard* is None, this rank may write any slice, so it needs the whole versions.
    own = {} if shard is None else own_versions(exchange, repo, layers)
    with exchange.raise_on_all():
        older, others = referable(replace(repo, own_versions=own), place, shard=shard, world_size=world_size)
    found = exchange.sums([float(layer in older) for layer in place.inherited])
    on_all = [layer for layer, count in zip(place.inherited, found, strict=True) if count == exchange.size]
    return {layer: older[layer] for layer in on_all}, others


class Retries:
    """
    Counts the requests to a bucket that one rank has to retry, in all its threads.

    Outside of savers, each retry is a warning. In a saver, rank 0 logs its first retry at once, which explains a slow
    save, and the total over all ranks once they have exchanged reports.
    """

    def __init__(self, repo: Repository, *, is_first: bool) -> None:
        self._repo = repo
        self._is_first = is_first
        self._guard = threading.Lock()
        self._count = 0
        """Retries since the last report."""
        self._logged = 0
        """How many of these retries were logged already: 0 or 1."""
        repo.report_retries(self._note)

    def _note(self, retry: str) -> None:
        with self._guard:
            self._count += 1
            is_logged = self._is_first and not self._logged
            self._logged += is_logged
        if is_logged:
            LOG.warning("%s", retry)

    def taken(self) -> int:
        """Return the number of retries since the last call."""
        with self._guard:
            count, self._count = self._count, 0
        return count

    def log(self, count: int) -> None:
        """Log *count*, the total of retries on all ranks, unless all of them were logged already."""
        with self._guard:
            logged, self._logged = self._logged, 0
        if self._is_first and count > logged:
            LOG.warning("%s: requests retried, total of all ranks: %d", self._repo.name, count)

    def close(self) -> None:
        """Stop counting: each retry is a warning again."""
        self._repo.report_retries(None)


class Background:
    """One rank's threads."""

    def __init__(
        self,
        repo: Repository,
        pool: Pool,
        copier: Copier,
        *,
        commits: bool,
        following: Following,
        refers: tuple[int | None, int] | None,
    ) -> None:
        """
        Start the threads; they write to *repo* and pass each save on to *following*.

        *refers* is None unless differences are kept; it has the shard that this rank writes, or None if that may be any
        shard, and the number of ranks.
        """
        self._refers = refers
        self._repo = repo
        self.retries = Retries(following.repo, is_first=commits)
        self._pool = pool
        self._copier = copier
        self._following = following
        self._frozen: FrozenWeights = {}
        self._older: OlderVersions = {}
        self._inherited: dict[str, LayerEntry] = {}
        """The newest visible version of each layer."""
        self._own: set[CommitId] = set()
        """The commits that this job has tried to publish."""
        self._stop = threading.Event()
        self._copying = Worker("copy", self._copy)
        self._writing = Worker("write", self._write)
        self._committing = Worker("commit", self._commit) if commits else None
        self._has_said_exact = False
        """Whether the user was warned that no layer of a save could be kept in the requested precision."""
        self.has_lost_base = False
        """Whether gc removed a layer that the next commit would inherit, so that every layer must be saved again."""

    def add(self, job: Job) -> None:
        """Start *job*."""
        self._copying.add(job)
        self._writing.add(job)
        if self._committing is not None:
            self._committing.add(job)

    def begin_at(self, place: NextCommit, exchange: Exchange) -> Collection[str]:
        """
        Continue from *place*, with no pending saves; frozen weights are read again.

        Return the inherited layers that differences can refer to, which are the same on every rank. Collective.
        """
        self._inherited = dict(place.inherited)
        self._frozen.clear()
        self._older = {}
        if self._refers is None or not place.inherited:
            return ()
        shard, world_size = self._refers
        self._older, others = referable_on_all(exchange, self._repo, place, shard=shard, world_size=world_size)
        if others and self._committing is not None:
            more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
            LOG.info("%s%s kept exactly at first: the last version has a different number of ranks", others[0], more)
        return frozenset(self._older)

    def close(self, *, at_once: bool) -> None:
        """End the threads when their work is done, or *at_once*."""
        if at_once:
            self._stop.set()
            self._pool.close()
        for worker in (self._copying, self._writing, self._committing):
            if worker is not None:
                worker.close()
        self._following.close(at_once=at_once)
        self._pool.close()
        self.retries.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _copy(self, job: Job) -> None:
        # Never raises: `fill` keeps its error for the writer. If this thread died, the saves in its queue would hang.
        job.snapshot.fill(self._pool, self._copier)

    def _write(self, job: Job) -> None:
        try:
            part = write_share(self._repo, job.joint, job.snapshot, frozen=self._frozen, older=self._older)
            job.written_bytes = part.bytes_new
            self._following.written(job, part)
        except BaseException as exc:  # noqa: BLE001  # training continues, whatever happens here
            self._older.clear()  # otherwise shares that are already planned may fail for the same reason
            self._lose(job, exc)
            if isinstance(exc, StorageIO) and exc.errno in FULL_DISK_ERRNOS and self._committing is not None:
                LOG.error("layerstore gc frees space in the store; a saver with keep= removes old saves by itself")
            self._report_failure(job)
        finally:
            try:
                job.snapshot.discard()
            finally:
                # Set whatever happened: every rank waits for this in a collective.
                job.durable_seconds = time.monotonic() - job.begun
                job.is_written.set()

    def _lose(self, job: Job, exc: BaseException) -> None:
        job.failure = one_line(exc)
        ending = "" if self._stop.is_set() else "; training continues"
        LOG.error("step %d was not saved: %s%s", job.joint.step, job.failure, ending)

    def _report_failure(self, job: Job) -> None:
        try:
            fail_share(self._repo, job.joint, job.failure)
        except Exception as exc:  # noqa: BLE001  # the disk may be full; the next reports inform the other ranks
            LOG.warning("could not record the failure in the store: %s", exc)

    def _commit(self, job: Job) -> None:
        try:
            job.commit = commit = self._joined(job)
            job.visible_seconds = time.monotonic() - job.begun
            if job.joint.compact and not commit.observed.losses and not self._has_said_exact:
                self._has_said_exact = True
                LOG.warning(
                    "step %d is kept exactly: %s applies only to fp32 weights and to fp32 moments like Adam's",
                    job.joint.step,
                    job.joint.precision.name,
                )
            self._following.visible(commit, job.joint)
        except BaseException as exc:  # noqa: BLE001  # training continues, whatever happens here
            if not job.failure:  # otherwise the writing thread has logged it
                self._lose(job, exc)
            if isinstance(exc, InheritedLayerLost):
                self._inherited, self.has_lost_base = {}, True
        finally:
            try:
                # Only once the record is written or given up: until then, only parts protect objects from gc.
                self._remove_parts(job.joint)
            finally:
                job.is_resolved.set()

    def _joined(self, job: Job) -> Commit:
        """Wait for all ranks' parts and publish the commit."""
        joint, begun = job.joint, time.monotonic()
        known: dict[int, Part] = {}
        while (parts := parts_of(self._repo, joint, known)) is None:
            # The main thread sets is_given_up from the other ranks' reports: a failed rank may leave no part at all.
            if job.is_given_up or (job.failure and job.is_written.is_set()):
                raise GivenUp("a rank could not write its share")
            waited_seconds = time.monotonic() - begun
            if self._stop.wait(min(max(waited_seconds / 10, POLL_SECONDS), POLL_SECONDS_MAX)):
                raise GivenUp("the saver was closed before all ranks had written")
        commit = join(self._repo, joint, parts, inherited=self._inherited, own=self._own)
        # Set only once the commit is visible: the next save must not inherit from a commit that was given up.
        self._inherited = {entry.layer: entry for entry in commit.record.layers}
        return commit

    def _remove_parts(self, joint: JointCommit) -> None:
        try:
            self._repo.parts.remove(joint.session, joint.save, world_size=joint.share.world_size)
        except Exception as exc:  # noqa: BLE001  # the thread must survive; a collection will remove them
            LOG.warning("could not remove the parts of step %d, a later collection will: %s", joint.step, exc)
