"""
Ingest: a checkpoint on disk becomes a commit.

Write order (docs/reference/format.md, section 6): objects, then version and state blobs, then the record,
then the index. The link of the record is what makes it a commit.
"""

import contextlib
import errno as errnos
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import NamedTuple

from layerstore.errors import Conflict, Overtaken, StorageIO
from layerstore.format.records import WITHOUT_MOMENTS, commit_id, make_commit
from layerstore.model import (
    Commit,
    CommitId,
    CommitRecord,
    Observed,
    Origin,
    PolicyUse,
    SourceLayout,
)
from layerstore.ingest.brought_back import (
    as_first_saved,
    keep_damaged,
    of_attempt,
    replacing,
    rivals_of,
    very_record,
    what_became_of,
)
from layerstore.publish.claims import claim, publish
from layerstore.check.fall_back import FELL_BACK
from layerstore.check.given_up import lost_at
from layerstore.ingest.plan import IngestPlan
from layerstore.history.past import asked_again
from layerstore.history.place import (
    Place,
    check_not_abandoned,
    elsewhere,
    entries_of,
    opens_the_same,
    place_beside,
    place_free,
    place_of,
    rows_at,
)
from layerstore.progress import Progress, Silent
from layerstore.ingest.recognition import is_same_content, is_whole
from layerstore.history.resumed import resumed_decision
from layerstore.storage.rooms import Rooms
from layerstore.history.attempt_locks import reserve
from layerstore.ingest.selection import layers_due
from layerstore.ingest.transfer import Content, content_without_moments, transfer
from layerstore.gc.trim import lacks_moments
from layerstore.policy import Latest
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.runview import RunView
from layerstore.zero3.discover import check_unchanged

