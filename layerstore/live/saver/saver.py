"""
The saver: saves a running engine's checkpoints to the store while training continues.

    with layerstore.attach(engine, "runs/store", run="sft", policy="parity") as saver:
        for batch in data:
            …
            engine.step()
            if engine.global_steps % 100 == 0:
                saver.save()

``save`` is collective: every rank calls it, and all ranks agree on what to save. The rest happens in the background:
slices are copied until the next update, which waits for the remaining copies, and each rank writes its own share.
"""

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from layerstore.compose import Composition
from layerstore.errors import Conflict, LayoutMismatch, Locked, StorageIO
from layerstore.history import NextCommit
from layerstore.live.engine import Captured, Engine, NotPlain, check_client_state
from layerstore.live.log import LOG
from layerstore.live.ranks import (
    SAVES_MAX,
    AttemptLock,
    Exchange,
    RankReport,
    agree_on_save,
    agreed_layers,
    as_text,
    exchange_reports,
    open_session,
    place_resumed,
)
from layerstore.live.saver.background import Background, wait_at_exit
from layerstore.live.saver.following import Following, Near
from layerstore.live.saver.movements import MovementWatch, Sample
from layerstore.live.saver.options import SaverOptions, pool_bytes
from layerstore.live.saver.request import SaveFiles, SaveRequest, read_request
from layerstore.live.saver.results import Job, LastSave, Saved, Status, hold_training, note_job, saved_as, with_job
from layerstore.live.saver.schedule import Schedule, policy_use
from layerstore.live.saver.snapshot import COPY_BYTES, Copier, CudaCopier, Pool, Snapshot, changing, changing_bytes
from layerstore.numbers import Movements
from layerstore.policy import Latest, chosen_policy
from layerstore.precision import PrecisionName, keyframes
from layerstore.publish import JointCommit, objects_due
from layerstore.store import Store, StrPath

JOBS_MAX = 2
"""The most pending saves; with ``on_pressure="wait"``, the next one waits until the oldest is on disk."""

DISK_SECONDS_MAX = 600.0
"""With ``on_pressure="wait"``, a save is skipped once an earlier one has waited this long for some rank's disk."""


