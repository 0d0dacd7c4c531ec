"""
What drift saves, and what training loses by it: real ZeRO-3 on two CPU ranks, resumed from every policy's store.

The demo's own training, learning rate included. Several savers save one run, each into a store of its own. The run
fails just before its next save is due. From every store it is resumed at the newest step that is there, as a mixture
of layers of different ages, and trained on. It is compared with the run that never stopped, as many steps after its
own last save: by evaluation of text that is never trained on, the same in all. That is done twice: 20 steps after the
resume, and 20 beyond the step of the failure, up to which work is done again.

A plain full save every 20th time goes back far instead, and trains its 20 steps there; trained on to the step of the
failure it would be the uninterrupted run, for up to 20 times as many steps of work done again.
"""

import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import layerstore
from layerstore.history import resolve
from layerstore.live.demo.launch import Ranks
from layerstore.model import CommitRecord
from layerstore.tree import Tree
from tests.bench.drift_job import FURTHER_STEPS, HIDDEN, LAYERS, Course, Result
from tests.bench.drift_lines import CONTROL, DRIFT, LINES, OTHER_TEXT, RUN
from tests.bench.loop_table import DEEPSPEED_BYTES, TRAINER_BYTES

BYTES_RATIO_MIN = 20.0
LOSS_SHARE_MAX = 0.01
LARGEST_SHARE_MAX = 0.5
"""Of a full save: from here on it is one of nearly everything."""
_RANKS = 2
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How long the job is."""

    seeds: int
    saves: int
    every: int


def run(folder: Path, setting: Setting) -> None:
    """Run the job with every seed and print its tables."""
    print(
        f"{_RANKS} CPU ranks, {os.cpu_count()} processors, {platform.platform()}\n"
        f"the demo's training with {LAYERS} blocks of width {HIDDEN}; a first save and {setting.saves} after it, one "
        f"every {setting.every} steps; {setting.seeds} seeds",
        flush=True,
    )
    results = []
    for seed in range(setting.seeds):
        result = _measured(folder / f"seed{seed}", setting, seed)
        print("\n".join(["", *_table(result), *_records(folder / f"seed{seed}" / DRIFT.name, result)]), flush=True)
        results.append(result)
    print("\n".join(["", *_summary(results), "", *_bars(results)]), flush=True)


def _measured(folder: Path, setting: Setting, seed: int) -> Result:
    folder.mkdir(parents=True)
    out = folder / "result.json"
    arguments = ["--out", str(out), "--data", str(folder), "--seed", str(seed)]
    arguments += ["--saves", str(setting.saves), "--every", str(setting.every)]
    with Ranks("tests.bench.drift_job", arguments, count=_RANKS, folder=_ROOT, log=folder / "log") as ranks:
        for _ in ranks.events():
            pass
    found = json.loads(out.read_text())
    courses = {
        name: Course(**course | {"losses": _by_number(course["losses"])}) for name, course in found["courses"].items()
    }
    return Result(**found | {"losses": _by_number(found["losses"]), "courses": courses})


def _by_number(losses: Mapping[str, float]) -> dict[int, float]:
    return {int(steps): loss for steps, loss in losses.items()}


def _fewer(result: Result, name: str, *, of: int = DEEPSPEED_BYTES, with_first: bool = False) -> float:
    """Return how many times fewer bytes were saved than by *of* bytes a parameter at every moment."""
    sizes = result.courses[name].bytes
    return of * result.parameters * (result.saves + with_first) / sum(sizes if with_first else sizes[1:])


def _off(result: Result, name: str, steps: int) -> float:
    """Return by what share of it the loss is above the uninterrupted run's, so many steps after resuming."""
    return result.courses[name].losses[steps] / result.losses[steps] - 1


def _table(result: Result) -> Iterator[str]:
    _, further, beyond = sorted(result.losses)
    yield (
        f"seed {result.seed}: {result.parameters / 1e6:.2f} million parameters; last save at step {result.last}, "
        f"failure after step {result.failure}; the uninterrupted run's loss, {further} and {beyond} steps after that "
        f"save: {result.losses[further]:.4f}, {result.losses[beyond]:.4f}"
    )
    yield (
        f"  {'':<18}{'a save':>9}{'x 12 B':>8}{'x 14 B':>8}{'with 1st':>9}{'largest':>9}{'base':>6}{'oldest':>8}"
        f"{'mean':>7}{'loss at once':>14}{f'+{further}':>9}{f'+{beyond}':>9}"
    )
    for name, course in result.courses.items():
        yield f"  {name:<18}{_sizes(result, name)}{_ages(result, course)}" + "".join(
            f"{_off(result, name, steps):>+{width}.2%}"
            for steps, width in zip(sorted(result.losses), (14, 9, 9), strict=True)
        )