_HOW_TO_SAVE_IT = (
    "--replace hides the old commit, --rollback says that training went back to an earlier step, "
    "--run NAME that this is another run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What an ingest did."""

    run: str
    step: int
    attempt: int
    commit: CommitId
    is_new: bool
    """False where this very content was saved before: then nothing was written but what the store had lost."""
    record_healed: bool
    """Whether its record was damaged, and is written again."""
    layers: tuple[str, ...]
    layers_saved: tuple[str, ...]
    """Those that were due; the others are inherited."""
    objects_new: int
    objects_reused: int
    bytes_new: int
    bytes_reused: int
    objects_healed: int
    """Those of the new ones that the store had, damaged: they have this checkpoint's bytes in their place."""
    reused_read: bool
    """Whether what was reused was read first, and not trusted."""
    bytes_derived: int
    """Gathered weights that were not stored because they follow from the masters."""
    seconds: float
    source: Path
    """The folder of the tag that was read."""
    notes: tuple[str, ...]


def execute_ingest(rooms: Rooms, plan: IngestPlan, *, progress: Progress) -> Ingested:
    """
    Store *plan*'s checkpoint.

    Once this returns the commit survives a power cut. If it raises, every earlier commit is as it was.

    Raises:
        Conflict: Other content was saved for this run and step, and *replace* was not asked for.
        SourceCheckpoint: The source is damaged, or changed meanwhile.
    """
    started = time.monotonic()
    with rooms.lock_run(plan.run), _disk_explained(rooms, plan):
        return asked_again(rooms, plan.run, lambda view: _stored(rooms, plan, view, progress=progress, started=started))


def _stored(rooms: Rooms, plan: IngestPlan, view: RunView | None, *, progress: Progress, started: float) -> Ingested:
    with contextlib.ExitStack() as opened, _writer(rooms, plan) as writer:
        lost = lost_at(rooms, plan.run, plan.step)
        intent = opened.enter_context(_reserved(rooms, plan, view, _intent(rooms, plan, view)))
        content = transfer(
            plan.checkpoint,
            writer,
            progress,
            due=intent.due,
            known_before=bool(intent.rivals),
            moments=intent.moments,
        )
        check_unchanged(plan.checkpoint.found)
        commit, is_new, record_healed, published = _commit(rooms, plan, intent, content, writer, lost=lost)
    return Ingested(
        run=plan.run,
        step=commit.record.step,
        attempt=commit.record.attempt,
        commit=commit.id,
        is_new=is_new,
        record_healed=record_healed,
        layers=tuple(entry.layer for entry in commit.record.layers),
        layers_saved=tuple(entry.layer for entry in commit.record.layers if entry.saved_by(commit.record)),
        objects_new=published.count_new if published else 0,
        objects_reused=(published or writer).count_reused,
        bytes_new=published.bytes_new if published else 0,
        bytes_reused=(published or writer).bytes_reused,
        objects_healed=len(published.damaged) if published else 0,
        reused_read=not plan.trust_store,
        bytes_derived=content.bytes_derived,
        seconds=time.monotonic() - started,
        source=plan.checkpoint.found.folder / plan.checkpoint.found.tag,
        notes=(
            *plan.checkpoint.notes,
            *_doubts(plan, commit.record, is_new=is_new),
            *(_filled_in(plan, commit.record, view) if is_new else ()),
            *(_healed(published) if published else ()),
            *what_became_of(rooms, lost),
        ),
    )


def _writer(rooms: Rooms, plan: IngestPlan) -> ObjectWriter:
    return ObjectWriter(rooms.layout, rooms.files, rooms.objects, reads_reused=not plan.trust_store)


def _healed(writer: ObjectWriter) -> Iterator[str]:
    """Say that the store had rotted: other objects may have, too."""
    count = len(writer.damaged)
    if count:
        were = "object in the store was" if count == 1 else "objects in the store were"
        yield (
            f"{count} {were} damaged (first: {writer.damaged[0].id}) and written again from this checkpoint; "
            "layerstore verify --read-data looks at all the others"
        )


def _doubts(plan: IngestPlan, record: CommitRecord, *, is_new: bool) -> Iterator[str]:
    """Say that less is stored than was asked for: the step was saved before, under another policy."""
    saved = sum(entry.saved_by(record) for entry in record.layers)
    fell_back = record.policy.decisions.get(FELL_BACK)
    if not is_new and isinstance(fell_back, dict):
        yield (
            f"a repair has let {len(fell_back)} of {record.run}@{record.step}'s layers fall back to older saves; "
            "--replace stores them as this checkpoint has them"
        )
    elif not is_new and WITHOUT_MOMENTS in record.flags:
        yield (
            f"{record.run}@{record.step} is stored without its moments, which a collection has dropped; "
            "--replace stores them again"
        )
    elif not is_new and saved < len(record.layers) and record.policy.name != plan.policy.name:
        yield (
            f"{record.run}@{record.step} was saved under policy {record.policy.name}: {saved} of its "
            f"{len(record.layers)} layers are stored, the others are older; --replace stores what policy "
            f"{plan.policy.name} asks for"
        )


def _filled_in(plan: IngestPlan, record: CommitRecord, view: RunView | None) -> Iterator[str]:
    """Say that a policy has chosen the layers of a step below one that was there: it counts saves as they come."""
    tip = None if view is None else next(view.history(record.attempt), None)
    if plan.replace or tip is None or tip.step <= record.step:
        return
    if not all(entry.saved_by(record) for entry in record.layers):
        yield (
            f"{record.run}@{record.step} was filled in below {record.run}@{tip.step}: policy {record.policy.name} "
            "counted it as the newest save, and steps above it inherit nothing from it"
        )


@contextlib.contextmanager
def _disk_explained(rooms: Rooms, plan: IngestPlan) -> Iterator[None]:
    """Say who removes files of an ingest; add to a full disk's error how much was asked for and how much there is."""
    try:
        yield
    except StorageIO as exc:
        if exc.errno == errnos.ENOENT and rooms.layout.root in Path(exc.filename).parents:
            rooms.records.check_store()  # a migration moves folders, and is the better word for that
            if not all(folder.is_dir() for folder in (rooms.layout.tmp, rooms.layout.objects)):
                raise  # no collection removes folders
            raise Overtaken(
                f"files that this ingest had written were removed from the store: {exc}",
                hint="repeat the command; gc --grace 0s takes what others are writing: not beside an ingest or a save",
            ) from exc
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
    moments: bool = True
    """Whether they are to be stored: they are not where a collection has dropped them from what stands there."""


def _intent(rooms: Rooms, plan: IngestPlan, view: RunView | None) -> _Intent:
    rivals = rows_at(view, plan.step)
    names = frozenset(layer.layer for layer in plan.checkpoint.layers)
    if rivals and not (plan.replace or plan.opens_attempt):
        # Most likely the same again: only by the very layers that were stored then can it be seen to be the same.
        place, use = place_beside(rooms, rivals[0])
        moments = not all(lacks_moments(rooms, rival) for rival in rivals)
        return _Intent(place=place, policy=use, due=names - place.inherited.keys(), rivals=rivals, moments=moments)
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


@contextlib.contextmanager
def _reserved(rooms: Rooms, plan: IngestPlan, view: RunView | None, intent: _Intent) -> Iterator[_Intent]:
    """Keep the attempt that is to be opened from jobs that open one too; where they have it, open the next."""
    if not plan.opens_attempt:
        yield intent
        return
    found = reserve(rooms, plan.run, lambda taken: place_free(view, intent.place, taken))
    with found.lock:
        yield replaced(intent, place=found.place)


class _Outcome(NamedTuple):
    """What became of the record."""

    commit: Commit
    is_new: bool
    record_healed: bool
    published: ObjectWriter | None = None
    """What was written for it; None where nothing was."""


def _commit(
    rooms: Rooms,
    plan: IngestPlan,
    intent: _Intent,
    content: Content,
    writer: ObjectWriter,
    *,
    lost: Collection[RecordName],
) -> _Outcome:
    view = rooms.catalog.find(plan.run)
    # Training that went back may well come to the same bits again.
    again = None if plan.opens_attempt else _once_more(rooms, plan, intent, content, lost)
    if again is not None:
        return _brought_back(rooms, plan, again, intent, writer, view=view)
    if plan.replace and not plan.opens_attempt:
        going = of_attempt(rooms, lost, intent.place.attempt)
        if going:
            record = replacing(_record(plan, content, intent), (name.id for name in going))
            return _published(rooms, record, intent, writer)
    there = _as_it_stands(rooms, plan, intent, content, writer, view=view)
    if there is not None:
        return there
    if intent.rivals and not (plan.replace or plan.opens_attempt):
        raise Conflict(
            f"{plan.run}@{plan.step} is saved already, with other content (commit {intent.rivals[0].id[:12]}); "
            "nothing was changed",
            hint=_HOW_TO_SAVE_IT,
        )
    if not plan.opens_attempt:
        for row in elsewhere(view, plan.step):
            twin = rooms.catalog.commit(row.name)
            if is_same_content(rooms, plan, twin.record, content):
                if writer.damaged or not is_whole(rooms, twin.record):
                    # Written again, whosesoever it is: composites and pins outlive the attempt that saved it.
                    saved = frozenset(entry.layer for entry in twin.record.layers if entry.saved_by(twin.record))
                    return _written_again(rooms, plan, twin.record, replaced(intent, due=saved))
                check_not_abandoned(view, row)
                return _Outcome(twin, is_new=False, record_healed=False)
    # What is saved where a commit was dropped takes its place, and hides what hid it: so its id is a new one.
    return _published(rooms, _record(plan, content, intent), intent, writer)


def _as_it_stands(
    rooms: Rooms, plan: IngestPlan, intent: _Intent, content: Content, writer: ObjectWriter, *, view: RunView | None
) -> _Outcome | None:
    """Confirm or heal the rival that is this very save, or what a collection has left of it; None where none is."""
    for rival in intent.rivals:
        if plan.opens_attempt and not opens_the_same(view, rival, intent.place):
            continue
        is_trimmed = lacks_moments(rooms, rival)
        if plan.replace and is_trimmed:
            continue  # that is how they are asked for
        beside, use = place_beside(rooms, rival)
        if frozenset(rival.layer_names) - beside.inherited.keys() != intent.due:
            continue
        held = content_without_moments(content) if is_trimmed else content
        record = _record(plan, held, replaced(intent, place=beside, policy=use))
        if commit_id(record) == rival.id:
            # A collection may be taking it, and then it is new.
            is_staged = held.has_moments == content.has_moments
            return (
                _published(rooms, record, intent, writer) if is_staged else _written_again(rooms, plan, record, intent)
            )
    return None


def _written_again(rooms: Rooms, plan: IngestPlan, record: CommitRecord, intent: _Intent) -> _Outcome:
    """Store what *record*, which is there, has saved of the checkpoint: no other layers, and no moments it has not."""
    moments = WITHOUT_MOMENTS not in record.flags
    with _writer(rooms, plan) as writer:
        _ = transfer(plan.checkpoint, writer, Silent(), due=intent.due, known_before=True, moments=moments)
        check_unchanged(plan.checkpoint.found)
        return _published(rooms, record, intent, writer)


def _once_more(
    rooms: Rooms, plan: IngestPlan, intent: _Intent, content: Content, lost: Iterable[RecordName]
) -> CommitRecord | None:
    """Return the very record that is *lost*, if this checkpoint is what it was made from."""
    names = frozenset(layer.layer for layer in plan.checkpoint.layers)

    def made(place: Place, policy: PolicyUse | None) -> CommitRecord | None:
        if policy is not None and names - place.inherited.keys() != intent.due:
            return None  # it is known to have saved other layers
        return _record(plan, content, replaced(intent, place=place, policy=policy or intent.policy))

    return very_record(rooms, lost, beside=intent.place, made=made)


def _brought_back(
    rooms: Rooms, plan: IngestPlan, again: CommitRecord, intent: _Intent, writer: ObjectWriter, *, view: RunView | None
) -> _Outcome:
    """
    Publish *again*, which was lost, so that it is the one commit that shows at its place.

    Where another one was saved there since, a record of the same content hides both: one link, and no two side by side.
    """
    rivals = rivals_of(view, again)
    # What had replaced it failed, and was withdrawn: its own record would stay hidden.
    is_hidden = view is not None and commit_id(again) in view.hidden
    if not (rivals or is_hidden):
        return _published(rooms, again, intent, writer, is_lost=True)
    if rivals and not plan.replace:
        raise Conflict(
            f"{plan.run}@{plan.step} has lost the commit of this checkpoint ({commit_id(again)[:12]}), and another one "
            f"was saved in its place since (commit {rivals[0].id[:12]}); nothing was changed",
            hint=_HOW_TO_SAVE_IT,
        )
    record = replacing(again, (commit_id(again), *(row.id for row in rivals)))
    return _published(rooms, record, intent, writer)


def _published(
    rooms: Rooms, record: CommitRecord, intent: _Intent, writer: ObjectWriter, *, is_lost: bool = False
) -> _Outcome:
    """Publish all that *record* needs, and then the record; what *is_lost* is healed by it."""
    claim(rooms, writer, [entry for entry in record.layers if entry.layer not in intent.due])
    writer.publish()
    commit = make_commit(record, _observed(writer))
    is_damaged = rooms.records.is_damaged(rooms.records.name_of(commit))
    if is_damaged or is_lost:
        commit = as_first_saved(rooms, commit)
    if is_damaged:
        keep_damaged(rooms, rooms.records.name_of(commit))
    is_new = publish(rooms, writer, commit)
    return _Outcome(commit, is_new=is_new, record_healed=is_lost or (is_damaged and not is_new), published=writer)


def _observed(writer: ObjectWriter) -> Observed:
    return Observed(time_ns=time.time_ns(), bytes_new=writer.bytes_new, bytes_reused=writer.bytes_reused)


def _record(plan: IngestPlan, content: Content, intent: _Intent) -> CommitRecord:
    place, found = intent.place, plan.checkpoint.found
    layers = plan.checkpoint.layers
    if not content.has_moments:
        layers = tuple(replaced(layer, optimizer_step=None) for layer in layers)
    origin = Origin(run=plan.run, attempt=place.attempt, step=plan.step, save_number=place.save_number)
    return CommitRecord(
        run=plan.run,
        attempt=place.attempt,
        fork=place.fork,
        step=plan.step,
        save_number=place.save_number,
        world_size=plan.checkpoint.world_size,
        layers=entries_of(
            layers,
            due=intent.due,
            versions=content.versions,
            origin=origin,
            inherited=place.inherited,
        ),
        states=content.states,
        layout=SourceLayout(flavour=found.flavour, tag=found.tag, layer_pattern=plan.layer_pattern),
        policy=intent.policy,
        supersedes=place.supersedes,
        flags=() if content.has_moments else (WITHOUT_MOMENTS,),
    )
