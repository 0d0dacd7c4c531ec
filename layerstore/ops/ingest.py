"""
Ingest: a checkpoint on disk becomes a commit.

Write order (docs/reference/format.md, section 6): objects, then version and state blobs, then the record,
then the index. The link of the record is what makes it a commit.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import Conflict, NotFound, SourceCheckpoint, StorageIO
from layerstore.format.records import commit_id, make_commit
from layerstore.layers import check_name, compile_pattern
from layerstore.model import (
    Commit,
    CommitId,
    CommitRecord,
    Fork,
    LayerEntry,
    Observed,
    Origin,
    PolicyUse,
    SourceLayout,
)
from layerstore.ops.progress import Progress
from layerstore.ops.rooms import Rooms
from layerstore.ops.transfer import Content, transfer
from layerstore.storage.catalog import RunView
from layerstore.storage.manifest import RecordRow
from layerstore.storage.objects import ObjectWriter
from layerstore.zero3.checkpoint import Checkpoint
from layerstore.zero3.discover import check_unchanged, discover
from layerstore.zero3.read import read_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPlan:
    """What would be ingested."""

    checkpoint: Checkpoint
    run: str
    replace: bool
    layer_pattern: str | None

    @property
    def step(self) -> int:
        """The step of the commit to be."""
        return self.checkpoint.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What an ingest did."""

    run: str
    step: int
    attempt: int
    commit: CommitId
    is_new: bool
    """False where this very content was saved before: then nothing was written but what the store had lost."""
    layers: tuple[str, ...]
    objects_new: int
    objects_reused: int
    bytes_new: int
    bytes_reused: int
    bytes_derived: int
    """Gathered weights that were not stored because they follow from the masters."""
    seconds: float
    source: Path
    """The folder of the tag that was read."""
    notes: tuple[str, ...]


def plan_ingest(
    rooms: Rooms,
    path: Path,
    *,
    run: str | None = None,
    tag: str | None = None,
    replace: bool = False,
    layer_pattern: str | None = None,
    allowed_globals: frozenset[str] = frozenset(),
    follow: bool = False,
) -> IngestPlan:
    """Read what is at *path* and decide what it is; nothing is written."""
    rooms.prepare_writing()
    pattern = compile_pattern(layer_pattern)
    found = discover(path, tag=tag, follow=follow)
    name = check_name(found.run_name if run is None else run, what="the run's name")
    if name in rooms.records.pin_names():
        raise Conflict(
            f"{name!r} is the name of a pin; runs and pins share their names", hint="choose another name with --run"
        )
    checkpoint = read_checkpoint(found, layer_pattern=pattern, allowed_globals=allowed_globals)
    if not checkpoint.layers:
        raise SourceCheckpoint(f"{path} holds no parameters: there is nothing to keep", hint="is it the right folder?")
    return IngestPlan(checkpoint=checkpoint, run=name, replace=replace, layer_pattern=layer_pattern)


def execute_ingest(rooms: Rooms, plan: IngestPlan, *, progress: Progress) -> Ingested:
    """
    Store *plan*'s checkpoint.

    Once this returns the commit survives a power cut. If it raises, every earlier commit is as it was.

    Raises:
        Conflict: Other content was saved for this run and step, and *replace* was not asked for.
        SourceCheckpoint: The source is damaged, or changed meanwhile.
    """
    started = time.monotonic()
    with (
        rooms.lock_run(plan.run),
        _space_explained(rooms, plan),
        ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer,
    ):
        view = _view(rooms, plan.run)
        content = transfer(
            plan.checkpoint, writer, progress, known_before=view is not None and bool(_at(view, plan.step))
        )
        check_unchanged(plan.checkpoint.found)
        commit, is_new = _commit(rooms, plan, content, writer)
    return Ingested(
        run=plan.run,
        step=commit.record.step,
        attempt=commit.record.attempt,
        commit=commit.id,
        is_new=is_new,
        layers=tuple(entry.layer for entry in commit.record.layers),
        objects_new=writer.count_new,
        objects_reused=writer.count_reused,
        bytes_new=writer.bytes_new,
        bytes_reused=writer.bytes_reused,
        bytes_derived=content.bytes_derived,
        seconds=time.monotonic() - started,
        source=plan.checkpoint.found.folder / plan.checkpoint.found.tag,
        notes=plan.checkpoint.notes,
    )


