"""
The facts of a report, as ``--json`` prints them and as the page draws them.

`log`, `show`, `stats`, `compose --dry-run` and `gc --dry-run` give the same facts. For a long history, only some saves
are shown; totals count all of them. Saves are stored by column: each field is a list with one value per shown save,
which takes a third of the bytes.
"""

import math
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from layerstore.assemble import checked_file, write_file
from layerstore.compose import compose_by_policy
from layerstore.errors import IntegrityError, LayerstoreError, Unsupported
from layerstore.gc import CommitFate, GcRequest, plan_gc
from layerstore.history import Resolved, Staleness, references_to
from layerstore.inspect.growth import AMOUNTS, Growth, WhatIf
from layerstore.inspect.log import log_entry, names_of_pins
from layerstore.inspect.page import BEGINS, PAGE_BYTES_MAX, render
from layerstore.inspect.report_parts import VERSION_DIGITS, metrics_and_curves, mixture_fields, pins_of
from layerstore.inspect.stats import commits_of, count_bytes, stats_fields, views_shown
from layerstore.json_fields import short_time
from layerstore.model import Commit, CommitId, LayerEntry, Origin
from layerstore.policy import SELECTIVE, Keep, Policy
from layerstore.progress import Progress
from layerstore.publish import SaveTiming, read_timings
from layerstore.storage import RecordRow, Repository, RunView

# The bytes of facts that fit into a page of 1 MB besides its own text, the approximate bytes of a save, and those of
# each layer in a save.
_FACTS_BYTES = 640_000
_SAVE_BYTES = 450
_CELL_BYTES = 22
# Curves get the bytes of facts divided by this number.
_CURVES_SHARE = 8

# The most saves in a picture: more columns would be narrower than a pointer.
_COLUMNS_MAX = 360

# The most layers in a picture: more rows would be thinner than its lines.
_LAYERS_MAX = 1000

# The most runs and problems that are listed, and the most pins of one save.
_RUNS_MAX = 200
_PROBLEMS_MAX = 50
_PINS_MAX = 4


def make_report(
    repo: Repository,
    out: Path | None,
    *,
    run: str | None,
    keep: Keep | None,
    progress: Progress,
    version: str | None = None,
) -> tuple[dict[str, Any], bytes]:
    """
    Return the facts that `Store.report` describes and, with *out* or *version*, the page that shows them.

    With *version*, the page reloads once its server has another version.
    """
    target = None if out is None else checked_file(repo, out, what="a report", begins=BEGINS)
    stats = count_bytes(repo, run=run, progress=progress)
    retention, fates = _retention(repo, run, keep, progress=progress)
    listed = [view for view in views_shown(repo, run) if view.visible or view.damaged]
    shown, pins, facts_bytes = listed[:_RUNS_MAX], names_of_pins(repo), _FACTS_BYTES
    while True:
        progress.start("records", sum(len(view.visible) for view in shown))
        problems = list(stats.left_out)
        room, curve_bytes = rooms(shown, facts_bytes), facts_bytes // _CURVES_SHARE // max(1, len(shown))
        runs = [
            _run(
                repo,
                view,
                fates=fates,
                pins=pins,
                room=room[view.run],
                curve_bytes=curve_bytes,
                problems=problems,
                progress=progress,
            )
            for view in shown
        ]
        pinned = pins_of(repo, run, runs, problems)
        facts = {
            "store": str(repo.layout.root),
            "id": repo.identity.store_id,
            "time": short_time(time.time_ns()),
            "run": run,
            "is_sampled": any(len(run_facts["saves"]["step"]) < run_facts["commits"] for run_facts in runs),
            "stats": _figures(stats_fields(stats)),
            "runs": runs,
            "runs_left_out": len(listed) - len(shown),
            **pinned,
            "retention": retention,
            # `stats` and the growth of a run report the same damage; list it once.
            "left_out": list(dict.fromkeys(problems))[:_PROBLEMS_MAX],
        }
        if target is None and version is None:
            return facts, b""
        page = render(facts, version=version)
        if len(page) <= PAGE_BYTES_MAX:
            if target is not None:
                write_file(repo, target, page)
            return facts, page
        if all(len(run_facts["saves"]["step"]) < 2 for run_facts in runs):
            about = "layerstore report --run RUN makes a page about one run; " if run is None else ""
            raise Unsupported(
                f"a page about {run or 'the whole store'} has more than {PAGE_BYTES_MAX:,} bytes",
                hint=f"{about}--json has no size limit",
            )
        # The bytes of a save are only estimated, so shrink until the page fits.
        facts_bytes = min(facts_bytes, len(page)) // 2


