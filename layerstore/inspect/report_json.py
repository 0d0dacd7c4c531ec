"""
A report as JSON, for ``--json`` and for the page.

Saves are stored by column: each field is a list with one value per shown save, which takes a third of the bytes.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median

from layerstore.compose import checked_file, write_file
from layerstore.errors import Unsupported
from layerstore.gc import CommitFate
from layerstore.inspect.page import BEGINS, PAGE_BYTES_MAX, render
from layerstore.inspect.report import Report, RetentionReport, RunReport, ShownSave, collect_report, thinned
from layerstore.inspect.stats import Stats, stats_fields
from layerstore.json_fields import json_fields
from layerstore.model import LayerEntry, Origin
from layerstore.policy import Keep
from layerstore.progress import Progress
from layerstore.storage import Repository, SaveTiming

# Digits of a version's id that tell two of one layer apart.
VERSION_DIGITS = 8

# A longer time is no time that a save took.
_SECONDS_MAX = 1e9

# Pins that are listed of one save, and runs that are listed with their bytes.
_PINS_MAX = 4
_COUNTED_MAX = 200

_STATS = (
    "commits",
    "pins",
    "logical_bytes",
    "unique_bytes",
    "physical_bytes",
    "saved_ratio",
    "unneeded",
    "missing",
    "kinds",
)


def make_report(
    repo: Repository, out: Path | None, *, run: str | None, keep: Keep | None, progress: Progress
) -> Report:
    """
    Return what `collect_report` does, and write it as a page to the file *out*, where an older report is replaced.

    Raises:
        AlreadyExists: Something else is at *out*.
        Unsupported: The page would be too large.
    """
    target = None if out is None else checked_file(repo, out, what="a report", begins=BEGINS)
    report = collect_report(repo, run=run, keep=keep, progress=progress)
    if target is not None:
        write_file(repo, target, report_page(report))
    return report


def report_fields(report: Report) -> dict[str, object]:
    """Return *report* as JSON has it."""
    return json_fields(report) | {
        "time": _iso(report.time_ns),
        "stats": _stats(report.stats),
        "runs": [_run(run) for run in report.runs],
        "retention": None if report.retention is None else _retention(report.retention),
    }


def report_page(report: Report) -> bytes:
    """
    Return the HTML page of *report*; it shows fewer saves if it would be larger than its bound.

    Raises:
        Unsupported: Even with one save of each run it is too large.
    """
    shown: Report | None = report
    while shown is not None:
        page = render(report_fields(shown))
        if len(page) <= PAGE_BYTES_MAX:
            return page
        shown = thinned(shown)
    raise Unsupported(
        f"a page about the whole store has more than {PAGE_BYTES_MAX:,} bytes",
        hint="layerstore report --run RUN makes one about a single run; --json has no bound",
    )


def _stats(found: Stats) -> dict[str, object]:
    fields = stats_fields(found)
    runs = fields["runs"]
    assert isinstance(runs, list)
    return {name: fields[name] for name in _STATS} | {"run_count": len(runs), "runs": runs[:_COUNTED_MAX]}


def _run(run: RunReport) -> dict[str, object]:
    origins: dict[Origin, int] = {}
    composites = {
        name: [None if layers is None else _places(layers, run.layers, origins) if layers else [] for layers in each]
        for name, each in _composites(run).items()
    }
    return json_fields(run) | {
        "first_time": _iso(run.first_ns) if run.commits else None,
        "last_time": _iso(run.last_ns) if run.commits else None,
        "saves": _columns(run.saves),
        "composites": composites,
        "origins": _origins(run, origins),
        "versions": [_versions(save.layers, run.layers) for save in run.saves],
        "drift": [
            [_rounded(save.movements.get(layer)) for layer in run.layers] if save.movements else None
            for save in run.saves
        ],
        "timings": _timings(run.timings),
    }


def _composites(run: RunReport) -> dict[str, list[Mapping[str, LayerEntry] | None]]:
    """Return the layers of a composite at each save, by policy; None where they are the commit's own."""
    asked = sorted({name for save in run.saves for name in save.asked})
    return {
        "latest": [save.layers for save in run.saves],
        **{name: [save.asked.get(name) for save in run.saves] for name in asked},
    }


def _places(layers: Mapping[str, LayerEntry], names: Iterable[str], origins: dict[Origin, int]) -> list[int]:
    """Return the index among *origins* of each layer's version; -1 where there is no such layer."""
    found = (layers.get(name) for name in names)
    return [-1 if entry is None else origins.setdefault(entry.origin, len(origins)) for entry in found]


