"""
Ingest: a checkpoint on disk becomes a commit.

Write order (docs/reference/format.md, section 6): objects, then version and state blobs, then the record,
then the index. The link of the record is what makes it a commit.
"""

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from layerstore.errors import Conflict, InvalidInput, SourceCheckpoint, StorageIO
from layerstore.format.records import commit_id, make_commit
from layerstore.layers import check_name, compile_pattern
from layerstore.model import (
    BlobRef,
    Commit,
    CommitId,
    CommitRecord,
    Observed,
    Origin,
    PolicyUse,
    SourceLayout,
)
from layerstore.ops.claims import claim, publish
from layerstore.ops.past import view_or_none
from layerstore.ops.place import (
    Place,
    check_not_abandoned,
    elsewhere,
    entries_of,
    opens_the_same,
    place_beside,
    place_of,
    rows_at,
)
from layerstore.ops.progress import Progress, Silent
from layerstore.ops.resumed import resumed_decision
from layerstore.ops.rooms import Rooms
from layerstore.ops.selection import layers_due
from layerstore.ops.transfer import Content, transfer
from layerstore.policy import Latest, Policy
from layerstore.storage.manifest import RecordRow
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.runview import RunView
from layerstore.zero3.checkpoint import Checkpoint
from layerstore.zero3.discover import check_unchanged, discover
from layerstore.zero3.pointers import refuse_pointer
from layerstore.zero3.read import read_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPlan:
    """What would be ingested."""

    checkpoint: Checkpoint
    run: str
    replace: bool
    layer_pattern: str | None
    policy: Policy
    """Says which layers are stored."""
    rollback: bool
    """Training went back to an earlier step."""
    resumed_from: str | None
    """The commit or composite that training went on from, if it is to open an attempt."""

    @property
    def opens_attempt(self) -> bool:
        """Whether the commit begins another history."""
        return self.rollback or self.resumed_from is not None

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
    layers_saved: tuple[str, ...]
    """Those that were due; the others are inherited."""
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
    policy: Policy | None = None,
    rollback: bool = False,
    resumed_from: str | None = None,
) -> IngestPlan:
    """Read what is at *path* and decide what it is; nothing is written."""
    if rollback and resumed_from is not None:
        raise InvalidInput("--rollback and --resumed-from were both given", hint="the second says it all")
    rooms.prepare_writing()
    pattern = compile_pattern(layer_pattern)
    found = discover(path, tag=tag, follow=follow)
    refuse_pointer(found.ranks[0].model)
    name = check_name(found.run_name if run is None else run, what="the run's name")
    if name in rooms.records.pin_names():
        raise Conflict(
            f"{name!r} is the name of a pin; runs and pins share their names", hint="choose another name with --run"
        )
    checkpoint = read_checkpoint(found, layer_pattern=pattern, allowed_globals=allowed_globals)
    if not checkpoint.layers:
        raise SourceCheckpoint(f"{path} holds no parameters: there is nothing to keep", hint="is it the right folder?")
    return IngestPlan(
        checkpoint=checkpoint,
        run=name,
        replace=replace,
        layer_pattern=layer_pattern,
        policy=policy or Latest(),
        rollback=rollback,
        resumed_from=resumed_from,
    )


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
        view = view_or_none(rooms, plan.run)
        intent = _intent(rooms, plan, view)
        content = transfer(plan.checkpoint, writer, progress, due=intent.due, known_before=bool(intent.rivals))
        check_unchanged(plan.checkpoint.found)
        commit, is_new = _commit(rooms, plan, intent, content, writer)
    return Ingested(
        run=plan.run,
        step=commit.record.step,
        attempt=commit.record.attempt,
        commit=commit.id,
        is_new=is_new,
        layers=tuple(entry.layer for entry in commit.record.layers),
        layers_saved=tuple(entry.layer for entry in commit.record.layers if entry.saved_by(commit.record)),
        objects_new=writer.count_new,
        objects_reused=writer.count_reused,
        bytes_new=writer.bytes_new,
        bytes_reused=writer.bytes_reused,
        bytes_derived=content.bytes_derived,
        seconds=time.monotonic() - started,
        source=plan.checkpoint.found.folder / plan.checkpoint.found.tag,
        notes=(*plan.checkpoint.notes, *_doubts(plan, commit.record, is_new=is_new)),
    )