def _sizes(result: Result, name: str) -> str:
    later = result.courses[name].bytes[1:]
    if not later:
        return " " * 43
    return (
        f"{sum(later) / result.saves / 1e6:>6.2f} MB{_fewer(result, name):>7.1f}x"
        f"{_fewer(result, name, of=TRAINER_BYTES):>7.1f}x{_fewer(result, name, with_first=True):>8.1f}x"
        f"{max(later) / sum(later):>9.1%}"
    )


def _ages(result: Result, course: Course) -> str:
    ages = [result.failure - step for step in course.layers.values()]
    return f"{course.base:>6}{max(ages):>8}{statistics.mean(ages):>7.0f}"


def _records(store: Path, result: Result) -> Iterator[str]:
    """Say what the records have of drift's decisions; raise where that is not what was saved."""
    moved: list[float] = []
    with layerstore.open(store) as opened:
        steps = sorted(entry.step for entry in opened.log(RUN))
        if len(steps) != result.saves + 1:
            raise RuntimeError(f"of {result.saves + 1} saves {len(steps)} are visible")
        for step in steps[1:]:
            record = resolve(opened.repo, f"{RUN}@{step}").record
            found = {str(layer): movement for layer, movement in _movements(record).items()}
            new = [layer.layer for layer in record.layers if layer.origin.step == step]
            if record.policy.decisions.get("due") != new or found.keys() != {layer.layer for layer in record.layers}:
                raise RuntimeError(f"the record of step {step} does not say what was decided, and from what")
            moved += [found[layer] for layer in new]
    yield (
        f"  {DRIFT.name}: the records of all {len(steps)} saves say what was due and how far every layer had moved; "
        f"those saved, by {statistics.median(moved):.0%} in the median, {min(moved):.1%} to {max(moved):.0%}"
    )


def _movements(record: CommitRecord) -> dict[Tree, float]:
    found = record.policy.decisions.get("movements")
    assert isinstance(found, dict)
    return {layer: movement for layer, movement in found.items() if isinstance(movement, float)}


def _summary(results: list[Result]) -> Iterator[str]:
    for line in LINES:
        settings = line.policy(results[0].parameters).parameters
        yield f"{line.name}: " + (", ".join(f"{key!r} {value!r}" for key, value in settings.items()) or "no settings")
    yield ""
    heads = "".join(f"{f'+{steps} steps: mean':>18}{'worst':>9}" for steps in _further(results))
    yield f"{'':<20}{'x 12 B, worst':>16}{'oldest, steps':>16}{heads}"
    for name in results[0].courses:
        has_saves = len(results[0].courses[name].bytes) > 1
        fewer = f"{min(_fewer(result, name) for result in results):.1f}x" if has_saves else ""
        offs = [[_off(result, name, steps) for result in results] for steps in _further(results)]
        yield f"{name:<20}{fewer:>16}{_oldest(results, name):>16}" + "".join(
            f"{statistics.mean(off):>+18.2%}{max(off, key=abs):>+9.2%}" for off in offs
        )


def _further(results: list[Result]) -> list[int]:
    """Return after how many steps since the resume losses are compared."""
    return sorted(results[0].losses)[1:]


def _oldest(results: list[Result], name: str) -> int:
    """Return how many steps the oldest layer is behind the failure."""
    return max(result.failure - min(result.courses[name].layers.values()) for result in results)


def _bars(results: list[Result]) -> Iterator[str]:
    name, saves = DRIFT.name, min(result.saves for result in results)
    fewer = min(_fewer(result, name) for result in results)
    yield (
        f"≥ {BYTES_RATIO_MIN:.0f} × fewer bytes over {saves} saves after the first: "
        f"{_kept(fewer >= BYTES_RATIO_MIN)} ({fewer:.1f} ×)"
    )
    for steps, since in zip(_further(results), ("since the resume", "beyond the step of the failure"), strict=True):
        off = max((_off(result, name, steps) for result in results), key=abs)
        yield (
            f"loss within {LOSS_SHARE_MAX:.0%} of the full run's, {FURTHER_STEPS} steps {since}: "
            f"{_kept(abs(off) <= LOSS_SHARE_MAX)} ({off:+.2%}, the oldest layer {_oldest(results, name)} steps old)"
        )
    noise = max(abs(_off(result, OTHER_TEXT, steps)) for result in results for steps in _further(results))
    yield f"  a full save that goes on with other batches comes out up to {noise:.2%} off: less than that says little"
    saved = [result.courses[name].bytes for result in results]
    most = max(max(sizes[1:]) / sizes[0] for sizes in saved)
    largest = max(max(sizes[1:]) / sum(sizes[1:]) for sizes in saved)
    yield (
        f"no save of nearly everything: {_kept(most <= LARGEST_SHARE_MAX)} (the largest after the first is {most:.0%} "
        f"of a full save, and {largest:.1%} of all bytes after the first)"
    )
    same = all(_off(result, CONTROL.name, steps) == 0 for result in results for steps in result.losses)
    yield f"resumed from a full save, losses are the uninterrupted run's to the last bit: {_kept(same)}"


def _kept(is_so: bool) -> str:
    return "kept" if is_so else "missed"
