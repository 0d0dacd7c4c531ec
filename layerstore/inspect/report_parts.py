"""
Two parts of a report.

First, the pins: what each pin holds and, unless a shown save has the same layers, the origin of each layer. Second,
what training measured at each save, and what a Trainer logged in between.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layerstore.errors import LayerstoreError
from layerstore.format import commit_id
from layerstore.history import measured_by, others_in, references_to
from layerstore.json_fields import short_time
from layerstore.model import Commit, CommitRecord, LayerEntry, Origin, Pin
from layerstore.storage import Repository, RunView

# The most pins that are listed, and the most bytes for layers of pins that no shown save covers.
_PINS_MAX = 200
_LAYERS_BYTES = 80_000

# Digits of a version's id: enough to tell two versions of a layer apart.
VERSION_DIGITS = 8

# The most metrics of a run, and the most letters of a metric's name.
_METRICS_MAX = 6
_NAME_MAX = 80

# The most points of a curve: more would be narrower than a pixel.
_POINTS_MAX = 400
_POINT_BYTES = 20

Point = tuple[int, int, float]
"""Attempt, step, value."""


def pins_of(
    repo: Repository, run: str | None, runs: Iterable[Mapping[str, Any]], problems: list[str]
) -> dict[str, object]:
    """
    Return the facts about the pins of the store, or of *run*; add to *problems* what cannot be read.

    *runs* are the facts about the runs. A pin of a save that they show is listed without its layers, to repeat nothing.
    """
    layers = {run_facts["run"]: run_facts["layers"] for run_facts in runs}
    commits = {commit for run_facts in runs for commit in run_facts["saves"]["commit"]}
    pins = sorted((pin for pin in repo.records.readable_pins() if run in {None, pin.run}), key=lambda pin: pin.name)
    listed, room = pins[:_PINS_MAX], _LAYERS_BYTES
    facts = list[dict[str, Any]]()
    for pin, reference in zip(listed, references_to(repo, [pin.record for pin in listed]), strict=True):
        taken, pin_facts = None, _pin(repo, pin, reference)
        if pin.base not in commits or pin_facts["is_composite"]:
            taken = _taken(repo, pin, layers.get(pin.run, []), problems)
            size_bytes = len(json.dumps(taken))
            taken, room = (taken, room - size_bytes) if size_bytes <= room else (None, room)
        facts.append(pin_facts | {"taken": taken})
    return {"pins": facts, "pins_left_out": len(pins) - len(facts)}


def mixture_fields(base: CommitRecord, layers: Sequence[LayerEntry]) -> list[int] | None:
    """Return [layers from other saves, all *layers*, whether the former are all older] as numbers; None if unmixed."""
    others = others_in(base, layers) if layers else None
    return None if others is None else [others[0], len(layers), others[1]]


def _pin(repo: Repository, pin: Pin, reference: str) -> dict[str, Any]:
    record, made_ns = pin.record, repo.files.modified_ns(repo.layout.pin(pin.name))
    return {
        "pin": pin.name,
        "run": record.run,
        "attempt": record.attempt,
        "step": record.step,
        "save_number": record.save_number,
        "reference": reference,
        "commit": pin.base,
        "time": short_time(pin.observed.time_ns),
        "made": None if made_ns is None else short_time(made_ns),
        "policy": record.policy.name,
        "policy_parameters": {str(name): str(value) for name, value in record.policy.parameters.items()},
        "is_composite": commit_id(record) != pin.base,
        "mixture": mixture_fields(record, record.layers),
    }


def _taken(repo: Repository, pin: Pin, layers: list[str], problems: list[str]) -> dict[str, Any]:
    """Return the layer names of *pin* (None if equal to *layers*), and each layer's origin, version and size."""
    entries = pin.record.layers
    names = [entry.layer for entry in entries]
    indexes: dict[Origin, int] = {}
    return {
        "layers": None if names == layers else names,
        "origin": [indexes.setdefault(entry.origin, len(indexes)) for entry in entries],
        "version": "".join(entry.version.id[:VERSION_DIGITS] for entry in entries),
        "bytes": [_size_of(repo, entry, problems) for entry in entries],
        "origins": {
            "run": [origin.run for origin in indexes],
            "attempt": [origin.attempt for origin in indexes],
            "step": [origin.step for origin in indexes],
            "save_number": [origin.save_number for origin in indexes],
        },
    }


def _size_of(repo: Repository, entry: LayerEntry, problems: list[str]) -> int | None:
    try:
        return sum(stored.size_bytes for stored in repo.version_of(entry).objects)
    except LayerstoreError as exc:
        problems.append(str(exc))
        return None


# -- what training measured ----------------------------------------------------------------------------------------


def metrics_and_curves(
    repo: Repository, view: RunView, shown: Sequence[Commit], problems: list[str], *, room_bytes: int
) -> dict[str, Any]:
    """
    Return `metrics`: by name, a value for each save *shown*; and `curves`, of about *room_bytes*, if a Trainer logged.

    Losses come first, then the metrics that most saves have. What cannot be read is added to *problems*.
    """
    ends = {commit.record.attempt: commit.id for commit in shown}
    measured, points = list[dict[str, float]](), dict[str, list[Point]]()
    for commit in shown:
        try:
            found = measured_by(repo, commit.record, view=view)
        except LayerstoreError as exc:
            problems.append(str(exc))
            measured.append({})
            continue
        measured.append(_finite(found.at_save))
        if ends[commit.record.attempt] == commit.id:
            _add(points, commit.record, found.by_step())
    counts = Counter(name for metrics in measured for name in metrics)
    counts.update(dict.fromkeys(points, 0))
    names = sorted(counts, key=lambda name: (name != "loss", "loss" not in name, -counts[name], name))[:_METRICS_MAX]
    facts: dict[str, Any] = {
        "metrics": {
            name: [_short(metrics[name]) if name in metrics else None for metrics in measured] for name in names
        }
    }
    room = min(_POINTS_MAX, room_bytes // _POINT_BYTES // _METRICS_MAX)
    curves = {name: thinned(points[name], room=room) for name in names if points.get(name)}
    return facts | ({"curves": curves} if curves else {})


def _add(
    points: dict[str, list[Point]], record: CommitRecord, logged: Iterable[tuple[int, Mapping[str, float]]]
) -> None:
    """Add what was *logged* after the fork of an attempt, up to *record*, the last shown save of that attempt."""
    fork = record.lineage[0].step if record.lineage else -1
    for step, metrics in logged:
        if fork < step <= record.step:
            for name, value in _finite(metrics).items():
                points.setdefault(name, []).append((record.attempt, step, _short(value)))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value) and len(name) <= _NAME_MAX}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def thinned(points: Sequence[Point], *, room: int) -> list[Point]:
    """
    Return about *room* of *points*, the least and the greatest of each stretch, so that no spike is lost.

    >>> [value for _, _, value in thinned([(1, step, step % 7) for step in range(700)], room=4)]
    [0, 6, 0, 6]
    """
    if len(points) <= room:
        return list(points)
    stretches = max(1, room // 2)
    kept = set[int]()
    for stretch in range(stretches):
        places = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        kept |= {min(places, key=lambda at: points[at][2]), max(places, key=lambda at: points[at][2])}
    return [points[at] for at in sorted(kept)]
