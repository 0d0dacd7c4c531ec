"""
Ingest: turn a checkpoint on disk into a commit.

Write order (docs/reference/format.md, section 6): objects, then version and state blobs, then the record, then the
index. Linking the record makes it a commit.
"""

import contextlib
import errno as errnos
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

from layerstore.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    NotFound,
    Overtaken,
    StorageIO,
)
from layerstore.filenames import SUMMARY
from layerstore.format import WITHOUT_MOMENTS, commit_id
from layerstore.history import (
    NextCommit,
    has_shrunk,
    reserve,
    resolve,
    saves_below,
    view_read_again,
)
from layerstore.ingest.ingested import Ingested
from layerstore.ingest.selection import layers_due
from layerstore.ingest.sources import read_source
from layerstore.ingest_options import IngestOptions
from layerstore.json_text import parse_json
from layerstore.limits import OWN_JSON_BYTES_MAX
from layerstore.model import CommitRecord, LayerEntry, PolicyUse, SourceLayout
from layerstore.policy import Latest
from layerstore.precision import compact_counts, keyframes
from layerstore.progress import Progress
from layerstore.publish import Published, Transaction, check_pin_means, make_pin, retire
from layerstore.staging import CompactLayers, Content, can_refer
from layerstore.storage import ObjectWriter, RecordName, RecordRow, Repository, RunView
from layerstore.tree import Tree
from layerstore.units import short_id, size
from layerstore.zero3 import Checkpoint

_HOW_TO_SAVE_IT = (
    "use --replace to replace the old commit, --rollback if training went back to an earlier step, "
    "--run NAME if this is another run"
)
_HOW_TO_FIND_A_BASE = (
    "use --onto with the commit that the folder was composed or trained from; or --replace, or --run NAME to keep both"
)
_HOW_TO_KEEP_A_MIXTURE = (
    "layerstore compose wrote this folder from what a store has: compose --pin NAME keeps a mixture there, "
    "--run NAME stores this as another run"
)
_HOW_TO_KEEP_A_COPY = (
    "layerstore compose wrote this folder from one save, which its store has; --run NAME stores this as another run"
)


def ingest(repo: Repository, path: Path, options: IngestOptions, *, progress: Progress) -> Ingested:
    """
    Store the checkpoint at *path*.

    Once this returns, the commit survives a power cut. If it raises, all earlier commits are unchanged.
    """
    source = read_source(repo, path, options)
    run, checkpoint, transfer_it = source.run, source.checkpoint, source.transfer
    started = time.monotonic()
    with repo.lock_run(run), _disk_explained(repo, checkpoint):
        while True:
            view = view_read_again(repo, run, checkpoint.step)
            try:
                ingested = _Ingest(repo, options, run, checkpoint, transfer_it, view, progress, started).stored()
                break
            except NotFound:
                # A collection has removed a record that this ingest relied on: begin again with what is left.
                if view is None or not has_shrunk(repo, view):
                    raise
    if options.pin is not None:
        # By its id, because the run's name may now refer to a newer commit.
        make_pin(repo, options.pin, resolve(repo, ingested.commit))
    return ingested


def _notes(
    options: IngestOptions, record: CommitRecord, view: RunView | None, writer: ObjectWriter, *, is_new: bool
) -> Iterator[str]:
    """Yield notes on where the stored commit differs from what the command suggests, and on rotted objects."""
    reference, saved = f"{record.run}@{record.step}", sum(entry.saved_by(record) for entry in record.layers)
    tip = None if view is None else next(view.history(record.attempt), None)
    is_whole = saved == len(record.layers)
    if not is_new and WITHOUT_MOMENTS in record.flags:
        yield f"{reference} is stored without its moments, which gc has removed; --replace stores them again"
    elif not is_new and not is_whole and record.policy.name != options.policy.name:
        yield (
            f"{reference} was saved under policy {record.policy.name}: {saved} of its {len(record.layers)} layers are "
            f"stored, the others are older; --replace stores what policy {options.policy.name} asks for"
        )
    elif not is_new and record.precision != options.precision and _has_own_compact(record):
        yield f"{reference} was saved in precision {record.precision}; --replace stores it as {options.precision}"
    elif is_new and not is_whole and not options.replace and tip is not None and tip.step > record.step:
        yield (
            f"{reference} was ingested after {record.run}@{tip.step}: policy {record.policy.name} "
            "counted it as the newest save, and later steps inherit nothing from it"
        )
    if count := len(writer.damaged):
        were = "object in the store was" if count == 1 else "objects in the store were"
        yield (
            f"{count} {were} damaged (first: {writer.damaged[0].id}) and written again from this checkpoint; "
            "layerstore verify --read-data checks all other objects"
        )


