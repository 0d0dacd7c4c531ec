"""What happens once a save is written: it is sent to the next levels, and commits that are not kept are collected."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from layerstore.errors import LayerstoreError, StorageIO
from layerstore.live.log import LOG
from layerstore.live.ranks import Exchange
from layerstore.live.saver.collector import Collector
from layerstore.live.saver.results import ERRORS_MAX, Job, Status
from layerstore.live.saver.sending import Sender, pin
from layerstore.model import Commit
from layerstore.parts import Part
from layerstore.policy import Keep
from layerstore.publish import JointCommit, SaveTiming, note_timing
from layerstore.storage import Repository
from layerstore.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A node's own first level: the node's ranks write to it, and commits are made in the next level."""

    store: Store
    repo: Repository
    """The repository of *store*, with parts that all ranks see."""
    behind: str
    """The URL of the level where commits are made."""
    is_first_here: bool
    """Whether this rank is the first one of its node."""


_SECONDS = 1.0
"""How long a rank waits for its sends before the ranks exchange a message."""


class Following:
    """One rank's background work on saves that are written."""

    def __init__(
        self, store: Store, near: Near | None, keep: Keep | None, *, run: str, places: Sequence[str], commits: bool
    ) -> None:
        """*places* are the levels after *store*, nearest first; the last level is trimmed only if there is no other."""
        trims = keep if near is None or places else None
        self.repo = store.repo
        """The level where commits are made."""
        self._commits = commits
        self._behind = (
            Collector(store, trims, run=run, places=places) if commits and (trims is not None or places) else None
        )
        self._near = self._sender = None
        if near is not None:
            if near.is_first_here and keep is not None:
                # Dropping moments changes a record, which would then differ from the record in the next level.
                rules = replace(keep, drop_optimizer_older_than=None)
                self._near = Collector(near.store, rules, run=run, places=(), origin=near.behind)
            self._sender = Sender(
                near.repo, store.repo, commits=commits, copied=self._copied, committed=self._committed
            )

    def written(self, job: Job, part: Part) -> None:
        """Send *part* of *job*, which is durable in the first level, to the next level."""
        if self._sender is not None:
            self._sender.send(job, part)

    def visible(self, commit: Commit, joint: JointCommit) -> None:
        """Pin *commit*, which is visible, send it and collect; with a level on each node, the sender does so later."""
        if self._sender is None:
            pin(self.repo, commit, joint)
            self._committed()

    def note(self, session: str, timing: SaveTiming) -> None:
        """Write *timing* to the level where commits are made; in the background if each node has a first level."""
        write = partial(note_timing, self.repo, session, timing)
        if self._sender is not None:
            self._sender.after_commits(write, timing.step)
            return
        try:
            write()
        except LayerstoreError as exc:  # such as a full disk; this is training's thread, which continues
            LOG.warning("could not record the timing of step %d: %s", timing.step, exc)

    def _copied(self) -> None:
        # Not on the rank that commits: its node's store gets the record before the next level does; see `_committed`.
        if self._near is not None and not self._commits:
            self._near.wake()

    def _committed(self) -> None:
        for collector in (self._behind, self._near):
            if collector is not None:
                collector.wake()

    def send_all(self, exchange: Exchange) -> None:
        """
        Wait until every level has every save. Collective.

        Raises:
            StorageIO: A save could not be sent.
        """
        while True:
            is_sent, error = self.is_sent(_SECONDS), "" if self._sender is None else self._sender.error
            # A message each round, so that an error on one rank ends the wait on all.
            waiting, failed = exchange.sums([float(not is_sent), float(bool(error))])
            if failed or not waiting:
                break
        if not failed and self._behind is not None:
            self._behind.retry()
        if not failed:
            exchange.wait(self.wait)
        with exchange.raise_on_all():
            if error := error or ("" if self._behind is None else self._behind.push_error):
                raise StorageIO(error, errno=None, filename=self.repo.name)

    def finish(self, exchange: Exchange) -> bool:
        """
        Let each rank send what it can, without retries; return whether every commit was sent. Collective.

        The next resume sends the rest.
        """
        if self._sender is None:
            return True
        # In this order: rank 0 may only give up on missing parts once every rank has stopped copying.
        self._sender.stop_retrying()
        exchange.wait(self._sender.has_copied)
        self._sender.expect_no_more()
        exchange.wait(self._sender.wait)
        is_complete = not any(exchange.sums([float(bool(self._sender.error))]))
        if not is_complete and exchange.rank == 0:
            LOG.warning("the newest saves are only on these nodes, not in %s: resume on the same nodes", self.repo.name)
        return is_complete

    def is_sent(self, seconds: float) -> bool:
        """Wait at most *seconds* until all saves have left the node's own level, if any; return whether they have."""
        return self._sender is None or self._sender.wait(seconds)

    def wait(self, seconds: float) -> bool:
        """Wait at most *seconds* for each level until every commit was sent or failed; return whether that is so."""
        return self.is_sent(seconds) and (self._behind is None or self._behind.wait(seconds))

    @property
    def has_lost_base(self) -> bool:
        """Whether some save will never reach the nodes' next level."""
        return self._sender is not None and self._sender.has_lost_base

    def begin_anew(self) -> None:
        """Record that the next save stores every layer."""
        if self._sender is not None:
            self._sender.has_lost_base = False

    def close(self, *, at_once: bool) -> None:
        """End when everything is done, or *at_once*."""
        for worker in (self._sender, self._behind, self._near):
            if worker is not None:
                worker.close(at_once=at_once)

    def added_to(self, status: Status) -> Status:
        """Return *status* with the state of the levels."""
        lost = [] if self._sender is None else self._sender.lost
        workers = (self._sender, self._behind, self._near)
        errors = [worker.error for worker in workers if worker is not None and worker.error]
        pushed = None if self._sender is None else self._sender.sent_step
        if self._behind is not None and self._behind.has_places:
            pushed = self._behind.pushed_step
        return replace(
            status,
            saved=status.saved - len(lost),
            failed=status.failed + len(lost),
            errors=(*status.errors, *lost)[-ERRORS_MAX:],
            collection_error=errors[0] if errors else "",
            pushed_step=pushed,
        )
