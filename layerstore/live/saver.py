"""
The saver: a running engine's checkpoints go into the store while training goes on.

    with layerstore.attach(engine, "runs/store", run="sft", policy="parity") as saver:
        for batch in data:
            …
            engine.step()
            if engine.global_steps % 100 == 0:
                saver.save()

``save`` is collective: every rank calls it, and all agree there on what is saved. The rest happens behind training's
back: slices are copied until the next update, which waits for what is left; then each rank writes its own.
"""

import atexit
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

from layerstore.compose import Composition
from layerstore.errors import Conflict
from layerstore.history.place import Place
from layerstore.layers import compile_pattern
from layerstore.live.asked import Asked, asked
from layerstore.live.background import Background, Job, Result
from layerstore.live.capture import capture, check_client_state
from layerstore.live.clock import Clock
from layerstore.live.council import SAVES_MAX, Facts, Report, agree, decided, meet
from layerstore.live.dropin import drop_in
from layerstore.live.exchange import Exchange
from layerstore.live.files import Destination
from layerstore.live.joints import in_order, note_job, use_of
from layerstore.live.leaving import leave
from layerstore.live.log import LOG
from layerstore.live.memory import pool_bytes
from layerstore.live.newest import Newest
from layerstore.live.pool import Pool
from layerstore.live.results import Results, Saved, Status, saved_as
from layerstore.live.resume import note_closed, place_resumed
from layerstore.live.schedule import Schedule
from layerstore.live.seams import ENGINE_KEYS, FOLDER, Engine, SavedStates
from layerstore.live.seat import Seat
from layerstore.live.settings import Settings
from layerstore.live.sizes import counted, local_bytes, sizes_of
from layerstore.live.snapshot import Copier, CudaCopier, Snapshot, changing
from layerstore.live.taking import Taken, take_stock
from layerstore.live.together import open_session
from layerstore.live.watch import Watch
from layerstore.policy import Latest, Policy
from layerstore.publish.joining import Joint
from layerstore.publish.shares import ShareWork, objects_due
from layerstore.store import Store, StrPath
from layerstore.zero3 import Pointer, Share

JOBS_MAX = 2
"""Saves that may be on their way: one more waits until the oldest is on disk."""