def _has_own_compact(record: CommitRecord) -> bool:
    """Whether *record* itself saved a layer that is not kept bit for bit."""
    return any(entry.compact and entry.saved_by(record) for entry in record.layers)


def _exact_notes(layers: Sequence[str]) -> Iterator[str]:
    """Yield a note on *layers*, if any, which were to be compact but are kept exactly."""
    if layers:
        others = f" and {len(layers) - 1} more are" if len(layers) > 1 else " is"
        yield f"{layers[0]}{others} kept exactly: no intact, exact version has the same number of ranks"


@contextlib.contextmanager
def _disk_explained(repo: Repository, checkpoint: Checkpoint) -> Iterator[None]:
    """Explain errors about removed files; on a full disk, add how much space is needed and how much is free."""
    try:
        yield
    except StorageIO as exc:
        if exc.errno == errnos.ENOENT and repo.layout.root in Path(exc.filename).parents:
            repo.records.check_store()  # if a migration moved the folders, this raises the better error
            if not all(folder.is_dir() for folder in (repo.layout.tmp, repo.layout.objects)):
                raise  # not a collection's doing: it removes no folders
            raise Overtaken(
                f"files that this ingest had written were removed from the store: {exc}",
                hint="repeat the command; never run gc --grace 0s during an ingest or a save: it removes their files",
            ) from exc
        if exc.kind == "no_space" and repo.remote is None:
            exc.message += (
                f"; this checkpoint needs up to {size(checkpoint.size_bytes)}, "
                f"{size(repo.files.room(repo.layout.root).free_bytes)} are free; earlier commits are not affected"
            )
        raise