def _figures(fields: dict[str, Any]) -> dict[str, object]:
    """Return the overall figures of `stats`, and those of the first runs."""
    elsewhere = {"run", "runs", "layers", "left_out"}
    figures = {name: value for name, value in fields.items() if name not in elsewhere}
    return figures | {"run_count": len(fields["runs"]), "runs": fields["runs"][:_RUNS_MAX]}


# -- one run -------------------------------------------------------------------------------------------------------


def _run(
    repo: Repository,
    view: RunView,
    *,
    fates: Mapping[str, CommitFate],
    pins: Mapping[str, list[str]],
    room: int,
    curve_bytes: int,
    problems: list[str],
    progress: Progress,
) -> dict[str, Any]:
    """Return the facts about one run, showing *room* of its saves; add to *problems* what cannot be read."""
    growth, shown_ids, shown = Growth(repo), _chosen(view.visible, pins, room), list[Commit]()
    what_ifs, columns = {policy.name: WhatIf(policy) for policy in SELECTIVE}, list[int]()
    own_bytes, total_bytes, total = list[list[int]](), list[list[int]](), [0] * len(AMOUNTS)
    times, precisions = dict[tuple[int, int], str](), dict[tuple[int, int], str]()
    commits = 0
    # All commits, shown or not: totals count the whole run.
    for commits, commit in enumerate(commits_of(repo, view, problems), start=1):
        own = growth.add(commit, *what_ifs.values())
        total = [before + added for before, added in zip(total, own, strict=True)]
        place = commit.record.attempt, commit.record.step
        times[place], precisions[place] = short_time(commit.observed.time_ns), commit.record.kept_precision
        progress.advance(1)
        if commit.id in shown_ids:
            shown.append(commit)
            columns.append(commits - 1)
            own_bytes.append(own)
            total_bytes.append(total)
    problems += growth.left_out
    names, timings = _layer_names(view.visible), read_timings(repo, view.run)
    layers = names[:_LAYERS_MAX]
    saves = _saves(repo, shown, pins=pins, timings=timings, fates=fates)
    if set(precisions.values()) <= {"exact"}:
        precisions = {}  # if all saves are exact, the page shows no precisions
    else:
        saves["precision"] = [commit.record.kept_precision for commit in shown]
    return {
        "run": view.run,
        "commits": commits,
        "attempts": len(view.attempts),
        "first_time": min(times.values(), default=None),
        "last_time": max(times.values(), default=None),
        "total": dict(zip(AMOUNTS, total, strict=True)),
        "layers": layers,
        "layers_left_out": len(names) - len(layers),
        "saves": saves | {"bytes": own_bytes, "total_bytes": total_bytes},
        **_composites(repo, view, shown, layers, times=times, precisions=precisions),
        "versions": [_versions(commit, layers) for commit in shown],
        "layer_bytes": _layer_bytes(growth, shown, layers),
        "versions_overlap": growth.versions_overlap,
        "what_if": {name: _what_if(found, columns) for name, found in what_ifs.items()} if commits > 1 else {},
        "drift": [_drift(commit, layers) for commit in shown],
        **metrics_and_curves(repo, view, shown, problems, room_bytes=curve_bytes),
        "timings": _timings(list(timings.values())),
    }


def _layer_names(rows: Sequence[RecordRow]) -> list[str]:
    """Return the layer names in *rows*, those of the newest model first."""
    models = dict.fromkeys(row.layer_names for row in reversed(rows))
    return list(dict.fromkeys(name for model in models for name in model))