def _origins(run: RunReport, origins: Iterable[Origin]) -> dict[str, list[object]]:
    each = list(origins)
    times = [run.times_ns.get((of.attempt, of.step)) if of.run == run.run else None for of in each]
    return {
        "run": [of.run for of in each],
        "attempt": [of.attempt for of in each],
        "step": [of.step for of in each],
        "turn": [of.save_number if of.run == run.run else None for of in each],
        "time": [None if time_ns is None else _iso(time_ns) for time_ns in times],
    }


def _versions(layers: Mapping[str, LayerEntry], names: Iterable[str]) -> str:
    found = (layers.get(name) for name in names)
    return "".join("-" * VERSION_DIGITS if entry is None else entry.version.id[:VERSION_DIGITS] for entry in found)


_SAVE: Mapping[str, Callable[[ShownSave], object]] = {
    "reference": lambda save: save.reference,
    "commit": lambda save: save.entry.commit,
    "attempt": lambda save: save.entry.attempt,
    "step": lambda save: save.entry.step,
    "turn": lambda save: save.turn,
    "time": lambda save: _iso(save.entry.time_ns),
    "policy": lambda save: save.policy,
    "layers_saved": lambda save: save.entry.layers_saved,
    "has_moments": lambda save: save.entry.has_moments,
    "pins": lambda save: list(save.entry.pins[:_PINS_MAX]),
    "oldest_layer": lambda save: save.staleness.oldest.layer,
    "oldest_steps": lambda save: save.staleness.oldest.steps,
    "oldest_saves": lambda save: save.staleness.oldest.saves,
    "timing": lambda save: None if save.timing is None else _timing(save.timing),
    "fate": lambda save: None if save.fate is None else _fate(save.fate),
    "bytes": lambda save: list(json_fields(save.own).values()),
    "total_bytes": lambda save: list(json_fields(save.total).values()),
}


def _columns(saves: Iterable[ShownSave]) -> dict[str, list[object]]:
    each = list(saves)
    return {name: [told(save) for save in each] for name, told in _SAVE.items()}


# -- timings, which come from a file that anybody may have edited --------------------------------------------------


def _timing(timing: SaveTiming) -> list[float | None]:
    """Return the seconds blocked, until durable, until visible."""
    return [_number(each) for each in (timing.blocked_seconds, timing.durable_seconds, timing.visible_seconds)]


def _timings(timings: Iterable[SaveTiming]) -> dict[str, object] | None:
    each = list(timings)
    if not each:
        return None
    blocked, durable, visible = zip(*map(_timing, each), strict=True)
    return {
        "saves": len(each),
        "given_up": sum(bool(timing.failure) for timing in each),
        "blocked": _summary(blocked),
        "durable": _summary(durable),
        "visible": _summary(visible),
    }


def _summary(seconds: Iterable[float | None]) -> dict[str, float] | None:
    found = [number for number in seconds if number is not None]
    return {"median": _four_digits(median(found)), "max": max(found)} if found else None


def _number(value: object) -> float | None:
    """Return *value* if it is a number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _SECONDS_MAX:
        return _four_digits(float(value))
    return None


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(movement: float | None) -> float | str | None:
    """Return *movement* with four digits; NaN and infinity, which JSON lacks, as text."""
    if movement is None:
        return None
    return _four_digits(movement) if math.isfinite(movement) else str(movement)


# -- retention ------------------------------------------------------------------------------------------------------


def _retention(found: RetentionReport) -> dict[str, object]:
    outcome = found.outcome
    if outcome is None:
        return {"rules": rules_of(found.keep), "refusal": found.refusal}
    return {
        "rules": rules_of(found.keep),
        "refusal": None,
        "commits_kept": found.commits_kept,
        "commits_removed": len(outcome.removed),
        "commits_trimmed": len(outcome.trimmed),
        "bytes_freed": outcome.bytes_freed,
        "bytes_freed_later": outcome.young.size_bytes,
        "unserved": len({each.reference for each in outcome.unserved}),
        "unserved_policies": list(dict.fromkeys(each.policy for each in outcome.unserved)),
    }


def rules_of(keep: Keep) -> str:
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
    """Return what gc would do with a commit, why, and the bytes that this frees, at once or later."""
    verdict = "trim" if fate.loses_moments else "keep" if fate.kept_by else "remove"
    why = ", ".join(fate.kept_by) if fate.kept_by else fate.goes_because
    return [verdict, why, fate.bytes_freed + fate.bytes_freed_later]


def _iso(time_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ns // 10**9))
