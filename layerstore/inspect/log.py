"""Log: list the visible commits of a store, run by run and page by page."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import ClassVar

from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError, NotFound
from layerstore.format import WITHOUT_MOMENTS
from layerstore.history import ambiguous_id, metrics_if_sound, pushed_to
from layerstore.inspect.graph import GraphLine, draw_graph
from layerstore.json_fields import json_fields
from layerstore.model import Commit, CommitId
from layerstore.storage import RecordName, RecordRow, Repository, RunView
from layerstore.units import short_id, size, utc


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One commit in a log."""

    _JSON: ClassVar = "run attempt step commit time=time_ns layers_saved bytes_new precision pins pushed has_moments"

    run: str
    attempt: int = 0
    step: int
    commit: str
    time_ns: int = 0
    layers_saved: int = 0
    """Layers that were saved at this step; the commit inherits the others."""
    layers: int = 0
    bytes_new: int = 0
    """Bytes that the commit's writer put into the store."""
    precision: str = "exact"
    """``exact`` if all layers are, ``mixed`` if only inherited layers are compact, else the save's own precision."""
    pins: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    """URLs of the remotes that had the commit as of the last push or pull."""
    has_moments: bool = True
    """Whether training can resume from it: gc may have dropped its moments."""
    metrics: Mapping[str, float] | None = field(default_factory=dict)
    """The metrics that training measured at this step; None if they are damaged, empty if not requested."""
    damage: str | None = None
    """Why the record cannot be read (then only run, step and commit are set); None if it can."""

    def __repr__(self) -> str:
        head = f"<LogEntry {self.run}@{self.step} {short_id(self.commit)}"
        if self.damage is not None:
            return f"{head}: {self.damage}>"
        saved = f"{self.layers_saved} of {self.layers} layers, {size(self.bytes_new)} new"
        pinned = f", pinned as {', '.join(self.pins)}" if self.pins else ""
        return f"{head}: {saved}, {self.time:%Y-%m-%d %H:%M} UTC{pinned}>"

    @property
    def time(self) -> datetime | None:
        """When it was committed, in UTC; None if its record cannot be read."""
        return None if self.damage is not None else utc(self.time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a log."""

    drawing: str
    """The graph to the left of the commit; empty if not requested."""
    entry: LogEntry | None
    """None on a line where the graph joins two attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """The commits of one run that a page leaves out."""

    run: str
    commits: int
    after: str
    """The id of the last commit on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Some of the commits of some runs."""

    lines: tuple[LogLine, ...]
    more: tuple[More, ...]
    """One for each run that has more commits than the page shows."""

    @property
    def entries(self) -> list[LogEntry]:
        """The commits without the graph."""
        return [line.entry for line in self.lines if line.entry is not None]


def read_log(
    repo: Repository,
    *,
    run: str | None = None,
    limit: int | None = None,
    before: str | None = None,
    graph: bool = False,
    metrics: bool = False,
) -> LogPage:
    """Return the visible commits of *run*, or of every run, as `Store.log_page` describes."""
    if limit is not None and limit < 1:
        raise InvalidInput(f"a page cannot have {limit} commits", hint="give a limit of 1 or more, or none")
    if run is not None and run not in repo.catalog.runs():
        repo.catalog.view(run)  # raises, and lists the existing runs
    views = [repo.catalog.view(name) for name in ([run] if run else repo.catalog.runs())]
    start = None if before is None else _commit_named(views, before)
    if start is not None:
        views = [view for view in views if view.run == start.run]
    pins, pushed = names_of_pins(repo), pushed_to(repo)
    lines: list[LogLine] = []
    more = []
    for view in views:
        drawn = list(draw_graph(view)) if graph else [GraphLine("", row) for row in reversed(view.visible)]
        page, left = _page(drawn, start, limit)
        lines += [_line(repo, line, pins, pushed, metrics_in=view if metrics else None) for line in page]
        if left:
            after = next(line.row.id for line in reversed(page) if line.row is not None)
            more.append(More(run=view.run, commits=left, after=after))
        if start is None:
            # Only on the first page, since the position of damaged commits among the others is unknown.
            damaged = (_damaged_entry(name, problem) for name, problem in view.damaged.items())
            lines += [LogLine(drawing="", entry=entry) for entry in damaged]
    return LogPage(lines=tuple(lines), more=tuple(more))


def _commit_named(views: list[RunView], before: str) -> RecordRow:
    rows = [row for view in views for row in view.visible if row.id.startswith(before.lower())]
    if len(rows) == 1:
        return rows[0]
    if not rows:
        raise NotFound(f"there is no commit {before!r} to continue after", hint="give an id from `layerstore log`")
    raise ambiguous_id(before, (row.id for row in rows))


def _page(lines: list[GraphLine], start: RecordRow | None, limit: int | None) -> tuple[list[GraphLine], int]:
    """Return the lines after *start*, up to *limit* commits, and how many commits follow."""
    if start is not None:
        index = next(index for index, line in enumerate(lines) if line.row is not None and line.row.id == start.id)
        lines = lines[index + 1 :]
    ends = [end for end, line in enumerate(lines, start=1) if line.row is not None]
    if limit is None or limit >= len(ends):
        return lines, 0
    return lines[: ends[limit - 1]], len(ends) - limit


def _line(
    repo: Repository,
    line: GraphLine,
    pins: dict[str, list[str]],
    pushed: Mapping[str, Collection[CommitId]],
    *,
    metrics_in: RunView | None,
) -> LogLine:
    if line.row is None:
        return LogLine(drawing=line.drawing, entry=None)
    try:
        urls = [url for url, commits in pushed.items() if line.row.id in commits]
        commit = repo.catalog.commit(line.row.name)
        entry = log_entry(commit, pins.get(line.row.id, []), urls)
        if metrics_in is not None:
            entry = replace(entry, metrics=metrics_if_sound(repo, commit.record, view=metrics_in))
    except (IntegrityError, NotFound) as exc:  # lost but still in the index, or just removed
        entry = _damaged_entry(line.row.name, exc)
    return LogLine(drawing=line.drawing, entry=entry)


def _damaged_entry(name: RecordName, problem: LayerstoreError) -> LogEntry:
    return LogEntry(run=name.run, step=name.step, commit=name.id, damage=str(problem))


def log_entry(commit: Commit, pins: Iterable[str], pushed: Iterable[str] = ()) -> LogEntry:
    """Return the log's entry of *commit*, which has *pins* and was *pushed* to some remotes."""
    record = commit.record
    return LogEntry(
        run=record.run,
        attempt=record.attempt,
        step=record.step,
        commit=commit.id,
        time_ns=commit.observed.time_ns,
        layers_saved=sum(entry.saved_by(record) for entry in record.layers),
        layers=len(record.layers),
        bytes_new=commit.observed.bytes_new,
        precision=record.kept_precision,
        pins=tuple(pins),
        pushed=tuple(pushed),
        has_moments=WITHOUT_MOMENTS not in record.flags,
    )


def log_fields(entry: LogEntry) -> dict[str, object]:
    """Return the fields of *entry* for tables: those of ``--json`` and its metrics, or the damage if unreadable."""
    if entry.damage is not None:
        return {"run": entry.run, "step": entry.step, "commit": entry.commit, "damage": entry.damage}
    return json_fields(entry) | ({"metrics": dict(entry.metrics)} if entry.metrics else {})


def names_of_pins(repo: Repository) -> dict[str, list[str]]:
    """Return the names of all readable pins, by the id of the pinned commit or of a composite's base."""
    pins: dict[str, list[str]] = {}
    for pin in repo.records.readable_pins():
        pins.setdefault(pin.base, []).append(pin.name)
    return pins