class Saver:
    """Saves an engine's state while it trains; made by `attach`. A context manager."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        exchange: Exchange,
        settings: Settings,
        *,
        run: str,
        policy: Policy,
        seat: Seat,
        place: Place,
    ) -> None:
        self._engine = engine
        self._store = store
        self._rooms = store.rooms
        self.run = run
        self._settings = settings
        self._pattern = compile_pattern(settings.layer_pattern)
        self._seat = seat
        self._place = place
        self._exchange = exchange
        is_cuda = engine.device.type == "cuda"
        self._copier = CudaCopier(engine.device) if is_cuda else Copier()
        self._clock = Clock(engine.device)
        with exchange.together():
            self._pool = Pool(pool_bytes(engine, settings.host_buffer), pinned=is_cuda)
        self._is_closed = False
        self._session = open_session(exchange, self._rooms)
        self._background = Background(
            self._rooms, self._pool, self._copier, is_first=engine.rank == 0, run=run, keep=settings.keep
        )
        self._background.begin_at(place)
        self._schedule = Schedule.after(place, policy, run=run)
        self._watch = Watch(self._exchange) if getattr(policy, "measures", False) else None
        self._is_unmeasured = bool(place.inherited)
        self._measure()
        self._saves = 0
        self._jobs: deque[Job] = deque()
        """Those of which it is not known yet what became of them."""
        self._over = Results()
        self._fates: dict[int, bool] = {}
        self._newest = Newest(place.after)
        self._updates = 0
        self.step_of: Callable[[], int] = lambda: engine.step
        """Tells the step where the engine saves by itself: trainers count their own."""
        self._ungate: Callable[[], None] = engine.before_update(self._gate)
        self._dropin = drop_in(engine, self)
        atexit.register(self._at_exit)

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int | None = None,
        *,
        client_state: Mapping[str, object] | None = None,
        extra_files: Mapping[str, StrPath] | None = None,
        tag: str | None = None,
        pin: str | None = None,
    ) -> Saved:
        """
        Save the engine's state as step *step*, by default the engine's own counter.

        Every rank calls it, after ``engine.step()``. *client_state* is given back by ``resume``; *extra_files* are kept
        byte for byte, under the names that a composed folder will have for them. *pin* names the commit.

        Raises:
            TypeError: *client_state* holds something else than plain values, tensors and numpy's.
            InvalidInput: Gradients are being accumulated for an update that is still to come; or a file is not there,
                a step is none, a pin is taken.
            Conflict: *step* is not after the last one, or the ranks do not want the same.
        """
        tag = tag or f"global_step{self._engine.step}"
        wish = asked(
            self._rooms,
            run=self.run,
            step=step,
            engine_step=self._engine.step,
            client_state=client_state,
            extra_files=extra_files,
            pin=pin,
        )
        saved = self._save(
            wish,
            lambda: self._engine.states(tag, wish.client_state, exclude_frozen=self._settings.frozen == "exclude"),
            place=Destination(folder=FOLDER, tag=tag, files=wish.files, pin=pin, is_complete=True),
        )
        self._seal()
        return saved

    def take(self, states: SavedStates, *, folder: Path, tag: str) -> None:
        """
        Save the *states* that the engine itself has handed over, on their way to *folder*.

        Whoever saves there may add files until training goes on: these are kept too.
        """
        client_state = {key: value for key, value in states.model.items() if key not in ENGINE_KEYS}
        place = Destination(folder=folder, tag=tag, is_complete=False)
        kept = partial(self._engine.without_frozen, states) if self._settings.frozen == "exclude" else lambda: states
        self._save(Asked(step=self.step_of(), client_state=client_state), kept, place=place)

    def _save(self, wish: Asked, states: Callable[[], SavedStates], *, place: Destination) -> Saved:
        held, number = self._clock.hold(), wish.step
        if self._is_closed:
            raise Conflict(f"step {number} is not saved: the saver is closed", hint="attach another one")
        self._measure()
        in_parts = self._schedule.policy.name != Latest.name or self._settings.on_pressure == "degrade"
        taken, trouble = take_stock(
            self._engine, states, place, pattern=self._pattern, watch=self._watch, in_parts=in_parts
        )
        mistyped = wish.mistyped or check_client_state(wish.client_state)
        problem = next(iter(wish.problems), trouble or self._dropin.trouble)
        facts = agree(self._exchange, self._report(step=number, mistyped=mistyped, problem=problem))
        assert taken is not None, "a rank that could not capture has said so"
        self._learn(facts)
        is_told = place.is_complete and bool(wish.client_state or place.files)
        repeated = self._newest.same(number, updates=self._updates, pin=place.pin, is_told=is_told)
        if repeated is not None:
            return repeated  # and into its folder more may still come: that is not sealed
        self._seal()
        if self._settings.on_pressure == "wait":
            self._make_room()
        captured, sample = taken.captured, taken.sample
        self._copier.follow()
        movements = self._watch.movements(sample) if self._watch is not None and sample is not None else {}
        due = self._due(captured.share, movements)
        # However few layers a save has, no more of them may be open than fates are told of.
        if (facts.is_pressed and self._settings.on_pressure == "skip") or self._schedule.open_for >= SAVES_MAX:
            self._schedule.skip(due)
            LOG.warning("step %d is not saved: earlier saves still wait for the disk", number)
            return saved_as(number, self._schedule.number - 1, (), held, skipped=True)
        if facts.is_pressed and self._settings.on_pressure == "degrade":
            share = captured.share
            due = self._schedule.fewer(due, local_bytes(share), facts.free_bytes, counted=counted(share))
        job = self._begin(number, taken, due, movements)
        if self._watch is not None and sample is not None:
            self._watch.saved(sample, due)
        job.timing.held.append(held)
        if self._settings.mode == "sync" and (place.is_complete or self._engine.ungated):
            self._finish(job)
        held.end()
        saved = saved_as(number, job.number, in_order(captured.share, due), held, skipped=False)
        self._newest.note(saved, updates=self._updates)
        return saved

    def wait(self) -> None:
        """Return once every save is visible and durable, or given up. Every rank calls it."""
        if self._is_closed:
            return
        self._seal()
        for job in self._jobs:
            job.is_written.wait()
        # The first rank hears first who has failed; only then can it stop waiting for a part that will not come.
        self._learn(meet(self._exchange, self._report()))
        if self._engine.rank == 0:
            for job in self._jobs:
                job.is_resolved.wait()
        self._learn(meet(self._exchange, self._report()))

    def status(self) -> Status:
        """Tell how this rank's saves are doing; asks no other rank."""
        return self._over.status(job.result() for job in self._jobs)

    @property
    def results(self) -> list[Result]:
        """What is known of each of this rank's newest saves, in their order."""
        return [*self._over.newest, *(job.result() for job in self._jobs)]

    def close(self) -> None:
        """Wait for what is on its way, and let go of the engine. Every rank calls it; twice is harmless."""
        if self._is_closed:
            return
        try:
            self.wait()
        except BaseException:
            self._leave()
            raise
        note_closed(self._engine.engine, self._store, self.run, attempt=self._place.attempt)
        self._end(at_once=False)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._leave()

    # -- before an update ----------------------------------------------------------------------------------------

    def _gate(self) -> None:
        """Hold the update until nothing of the state before it is left to copy; with ``sync``, to be made durable."""
        self._updates += 1
        self._seal()
        if self._settings.mode == "sync" and self._jobs:
            with self._jobs[-1].timing.hold(self._clock):
                self._finish(self._jobs[-1])
        for job in self._jobs:
            if not job.snapshot.copied.is_set():
                with job.timing.hold(self._clock):
                    job.snapshot.copied.wait()

    # -- what the ranks agree on ---------------------------------------------------------------------------------

    def _report(self, *, step: int = 0, mistyped: str = "", problem: str = "") -> Report:
        running = [job for job in self._jobs if not job.is_written.is_set()]
        free = max(self._pool.size_bytes - self._pool.used_bytes, 0)
        last = self._jobs[-1].snapshot.size_bytes if self._jobs else 0
        return Report(
            step=step,
            number=self._schedule.number,
            is_at_boundary=self._engine.is_at_boundary,
            is_pressed=len(running) >= JOBS_MAX or (bool(running) and last > free),
            free_bytes=free,
            failed=tuple(job.number for job in self._jobs if job.is_written.is_set() and job.failure),
            fates=self._known_fates(),
            has_lost_base=self._background.has_lost_base,
            mistyped=mistyped,
            problem=problem,
        )

    def _known_fates(self) -> dict[int, bool]:
        """Return, on the rank that commits, what became of the saves; they are resolved in order."""
        if self._engine.rank == 0:
            for job in self._jobs:
                if not job.is_resolved.is_set():
                    break
                self._fates[job.number] = job.commit is not None
            self._fates = dict(sorted(self._fates.items())[-SAVES_MAX:])  # no more are told
        return self._fates

    def _learn(self, facts: Facts) -> None:
        for number in facts.failed:
            self._background.give_up(number)  # its rank may not even have been able to say so in the store
        for save in [save for save in self._schedule.pending if facts.fates.get(save.number) is False]:
            self._newest.note_lost(save.number)
        self._schedule.resolve(facts.fates.items())
        if facts.has_lost_base:
            self._schedule.begin_anew()
            self._background.has_lost_base = False
        pending = {save.number for save in self._schedule.pending}
        while self._jobs and self._jobs[0].number not in pending and self._jobs[0].is_written.is_set():
            self._finished(self._jobs.popleft())

    def _finished(self, job: Job) -> None:
        if self._newest.is_lost(job.number):
            job.failure = job.failure or "another rank could not write its share"
        self._over.add(job.result())
        if job.joint is not None:
            note_job(self._rooms, self._session, job, self._settings.on_saved)

    # -- one save ------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        running = [job for job in self._jobs if not job.is_written.is_set()]
        for job in running[: len(running) - JOBS_MAX + 1]:
            job.is_written.wait()

    def _due(self, share: Share, movements: Mapping[str, float]) -> frozenset[str]:
        def due() -> frozenset[str]:
            layers = tuple(layer.layer for layer in share.layers)
            return self._schedule.due(layers, counted=counted(share), movements=movements, sizes=sizes_of(share))

        return decided(self._exchange, self._schedule.policy, due)

    def _begin(self, step: int, taken: Taken, due: frozenset[str], movements: Mapping[str, float]) -> Job:
        share, files = taken.captured.share, taken.files
        number = self._schedule.begin(due, counted(share))
        work = ShareWork(
            session=self._session,
            save=self._saves,
            share=share,
            due=due,
            files=files.wait,
            mark=taken.captured.mark,
        )
        joint = self._joint(step, number, taken, work, movements) if share.rank == 0 else None
        if joint is not None:
            self._seat.begin(self._place)
        snapshot = Snapshot(taken.captured, changing(objects_due(share, due)))
        job = Job(step=step, number=number, work=work, snapshot=snapshot, joint=joint, files=files)
        job.timing.queued = sum(not earlier.is_written.is_set() for earlier in self._jobs)
        self._saves += 1
        self._jobs.append(job)
        self._background.add(job)
        return job

    def _joint(self, step: int, number: int, taken: Taken, work: ShareWork, movements: Mapping[str, float]) -> Joint:
        return Joint(
            work=work,
            run=self.run,
            place=self._place,
            step=step,
            save_number=number,
            pin=taken.files.pin,
            policy=use_of(self._schedule.policy, work, movements),
            layout=partial(taken.files.layout, layer_pattern=self._settings.layer_pattern),
        )

    def _measure(self) -> None:
        """Measure movements from what the engine was filled with, before it moves: what its next saves inherit."""
        if self._watch is None or not self._is_unmeasured or self._is_closed:
            return
        self._is_unmeasured = False
        try:
            with self._exchange.together():
                states = self._engine.states("resumed", {}, exclude_frozen=self._settings.frozen == "exclude")
                captured = capture(states, rank=self._engine.rank, folder=FOLDER, pattern=self._pattern)
                sample = self._watch.sample(captured)
        except Exception as exc:  # noqa: BLE001  # training goes on: what was not measured is due at the next save
            LOG.warning("how far layers move is measured from their next save on: %s", exc)
            self._watch.forget()
        else:
            self._watch.saved(sample, frozenset(self._place.inherited))

    def _seal(self) -> None:
        """Take up what has come into the folders of earlier saves; from here on they are complete."""
        for job in self._jobs:
            job.files.seal()

    def _finish(self, job: Job) -> None:
        """Wait for *job*, and raise what went wrong with it, on every rank."""
        self.wait()
        self._exchange.agree_on_disk(job.failure, self._rooms.layout.root)

    # -- what the drop-in asks for -------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """Where to."""
        return self._store

    @property
    def exchange(self) -> Exchange:
        """With which ranks."""
        return self._exchange

    def pointer(self) -> Pointer:
        """Return what leads to the next save."""
        return Pointer(
            store=str(self._store.path),
            store_id=self._store.id,
            name=f"{self.run}@{self.step_of()}",
            run=self.run,
            attempt=self._place.attempt,
            step=self.step_of(),
        )

    def went_to(self, composition: Composition | None) -> None:
        """Go on from *composition*, which the engine was filled with; None: with something that no store knows."""
        self._place = place = self._seat.take(partial(place_resumed, composition=composition))
        self._background.begin_at(place)
        self._schedule = Schedule.after(place, self._schedule.policy, run=self.run)
        self._is_unmeasured = bool(place.inherited)
        self._engine.at_next_forward(self._measure)  # by then the engine is filled, which a loader may just be doing
        self._fates.clear()
        self._newest.begin_at(place.after, updates=self._updates)

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        """Bring what is on its way to the disk: the process ends without having closed this saver."""
        if not self._is_closed:
            self._seal()
            leave(self._jobs, is_first=self._engine.rank == 0)

    def _leave(self) -> None:
        """End without a word to the other ranks, which may never come to where they could be waited for."""
        self._at_exit()
        self._end(at_once=True)

    def _end(self, *, at_once: bool) -> None:
        self._is_closed = True
        atexit.unregister(self._at_exit)
        try:
            self._ungate()
            self._dropin.detach(self)
            self._background.close(at_once=at_once)
            if self._engine.rank == 0:
                self._rooms.parts.close_session(self._session, is_over=not at_once)
        finally:
            self._seat.leave()
        if not at_once:
            self._exchange.close()
