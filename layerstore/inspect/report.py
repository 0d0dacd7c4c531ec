"""
The facts of a report: what a store holds, how each run grew, and what a composite at any step would consist of.

They are those of `log`, `show`, `stats`, `compose --dry-run` and `gc --dry-run`; `report_json` turns them into JSON.
Of a long history only some saves are shown; totals count all of them.
"""

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from layerstore.compose import compose_by_policy
from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.gc import CommitFate, GcOutcome, GcRequest, plan_gc
from layerstore.history import Resolved, Staleness, references_to, staleness_of
from layerstore.inspect.log import LogEntry, log_entry, names_of_pins
from layerstore.inspect.stats import Amounts, Growth, Stats, count, views_of
from layerstore.model import Commit, CommitId, LayerEntry
from layerstore.policy import Filter, Keep, Parity
from layerstore.progress import Progress
from layerstore.storage import RecordRow, Repository, RunView, SaveTiming, read_timings

# What a page of 1 MB has room for, its own text aside; and about what a save, and a layer of it, take of that.
_FACTS_BYTES = 640_000
_SAVE_BYTES = 300
_CELL_BYTES = 22

# Saves in a picture: more columns would be narrower than a pointer.
COLUMNS_MAX = 360

# Layers in a picture: more rows would be thinner than its lines. Bytes of their names.
_LAYERS_MAX = 1000
_NAMES_BYTES_MAX = 100_000

# Runs and problems that are listed.
_RUNS_MAX = 200
_PROBLEMS_MAX = 50

ASKED = (Parity(), Filter())
"""The policies whose composites are shown at each step, besides the commit's own layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSave:
    """One save, as a report shows it."""

    entry: LogEntry
    reference: str
    """The reference that means this commit."""
    turn: int
    """The number that policies count it by."""
    policy: str
    """The policy that it was saved under."""
    layers: Mapping[str, LayerEntry]
    """The commit's layers by name."""
    asked: Mapping[str, Mapping[str, LayerEntry]]
    """The layers of a composite by each policy, where they differ from the commit's; empty where there is none."""
    movements: Mapping[str, float]
    """How far each layer's masters had moved since their last version, where the save recorded it."""
    staleness: Staleness
    """Of the commit's own layers."""
    own: Amounts
    total: Amounts
    """Of all saves of the run up to this one, shown or not."""
    timing: SaveTiming | None
    fate: CommitFate | None
    """What gc by the given rules would do with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run."""

    run: str
    commits: int
    """All that can be read, shown or not."""
    attempts: int
    first_ns: int
    """When the oldest commit was saved."""
    last_ns: int
    """When the newest commit was saved."""
    layers: tuple[str, ...]
    """In the order of the newest commit's model, then those that only older commits have."""
    layers_left_out: int
    saves: tuple[ShownSave, ...]
    """By attempt and step."""
    times_ns: Mapping[tuple[int, int], int]
    """When each visible commit was saved, by attempt and step."""
    total: Amounts
    timings: tuple[SaveTiming, ...]
    """Of all saves made in training, by attempt and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What gc by these rules would do."""

    keep: Keep
    outcome: GcOutcome | None
    refusal: str = ""
    """Why gc would refuse, if it would."""

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
    """Runs that are not even listed."""
    retention: RetentionReport | None
    """None where no rule was given."""
    left_out: tuple[str, ...] = ()
    """What could not be read, and so is in no figure."""

    @property
    def is_sampled(self) -> bool:
        """Whether any run has more saves than are shown."""
        return any(len(run.saves) < run.commits for run in self.runs)


def collect_report(repo: Repository, *, run: str | None, keep: Keep | None, progress: Progress) -> Report:
    """
    Return the facts about the whole store, or about *run*; with *keep* also what gc by its rules would do.

    What is damaged is left out and named.

    Raises:
        NotFound: There is no such run.
        InvalidInput: No commit has the metric that *keep* goes by.
    """
    views = views_of(repo, run)
    retention = _retention(repo, run, keep, progress=progress)
    outcome = None if retention is None else retention.outcome
    fates = {} if outcome is None else {fate.commit: fate for fate in outcome.commits}
    pins = names_of_pins(repo)
    listed = [view for view in views if view.visible or view.damaged]
    shown = listed[:_RUNS_MAX]
    wishes = [_wish(view) for view in shown]
    room = {view.run: saves for view, saves in zip(shown, shares(wishes, bytes_max=_FACTS_BYTES), strict=True)}
    runs, problems = list[RunReport](), list[str]()

    def tap(view: RunView, commits: Iterable[Commit]) -> Iterator[Commit]:
        if view.run not in room:
            yield from commits
            return
        collecting = _Collecting(repo, view, fates=fates, pins=pins, room=room[view.run])
        for commit in commits:
            collecting.add(commit)
            progress.advance(1)
            yield commit
        runs.append(collecting.done())
        problems.extend(collecting.growth.left_out)

    progress.start("records", sum(len(view.visible) for view in shown))
    counted = count(repo, views, run=run, progress=progress, tap=tap)
    return Report(
        path=str(repo.layout.root),
        store_id=repo.identity.store_id,
        time_ns=time.time_ns(),
        stats=counted,
        runs=tuple(runs),
        runs_left_out=len(listed) - len(shown),
        retention=retention,
        left_out=tuple(dict.fromkeys([*counted.left_out, *problems]))[:_PROBLEMS_MAX],
    )


def _retention(repo: Repository, run: str | None, keep: Keep | None, *, progress: Progress) -> RetentionReport | None:
    if keep is None or not (keep.has_rules or keep.drop_optimizer_older_than is not None):
        return None
    request = GcRequest(keep=keep, runs=None if run is None else [run])
    try:
        return RetentionReport(keep=keep, outcome=plan_gc(repo, request, progress=progress).outcome)
    except IntegrityError as exc:
        return RetentionReport(keep=keep, outcome=None, refusal=str(exc))


