"""
Ingest: a checkpoint on disk becomes a commit.

Write order (docs/reference/format.md, section 6): objects, then version and state blobs, then the record,
then the index. The link of the record is what makes it a commit.
"""

import contextlib
import errno as errnos
import time
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import NamedTuple

from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayerstoreError, Overtaken, StorageIO
from layerstore.format import WITHOUT_MOMENTS, commit_id
from layerstore.history import (
    Place,
    asked_again,
    entries_of,
    newest_attempt,
    place_beside,
    place_free,
    place_of,
    reserve,
    rows_at,
    with_records_read,
)
from layerstore.ingest.due import layers_due
from layerstore.ingest.plan import IngestPlan
from layerstore.ingest.transfer import Content, transfer
from layerstore.model import CommitId, CommitRecord, Origin, PolicyUse, SourceLayout
from layerstore.policy import Latest
from layerstore.progress import Progress
from layerstore.publish import Published, Transaction
from layerstore.storage import ObjectWriter, RecordName, RecordRow, Repository, RunView
from layerstore.tree import Tree
from layerstore.zero3 import check_unchanged

_HOW_TO_SAVE_IT = (
    "--replace puts it in the place of the old commit, --rollback says that training went back to an earlier step, "
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


def execute_ingest(repo: Repository, plan: IngestPlan, *, progress: Progress) -> Ingested:
    """
    Store *plan*'s checkpoint.

    Once this returns the commit survives a power cut. If it raises, every earlier commit is as it was.

    Raises:
        Conflict: Other content was saved for this run and step, and *replace* was not asked for.
        SourceCheckpoint: The source is damaged, or changed meanwhile.
        Overtaken: A collection took what was to be reused; the same command again succeeds.
    """
    started = time.monotonic()
    with repo.lock_run(plan.run), _disk_explained(repo, plan):
        return asked_again(repo, plan.run, lambda view: _stored(repo, plan, view, progress=progress, started=started))


def _stored(
    repo: Repository, plan: IngestPlan, view: RunView | None, *, progress: Progress, started: float
) -> Ingested:
    if view is not None:
        view = with_records_read(repo, view, plan.step)
    rival = _rival(view, plan)
    outcome = None
    if rival is not None:
        outcome = _stored_beside(repo, plan, view, rival, progress)
    if outcome is None:
        outcome = _stored_as_new(repo, plan, view, rival, progress)
    record, writer = outcome.published.commit.record, outcome.objects
    return Ingested(
        run=plan.run,
        step=record.step,
        attempt=record.attempt,
        commit=outcome.published.commit.id,
        is_new=outcome.published.is_new,
        record_healed=bool(_damaged_at(view, plan.step)) and not outcome.published.is_new,
        layers=tuple(entry.layer for entry in record.layers),
        layers_saved=tuple(entry.layer for entry in record.layers if entry.saved_by(record)),
        objects_new=writer.count_new,
        objects_reused=writer.count_reused,
        bytes_new=writer.bytes_new,
        bytes_reused=writer.bytes_reused,
        objects_healed=len(writer.damaged),
        reused_read=not plan.trust_store,
        bytes_derived=outcome.content.bytes_derived,
        seconds=time.monotonic() - started,
        source=plan.checkpoint.found.folder / plan.checkpoint.found.tag,
        notes=(
            *plan.checkpoint.notes,
            *_doubts(plan, record, is_new=outcome.published.is_new),
            *(_filled_in(plan, record, view) if outcome.published.is_new else ()),
            *_healed(writer),
        ),
    )


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
    if not is_new and WITHOUT_MOMENTS in record.flags:
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
def _disk_explained(repo: Repository, plan: IngestPlan) -> Iterator[None]:
    """Say who removes files of an ingest; add to a full disk's error how much was asked for and how much there is."""
    try:
        yield
    except StorageIO as exc:
        if exc.errno == errnos.ENOENT and repo.layout.root in Path(exc.filename).parents:
            repo.records.check_store()  # a migration moves folders, and is the better word for that
            if not all(folder.is_dir() for folder in (repo.layout.tmp, repo.layout.objects)):
                raise  # no collection removes folders
            raise Overtaken(
                f"files that this ingest had written were removed from the store: {exc}",
                hint="repeat the command; gc --grace 0s takes what others are writing: not beside an ingest or a save",
            ) from exc
        if exc.kind == "no_space":
            free = repo.files.free_bytes(repo.layout.root)
            exc.message += (
                f"; this checkpoint needs up to {plan.checkpoint.size_bytes} bytes, {free} are free; "
                "earlier commits are not affected"
            )
        raise


# -- the record ----------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """What became of the checkpoint."""

    published: Published
    content: Content
    objects: ObjectWriter


def _rival(view: RunView | None, plan: IngestPlan) -> RecordRow | None:
    """Return the commit that stands at the checkpoint's step: in the newest attempt's history, else in another one."""
    rows = rows_at(view, plan.step)
    if view is None or not rows:
        return None
    if plan.opens_attempt:
        return next((row for row in rows if view.of_attempt(row.attempt)[0].id == row.id), None)
    history = {row.id for row in view.history(newest_attempt(view), step=plan.step)}
    return next((row for row in rows if row.id in history), rows[0])


def _stored_beside(
    repo: Repository, plan: IngestPlan, view: RunView | None, rival: RecordRow, progress: Progress
) -> _Outcome | None:
    """
    Store what *rival* has saved of the checkpoint, if that is the same; return None if it is other content.

    The same content is saved already; what the store has lost of it is put back.
    """
    place, use = place_beside(repo, rival)
    is_trimmed = WITHOUT_MOMENTS in repo.catalog.commit(rival.name).record.flags
    if plan.replace and (is_trimmed or use.name != plan.policy.name):
        return None  # that is how its moments are asked for, or more of its layers
    if plan.opens_attempt and not _opens_the_same(repo, view, plan, rival):
        return None
    due = frozenset(rival.layer_names) - place.inherited.keys()
    with _transaction(repo, plan) as tx:
        content = _transfer(plan, tx, progress, due=due, known_before=True, moments=not is_trimmed)
        record = _record(plan, content, place, use, due)
        if commit_id(record) != rival.id:
            _check_may_differ(view, plan, rival)
            return None
        for entry in place.inherited.values():
            tx.inherit(entry)
        return _Outcome(tx.commit(record, observed=repo.catalog.commit(rival.name).observed), content, tx.objects)


def _stored_as_new(
    repo: Repository, plan: IngestPlan, view: RunView | None, rival: RecordRow | None, progress: Progress
) -> _Outcome:
    with contextlib.ExitStack() as opened:
        replaced = [rival] if rival is not None and plan.replace and not plan.opens_attempt else []
        place = place_of(
            repo, view, step=plan.step, rivals=replaced, rollback=plan.rollback, resumed_from=plan.resumed_from
        )
        if plan.opens_attempt:
            found = reserve(repo, plan.run, lambda taken: place_free(view, place, taken))
            opened.enter_context(found.lock)
            place = found.place
        due, decisions = _due(repo, plan, place)
        use = PolicyUse(name=plan.policy.name, parameters=plan.policy.parameters, decisions=decisions)
        tx = opened.enter_context(_transaction(repo, plan))
        content = _transfer(plan, tx, progress, due=due, known_before=rival is not None)
        record = _record(plan, content, place, use, due)
        for name, problem in _damaged_at(view, plan.step):
            if name.id != commit_id(record):
                drop = f"layerstore drop {plan.run}@{plan.step}"
                raise IntegrityError(
                    f"{problem}; it may be this very save, so nothing was changed",
                    hint=f"layerstore repair --from COPY may heal it; {drop} gives it up",
                )
        for entry in record.layers:
            if entry.layer not in due:
                tx.inherit(entry)
        return _Outcome(tx.commit(record), content, tx.objects)


def _due(repo: Repository, plan: IngestPlan, place: Place) -> tuple[frozenset[str], dict[Tree, Tree]]:
    if isinstance(plan.policy, Latest):
        return frozenset(layer.layer for layer in plan.checkpoint.layers), {}
    return layers_due(repo, plan.checkpoint, place, plan.policy, run=plan.run)


def _transaction(repo: Repository, plan: IngestPlan) -> Transaction:
    return Transaction(repo, reads_reused=not plan.trust_store)


def _transfer(
    plan: IngestPlan,
    tx: Transaction,
    progress: Progress,
    *,
    due: frozenset[str],
    known_before: bool,
    moments: bool = True,
) -> Content:
    content = transfer(plan.checkpoint, tx.objects, progress, due=due, known_before=known_before, moments=moments)
    check_unchanged(plan.checkpoint.found)
    return content


def _opens_the_same(repo: Repository, view: RunView | None, plan: IngestPlan, rival: RecordRow) -> bool:
    """Whether the same command, given before *rival*'s attempt was there, would have opened that."""
    before = None
    if view is not None:
        before = replaced(view, rows={key: row for key, row in view.rows.items() if row.attempt < rival.attempt})
    try:
        place = place_of(
            repo, before, step=plan.step, rivals=[], rollback=plan.rollback, resumed_from=plan.resumed_from
        )
    except InvalidInput:
        return False
    return place.lineage == rival.lineage


def _check_may_differ(view: RunView | None, plan: IngestPlan, rival: RecordRow) -> None:
    """Raise Conflict if *rival*, which has other content, is what the step means."""
    if plan.replace or plan.opens_attempt or view is None:
        return
    if any(row.id == rival.id for row in view.history(newest_attempt(view), step=plan.step)):
        raise Conflict(
            f"{plan.run}@{plan.step} is saved already, with other content (commit {rival.id[:12]}); "
            "nothing was changed",
            hint=_HOW_TO_SAVE_IT,
        )


def _damaged_at(view: RunView | None, step: int) -> list[tuple[RecordName, LayerstoreError]]:
    return [] if view is None else [each for each in view.damaged.items() if each[0].step == step]


def _record(plan: IngestPlan, content: Content, place: Place, policy: PolicyUse, due: frozenset[str]) -> CommitRecord:
    found = plan.checkpoint.found
    layers = plan.checkpoint.layers
    if not content.has_moments:
        layers = tuple(replaced(layer, optimizer_step=None) for layer in layers)
    origin = Origin(run=plan.run, attempt=place.attempt, step=plan.step, save_number=place.save_number)
    return CommitRecord(
        run=plan.run,
        attempt=place.attempt,
        lineage=place.lineage,
        step=plan.step,
        save_number=place.save_number,
        world_size=plan.checkpoint.world_size,
        stage=3,
        layers=entries_of(layers, due=due, versions=content.versions, origin=origin, inherited=place.inherited),
        states=content.states,
        layout=SourceLayout(flavour=found.flavour, tag=found.tag, layer_pattern=plan.layer_pattern),
        policy=policy,
        supersedes=place.supersedes,
        flags=() if content.has_moments else (WITHOUT_MOMENTS,),
    )
