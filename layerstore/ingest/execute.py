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

from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayerstoreError, NotFound, Overtaken, StorageIO
from layerstore.format import WITHOUT_MOMENTS, commit_id
from layerstore.history import (
    Place,
    has_shrunk,
    newest_attempt,
    place_beside,
    place_free,
    place_of,
    reserve,
    resolve,
    rows_at,
    view_read_again,
)
from layerstore.ingest.due import layers_due
from layerstore.ingest.plan import IngestPlan
from layerstore.ingest.transfer import Content, transfer
from layerstore.model import CommitId, CommitRecord, PolicyUse, SourceLayout
from layerstore.policy import Latest
from layerstore.progress import Progress
from layerstore.publish import Published, Transaction, make_pin, retire
from layerstore.storage import ObjectWriter, RecordName, RecordRow, Repository, RunView
from layerstore.tree import Tree

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
    """False if this content was saved before: then only what the store had lost was written."""
    record_healed: bool
    """Whether its record was damaged and is written again."""
    layers: tuple[str, ...]
    layers_saved: tuple[str, ...]
    """Those that were due; the others are inherited."""
    objects_new: int
    objects_reused: int
    bytes_new: int
    bytes_reused: int
    objects_healed: int
    """New ones that replace damaged objects of the store."""
    reused_read: bool
    """Whether reused objects were read and compared."""
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
        while True:
            ingest = _Ingest(repo, plan, view_read_again(repo, plan.run, plan.step), progress, started)
            try:
                ingested = ingest.run()
                break
            except NotFound:
                if ingest.view is None or not has_shrunk(repo, ingest.view):
                    raise
    if plan.pin is not None:
        make_pin(repo, plan.pin, resolve(repo, ingested.commit))
    return ingested


def _notes(
    plan: IngestPlan, record: CommitRecord, view: RunView | None, writer: ObjectWriter, *, is_new: bool
) -> Iterator[str]:
    """Say what is stored otherwise than the command suggests, and that the store had rotted."""
    called, saved = f"{record.run}@{record.step}", sum(entry.saved_by(record) for entry in record.layers)
    tip = None if view is None else next(view.history(record.attempt), None)
    is_whole = saved == len(record.layers)
    if not is_new and WITHOUT_MOMENTS in record.flags:
        yield f"{called} is stored without its moments, which a collection has dropped; --replace stores them again"
    elif not is_new and not is_whole and record.policy.name != plan.policy.name:
        yield (
            f"{called} was saved under policy {record.policy.name}: {saved} of its {len(record.layers)} layers are "
            f"stored, the others are older; --replace stores what policy {plan.policy.name} asks for"
        )
    elif is_new and not is_whole and not plan.replace and tip is not None and tip.step > record.step:
        yield (
            f"{called} was filled in below {record.run}@{tip.step}: policy {record.policy.name} "
            "counted it as the newest save, and steps above it inherit nothing from it"
        )
    if count := len(writer.damaged):
        were = "object in the store was" if count == 1 else "objects in the store were"
        yield (
            f"{count} {were} damaged (first: {writer.damaged[0].id}) and written again from this checkpoint; "
            "layerstore verify --read-data looks at all the others"
        )


@contextlib.contextmanager
def _disk_explained(repo: Repository, plan: IngestPlan) -> Iterator[None]:
    """Explain removed files, and how much a full disk lacks."""
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
            exc.message += (
                f"; this checkpoint needs up to {plan.checkpoint.size_bytes} bytes, "
                f"{repo.files.free_bytes(repo.layout.root)} are free; earlier commits are not affected"
            )
        raise


