"""
Choose the attempt that a job saves: an attempt that no other job is saving.

If two jobs saved one attempt, their commits would mix. So the second job opens the next attempt, and both continue.
The lock is released however the process ends. A job also opens the next attempt if later commits of its attempt were
dropped: they may be restored, and would mix with new commits.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial

from layerstore.compose import Composition
from layerstore.errors import Conflict, IntegrityError, NotFound
from layerstore.history import NextCommit, reserve
from layerstore.live.log import LOG
from layerstore.live.ranks.exchange import DIFFERENT_COMMITS_HINT, Exchange
from layerstore.storage import Repository, RunView

PlaceFinder = Callable[[RunView | None], NextCommit]
"""Returns the position that a job wants, given its run's commits; another job may hold the position's attempt."""

_TRIES = 10


def place_resumed(view: RunView | None, composition: Composition | None) -> NextCommit:
    """Return where saves continue after a load of *composition*; if *composition* is None, where they begin anew."""
    if composition is None:
        return NextCommit.begun(view)
    base = composition.base
    record = composition.as_resolved().record
    return NextCommit.resumed(view, record, of_commit=composition.commit, is_as_it_stands=record.layers == base.layers)


class AttemptLock:
    """The lock on the attempt that a saver saves to; rank 0 holds it for all ranks."""

    def __init__(self, exchange: Exchange, repo: Repository, *, run: str) -> None:
        self._exchange = exchange
        self._repo = repo
        self._run = run
        self._lock = ExitStack()
        self._held = 0
        """The locked attempt; 0 if none is locked."""

    def acquire(self, wish: PlaceFinder) -> NextCommit:
        """
        Lock the attempt of *wish*, or the next free attempt; return, and log, where all ranks save from now on.

        If this raises, the previous lock stays held.

        Raises:
            Conflict: The ranks see different commits.
        """
        for _ in range(_TRIES):
            with ExitStack() as unless_agreed:
                with self._exchange.raise_on_all():
                    attempt = self._reserved(wish, unless_agreed) if self._exchange.rank == 0 else 0
                attempt = int(self._exchange.first(str(attempt)))
                # Find the position under the lock: the last holder may have committed right before releasing it.
                place, places = self._exchange.agree_on(
                    partial(self._place_at, wish, attempt),
                    lambda place: "" if place is None else f"{place.attempt} {place.save_number} {place.fork}",
                    may_be_late=self._repo.aside.is_on_network,
                )
                if "" in places or place is None:
                    continue
                if set(places) != {places[0]}:
                    raise Conflict(
                        f"the ranks see different commits of run {self._run!r}",
                        hint=DIFFERENT_COMMITS_HINT,
                    )
                # The old attempt is released only now: if an error came before this, the saver continues that attempt.
                self._hold(attempt, unless_agreed.pop_all())
                with self._exchange.raise_on_all():
                    if self._exchange.rank == 0:
                        self._log_place(place)
                return place
        raise Conflict(f"other jobs keep changing run {self._run!r}", hint="try again, or wait for them")

    def _place_at(self, wish: PlaceFinder, attempt: int) -> NextCommit | None:
        self._repo.records.refresh()  # with a bucket, only rank 0's mirror already has the commits that rank 0 made
        view = self._repo.catalog.find(self._run)
        return wish(view).moved_to(view, attempt)

    def _log_place(self, place: NextCommit) -> None:
        view = self._repo.catalog.find(self._run)
        root = self._repo.name
        if view is None or not view.visible:
            LOG.info("saving to %s: run %r begins", root, self._run)
            return
        newest = next(view.history(view.attempts[-1])).step
        if not place.inherited:
            LOG.warning(
                "saving to %s: run %r has commits up to step %d, and this engine was not resumed from them: starting "
                "attempt %d from scratch, unless a load comes before the first save; "
                "layerstore.resume(engine, store, run=%r) continues them",
                root,
                self._run,
                newest,
                place.attempt,
                self._run,
            )
        elif view.of_attempt(place.attempt):
            LOG.info("saving to %s, newest %s@%d", root, self._run, newest)
        else:
            LOG.info("saving to %s, newest %s@%d; attempt %d begins", root, self._run, newest, place.attempt)

    def release(self) -> None:
        """Release the attempt, so that other jobs may save it."""
        self._hold(0, ExitStack())

    def _hold(self, attempt: int, lock: ExitStack) -> None:
        if attempt != self._held:  # otherwise *lock* holds nothing: an attempt that is held already is not locked again
            self._lock.close()
            self._lock, self._held = lock, attempt

    def _reserved(self, wish: PlaceFinder, lock: ExitStack) -> int:
        """Lock the attempt of *wish*, or the next free attempt, until *lock* closes; return the locked attempt."""

        def placed(taken: Collection[int]) -> NextCommit:
            view = self._repo.catalog.find(self._run)
            place = wish(view)
            return place.avoiding(view, {*taken, *self._dropped_after(place)})

        reserved = reserve(self._repo, self._run, placed, held=self._held)
        lock.push(reserved.lock)
        attempt = reserved.place.attempt
        if reserved.passed:
            LOG.warning("%s: this job saves attempt %d", reserved.passed[0].message, attempt)
        if reserved.doubt is not None:
            LOG.warning("attempt %d could not be locked; another job may save it too: %s", attempt, reserved.doubt)
        return attempt

    def _dropped_after(self, place: NextCommit) -> Iterator[int]:
        """Yield the attempts of dropped commits that would come after *place* if they were restored."""
        trash = self._repo.trash
        for name in trash.records():
            if name.run == self._run and (place.after is None or name.step > place.after):
                with contextlib.suppress(NotFound, IntegrityError):  # the trash was emptied, or the record is damaged
                    yield trash.read_record(name).record.attempt