# -- the record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ingest:
    repo: Repository
    options: IngestOptions
    run: str
    checkpoint: Checkpoint
    transfer: Callable[..., Content]
    view: RunView | None
    """The run before this ingest."""
    progress: Progress
    started: float
    kept_exactly: list[str] = field(default_factory=list)
    """Layers that would have been compact, but have no exact version to refer to."""

    def stored(self) -> Ingested:
        """Store the checkpoint, unless it was saved before."""
        rival = self._existing_commit()
        replaced_rows = self._replaced(rival)
        is_ambiguous = len(replaced_rows) > 1  # then even a commit with this content is replaced
        healed = None if rival is None or is_ambiguous else self._heal_existing(rival)
        return healed or self._as_new(replaced_rows, known_before=rival is not None)

    def _replaced(self, rival: RecordRow | None) -> list[RecordRow]:
        """Return the commits to replace: those at *rival*'s step, if *rival* is in the newest attempt's history."""
        if rival is None or not self.options.replace or self.options.opens_attempt or not self._is_meant(rival):
            return []
        assert self.view is not None, "the rival is in the view"
        return [row for row in self.view.of_attempt(rival.attempt) if row.step == rival.step]

    def _existing_commit(self) -> RecordRow | None:
        """Return the commit at the checkpoint's step: from the newest attempt's history, otherwise from any attempt."""
        if self.view is None:
            return None
        rows = [row for row in self.view.visible if row.step == self.checkpoint.step]
        rows.sort(key=lambda row: row.attempt, reverse=True)
        if self.options.opens_attempt:
            # A command that opens an attempt may be repeated: its earlier commit is then the first of an attempt.
            return next((row for row in rows if self.view.of_attempt(row.attempt)[0].id == row.id), None)
        return next((row for row in rows if self._is_meant(row)), next(iter(rows), None))

    def _is_meant(self, row: RecordRow) -> bool:
        """Whether *row* is in the newest attempt's history."""
        view = self.view
        return view is not None and any(
            other.id == row.id for other in view.history(view.newest_attempt, step=self.checkpoint.step)
        )

    def _heal_existing(self, rival: RecordRow) -> Ingested | None:
        """Restore what the store has lost of *rival*, if the content is the same; return None if it is not."""
        options = self.options
        old = self.repo.catalog.commit(rival.name)
        # Stage the content under *rival*'s policy and at its position, so that equal content gets the same id.
        place, trimmed = NextCommit.of(old.record), WITHOUT_MOMENTS in old.record.flags
        as_saved = (old.record.policy.name, old.record.precision)
        if options.replace and (trimmed or as_saved != (options.policy.name, options.precision)):
            return None  # the user wants its moments back, more of its layers, or another precision
        if options.opens_attempt and not self._opens_the_same(rival):
            return None
        due = frozenset(layer.layer for layer in self.checkpoint.layers) - place.inherited.keys()
        own = {entry.layer: entry for entry in old.record.layers if entry.layer in due and entry.compact}
        counts = {layer: entry.compact for layer, entry in own.items()}
        compact = self._compact_as(old.record, own)
        with Transaction(self.repo, reads_reused=not options.trust_store) as tx:
            content = self._staged(tx, due, compact, known_before=True, moments=not trimmed)
            record = self._record(
                place, old.record.policy, content, due, precision=old.record.precision, compact=counts
            )
            # The content is the same: committing it again restores whatever is lost or damaged.
            if commit_id(record) == rival.id:
                for entry in place.inherited.values():
                    tx.inherit(entry)
                return self._outcome(tx, tx.commit(record, observed=old.observed), content)
        if not options.replace and not options.opens_attempt and self._is_meant(rival):
            raise Conflict(
                f"{self.run}@{self.checkpoint.step} is saved already, with other content "
                f"(commit {short_id(rival.id)}); nothing was changed",
                hint=self._how_to_keep_both(),
            )
        return None

    def _how_to_keep_both(self) -> str:
        if self.options.onto is not None:
            return _HOW_TO_FIND_A_BASE
        summary = self._summary()
        if summary is None:
            return _HOW_TO_SAVE_IT
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # anyone may have written the file
            if "mean" not in summary and all(age["steps"] == 0 for age in summary["staleness"]["layers"].values()):
                return _HOW_TO_KEEP_A_COPY
        return _HOW_TO_KEEP_A_MIXTURE

    def _summary(self) -> dict[str, Any] | None:
        """Return the summary that compose wrote in the folder: empty if it cannot be read, None if there is none."""
        summary = None
        # Even if its summary cannot be read, compose wrote the folder: its layers may come from several saves.
        with contextlib.suppress(LayerstoreError, ValueError):
            path = self.checkpoint.found.folder / SUMMARY
            data = self.repo.files.read_if_there(path, size_bytes_max=OWN_JSON_BYTES_MAX)
            if data is None:
                return None
            summary = parse_json(data)
        return summary if isinstance(summary, dict) else {}

    def _compact_as(self, record: CommitRecord, own: Mapping[str, LayerEntry]) -> CompactLayers:
        """Return how *record* kept its compact layers *own*; where a version is lost, how the previous save did."""
        assert self.view is not None, "the record is in the view"
        before = next(saves_below(self.view, attempt=record.attempt, step=record.step), None)
        older = {}
        for layer, entry in own.items():
            earlier = None if before is None else before.entries([layer]).get(layer)
            versions = filter(
                None, (self.repo.whole_version_of(saved) for saved in (entry, earlier) if saved is not None)
            )
            if (version := next(versions, None)) is not None:
                older[layer] = version
        return CompactLayers(keyframes(record.precision, None).precision, older)

    def _as_new(self, replaced_rows: list[RecordRow], *, known_before: bool) -> Ingested:
        """Store a new commit in place of *replaced_rows*."""
        options, view = self.options, self.view
        for row in replaced_rows:
            retire(self.repo, self.repo.catalog.commit(row.name))  # otherwise commits that it replaced would reappear
        with contextlib.ExitStack() as opened:
            place = self._place(view, replaced_rows)
            if options.opens_attempt:
                reserved = reserve(self.repo, self.run, lambda taken: place.avoiding(view, taken))
                opened.enter_context(reserved.lock)
                place = reserved.place
            due = frozenset(layer.layer for layer in self.checkpoint.layers)
            decisions: dict[Tree, Tree] = {}
            if not isinstance(options.policy, Latest):
                due, decisions = layers_due(self.repo, self.checkpoint.layers, place, options.policy, run=self.run)
            use = PolicyUse(name=options.policy.name, parameters=options.policy.parameters, decisions=decisions)
            tx = opened.enter_context(Transaction(self.repo, reads_reused=not options.trust_store))
            compact = self._compact(place, due)
            content = self._staged(tx, due, compact, known_before=known_before)
            # By what was actually coded: a layer that was to be compact may have had nothing to code.
            counts = compact_counts(place.inherited, {loss.layer for loss in content.losses})
            record = self._record(place, use, content, due, precision=options.precision, compact=counts)
            # Only now is the commit's id known: a damaged record with that id is this very save.
            for name, problem in self._damaged().items():
                if name.id != commit_id(record):
                    drop = f"layerstore drop {self.run}@{self.checkpoint.step}"
                    raise IntegrityError(
                        f"{problem}; it may be this very save, so nothing was changed",
                        hint=f"layerstore repair --from COPY may heal it; {drop} removes it",
                    )
            if options.pin is not None:
                check_pin_means(self.repo, options.pin, commit_id(record))
            # As late as possible: inherited files are touched right before the record that refers to them is written.
            for entry in record.layers:
                if entry.layer not in due:
                    tx.inherit(entry)
            observed = replaced(tx.observed(), losses=content.losses)
            return self._outcome(tx, tx.commit(record, observed=observed), content)

    def _staged(
        self,
        tx: Transaction,
        due: frozenset[str],
        compact: CompactLayers,
        *,
        known_before: bool,
        moments: bool = True,
    ) -> Content:
        """Stage the content; explain damage to objects that compact layers refer to: this checkpoint cannot heal it."""
        try:
            return self.transfer(
                tx.objects, self.progress, due=due, known_before=known_before, moments=moments, compact=compact
            )
        except IntegrityError as exc:
            damaged = exc.facts.get("object_id")
            if damaged not in {stored.id for layer in compact.older for stored in compact.references(layer)}:
                raise
            raise IntegrityError(
                f"object {damaged}, which {self.run}'s compact saves refer to, is damaged; nothing was changed",
                hint="layerstore repair --read-data --from COPY, or ingest again the checkpoint that it came from; "
                "--precision exact saves without it",
                object_id=damaged,
            ) from exc

    def _compact(self, place: NextCommit, due: frozenset[str]) -> CompactLayers:
        """Return which of the layers *due* need not be exact this time, and have an exact version to refer to."""
        keyframes, older = self.options.keyframes, {}
        for layer in self.checkpoint.layers:
            entry = place.inherited.get(layer.layer) if layer.layer in due else None
            if entry is None or keyframes.is_exact(entry.compact):
                continue
            version = self.repo.whole_version_of(entry)
            if version is not None and can_refer(layer, keyframes.precision, version):
                older[layer.layer] = version
            else:
                self.kept_exactly.append(layer.layer)
        return CompactLayers(keyframes.precision, older)

    def _place(self, view: RunView | None, rivals: list[RecordRow]) -> NextCommit:
        return NextCommit.at_step(
            self.repo,
            view,
            self.checkpoint.step,
            rivals=rivals,
            rollback=self.options.rollback,
            resumed_from=self.options.resumed_from,
        )

    def _opens_the_same(self, rival: RecordRow) -> bool:
        """Whether this command would open *rival*'s attempt if the attempt did not exist yet."""
        assert self.view is not None, "the rival is in the view"
        # The run as it was just before that attempt was opened: without it and all later attempts.
        rows = {key: row for key, row in self.view.rows.items() if row.attempt < rival.attempt}
        try:
            return self._place(replaced(self.view, rows=rows), []).lineage == rival.lineage
        except InvalidInput:
            return False  # without that attempt, this command would have been refused

    def _damaged(self) -> dict[RecordName, LayerstoreError]:
        damaged = {} if self.view is None else self.view.damaged
        return {name: problem for name, problem in damaged.items() if name.step == self.checkpoint.step}

    def _record(
        self,
        place: NextCommit,
        policy: PolicyUse,
        content: Content,
        due: frozenset[str],
        *,
        precision: str,
        compact: Mapping[str, int],
    ) -> CommitRecord:
        layers, found = self.checkpoint.layers, self.checkpoint.found
        if not content.has_moments:
            layers = tuple(replaced(layer, optimizer_step=None) for layer in layers)
        return place.record(
            run=self.run,
            step=self.checkpoint.step,
            layers=layers,
            due=due,
            versions=content.versions,
            states=content.states,
            world_size=self.checkpoint.world_size,
            stage=self.checkpoint.stage,
            layout=SourceLayout(flavour=found.flavour, tag=found.tag, layer_pattern=self.checkpoint.layer_pattern),
            policy=policy,
            precision=precision,
            compact=compact,
            flags=(*self.checkpoint.flags, *(() if content.has_moments else (WITHOUT_MOMENTS,))),
        )

    def _origin_notes(self) -> Iterator[str]:
        """If compose wrote the folder, yield notes on what the commit will not show about the origin of its layers."""
        summary = self._summary() or {}
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # anyone may have written the file
            if summary["step"] != self.checkpoint.step:
                return
            layers, base = len(summary["layers"]), f"{summary['run']}@{self.checkpoint.step}"
            if summary.get("mixture"):
                yield f"it was composed from several saves ({base} and others): log shows them as one"
            if count := len(summary["compact"]):
                yield (
                    f"{count} of {layers} layers were composed from a save that was not kept bit for bit "
                    f"({base}): they are stored as this folder has them, not as training had them"
                )

    def _outcome(self, tx: Transaction, published: Published, content: Content) -> Ingested:
        writer, commit, is_new = tx.objects, published.commit, published.is_new
        record = commit.record
        return Ingested(
            run=self.run,
            step=record.step,
            attempt=record.attempt,
            commit=commit.id,
            is_new=is_new,
            record_healed=bool(self._damaged()) and not is_new,
            layers=tuple(entry.layer for entry in record.layers),
            layers_saved=tuple(entry.layer for entry in record.layers if entry.saved_by(record)),
            layers_compact=tuple(entry.layer for entry in record.layers if entry.saved_by(record) and entry.compact),
            precision=self.options.precision if is_new else record.precision,
            objects_new=writer.count_new,
            objects_reused=writer.count_reused,
            bytes_new=writer.bytes_new,
            bytes_reused=writer.bytes_reused,
            objects_healed=len(writer.damaged),
            reused_read=not self.options.trust_store,
            bytes_derived=content.bytes_derived,
            seconds=time.monotonic() - self.started,
            source=self.checkpoint.source,
            notes=(
                *self.checkpoint.notes,
                *content.notes,
                *_exact_notes(self.kept_exactly),
                *self._origin_notes(),
                *_notes(self.options, record, self.view, writer, is_new=is_new),
            ),
        )