# -- the record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ingest:
    """A checkpoint on its way into a run."""

    repo: Repository
    plan: IngestPlan
    view: RunView | None
    """The run before."""
    progress: Progress
    started: float

    def run(self) -> Ingested:
        """Find out whether this was saved before, and store it."""
        rival = self._rival()
        done = None if rival is None else self._beside(rival)
        return done or self._as_new(rival)

    def _rival(self) -> RecordRow | None:
        """Return the commit at the checkpoint's step: in the newest attempt's history, else in another one."""
        rows = rows_at(self.view, self.plan.step)
        if self.view is None or not rows:
            return None
        if self.plan.opens_attempt:
            return next((row for row in rows if self.view.of_attempt(row.attempt)[0].id == row.id), None)
        return next((row for row in rows if self._is_meant(row)), rows[0])

    def _is_meant(self, row: RecordRow) -> bool:
        """Whether *row* is in the newest attempt's history."""
        view = self.view
        return view is not None and any(
            each.id == row.id for each in view.history(newest_attempt(view), step=self.plan.step)
        )

    def _beside(self, rival: RecordRow) -> Ingested | None:
        """Put back what the store has lost of *rival*, if that has the same content; return None if it has not."""
        plan = self.plan
        place, use = place_beside(self.repo, rival)
        trimmed = WITHOUT_MOMENTS in self.repo.catalog.commit(rival.name).record.flags
        if plan.replace and (trimmed or use.name != plan.policy.name):
            return None  # that is how its moments are asked for, or more of its layers
        if plan.opens_attempt and not self._opens_the_same(rival):
            return None
        due = frozenset(rival.layer_names) - place.inherited.keys()
        with Transaction(self.repo, reads_reused=not plan.trust_store) as tx:
            content = transfer(
                plan.checkpoint, tx.objects, self.progress, due=due, known_before=True, moments=not trimmed
            )
            record = self._record(place, use, content, due)
            if commit_id(record) == rival.id:
                for entry in place.inherited.values():
                    tx.inherit(entry)
                observed = self.repo.catalog.commit(rival.name).observed
                return self._outcome(tx, tx.commit(record, observed=observed), content)
        if not plan.replace and not plan.opens_attempt and self._is_meant(rival):
            raise Conflict(
                f"{plan.run}@{plan.step} is saved already, with other content (commit {rival.id[:12]}); "
                "nothing was changed",
                hint=_HOW_TO_SAVE_IT,
            )
        return None

    def _as_new(self, rival: RecordRow | None) -> Ingested:
        """Store a commit of its own, which replaces *rival* if that was asked for."""
        plan, view = self.plan, self.view
        replaced_row = rival if plan.replace and not plan.opens_attempt else None
        if replaced_row is not None:
            retire(self.repo, self.repo.catalog.commit(replaced_row.name))  # else what it replaced would reappear
        with contextlib.ExitStack() as opened:
            place = self._place(view, [] if replaced_row is None else [replaced_row])
            if plan.opens_attempt:
                found = reserve(self.repo, plan.run, lambda taken: place_free(view, place, taken))
                opened.enter_context(found.lock)
                place = found.place
            due = frozenset(layer.layer for layer in plan.checkpoint.layers)
            decisions: dict[Tree, Tree] = {}
            if not isinstance(plan.policy, Latest):
                due, decisions = layers_due(self.repo, plan.checkpoint, place, plan.policy, run=plan.run)
            use = PolicyUse(name=plan.policy.name, parameters=plan.policy.parameters, decisions=decisions)
            tx = opened.enter_context(Transaction(self.repo, reads_reused=not plan.trust_store))
            content = transfer(plan.checkpoint, tx.objects, self.progress, due=due, known_before=rival is not None)
            record = self._record(place, use, content, due)
            for name, problem in self._damaged().items():
                if name.id != commit_id(record):
                    drop = f"layerstore drop {plan.run}@{plan.step}"
                    raise IntegrityError(
                        f"{problem}; it may be this very save, so nothing was changed",
                        hint=f"layerstore repair --from COPY may heal it; {drop} gives it up",
                    )
            for entry in record.layers:
                if entry.layer not in due:
                    tx.inherit(entry)
            return self._outcome(tx, tx.commit(record), content)

    def _place(self, view: RunView | None, rivals: list[RecordRow]) -> Place:
        plan = self.plan
        return place_of(
            self.repo, view, step=plan.step, rivals=rivals, rollback=plan.rollback, resumed_from=plan.resumed_from
        )

    def _opens_the_same(self, rival: RecordRow) -> bool:
        """Whether this command would have opened *rival*'s attempt, had it not been there."""
        assert self.view is not None, "the rival is of the view"
        rows = {key: row for key, row in self.view.rows.items() if row.attempt < rival.attempt}
        try:
            return self._place(replaced(self.view, rows=rows), []).lineage == rival.lineage
        except InvalidInput:
            return False

    def _damaged(self) -> dict[RecordName, LayerstoreError]:
        damaged = {} if self.view is None else self.view.damaged
        return {name: problem for name, problem in damaged.items() if name.step == self.plan.step}

    def _record(self, place: Place, policy: PolicyUse, content: Content, due: frozenset[str]) -> CommitRecord:
        plan, checkpoint = self.plan, self.plan.checkpoint
        layers, found = checkpoint.layers, checkpoint.found
        if not content.has_moments:
            layers = tuple(replaced(layer, optimizer_step=None) for layer in layers)
        return place.record(
            run=plan.run,
            step=plan.step,
            layers=layers,
            due=due,
            versions=content.versions,
            states=content.states,
            world_size=checkpoint.world_size,
            layout=SourceLayout(flavour=found.flavour, tag=found.tag, layer_pattern=plan.layer_pattern),
            policy=policy,
            flags=() if content.has_moments else (WITHOUT_MOMENTS,),
        )

    def _outcome(self, tx: Transaction, published: Published, content: Content) -> Ingested:
        plan, writer, commit, is_new = self.plan, tx.objects, published.commit, published.is_new
        record, source = commit.record, plan.checkpoint.found
        return Ingested(
            run=plan.run,
            step=record.step,
            attempt=record.attempt,
            commit=commit.id,
            is_new=is_new,
            record_healed=bool(self._damaged()) and not is_new,
            layers=tuple(entry.layer for entry in record.layers),
            layers_saved=tuple(entry.layer for entry in record.layers if entry.saved_by(record)),
            objects_new=writer.count_new,
            objects_reused=writer.count_reused,
            bytes_new=writer.bytes_new,
            bytes_reused=writer.bytes_reused,
            objects_healed=len(writer.damaged),
            reused_read=not plan.trust_store,
            bytes_derived=content.bytes_derived,
            seconds=time.monotonic() - self.started,
            source=source.folder / source.tag,
            notes=(*plan.checkpoint.notes, *_notes(plan, record, self.view, writer, is_new=is_new)),
        )