def thinned(report: Report) -> Report | None:
    """Return *report* with about half of its shown saves; None if each run shows only one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How many saves a run has to show, and what they take."""

    saves: int
    bytes_fixed: int
    """What the run takes before its first save."""
    bytes_per_save: int


def _wish(view: RunView) -> Wish:
    layers, _ = _rows(view.visible)
    return Wish(
        saves=len(view.visible),
        bytes_fixed=sum(map(_name_bytes, layers)),
        bytes_per_save=_SAVE_BYTES + _CELL_BYTES * len(layers),
    )


def _rows(rows: Sequence[RecordRow]) -> tuple[tuple[str, ...], int]:
    """Return the layers of *rows*, those of the newest model first, and how many there is no room for."""
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
    """Collects the facts about one run, commit by commit."""

    def __init__(
        self,
        repo: Repository,
        view: RunView,
        *,
        fates: Mapping[str, CommitFate],
        pins: Mapping[str, list[str]],
        room: int,
    ) -> None:
        self._repo = repo
        self._view = view
        self._fates = fates
        self._pins = pins
        self._timings = read_timings(repo, view.run)
        self.growth = Growth(repo)
        self._shown = self._chosen(view.visible, room)
        self._commits = 0
        self._saves: list[ShownSave] = []
        self._total = Amounts()
        self._times: dict[tuple[int, int], int] = {}

    def add(self, commit: Commit) -> None:
        """Add *commit*, the next by attempt and step."""
        own = self.growth.add(commit)
        self._total += own
        self._commits += 1
        self._times[commit.record.attempt, commit.record.step] = commit.observed.time_ns
        if commit.id in self._shown:
            self._saves.append(self._save(commit, own=own))

    def done(self) -> RunReport:
        """Return the run, once all of its commits were added."""
        layers, layers_left_out = _rows(self._view.visible)
        references = references_to(self._repo, [save.entry for save in self._saves])
        return RunReport(
            run=self._view.run,
            commits=self._commits,
            attempts=len(self._view.attempts),
            first_ns=min(self._times.values(), default=0),
            last_ns=max(self._times.values(), default=0),
            layers=layers,
            layers_left_out=layers_left_out,
            saves=tuple(replace(save, reference=name) for save, name in zip(self._saves, references, strict=True)),
            times_ns=self._times,
            total=self._total,
            timings=tuple(timing for _, timing in sorted(self._timings.items())),
        )

    def _chosen(self, rows: Sequence[RecordRow], room: int) -> set[CommitId]:
        """Choose which of *rows* are shown, pinned ones and the ends of attempts first."""
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
        """Return the layers of a composite at *commit* by each policy, where they are not its *own*."""
        found: dict[str, dict[str, LayerEntry]] = {}
        for policy in ASKED:
            try:
                composition = compose_by_policy(self._repo, Resolved.of_commit(commit), policy, view=self._view)
            except LayerstoreError:
                found[policy.name] = {}  # `compose` would refuse, and say why
                continue
            layers = {entry.layer: entry for entry in composition.layers}
            if layers != own:
                found[policy.name] = layers
        return found


# -- which saves of a long history are shown ------------------------------------------------------------------------


def shares(wishes: Sequence[Wish], *, bytes_max: int) -> list[int]:
    """
    Return how many saves each of *wishes* may show, so that all of them together take about *bytes_max*.

    Larger runs get what small ones leave over. If there are too many runs, the last ones get nothing.

    >>> small, large = (Wish(saves=n, bytes_fixed=0, bytes_per_save=10) for n in (2, 500))
    >>> shares([small, large], bytes_max=1000), shares([large, large], bytes_max=15)
    ([2, 98], [1, 0])
    """
    found = [0] * len(wishes)
    left = bytes_max
    shown = []
    for index, wish in enumerate(wishes):
        least = wish.bytes_fixed + wish.bytes_per_save
        if wish.saves and least <= left:
            shown.append(index)
            left -= least
            found[index] = 1
    shown.sort(key=lambda index: wishes[index].saves * wishes[index].bytes_per_save)
    for place, index in enumerate(shown):
        wish = wishes[index]
        more = min(left // (len(shown) - place) // wish.bytes_per_save, wish.saves - 1, COLUMNS_MAX - 1)
        found[index] += more
        left -= more * wish.bytes_per_save
    return found


def chosen(count: int, *, room: int, wanted: Collection[int] = ()) -> list[int]:
    """
    Return which of *count* places are shown if there is *room* for that many, in order.

    The last is among them, then the first, then those *wanted* up to half of the room, then others, evenly spaced.

    >>> chosen(5, room=9), chosen(100, room=5), chosen(100, room=6, wanted=[42]), chosen(100, room=1)
    ([0, 1, 2, 3, 4], [0, 17, 50, 82, 99], [0, 17, 42, 50, 82, 99], [99])
    """
    if count <= room:
        return list(range(count))
    found = {count - 1} if room == 1 else {0, count - 1}
    special = sorted(set(wanted) - found)
    found |= {special[place] for place in _evenly(len(special), max(0, room // 2 - len(found)))}
    rest = sorted(set(range(count)) - found)
    return sorted(found | {rest[place] for place in _evenly(len(rest), room - len(found))})


def _evenly(count: int, room: int) -> list[int]:
    """Return *room* of *count* places, evenly spaced."""
    if count <= room:
        return list(range(count))
    return [(2 * step + 1) * count // (2 * room) for step in range(room)]