@contextlib.contextmanager
def _space_explained(rooms: Rooms, plan: IngestPlan) -> Iterator[None]:
    """Add to a full disk's error how much was asked for and how much there is."""
    try:
        yield
    except StorageIO as exc:
        if exc.kind == "no_space":
            free = rooms.files.free_bytes(rooms.layout.root)
            exc.message += (
                f"; this checkpoint needs up to {plan.checkpoint.size_bytes} bytes, {free} are free; "
                "earlier commits are not affected"
            )
        raise


# -- the record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """Where a commit stands in its run."""

    attempt: int
    fork: Fork | None
    save_number: int
    supersedes: tuple[CommitId, ...] = ()


def _commit(rooms: Rooms, plan: IngestPlan, content: Content, writer: ObjectWriter) -> tuple[Commit, bool]:
    view = _view(rooms, plan.run)
    rivals = [] if view is None else _at(view, plan.step)
    for rival in rivals:
        numbers = _Numbers(
            attempt=rival.attempt, fork=rival.fork, save_number=rival.save_number, supersedes=rival.supersedes
        )
        record = _record(plan, content, numbers)
        if commit_id(record) == rival.id:
            if writer.count_new:  # objects that the store had lost: this heals it
                _publish_healing(writer)
            commit = make_commit(record, _observed(writer))
            rooms.records.publish(commit)  # confirms the one that is there, or heals it
            return commit, False
    if rivals and not plan.replace:
        raise Conflict(
            f"{plan.run}@{plan.step} is saved already, with other content (commit {rivals[0].id[:12]}); "
            "nothing was changed",
            hint="pass --replace to hide the old commit, or --run NAME if this is another run",
        )
    record = _record(plan, content, _numbers(view, rivals))
    writer.publish()
    commit = make_commit(record, _observed(writer))
    is_new = rooms.records.publish(commit)
    _look_again(writer)
    rooms.catalog.add(commit)
    return commit, is_new


def _observed(writer: ObjectWriter) -> Observed:
    return Observed(time_ns=time.time_ns(), bytes_new=writer.bytes_new, bytes_reused=writer.bytes_reused)


def _publish_healing(writer: ObjectWriter) -> None:
    writer.publish()
    _look_again(writer)


def _look_again(writer: ObjectWriter) -> None:
    """Make sure that no collection took a reused object before the record that names it was visible."""
    lost = writer.look_again()
    if lost:
        raise Conflict(
            f"{len(lost)} objects were removed while they were committed (first: {lost[0].id})",
            hint="repeat the command: it writes them again",
        )


def _view(rooms: Rooms, run: str) -> RunView | None:
    try:
        return rooms.catalog.view(run)
    except NotFound:
        return None


def _at(view: RunView, step: int) -> list[RecordRow]:
    newest = view.attempts[-1] if view.attempts else 1
    return [row for row in view.visible if row.step == step and row.attempt == newest]


def _numbers(view: RunView | None, rivals: list[RecordRow]) -> _Numbers:
    if rivals:
        return _Numbers(
            attempt=rivals[0].attempt,
            fork=rivals[0].fork,
            save_number=rivals[0].save_number,
            supersedes=tuple(sorted(CommitId(rival.id) for rival in rivals)),
        )
    if view is None or not view.attempts:
        return _Numbers(attempt=1, fork=None, save_number=0)
    # Hidden ones too: a number is given once. What is filled in later comes later in the count.
    own = [row for row in view.rows.values() if row.attempt == view.attempts[-1]]
    next_number = max(row.save_number for row in own) + 1
    return _Numbers(attempt=own[0].attempt, fork=own[0].fork, save_number=next_number)


def _record(plan: IngestPlan, content: Content, numbers: _Numbers) -> CommitRecord:
    origin = Origin(run=plan.run, attempt=numbers.attempt, step=plan.step, save_number=numbers.save_number)
    found = plan.checkpoint.found
    return CommitRecord(
        run=plan.run,
        attempt=numbers.attempt,
        fork=numbers.fork,
        step=plan.step,
        save_number=numbers.save_number,
        world_size=plan.checkpoint.world_size,
        layers=tuple(
            LayerEntry(layer=of.layer, version=version, origin=origin, optimizer_step=of.optimizer_step)
            for of, version in zip(plan.checkpoint.layers, content.versions, strict=True)
        ),
        states=content.states,
        layout=SourceLayout(flavour=found.flavour, tag=found.tag, layer_pattern=plan.layer_pattern),
        policy=PolicyUse(name="full", parameters={}, decisions={}),
        supersedes=numbers.supersedes,
    )