def _saves(
    repo: Repository,
    shown: list[Commit],
    *,
    pins: Mapping[str, list[str]],
    timings: Mapping[tuple[int, int], SaveTiming],
    fates: Mapping[str, CommitFate],
) -> dict[str, object]:
    """Return the facts about the saves *shown*, by column."""
    entries = [log_entry(commit, pins.get(commit.id, ())) for commit in shown]
    records = [commit.record for commit in shown]
    oldest = [Staleness.of(record, record.layers).oldest for record in records]
    took = [timings.get((record.attempt, record.step)) for record in records]
    planned = [fates.get(commit.id) for commit in shown]
    return {
        "reference": references_to(repo, entries),
        "commit": [entry.commit for entry in entries],
        "attempt": [entry.attempt for entry in entries],
        "step": [entry.step for entry in entries],
        "save_number": [record.save_number for record in records],
        "time": [short_time(entry.time_ns) for entry in entries],
        "policy": [record.policy.name for record in records],
        "layers_saved": [entry.layers_saved for entry in entries],
        "has_moments": [entry.has_moments for entry in entries],
        "pins": [list(entry.pins[:_PINS_MAX]) for entry in entries],
        "oldest_layer": [age.layer for age in oldest],
        "oldest_steps": [age.steps for age in oldest],
        "oldest_saves": [age.saves for age in oldest],
        "timing": [None if timing is None else _timing(timing) for timing in took],
        "fate": [None if fate is None else _fate(fate) for fate in planned],
    }


def _composites(
    repo: Repository,
    view: RunView,
    shown: list[Commit],
    layers: list[str],
    *,
    times: Mapping[tuple[int, int], str],
    precisions: Mapping[tuple[int, int], str],
) -> dict[str, object]:
    """
    Return, by policy, the origin of each layer of a composite at each save, as an index into the origins.

    A save that kept only some layers bit for bit counts as two origins. *precisions* is empty if all saves are exact.
    """
    indexes: dict[tuple[Origin, bool], int] = {}

    def places(entries: Iterable[LayerEntry]) -> list[int]:
        origins = {entry.layer: (entry.origin, entry.compact > 0) for entry in entries}
        return [indexes.setdefault(origins[name], len(indexes)) if name in origins else -1 for name in layers]

    composites: dict[str, list[list[int] | None]] = {"latest": [places(commit.record.layers) for commit in shown]}
    mixtures = {"latest": [mixture_fields(commit.record, commit.record.layers) for commit in shown]}
    for policy in SELECTIVE:
        entries_of_saves = [_layers_by(repo, commit, view, policy) for commit in shown]
        if any(entries is not None for entries in entries_of_saves):
            composites[policy.name] = [
                None if entries is None else places(entries) if entries else [] for entries in entries_of_saves
            ]
            mixtures[policy.name] = [
                mixed if entries is None else mixture_fields(commit.record, entries)
                for commit, entries, mixed in zip(shown, entries_of_saves, mixtures["latest"], strict=True)
            ]
    # Save numbers and times are known only for saves of this run.
    own = [origin if origin.run == view.run else None for origin, _ in indexes]
    origins: dict[str, object] = {
        "run": [origin.run for origin, _ in indexes],
        "attempt": [origin.attempt for origin, _ in indexes],
        "step": [origin.step for origin, _ in indexes],
        "save_number": [origin and origin.save_number for origin in own],
        "time": [origin and times.get((origin.attempt, origin.step)) for origin in own],
    }
    if precisions:
        origins["precision"] = [
            origin and precisions.get((origin.attempt, origin.step)) if is_compact else "exact"
            for origin, (_, is_compact) in zip(own, indexes, strict=True)
        ]
    return {"composites": composites, "mixtures": mixtures, "origins": origins}


