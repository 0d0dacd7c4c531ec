"""
The seat of a saver: the attempt that no other job saves.

A job that is started while an older one still runs would mix its commits with that one's. Who comes second opens the
next attempt instead, and both go on. The lock is freed by whatever ends the process.
"""

from collections.abc import Callable, Collection
from contextlib import ExitStack

from layerstore.errors import Conflict
from layerstore.history.attempt_locks import reserve
from layerstore.history.place import Place, place_at, place_free
from layerstore.live.exchange import Exchange
from layerstore.live.log import LOG
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView

Wish = Callable[[RunView | None], Place]
"""Where the saves of a job go, by what its run holds, if nobody else saves there."""

_TRIES = 10


class Seat:
    """Where a saver saves; the first rank holds it for all."""

    def __init__(self, exchange: Exchange, rooms: Rooms, *, run: str) -> None:
        self._exchange = exchange
        self._rooms = rooms
        self._run = run
        self._lock = ExitStack()
        self._held = 0
        """The attempt that is this saver's; 0 while it has none."""
        self._has_begun = False
        """Whether anything is saved there yet."""

    def take(self, wish: Wish) -> Place:
        """
        Return the place that every rank saves to from now on: the one that is wished for, or the next that is free.

        If it raises, the seat is the one that it was.

        Raises:
            Conflict: The ranks see different commits.
        """
        for _ in range(_TRIES):
            with ExitStack() as unless_agreed:
                with self._exchange.together():
                    attempt = self._reserved(wish, unless_agreed) if self._exchange.rank == 0 else 0
                attempt = int(self._exchange.first(str(attempt)))
                with self._exchange.together():
                    # Looked for again: what the attempt's last holder has committed is only seen for good by now.
                    view = self._rooms.catalog.find(self._run)
                    place = place_at(view, wish(view), attempt)
                said = self._exchange.texts("" if place is None else f"{attempt} {place.save_number} {place.fork}")
                if "" in said or place is None:
                    continue
                if set(said) != {said[0]}:
                    raise Conflict(
                        f"the ranks see different commits of run {self._run!r}",
                        hint="does every host see the same store?",
                    )
                self._move(attempt, unless_agreed.pop_all())
                self._has_begun = False
                return place
        raise Conflict(f"run {self._run!r} is changed by others again and again", hint="try again, or wait for them")

    def begin(self, place: Place) -> None:
        """Say so at the first save at *place* if the run has commits that it does not go on from; until then it may."""
        if self._has_begun:
            return
        self._has_begun = True
        view = self._rooms.catalog.find(self._run)
        if view is not None and view.visible and place.fork is None and not place.inherited:
            LOG.warning(
                "run %r has commits up to step %d, and this engine was not resumed from them: attempt %d begins anew; "
                "layerstore.resume(engine, store, run=%r) before training goes on with them",
                self._run,
                max(row.step for row in view.of_attempt(view.attempts[-1])),
                place.attempt,
                self._run,
            )

    def leave(self) -> None:
        """Let others save this attempt."""
        self._move(0, ExitStack())

    def _move(self, attempt: int, lock: ExitStack) -> None:
        if attempt != self._held:
            self._lock.close()
            self._lock, self._held = lock, attempt

    def _reserved(self, wish: Wish, lock: ExitStack) -> int:
        """Hold the attempt that is wished for, or the next that is free, until *lock* ends."""

        def placed(taken: Collection[int]) -> Place:
            view = self._rooms.catalog.find(self._run)
            return place_free(view, wish(view), taken)

        found = reserve(self._rooms, self._run, placed, held=self._held)
        lock.push(found.lock)
        attempt = found.place.attempt
        if found.passed:
            LOG.warning("%s: this job saves attempt %d", found.passed[0].message, attempt)
        if found.doubt is not None:
            LOG.warning("nobody is kept from saving attempt %d beside this job: %s", attempt, found.doubt)
        return attempt
