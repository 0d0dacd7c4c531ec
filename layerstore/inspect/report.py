"""
The facts of a report: what a store holds, how each run grew, and what a composite at any step would consist of.

They are those of `log`, `show`, `stats`, `compose --dry-run` and `gc --dry-run`; `report_json` turns them into JSON.
Of a long history only some saves are shown; totals count all of them.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from layerstore.compose import compose_by_policy
from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.gc import CommitFate, GcOutcome, GcRequest, plan_gc
from layerstore.history import Resolved, Staleness, references_to, staleness_of
from layerstore.inspect.log import LogEntry, log_entry, names_of_pins
from layerstore.inspect.stats import Amounts, Growth, Stats, commits_of, count_bytes, views_of
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

# Layers in a picture: more rows would be thinner than its lines.
_LAYERS_MAX = 1000

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
    stats = count_bytes(repo, run=run, progress=progress)
    retention = _retention(repo, run, keep, progress=progress)
    outcome = None if retention is None else retention.outcome
    fates = {} if outcome is None else {fate.commit: fate for fate in outcome.commits}
    listed = [view for view in views_of(repo, run) if view.visible or view.damaged]
    shown = listed[:_RUNS_MAX]
    progress.start("records", sum(len(view.visible) for view in shown))
    room, pins, problems = rooms(shown), names_of_pins(repo), list(stats.left_out)
    runs = [
        _run_report(repo, view, fates=fates, pins=pins, room=room[view.run], problems=problems, progress=progress)
        for view in shown
    ]
    return Report(
        path=str(repo.layout.root),
        store_id=repo.identity.store_id,
        time_ns=time.time_ns(),
        stats=stats,
        runs=tuple(runs),
        runs_left_out=len(listed) - len(shown),
        retention=retention,
        left_out=tuple(dict.fromkeys(problems))[:_PROBLEMS_MAX],
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


def _run_report(
    repo: Repository,
    view: RunView,
    *,
    fates: Mapping[str, CommitFate],
    pins: Mapping[str, list[str]],
    room: int,
    problems: list[str],
    progress: Progress,
) -> RunReport:
    """Return the facts about one run, of which *room* saves are shown; add to *problems* what cannot be read."""
    growth, took, shown = Growth(repo), read_timings(repo, view.run), _chosen(view.visible, pins, room)
    saves, times, total = list[ShownSave](), dict[tuple[int, int], int](), Amounts()
    for commit in commits_of(repo, view, problems):
        own = growth.add(commit)
        total += own
        place = commit.record.attempt, commit.record.step
        times[place] = commit.observed.time_ns
        progress.advance(1)
        if commit.id in shown:
            entry, fate = log_entry(commit, pins.get(commit.id, ())), fates.get(commit.id)
            asked = _asked(repo, commit, view)
            saves.append(_save(commit, entry, asked, own=own, total=total, timing=took.get(place), fate=fate))
    problems += growth.left_out
    layers = _layer_names(view.visible)
    references = references_to(repo, [save.entry for save in saves])
    return RunReport(
        run=view.run,
        commits=len(times),
        attempts=len(view.attempts),
        first_ns=min(times.values(), default=0),
        last_ns=max(times.values(), default=0),
        layers=layers[:_LAYERS_MAX],
        layers_left_out=len(layers[_LAYERS_MAX:]),
        saves=tuple(replace(save, reference=name) for save, name in zip(saves, references, strict=True)),
        times_ns=times,
        total=total,
        timings=tuple(timing for _, timing in sorted(took.items())),
    )


def _layer_names(rows: Sequence[RecordRow]) -> tuple[str, ...]:
    """Return the layers of *rows*, those of the newest model first."""
    models = dict.fromkeys(row.layer_names for row in reversed(rows))
    return tuple(dict.fromkeys(name for model in models for name in model))


def _save(
    commit: Commit,
    entry: LogEntry,
    asked: Mapping[str, Mapping[str, LayerEntry]],
    *,
    own: Amounts,
    total: Amounts,
    timing: SaveTiming | None,
    fate: CommitFate | None,
) -> ShownSave:
    record = commit.record
    movements = record.policy.decisions.get("movements")
    return ShownSave(
        entry=entry,
        reference="",
        turn=record.save_number,
        policy=record.policy.name,
        layers={each.layer: each for each in record.layers},
        asked=asked,
        movements={
            str(layer): moved
            for layer, moved in (movements.items() if isinstance(movements, dict) else ())
            if isinstance(moved, float)
        },
        staleness=staleness_of(record, record.layers),
        own=own,
        total=total,
        timing=timing,
        fate=fate,
    )


def _asked(repo: Repository, commit: Commit, view: RunView) -> dict[str, dict[str, LayerEntry]]:
    """Return the layers of a composite at *commit* by each policy, where they are not the commit's own."""
    found: dict[str, dict[str, LayerEntry]] = {}
    for policy in ASKED:
        try:
            composition = compose_by_policy(repo, Resolved.of_commit(commit), policy, view=view)
        except LayerstoreError:
            found[policy.name] = {}  # `compose` would refuse, and say why
            continue
        if composition.layers != commit.record.layers:
            found[policy.name] = {entry.layer: entry for entry in composition.layers}
    return found


# -- which saves of a long history are shown ------------------------------------------------------------------------


def rooms(views: Sequence[RunView]) -> dict[str, int]:
    """
    Return how many saves of each run are shown, so that the page has room for all of them.

    Large runs get what small ones leave over.
    """
    found: dict[str, int] = {}
    left = _FACTS_BYTES
    size = {view.run: _SAVE_BYTES + _CELL_BYTES * len(_layer_names(view.visible)) for view in views}
    ordered = sorted(views, key=lambda view: len(view.visible) * size[view.run])
    for place, view in enumerate(ordered):
        share = left // (len(ordered) - place) // size[view.run]
        found[view.run] = min(share, len(view.visible), COLUMNS_MAX)
        left -= found[view.run] * size[view.run]
    return found


def _chosen(rows: Sequence[RecordRow], pins: Mapping[str, list[str]], room: int) -> set[CommitId]:
    """Choose which of *rows* are shown, pinned ones and the ends of attempts first."""
    attempts = [row.attempt for row in rows]
    ends = {place for place, attempt in enumerate(attempts) if attempts[place - 1 : place] != [attempt]}
    ends |= {place - 1 for place in ends if place}
    pinned = {place for place, row in enumerate(rows) if row.id in pins}
    return {rows[place].id for place in chosen(len(rows), room=room, wanted=ends | pinned)} if room else set()


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