def _layers_by(repo: Repository, commit: Commit, view: RunView, policy: Policy) -> list[LayerEntry] | None:
    """Return the layers of a composite by *policy*: None if they are the commit's own, empty if it cannot be made."""
    try:
        entries = compose_by_policy(repo, Resolved.of_commit(commit), policy, view=view).layers
    except LayerstoreError:
        return []  # `compose` would refuse, and say why
    return None if entries == commit.record.layers else list(entries)


def _versions(commit: Commit, layers: Iterable[str]) -> str:
    # One string per save, which the page splits by position: shorter than a list.
    ids = {entry.layer: entry.version.id[:VERSION_DIGITS] for entry in commit.record.layers}
    return "".join(ids.get(name, "-" * VERSION_DIGITS) for name in layers)


def _layer_bytes(growth: Growth, shown: Iterable[Commit], layers: Iterable[str]) -> list[list[int | None] | None]:
    """Return for each save the size of each layer's version, as `ls` shows it; None for a save like the one before."""
    sizes_by_save: list[list[int | None] | None] = []
    before: list[int | None] | None = None
    for commit in shown:
        entries = {entry.layer: entry for entry in commit.record.layers}
        sizes = [growth.layer_bytes(entries[name]) if name in entries else None for name in layers]
        sizes_by_save.append(None if sizes == before else sizes)
        before = sizes
    return sizes_by_save


def _what_if(what_if: WhatIf, columns: Sequence[int]) -> dict[str, object]:
    """Return what all saves together would have added, what each of *columns* would have, and the totals up to each."""
    total, estimated = list(accumulate(what_if.own_bytes)), list(accumulate(what_if.estimated_bytes))
    return {
        "total": {"bytes": total[-1], "estimated_bytes": estimated[-1], "first_bytes": total[0]},
        "bytes": [what_if.own_bytes[column] for column in columns],
        "total_bytes": [total[column] for column in columns],
        "estimated_bytes": [estimated[column] for column in columns],
    }


def _drift(commit: Commit, layers: Iterable[str]) -> list[float | str | None] | None:
    """Return how far each layer had moved since its last version; None if the save did not record that."""
    decisions = commit.record.policy.decisions
    movements = decisions.get("weighted_movements") or decisions.get("movements")
    if not isinstance(movements, dict) or not movements:
        return None
    moved = (movements.get(name) for name in layers)
    # NaN and infinity, which JSON lacks, as text.
    return [
        (_four_digits(movement) if math.isfinite(movement) else str(movement)) if isinstance(movement, float) else None
        for movement in moved
    ]


# -- timings -------------------------------------------------------------------------------------------------------


def _timing(timing: SaveTiming) -> list[float | None]:
    """Return the seconds blocked, until durable, until visible."""
    seconds = timing.blocked_seconds, timing.durable_seconds, timing.visible_seconds
    return [None if value is None else _four_digits(value) for value in seconds]


def _timings(timings: list[SaveTiming]) -> dict[str, object] | None:
    if not timings:
        return None
    blocked, durable, visible = zip(*map(_timing, timings), strict=True)
    return {
        "saves": len(timings),
        "given_up": sum(bool(timing.failure) for timing in timings),
        "blocked": _summary(blocked),
        "durable": _summary(durable),
        "visible": _summary(visible),
    }


def _summary(seconds: Iterable[float | None]) -> dict[str, float] | None:
    known = [number for number in seconds if number is not None]
    return {"median": _four_digits(median(known)), "max": max(known)} if known else None


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


# -- retention ------------------------------------------------------------------------------------------------------


def _retention(
    repo: Repository, run: str | None, keep: Keep | None, *, progress: Progress
) -> tuple[dict[str, object] | None, dict[str, CommitFate]]:
    """Return what gc would do under the rules of *keep*, or why it would refuse, and the fate of each commit."""
    if keep is None or not (keep.has_rules or keep.drop_optimizer_older_than is not None):
        return None, {}
    rules: dict[str, object] = {"rules": _rules(keep), "refusal": None}
    request = GcRequest(keep=keep, runs=None if run is None else [run])
    try:
        outcome = plan_gc(repo, request, progress=progress).outcome
    except IntegrityError as exc:
        return rules | {"refusal": str(exc)}, {}
    return {
        **rules,
        "commits_kept": len(outcome.commits) - len(outcome.removed),
        "commits_removed": len(outcome.removed),
        "commits_trimmed": len(outcome.trimmed),
        "bytes_freed": outcome.bytes_freed,
        "bytes_freed_later": outcome.young.size_bytes,
    }, {fate.commit: fate for fate in outcome.commits}


