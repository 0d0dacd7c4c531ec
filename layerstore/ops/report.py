"""
A report: what a store holds, how each run came to be, and what a composite at any of its steps would be made of.

Facts alone, as `log`, `show`, `stats`, `compose --dry-run` and `gc --dry-run` tell them; how they look is the room
`report`'s to say. A long history is sampled: what is counted is counted over all of it.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from layerstore.compose import compose_by_policy
from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.gc.collect import CommitFate, GcOutcome, Request, plan_gc
from layerstore.history.references import Resolved, references_to
from layerstore.history.staleness import Staleness, staleness_of
from layerstore.model import Commit, CommitId, LayerEntry
from layerstore.ops.growth import Amounts, Growth
from layerstore.ops.queries import LogEntry, log_entry, names_of_pins
from layerstore.ops.sampling import Wish, chosen, shares
from layerstore.ops.stats import Stats, count, views_of
from layerstore.policy import Filter, Parity
from layerstore.policy.keep import Keep
from layerstore.progress import Progress
from layerstore.storage.manifest import RecordRow
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView
from layerstore.storage.timings import SaveTiming, timings

# About what a page of 1 MB has room for beside its own text; and what a save and a layer of it take there.
_FACTS_BYTES = 640_000
_SAVE_BYTES = 300
_CELL_BYTES = 22

# Rows of a picture: more would be thinner than its lines. Bytes of their names.
_LAYERS_MAX = 1000
_NAMES_BYTES_MAX = 100_000

# Runs and problems that are named.
_RUNS_MAX = 200
_PROBLEMS_MAX = 50

ASKED = (Parity(), Filter())
"""What a composite of a step might be chosen by, beside what the commit has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSave:
    """One save, as a report shows it."""

    entry: LogEntry
    """As a log has it."""
    reference: str
    """What means it and no other."""
    turn: int
    """The number that policies count it by."""
    policy: str
    """Which it was saved under."""
    layers: Mapping[str, LayerEntry]
    """The version of each, by name."""
    asked: Mapping[str, Mapping[str, LayerEntry]]
    """By policy, what a composite of this step takes where that is not what the commit has; nothing if it has none."""
    movements: Mapping[str, float]
    """How far each layer's masters had moved since their last version, where that was recorded."""
    staleness: Staleness
    """Of the commit's own layers."""
    own: Amounts
    total: Amounts
    """Of all saves of the run up to this one, shown or not."""
    timing: SaveTiming | None
    fate: CommitFate | None
    """What a collection by the rules would make of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run."""

    run: str
    commits: int
    """All that can be read; as many of them are shown as there is room for."""
    attempts: int
    first_ns: int
    last_ns: int
    """When the oldest and the newest were saved."""
    layers: tuple[str, ...]
    """In the order of the newest one's model, those of older ones that it lacks behind."""
    layers_left_out: int
    saves: tuple[ShownSave, ...]
    """By attempt and step."""
    times_ns: Mapping[tuple[int, int], int]
    """When each visible commit was saved, by attempt and step."""
    total: Amounts
    timings: tuple[SaveTiming, ...]
    """Of all saves that were made in training, by attempt and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What a collection by these rules would do."""

    keep: Keep
    outcome: GcOutcome | None
    refusal: str = ""
    """Why it would remove nothing, where it would refuse."""

    @property
    def commits_kept(self) -> int:
        """Count the visible commits that would stay."""
        fates = () if self.outcome is None else self.outcome.commits
        return sum(bool(fate.kept_by) for fate in fates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts."""

    path: str
    store_id: str
    time_ns: int
    stats: Stats
    runs: tuple[RunReport, ...]
    runs_left_out: int
    """Runs that are not even named: there are too many."""
    retention: RetentionReport | None
    """None where no rule was given."""
    left_out: tuple[str, ...] = field(default=())
    """What could not be read, so that it is in no figure."""

    @property
    def is_sampled(self) -> bool:
        """Whether any run has more saves than are shown."""
        return any(len(run.saves) < run.commits for run in self.runs)


def collect(rooms: Rooms, *, run: str | None, keep: Keep | None, progress: Progress) -> Report:
    """
    Return the facts about the whole store, or about *run*; with *keep* also what a collection by its rules would do.

    What is damaged is left out and named; a collection would refuse then, which is told.

    Raises:
        NotFound: There is no such run.
        InvalidInput: No commit has the metric that *keep* goes by.
    """
    views = list(views_of(rooms, run))
    retention = _retention(rooms, run, keep, progress=progress)
    outcome = None if retention is None else retention.outcome
    fates = {} if outcome is None else {fate.commit: fate for fate in outcome.commits}
    pins = names_of_pins(rooms)
    listed = [view for view in views if view.visible or view.damaged]
    shown = listed[:_RUNS_MAX]
    room = dict(
        zip(
            (view.run for view in shown),
            shares([_wish(view) for view in shown], bytes_max=_FACTS_BYTES),
            strict=True,
        )
    )
    runs, problems = list[RunReport](), list[str]()

    def tap(view: RunView, commits: Iterable[Commit]) -> Iterator[Commit]:
        if view.run not in room:
            yield from commits
            return
        collecting = _Collecting(rooms, view, fates=fates, pins=pins, room=room[view.run])
        for commit in commits:
            collecting.add(commit)
            progress.advance(1)
            yield commit
        runs.append(collecting.done())
        problems.extend(collecting.left_out)

    progress.start("records", sum(len(view.visible) for view in shown))
    counted = count(rooms, views, run=run, progress=progress, tap=tap)
    return Report(
        path=str(rooms.layout.root),
        store_id=rooms.identity.store_id,
        time_ns=time.time_ns(),
        stats=counted,
        runs=tuple(runs),
        runs_left_out=len(listed) - len(shown),
        retention=retention,
        left_out=tuple(dict.fromkeys([*counted.left_out, *problems]))[:_PROBLEMS_MAX],
    )


def _retention(rooms: Rooms, run: str | None, keep: Keep | None, *, progress: Progress) -> RetentionReport | None:
    if keep is None or not (keep.has_rules or keep.drop_optimizer_older_than is not None):
        return None
    request = Request(keep=keep, runs=None if run is None else [run])
    try:
        return RetentionReport(keep=keep, outcome=plan_gc(rooms, request, progress=progress).outcome)
    except IntegrityError as exc:
        return RetentionReport(keep=keep, outcome=None, refusal=str(exc))


def thinned(report: Report) -> Report | None:
    """Return *report* with about half of the saves that it shows; None where it shows one of each run already."""
    if all(len(run.saves) < 2 for run in report.runs):
        return None
    return replace(
        report,
        runs=tuple(
            replace(run, saves=tuple(run.saves[place] for place in chosen(len(run.saves), room=len(run.saves) // 2)))
            if len(run.saves) > 1
            else run
            for run in report.runs
        ),
    )


def _wish(view: RunView) -> Wish:
    layers, _ = _rows(view.visible)
    return Wish(
        saves=len(view.visible),
        bytes_fixed=sum(map(_name_bytes, layers)),
        bytes_per_save=_SAVE_BYTES + _CELL_BYTES * len(layers),
    )


def _rows(rows: Sequence[RecordRow]) -> tuple[tuple[str, ...], int]:
    """Return the layers of *rows*, in the order of the newest one's model, and how many there is no room for."""
    models = dict.fromkeys(row.layer_names for row in reversed(rows))
    names = list(dict.fromkeys(name for model in models for name in model))
    shown, size_bytes = 0, 0
    for name in names[:_LAYERS_MAX]:
        size_bytes += _name_bytes(name)
        if size_bytes > _NAMES_BYTES_MAX:
            break
        shown += 1
    return tuple(names[:shown]), len(names) - shown


def _name_bytes(name: str) -> int:
    return len(json.dumps(name)) + 1


class _Collecting:
    """The facts about one run, on their way."""

    def __init__(
        self,
        rooms: Rooms,
        view: RunView,
        *,
        fates: Mapping[str, CommitFate],
        pins: Mapping[str, list[str]],
        room: int,
    ) -> None:
        self._rooms = rooms
        self._view = view
        self._fates = fates
        self._pins = pins
        self._timings = timings(rooms, view.run)
        self._growth = Growth(rooms)
        self._shown = self._chosen(view.visible, room)
        self._commits = 0
        self._saves: list[ShownSave] = []
        self._total = Amounts()
        self._times: dict[tuple[int, int], int] = {}

    @property
    def left_out(self) -> Sequence[str]:
        """What could not be read, besides records."""
        return self._growth.left_out

    def add(self, commit: Commit) -> None:
        """Note *commit*, which comes after those before it."""
        own = self._growth.add(commit)
        self._total += own
        self._commits += 1
        self._times[commit.record.attempt, commit.record.step] = commit.observed.time_ns
        if commit.id in self._shown:
            self._saves.append(self._save(commit, own=own))

    def done(self) -> RunReport:
        """Return the run, all of whose commits were added."""
        layers, layers_left_out = _rows(self._view.visible)
        return RunReport(
            run=self._view.run,
            commits=self._commits,
            attempts=len(self._view.attempts),
            first_ns=min(self._times.values(), default=0),
            last_ns=max(self._times.values(), default=0),
            layers=layers,
            layers_left_out=layers_left_out,
            saves=tuple(self._named(self._saves)),
            times_ns=self._times,
            total=self._total,
            timings=tuple(timing for _, timing in sorted(self._timings.items())),
        )

    def _chosen(self, rows: Sequence[RecordRow], room: int) -> set[CommitId]:
        """Return which of *rows* are shown: rather those with pins, and the ends of attempts."""
        attempts = [row.attempt for row in rows]
        ends = {place for place, attempt in enumerate(attempts) if attempts[place - 1 : place] != [attempt]}
        ends |= {place - 1 for place in ends if place}
        pinned = {place for place, row in enumerate(rows) if row.id in self._pins}
        return {rows[place].id for place in chosen(len(rows), room=room, wanted=ends | pinned)} if room else set()

    def _save(self, commit: Commit, *, own: Amounts) -> ShownSave:
        record = commit.record
        layers = {entry.layer: entry for entry in record.layers}
        movements = record.policy.decisions.get("movements")
        return ShownSave(
            entry=log_entry(commit, self._pins.get(commit.id, ())),
            reference="",
            turn=record.save_number,
            policy=record.policy.name,
            layers=layers,
            asked=self._asked(commit, layers),
            movements={
                str(layer): moved
                for layer, moved in (movements.items() if isinstance(movements, dict) else ())
                if isinstance(moved, float)
            },
            staleness=staleness_of(record, record.layers),
            own=own,
            total=self._total,
            timing=self._timings.get((record.attempt, record.step)),
            fate=self._fates.get(commit.id),
        )

    def _asked(self, commit: Commit, own: Mapping[str, LayerEntry]) -> dict[str, dict[str, LayerEntry]]:
        """Return what policies would take for a composite at *commit*."""
        found: dict[str, dict[str, LayerEntry]] = {}
        for policy in ASKED:
            try:
                composition = compose_by_policy(self._rooms, Resolved.of_commit(commit), policy, view=self._view)
            except LayerstoreError:
                found[policy.name] = {}  # whoever asks `compose` for this very one is told why
                continue
            layers = {entry.layer: entry for entry in composition.layers}
            if layers != own:
                found[policy.name] = layers
        return found

    def _named(self, saves: Sequence[ShownSave]) -> Iterable[ShownSave]:
        references = references_to(self._rooms, [save.entry for save in saves])
        return (replace(save, reference=reference) for save, reference in zip(saves, references, strict=True))