class Saver:
    """Saves an engine's state while it trains; made by `attach`. A context manager."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        exchange: Exchange,
        options: SaverOptions,
        *,
        run: str,
        attempt: AttemptLock,
        place: NextCommit,
        release: Callable[[int | None], None],
        near: Near | None,
        places: Sequence[str],
    ) -> None:
        self._engine = engine
        self.store, self._repo = store, store.repo
        self.run, self.options = run, options
        self._attempt_lock = attempt
        self._place = place
        self._release = release
        """Called at the end with the attempt that was saved, or None if an error ended the saver. Frees the engine."""
        self.exchange = exchange
        is_cuda, self._is_first = engine.device.type == "cuda", engine.rank == 0
        self._copier = CudaCopier(engine.device) if is_cuda else Copier()
        with exchange.raise_on_all():
            self._pool = Pool(pool_bytes(engine, options.host_buffer), pinned=is_cuda)
        self._session = open_session(exchange, self._repo)
        self._following = Following(store, near, options.keep, run=run, places=places, commits=self._is_first)
        self._background = Background(
            self._repo if near is None else near.repo,
            self._pool,
            self._copier,
            commits=self._is_first,
            following=self._following,
            refers=None if options.precision == "exact" else (engine.shard, engine.world_size),
        )
        try:
            referable = self._background.begin_at(place, exchange)
            self._schedule = Schedule.after(place, chosen_policy(options.policy), run=run, referable=referable)
        except BaseException:  # the engine trains on as if nobody had attached
            self._background.close(at_once=True)
            self._repo.parts.close_session(self._session, is_over=False)
            raise
        self._movements = MovementWatch(self.exchange) if getattr(self._schedule.policy, "measures", False) else None
        self._jobs: deque[Job] = deque()
        """Saves whose outcome is still unknown."""
        self._over = Status()
        """The summed status of all saves whose outcome is known; their jobs are dropped, so memory stays bounded."""
        self._tight: list[Job] = []
        """Saves since the last update whose copies may not fit some rank's host buffer; the same on every rank."""
        self._last = LastSave(place.after)
        self._is_closed, self._saves, self._updates = False, 0, 0
        self.step_of: Callable[[], int] = lambda: engine.step
        """Returns the step of a save that the engine itself makes; trainers replace it by their own count."""
        self._ungate: Callable[[], None] = engine.before_update(self._gate)
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
        metrics: Mapping[str, float] | None = None,
        precision: PrecisionName | None = None,
    ) -> Saved:
        """
        Save the engine's state as step *step*, by default the engine's own counter.

        Every rank calls it, after ``engine.step()`` or ``optimizer.step()``. ``resume`` returns *client_state*;
        *extra_files* are kept byte for byte, under the names that they get in a composed folder. *pin* is the name of a
        pin for the commit. *metrics*, such as ``{"loss": 2.31}``, show in ``layerstore log`` and go into *client_state*
        under the key ``metrics``. *precision*, such as ``"exact"``, applies to this save alone.

        Raises:
            TypeError: *client_state* holds something other than plain values, tensors and numpy's types.
            InvalidInput: Gradients are being accumulated for an update that is still to come; or a file does not
                exist, *step* is not a step, or *pin* is taken.
            Conflict: *step* is not after the last saved step, or the ranks disagree.
        """
        read = partial(
            read_request,
            self._repo,
            engine_keys=self._engine.own_keys,
            run=self.run,
            tag=tag or f"global_step{self._engine.step}",
            step=self._engine.step if step is None else step,
            client_state=client_state,
            extra_files=extra_files,
            pin=pin,
            keyframes=partial(keyframes, precision or self.options.precision, self.options.exact_every),
            metrics=metrics,
        )
        saved = self._save(read, self._captured)
        self._seal()
        return saved

    def take(
        self, capture: Callable[[], Captured] | None, *, client_state: dict[str, object], folder: Path, tag: str
    ) -> None:
        """
        Save the state that *capture* returns, or the engine's if *capture* is None, instead of writing it to *folder*.

        Files that are added to *folder* before training continues are kept, too.
        """
        frames, step = keyframes(self.options.precision, self.options.exact_every), self.step_of()
        request = SaveRequest(
            step=step, client_state=client_state, folder=folder, tag=tag, keyframes=frames, is_complete=False
        )
        self._save(lambda: request, self._captured if capture is None else lambda _: capture())

    def _captured(self, request: SaveRequest) -> Captured:
        pattern, exclude_frozen = self.options.pattern, self.options.excludes_frozen
        return self._engine.capture(request.tag, request.client_state, pattern=pattern, exclude_frozen=exclude_frozen)

    def _save(self, read: Callable[[], SaveRequest], capture: Callable[[SaveRequest], Captured]) -> Saved:
        held = hold_training(self._engine.device)
        if self._is_closed:
            raise Conflict(f"step {self._engine.step} is not saved: the saver is closed", hint="attach a new saver")
        try:
            captured, files, sample = self._capture_state(read, capture)
        except Exception as exc:
            # This raises on all ranks: no rank makes a save that another one cannot make.
            agree_on_save(self.exchange, self._report(step=self._engine.step, problem=exc))
            raise
        request, share, step = files.request, captured.share, files.request.step
        precision = request.keyframes.precision.name
        agreed = agree_on_save(
            self.exchange, self._report(step=step, copied_bytes=changing_bytes(captured), precision=precision)
        )
        # Outcomes first: which layers are due depends on which earlier saves became visible.
        self._apply_reports(agreed)
        has_extras = request.is_complete and bool(request.client_state or request.files)
        repeated = self._last.same(
            step, updates=self._updates, pin=request.pin, has_extras=has_extras, precision=precision
        )
        if repeated is not None:
            return repeated  # without sealing the previous save: more files may come into its folder
        self._seal()
        # All ranks wait for room before any other collective: if one waited alone, the others would time out in that.
        pressure = self.options.on_pressure if agreed.is_pressed else ""
        is_skipped = pressure == "skip" or (pressure == "wait" and not self._wait_for_room())
        self._copier.follow()
        moved = self._movements.movements(sample) if self._movements and sample else Movements()
        due_now = partial(
            self._schedule.due,
            tuple(layer.layer for layer in share.layers),
            moments=captured.moments,
            moved=moved,
            sizes=captured.bytes_by_layer,
        )
        due = agreed_layers(self.exchange, self._schedule.policy, due_now)
        # A rank's report has room for the outcomes of only SAVES_MAX saves, however small the saves are.
        if is_skipped or self._schedule.open_for >= SAVES_MAX:
            number = self._schedule.skip(due)
            if self._is_first:
                LOG.warning("step %d is not saved: earlier saves still wait for the disk", step)
            return Saved(step=step, number=number, layers_due=(), skipped=True, blocked_seconds=held.seconds)
        if pressure == "degrade":
            sizes = {layer: -(-size // share.world_size) for layer, size in captured.bytes_by_layer.items()}
            due = self._schedule.fewer(due, sizes, agreed.free_bytes, moments=captured.moments)
        job = self._begin(captured, files, due, moved)
        if agreed.is_tight:
            self._tight.append(job)
        if self._movements and sample:
            self._movements.saved(sample, due)
        job.held.append(held)
        if self.options.mode == "sync" and (request.is_complete or self._engine.ungated):
            self._finish(job)
        held.end()
        saved = saved_as(job.joint, blocked_seconds=held.seconds)
        self._last.note(saved, updates=self._updates)
        return saved

    def wait(self) -> None:
        """
        Wait until every save is visible and durable, or given up; with ``remote``, also pushed. Every rank calls this.

        Raises:
            StorageIO: With ``remote``, the last push failed.
        """
        if self._is_closed:
            return
        self._seal()
        self.exchange.wait(lambda seconds: all(job.is_written.wait(seconds) for job in self._jobs))
        self._tight.clear()
        # Failures are reported first: until then, rank 0 waits for a part that will never come.
        self._apply_reports(exchange_reports(self.exchange, self._report()))
        self.exchange.wait(
            lambda seconds: not self._is_first or all(job.is_resolved.wait(seconds) for job in self._jobs)
        )
        self._apply_reports(exchange_reports(self.exchange, self._report()))
        if self.options.durable == "remote":
            self._following.send_all(self.exchange)

    def copied(self) -> None:
        """Wait until this rank's saves are copied; after that, anything may change the trained state."""
        self._wait_for_copies(self._jobs)

    def _wait_for_room(self) -> bool:
        """Wait until no rank has too many saves waiting for its disk; return False if that takes too long."""
        awaited = self._running()[: 1 - JOBS_MAX]
        until = awaited[0].begun + DISK_SECONDS_MAX if awaited else math.inf
        return self.exchange.wait(lambda seconds: all(job.is_written.wait(seconds) for job in awaited), until=until)

    def status(self) -> Status:
        """Return the status of this rank's saves, without a message to other ranks."""
        return self._following.added_to(reduce(with_job, self._jobs, self._over))

    def close(self) -> None:
        """Wait for the pending saves, and release the engine. Every rank calls this; a second call does nothing."""
        if self._is_closed:
            return
        try:
            self.wait()
        except BaseException:
            self._leave()
            raise
        self._end(at_once=False, is_sent=self._following.finish(self.exchange))

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
        """Hold the update until the state before it is fully copied or, with ``sync``, durable."""
        self._updates += 1
        self._seal()  # once training continues, files in the folder may belong to a later step
        if self.options.mode == "sync" and self._jobs:
            job = self._jobs[-1]
            job.held.append(hold_training(self._engine.device))
            with job.held[-1]:
                self._finish(job)
        tight, self._tight = self._tight, []
        if tight:  # all ranks wait: if only one waited for its disk, the update's own collective would time out
            self.exchange.wait(partial(self._wait_for_copies, tight))
        self._wait_for_copies(self._jobs)

    def _wait_for_copies(self, jobs: Iterable[Job], seconds: float | None = None) -> bool:
        """Wait at most *seconds* for each of *jobs* to be copied; return whether all are."""
        for job in jobs:
            if not job.snapshot.copied.is_set():
                job.held.append(hold_training(self._engine.device))
                with job.held[-1]:
                    job.snapshot.copied.wait(seconds)
        return all(job.snapshot.copied.is_set() for job in jobs)

    # -- reports between ranks -----------------------------------------------------------------------------------

    def _report(
        self, *, step: int = 0, copied_bytes: int = 0, precision: str = "", problem: Exception | None = None
    ) -> RankReport:
        running = self._running()
        free = max(self._pool.size_bytes - self._pool.used_bytes, 0)
        last = self._jobs[-1].snapshot.size_bytes if self._jobs else 0
        return RankReport(
            step=step,
            number=self._schedule.number,
            is_at_boundary=self._engine.is_at_boundary,
            is_pressed=len(running) >= JOBS_MAX or (bool(running) and last > free),
            is_tight=copied_bytes + 2 * COPY_BYTES > free,
            free_bytes=free,
            failed=tuple(job.joint.save_number for job in self._jobs if job.is_written.is_set() and job.failure),
            outcomes=self._new_outcomes(),
            has_lost_base=self._background.has_lost_base or self._following.has_lost_base,
            precision=precision,
            retries=self._background.retries.taken(),
            is_mistyped=isinstance(problem, NotPlain),
            problem="" if problem is None else as_text(problem),
        )

    def _new_outcomes(self) -> dict[int, bool]:
        """Return, on the rank that commits, outcomes that some ranks may not know yet: whether each save is visible."""
        resolved = takewhile(lambda job: job.is_resolved.is_set(), self._jobs)  # in order
        return {job.joint.save_number: job.commit is not None for job in resolved if job.is_visible is None}

    def _apply_reports(self, agreed: RankReport) -> None:
        for job in self._jobs:
            if job.joint.save_number in agreed.failed:
                job.is_given_up = True  # the failed rank may have been unable to write a part that records the failure
            job.is_visible = agreed.outcomes.get(job.joint.save_number, job.is_visible)
            if job.is_visible is False:
                self._last.note_lost(job.joint.save_number)
        self._schedule.resolve(agreed.outcomes)
        self._background.retries.log(agreed.retries)
        if agreed.has_lost_base:  # one rank reports this; all ranks act on it in the same save
            self._schedule.begin_anew()
            self._background.has_lost_base = False
            self._following.begin_anew()
        while self._jobs and self._jobs[0].is_visible is not None and self._jobs[0].is_written.is_set():
            self._finished(self._jobs.popleft())

    def _finished(self, job: Job) -> None:
        if not job.is_visible:
            job.failure = job.failure or "another rank could not write its share"
        self._over = with_job(self._over, job)
        if self._is_first:
            note_job(job, self.options, write=partial(self._following.note, self._session))

    # -- one save ------------------------------------------------------------------------------------------------

    def _capture_state(
        self, read: Callable[[], SaveRequest], capture: Callable[[SaveRequest], Captured]
    ) -> tuple[Captured, SaveFiles, Sample | None]:
        """Return this rank's state and files and, if the policy uses movements, the sample that measures them."""
        request = read()
        check_client_state(request.client_state)
        captured = capture(request)
        self._check_cuttable(captured.undivided)
        self._engine.check_fully_loaded()
        files = SaveFiles(self._engine, captured.model, request)
        sample = None if self._movements is None else self._movements.sample(captured)
        return captured, files, sample

    def _check_cuttable(self, kept: str) -> None:
        """Raise LayoutMismatch if saves may be partial and *kept*, state of the optimizer, belongs to no layer."""
        if kept and (self._schedule.policy.name != Latest.name or self.options.on_pressure == "degrade"):
            raise LayoutMismatch(
                f"the optimizer keeps {kept}, which cannot be split by layer",
                hint="save all layers, with policy='full' and without on_pressure='degrade'",
            )

    def _running(self) -> list[Job]:
        return [job for job in self._jobs if not job.is_written.is_set()]

    def _begin(self, captured: Captured, files: SaveFiles, due: frozenset[str], moved: Movements) -> Job:
        share, frames = captured.share, files.request.keyframes
        compact = self._schedule.compact_now(due & captured.trained, frames, captured.moments)
        joint = JointCommit(
            session=self._session,
            save=self._saves,
            share=share,
            due=due,
            files=files.wait,
            mark=captured.mark,
            run=self.run,
            place=self._place,
            step=files.request.step,
            save_number=self._schedule.begin(due, captured.moments, compact),
            policy=policy_use(self._schedule.policy, share, due, moved),
            layout=partial(files.layout, layer_pattern=self.options.layer_pattern, is_dcp=captured.is_dcp),
            is_dcp=captured.is_dcp,
            precision=frames.precision,
            compact=compact,
            pin=files.request.pin,
        )
        snapshot = Snapshot(captured, changing(objects_due(share, due)))
        job = Job(joint=joint, snapshot=snapshot, files=files, queued=len(self._running()))
        self._saves += 1
        self._jobs.append(job)
        self._background.add(job)
        return job

    def _seal(self) -> None:
        """Read the files in the folders of earlier saves; files that are added later are not kept."""
        for job in self._jobs:
            job.files.seal()

    def _finish(self, job: Job) -> None:
        """Wait for *job*, and raise its failure, on every rank."""
        self.wait()
        with self.exchange.raise_on_all():
            if job.failure:
                raise StorageIO(job.failure, errno=None, filename=self._repo.name)

    # -- for the engine's loads and resumes -----------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The attempt that this saver saves to."""
        return self._place.attempt

    def publish(self, seconds: float) -> None:
        """Wait up to *seconds* for this rank's commits, and for its saves to leave the node's level. Not collective."""
        end = time.monotonic() + seconds
        self._seal()
        for job in self._jobs if self._is_first else ():
            if not job.is_resolved.wait(max(end - time.monotonic(), 0)):
                raise Locked(
                    f"step {job.joint.step} of run {self.run!r} is still being saved after {seconds:.0f} s",
                    hint="call wait() on the run's saver, then load again",
                )
        self._following.is_sent(max(end - time.monotonic(), 0))

    def rebase_on(self, composition: Composition | None) -> None:
        """Continue from *composition*, which the engine now holds; None if the engine was filled from elsewhere."""
        self._place = place = self._attempt_lock.acquire(partial(place_resumed, composition=composition))
        referable = self._background.begin_at(place, self.exchange)
        self._schedule = Schedule.after(place, self._schedule.policy, run=self.run, referable=referable)
        if self._movements is not None:
            self._movements.forget()
        self._last.begin_at(place.after, updates=self._updates)

    # -- the end -------------------------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        """Wait until this rank's saves are on disk; called if the process exits without closing the saver."""
        if not self._is_closed:
            self._seal()
            wait_at_exit(self._jobs, commits=self._is_first)

    def _leave(self) -> None:
        """End without the other ranks, which may never call a collective again."""
        self._at_exit()
        self._end(at_once=True)

    def _end(self, *, at_once: bool, is_sent: bool = False) -> None:
        self._is_closed = True
        atexit.unregister(self._at_exit)
        try:
            self._ungate()
            try:
                self._release(self._place.attempt if is_sent else None)
            finally:  # end the threads even if the store can no longer be read
                self._background.close(at_once=at_once)
            if self._is_first:
                self._repo.parts.close_session(self._session, is_over=not at_once)
        finally:
            # Last: another job may save this attempt from here on.
            self._attempt_lock.release()
        if not at_once:
            self.exchange.close()
