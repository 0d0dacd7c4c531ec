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

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from layerstore.errors import Conflict, InvalidInput, LayerstoreError, StorageIO
from layerstore.layers import compile_pattern
from layerstore.live.background import LOG, Background, Job
from layerstore.live.capture import Captured, capture, check_client_state
from layerstore.live.council import SAVES_MAX, Facts, Report, agree, meet
from layerstore.live.exchange import Exchange
from layerstore.live.files import FoundFile, find_files, kept_files
from layerstore.live.memory import pool_bytes
from layerstore.live.pool import Pool
from layerstore.live.schedule import Schedule
from layerstore.live.seams import Engine
from layerstore.live.snapshot import Copier, CudaCopier, Snapshot
from layerstore.model import Kind, PolicyUse, SourceLayout
from layerstore.ops.joining import Joint
from layerstore.ops.place import Place
from layerstore.ops.shares import ShareWork, objects_due
from layerstore.policy import Latest, Policy
from layerstore.store import Store, StrPath
from layerstore.zero3.share import Share
from layerstore.zero3.slices import elements_of

Mode = Literal["async", "sync"]
Pressure = Literal["wait", "skip", "degrade"]
Frozen = Literal["once", "exclude"]

JOBS_MAX = 2
"""Saves that may be on their way: one more waits until the oldest is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What ``save`` has begun."""

    step: int
    number: int
    layers_due: tuple[str, ...]
    skipped: bool
    blocked_seconds: float
    """Inside ``save``; the gate comes later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a saver is doing, on this rank."""

    queued: int
    """Saves that are not on disk yet."""
    saved: int
    """Saves of this rank that are."""
    failed: int
    newest_step: int | None
    """That this rank has written."""
    blocked_seconds: float
    """Of training, in all saves and at all gates."""
    copied_bytes: int
    written_bytes: int
    errors: tuple[str, ...]