def _doubts(plan: IngestPlan, record: CommitRecord, *, is_new: bool) -> Iterator[str]:
    """Say that less is stored than was asked for: the step was saved before, under another policy."""
    saved = sum(entry.saved_by(record) for entry in record.layers)
    if not is_new and saved < len(record.layers) and record.policy.name != plan.policy.name:
        yield (
            f"{record.run}@{record.step} was saved under policy {record.policy.name}: {saved} of its "
            f"{len(record.layers)} layers are stored, the others are older; --replace stores what policy "
            f"{plan.policy.name} asks for"
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
class _Intent:
    """What the record will say, but for what the layers turn out to hold."""

    place: Place
    policy: PolicyUse
    due: frozenset[str]
    """The layers to be stored; the others are inherited."""
    rivals: list[RecordRow]
    """What stands at this step of the newest attempt already."""


def _intent(rooms: Rooms, plan: IngestPlan, view: RunView | None) -> _Intent:
    rivals = rows_at(view, plan.step)
    names = frozenset(layer.layer for layer in plan.checkpoint.layers)
    if rivals and not (plan.replace or plan.opens_attempt):
        # Most likely the same again: only by the very layers that were stored then can it be seen to be the same.
        place, use = place_beside(rooms, rivals[0])
        return _Intent(place=place, policy=use, due=names - place.inherited.keys(), rivals=rivals)
    place = place_of(rooms, view, step=plan.step, rivals=rivals, rollback=plan.rollback, resumed_from=plan.resumed_from)
    resumed = {} if plan.resumed_from is None else resumed_decision(place.inherited.values())
    if isinstance(plan.policy, Latest):
        use = PolicyUse(name=plan.policy.name, parameters={}, decisions=resumed)
        return _Intent(place=place, policy=use, due=names, rivals=rivals)
    due, decisions = layers_due(rooms, plan.checkpoint, place, plan.policy, run=plan.run)
    use = PolicyUse(
        name=plan.policy.name,
        parameters=plan.policy.parameters,
        decisions=decisions | resumed,
    )
    return _Intent(place=place, policy=use, due=due, rivals=rivals)


def _is_same_content(rooms: Rooms, plan: IngestPlan, record: CommitRecord, content: Content) -> bool:
    """
    Whether *record* holds what *content* was taken from: all that is no layer, and the layers that both saved.

    Equal states alone prove nothing: a raw checkpoint says there little more than its counters and its schedule, which
    another attempt comes to at the same step with other weights. Nor do frozen layers, which all attempts share.
    So where no trained layer was saved by both, those that *record* saved are read from the source, too.
    """
    if record.states != content.states:
        return False
    trained = {layer.layer for layer in plan.checkpoint.layers if not all(of.frozen for of in layer.parameters)}
    saved = {entry.layer: entry.version for entry in record.layers if entry.saved_by(record)}
    versions = content.versions
    if not saved.keys() & versions.keys() & trained:
        versions = _versions_in_source(rooms, plan, saved.keys())
    both = saved.keys() & versions.keys()
    return bool(both & trained) and all(saved[of] == versions[of] for of in both)


def _versions_in_source(rooms: Rooms, plan: IngestPlan, layers: Collection[str]) -> dict[str, BlobRef]:
    """Return what *layers* would be stored as; nothing is kept of it."""
    with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as aside:
        return transfer(plan.checkpoint, aside, Silent(), due=layers, known_before=True).versions


def _commit(
    rooms: Rooms, plan: IngestPlan, intent: _Intent, content: Content, writer: ObjectWriter
) -> tuple[Commit, bool]:
    view = view_or_none(rooms, plan.run)
    for rival in intent.rivals:
        if plan.opens_attempt and not opens_the_same(view, rival, intent.place):
            continue  # training that went back may well come to the same bits again
        beside, use = place_beside(rooms, rival)
        if frozenset(rival.layer_names) - beside.inherited.keys() != intent.due:
            continue
        record = _record(plan, content, replaced(intent, place=beside, policy=use))
        if commit_id(record) == rival.id:
            # Confirms the one that is there, or heals it; a collection may be taking it, and then it is new.
            return _published(rooms, record, intent, writer)
    if intent.rivals and not (plan.replace or plan.opens_attempt):
        raise Conflict(
            f"{plan.run}@{plan.step} is saved already, with other content (commit {intent.rivals[0].id[:12]}); "
            "nothing was changed",
            hint="--replace hides the old commit, --rollback says that training went back to an earlier step, "
            "--run NAME that this is another run",
        )
    if not plan.opens_attempt:
        for row in elsewhere(view, plan.step):
            twin = rooms.catalog.commit(row.name)
            if _is_same_content(rooms, plan, twin.record, content):
                check_not_abandoned(view, row)
                return twin, False
    # What is saved where a commit was dropped takes its place, and hides what hid it: so its id is a new one.
    return _published(rooms, _record(plan, content, intent), intent, writer)


def _published(rooms: Rooms, record: CommitRecord, intent: _Intent, writer: ObjectWriter) -> tuple[Commit, bool]:
    """Publish all that *record* needs, and then the record; return whether that was new."""
    claim(rooms, writer, [entry for entry in record.layers if entry.layer not in intent.due])
    writer.publish()
    commit = make_commit(record, _observed(writer))
    return commit, publish(rooms, writer, commit)


def _observed(writer: ObjectWriter) -> Observed:
    return Observed(time_ns=time.time_ns(), bytes_new=writer.bytes_new, bytes_reused=writer.bytes_reused)


def _record(plan: IngestPlan, content: Content, intent: _Intent) -> CommitRecord:
    place, found = intent.place, plan.checkpoint.found
    origin = Origin(run=plan.run, attempt=place.attempt, step=plan.step, save_number=place.save_number)
    return CommitRecord(
        run=plan.run,
        attempt=place.attempt,
        fork=place.fork,
        step=plan.step,
        save_number=place.save_number,
        world_size=plan.checkpoint.world_size,
        layers=entries_of(
            plan.checkpoint.layers,
            due=intent.due,
            versions=content.versions,
            origin=origin,
            inherited=place.inherited,
        ),
        states=content.states,
        layout=SourceLayout(flavour=found.flavour, tag=found.tag, layer_pattern=plan.layer_pattern),
        policy=intent.policy,
        supersedes=place.supersedes,
    )