def _rules(keep: Keep) -> str:
    """Return *keep* as the options of ``layerstore gc``."""
    best = keep.best_of
    options = {
        "--keep-last": keep.last,
        "--keep-every": keep.every,
        "--keep-within": f"{keep.within.total_seconds():g}s" if isinstance(keep.within, timedelta) else keep.within,
        "--keep-best": best and f"{best.metric}:{best.count}:{best.direction}",
        "--drop-optimizer-older-than": keep.drop_optimizer_older_than,
    }
    return " ".join(f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None)


def _fate(fate: CommitFate) -> list[object]:
    """Return what gc would do with a commit, why, and the bytes that this frees, now or later."""
    verdict = "trim" if fate.loses_moments else "keep" if fate.kept_by else "remove"
    why = ", ".join(fate.kept_by) if fate.kept_by else fate.goes_because
    return [verdict, why, fate.bytes_freed + fate.bytes_freed_later]


# -- which saves of a long history are shown ------------------------------------------------------------------------


def rooms(views: Sequence[RunView], facts_bytes: int) -> dict[str, int]:
    """
    Return how many saves of each run to show, so that their facts take about *facts_bytes*.

    Large runs get the room that small ones leave.
    """
    room: dict[str, int] = {}
    bytes_left = facts_bytes
    size = {view.run: _SAVE_BYTES + _CELL_BYTES * len(_layer_names(view.visible)) for view in views}
    ordered = sorted(views, key=lambda view: len(view.visible) * size[view.run])
    for place, view in enumerate(ordered):
        share = bytes_left // (len(ordered) - place) // size[view.run]
        room[view.run] = min(share, len(view.visible), _COLUMNS_MAX)
        bytes_left -= room[view.run] * size[view.run]
    return room


def _chosen(rows: Sequence[RecordRow], pins: Mapping[str, list[str]], room: int) -> set[CommitId]:
    """Choose which of *rows* to show, pinned ones and the ends of attempts first."""
    attempts = [row.attempt for row in rows]
    ends = {place for place, attempt in enumerate(attempts) if attempts[place - 1 : place] != [attempt]}
    ends |= {place - 1 for place in ends if place}
    pinned = {place for place, row in enumerate(rows) if row.id in pins}
    return {rows[place].id for place in chosen_columns(len(rows), room=room, wanted=ends | pinned)} if room else set()


def chosen_columns(count: int, *, room: int, wanted: Collection[int] = ()) -> list[int]:
    """
    Choose which of *count* positions to show if only *room* of them fit; return them in order.

    The last position has priority, then the first, then *wanted* ones up to half of the room, then others, evenly
    spaced.

    >>> chosen_columns(5, room=9), chosen_columns(100, room=5)
    ([0, 1, 2, 3, 4], [0, 17, 50, 82, 99])
    >>> chosen_columns(100, room=6, wanted=[42]), chosen_columns(100, room=1)
    ([0, 17, 42, 50, 82, 99], [99])
    """
    if count <= room:
        return list(range(count))
    places = {count - 1} if room == 1 else {0, count - 1}
    special = sorted(set(wanted) - places)
    places |= {special[place] for place in _evenly(len(special), max(0, room // 2 - len(places)))}
    rest = sorted(set(range(count)) - places)
    return sorted(places | {rest[place] for place in _evenly(len(rest), room - len(places))})


def _evenly(count: int, room: int) -> list[int]:
    """Return *room* of *count* positions, evenly spaced."""
    if count <= room:
        return list(range(count))
    return [(2 * step + 1) * count // (2 * room) for step in range(room)]