class Saver:
    """Saves an engine's state while it trains; made by `attach`. A context manager."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        run: str,
        policy: Policy,
        mode: Mode,
        host_buffer: int | str,
        on_pressure: Pressure,
        frozen: Frozen,
        layer_pattern: str | None,
        place: Place,
    ) -> None:
        self._engine = engine
        self._store = store
        self._rooms = store.rooms
        self.run = run
        self._mode = mode
        self._on_pressure = on_pressure
        self._frozen = frozen
        self._layer_pattern = layer_pattern
        self._pattern = compile_pattern(layer_pattern)
        self._place = place
        self._exchange = Exchange()
        self._rooms.prepare_writing()
        self._session = self._open_session()
        is_cuda = engine.device.type == "cuda"
        self._copier = CudaCopier(engine.device) if is_cuda else Copier()
        self._pool = Pool(pool_bytes(engine, host_buffer), pinned=is_cuda)
        self._background = Background(self._rooms, self._pool, self._copier, is_first=engine.rank == 0)
        self._background.inherited = dict(place.inherited)
        self._schedule = Schedule(
            policy=policy,
            number=place.save_number,
            visible={layer: entry.origin.save_number for layer, entry in place.inherited.items()},
            counted={layer: entry.optimizer_step is not None for layer, entry in place.inherited.items()},
        )
        self._saves = 0
        self._jobs: deque[Job] = deque()
        """Those of which it is not known yet what became of them."""
        self._done: list[Job] = []
        self._fates: dict[int, bool] = {}
        self._newest: tuple[Saved, int] | None = None
        self._updates = 0
        self._is_closed = False
        self._first_decisions = dict(place.decisions)
        self._ungate: Callable[[], None] = engine.before_update(self._gate)

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int | None = None,
        *,
        client_state: Mapping[str, object] | None = None,
        extra_files: Mapping[str, StrPath] | None = None,
        tag: str | None = None,
    ) -> Saved:
        """
        Save the engine's state as step *step*, by default the engine's own counter.

        Every rank calls it, after ``engine.step()``. *client_state* is given back by ``resume``; *extra_files* are kept
        byte for byte, under the names that a composed folder will have for them.

        Raises:
            TypeError: *client_state* holds something else than plain values, tensors and numpy's.
            InvalidInput: Gradients are being accumulated for an update that is still to come, or a file is not there.
        """
        started = time.monotonic()
        number = self._engine.step if step is None else step
        files, problem = self._files(extra_files or {})
        report = self._report(step=number, mistyped=check_client_state(client_state or {}), problem=problem)
        facts = agree(self._exchange, report)
        self._learn(facts)
        repeated = self._repeated(number)
        if repeated is not None:
            return repeated
        if self._on_pressure == "wait":
            self._make_room()
        tag = tag or f"global_step{self._engine.step}"
        captured = capture(
            self._engine,
            tag=tag,
            client_state=client_state or {},
            exclude_frozen=self._frozen == "exclude",
            pattern=self._pattern,
        )
        self._copier.follow()
        due = self._due(captured.share)
        # However few layers a save has, no more of them may be open than fates are told of.
        if (facts.is_pressed and self._on_pressure == "skip") or self._schedule.open_for >= SAVES_MAX:
            self._schedule.skip(due)
            LOG.warning("step %d is not saved: earlier saves still wait for the disk", number)
            return _saved(number, self._schedule.number - 1, (), started, skipped=True)
        if facts.is_pressed and self._on_pressure == "degrade":
            due = self._schedule.fewer(due, _local_bytes(captured.share), facts.free_bytes)
        job = self._begin(number, tag, captured, due, files)
        job.timing.blocked_seconds += time.monotonic() - started
        if self._mode == "sync":
            self._finish(job, started)
        saved = _saved(number, job.number, _in_order(captured.share, due), started, skipped=False)
        self._newest = (saved, self._updates)
        return saved

    def wait(self) -> None:
        """Return once every save is visible and durable, or given up. Every rank calls it."""
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
        jobs = [*self._done, *self._jobs]
        written = [job for job in jobs if job.is_written.is_set()]
        failures = [f"step {job.step}: {job.failure}" for job in written if job.failure]
        return Status(
            queued=len(jobs) - len(written),
            saved=len(written) - len(failures),
            failed=len(failures),
            newest_step=max((job.step for job in written if not job.failure), default=None),
            blocked_seconds=sum(job.timing.blocked_seconds for job in jobs),
            copied_bytes=sum(job.snapshot.size_bytes for job in written),
            written_bytes=sum(job.timing.written_bytes for job in written),
            errors=tuple(failures),
        )

    def close(self) -> None:
        """Wait for what is on its way, and let go of the engine. Every rank calls it; twice is harmless."""
        if self._is_closed:
            return
        self.wait()
        self._end(at_once=False)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            # Other ranks may never come to where they could be waited for.
            for job in self._jobs:
                job.is_written.wait()
            self._end(at_once=True)

    # -- before an update ----------------------------------------------------------------------------------------

    def _gate(self) -> None:
        """Hold the update until nothing of the state before it is left to copy."""
        self._updates += 1
        for job in self._jobs:
            if not job.snapshot.copied.is_set():
                started = time.monotonic()
                job.snapshot.copied.wait()
                job.timing.blocked_seconds += time.monotonic() - started

    # -- what the ranks agree on ---------------------------------------------------------------------------------

    def _files(self, extra: Mapping[str, StrPath]) -> tuple[tuple[FoundFile, ...], str]:
        """Read what the first rank keeps beside the shards; return it, and what is wrong with it."""
        try:
            return (find_files(self._engine, extra) if self._engine.rank == 0 else ()), ""
        except LayerstoreError as exc:
            return (), str(exc)

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
        return self._fates

    def _learn(self, facts: Facts) -> None:
        for number in facts.failed:
            self._background.give_up(number)  # its rank may not even have been able to say so in the store
        self._schedule.resolve(facts.fates.items())
        pending = {save.number for save in self._schedule.pending}
        while self._jobs and self._jobs[0].number not in pending and self._jobs[0].is_written.is_set():
            self._done.append(self._jobs.popleft())

    # -- one save ------------------------------------------------------------------------------------------------

    def _repeated(self, step: int) -> Saved | None:
        """Return what the last save began if this one is the same: trainers save twice at the end of training."""
        if self._newest is None or step > self._newest[0].step:
            return None
        saved, updates = self._newest
        if step == saved.step and updates == self._updates:
            return saved
        raise Conflict(
            f"step {step} is not after step {saved.step}, which was saved last",
            hint="count steps on; to go back to an earlier step, resume from it",
        )

    def _make_room(self) -> None:
        running = [job for job in self._jobs if not job.is_written.is_set()]
        for job in running[: len(running) - JOBS_MAX + 1]:
            job.is_written.wait()

    def _due(self, share: Share) -> frozenset[str]:
        counted = {layer.layer: layer.optimizer_step is not None for layer in share.layers}
        return self._schedule.due(
            tuple(layer.layer for layer in share.layers), counted=counted, movements={}, sizes=_sizes(share)
        )

    def _begin(self, step: int, tag: str, captured: Captured, due: frozenset[str], found: tuple[FoundFile, ...]) -> Job:
        share = captured.share
        counted = {layer.layer: layer.optimizer_step is not None for layer in share.layers}
        number = self._schedule.begin(due, counted)
        files = kept_files(found, captured.model)
        work = ShareWork(session=self._session, save=self._saves, share=share, due=due, files=files)
        lazy = [
            part
            for source in objects_due(share, due)
            if source.kind in {Kind.MASTER, Kind.OPTIMIZER}
            for part in source.slices
        ]
        joint = self._joint(step, number, tag, work) if share.rank == 0 else None
        job = Job(step=step, number=number, work=work, snapshot=Snapshot(captured, lazy), joint=joint)
        self._saves += 1
        self._jobs.append(job)
        self._background.add(job)
        return job

    def _joint(self, step: int, number: int, tag: str, work: ShareWork) -> Joint:
        policy, share = self._schedule.policy, work.share
        decisions, self._first_decisions = dict(self._first_decisions), {}
        if not isinstance(policy, Latest) or len(work.due) < len(share.layers):
            decisions["due"] = list(_in_order(share, work.due))
        return Joint(
            session=work.session,
            save=work.save,
            run=self.run,
            attempt=self._place.attempt,
            fork=self._place.fork,
            step=step,
            save_number=number,
            share=share,
            due=work.due,
            policy=PolicyUse(name=policy.name, parameters=policy.parameters, decisions=decisions),
            layout=SourceLayout(flavour="raw", tag=tag, layer_pattern=self._layer_pattern),
        )

    def _finish(self, job: Job, started: float) -> None:
        """Wait for *job*, and raise what went wrong with it, on every rank."""
        self.wait()
        job.timing.blocked_seconds = time.monotonic() - started
        self._exchange.agree(job.failure, StorageIO)

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _open_session(self) -> str:
        """Agree on a name for what the ranks write together, and make sure that all see the same store."""
        session = self._exchange.first(secrets.token_hex(16) if self._exchange.rank == 0 else "")
        problem = ""
        if self._exchange.rank == 0:
            try:
                self._rooms.parts.open_session(session)
            except LayerstoreError as exc:
                problem = str(exc)
        self._exchange.agree(problem, StorageIO)
        if not self._rooms.parts.has_session(session):
            problem = f"{self._rooms.layout.root} is not the store that rank 0 has under this path"
        self._exchange.agree(problem, InvalidInput)
        return session

    def _end(self, *, at_once: bool) -> None:
        self._is_closed = True
        self._ungate()
        self._background.close(at_once=at_once)
        if self._engine.rank == 0:
            self._rooms.parts.close_session(self._session, is_over=not at_once)
        if not at_once:
            self._exchange.close()


def _saved(step: int, number: int, due: tuple[str, ...], started: float, *, skipped: bool) -> Saved:
    return Saved(step=step, number=number, layers_due=due, skipped=skipped, blocked_seconds=time.monotonic() - started)


def _in_order(share: Share, due: frozenset[str]) -> tuple[str, ...]:
    return tuple(layer.layer for layer in share.layers if layer.layer in due)


def _sizes(share: Share) -> dict[str, int]:
    """Return what each layer takes on all ranks together: the same on every rank."""
    states = 1 + len({part.state for layer in share.layers for of in layer.objects for part in of.slices if part.state})
    return {
        layer.layer: sum(elements_of(of.shape) * (2 if of.frozen else 4 * states) for of in layer.parameters)
        for layer in share.layers
    }


def _local_bytes(share: Share) -> dict[str, int]:
    """Return about what each layer takes of one rank's pool: the same on every rank."""
    return {layer: -(-size // share.world_size) for layer, size in _sizes(share).items()}
