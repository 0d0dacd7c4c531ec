"""
The pictures that are drawn from the rows.

Training with its spread, bytes against damage, which layers move when, how a resumed training recovers, and what many
policies cost at once.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from tests.bench.chart import COLOURS, WIDTH, Chart, Point, spanning
from tests.bench.quality.arms import FULL, NOISE, NOT_TRAINED, arms, taken_once_in
from tests.bench.quality.intervals import Interval, interval
from tests.bench.quality.settings import TASKS, Settings
from tests.bench.quality.table import BOUNDS, Findings
from tests.bench.rows import Row

_LEFT, _RIGHT = 70, WIDTH - 20
_SMOOTHED = 20
"""Steps of the training loss that are averaged: a batch is small."""
_LEAST, _FAR = 1e-5, 0.1
"""Differences of the loss that a picture of many powers of ten begins and ends with."""


def draw(settings: Settings, rows: Sequence[Row], folder: Path) -> None:
    """Write the pictures to *folder*."""
    found = Findings(rows)
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Settings, Findings], str]] = {
        "loss": loss,
        "frontier": frontier,
        "movements": movements,
        "recovery": recovery,
    }
    for name, picture in pictures.items():
        (folder / f"quality-{name}.svg").write_text(picture(settings, found))
    if tried := [row for row in rows if row["kind"] == "trial"]:
        (folder / "quality-trial.svg").write_text(at_once(tried))


def loss(settings: Settings, found: Findings) -> str:
    """Draw the training loss of the trunks: the mean over seeds, and from the lowest to the highest."""
    smooth = {
        task: [_smoothed(row["trained_losses"]) for (name, _), row in found.trunks.items() if name == task]
        for task in TASKS
    }
    ends = (
        f"{task} from {mean(curve[0] for curve in curves):.2f} to {mean(curve[-1] for curve in curves):.2f}"
        for task, curves in smooth.items()
        if curves
    )
    chart = Chart(
        title="Training without a failure",
        description=f"The training loss over {settings.steps} steps, its mean and its range over seeds, falls: "
        f"{'; '.join(ends)} nats a token.",
        height=360,
    )
    every = [value for curves in smooth.values() for curve in curves for value in curve]
    x = spanning([settings.steps], begin=_LEFT, end=_RIGHT)
    y = spanning(every, begin=300, end=80, with_zero=False)
    chart.axes(x, y, across="step", upwards="training loss, nats a token")
    for curves, colour in zip(smooth.values(), COLOURS, strict=False):
        if not curves:
            continue
        steps = [x.at(step + _SMOOTHED) for step in range(len(curves[0]))]
        each = list(zip(*curves, strict=True))
        upper = [(at, y.at(max(values))) for at, values in zip(steps, each, strict=True)]
        lower = [(at, y.at(min(values))) for at, values in zip(steps, each, strict=True)]
        chart.area(upper, lower, colour)
        chart.line([(at, y.at(mean(values))) for at, values in zip(steps, each, strict=True)], colour)
    chart.legend(TASKS, COLOURS[: len(TASKS)], y=46)
    return chart.svg()


def frontier(settings: Settings, found: Findings) -> str:
    """Draw bytes against damage: an arm to the right saves less, one further down harms less."""
    points = dict[str, tuple[float, Interval]]()
    for name in _names(settings):
        times = _times_fewer(settings, found, name)
        if times is not None and found.keys(name) and not _resumes_often(settings, name):
            points[name] = (times, interval(found.differences(name, found.keys(name))))
    said = "; ".join(f"{name} {times:.1f} times at {of.mean:+.5f}" for name, (times, of) in points.items())
    noise = found.noise()
    chart = Chart(
        title="Bytes saved and what that costs",
        description="For each arm, how many times fewer bytes a whole run saves, and how far its loss is from that of "
        f"the job that never failed; other batches alone move it by {noise:.4f}, the shaded part: {said}.",
        height=460,
    )
    shown = {name: point for name, point in points.items() if abs(point[1].mean) <= _FAR}
    far = [f"{name} ({times:.0f}x, {of.mean:+.2f})" for name, (times, of) in points.items() if name not in shown]
    chart.text(_LEFT, 46, f"further out: {'; '.join(far)}" if far else "")
    x = spanning([times for times, _ in shown.values()], begin=_LEFT, end=_RIGHT, is_logarithmic=True)
    y = spanning([_LEAST, _FAR], begin=400, end=84, is_logarithmic=True)
    at_noise = y.at(max(noise, _LEAST))
    chart.band(x.begin, at_noise, x.end - x.begin, y.begin - at_noise)
    across = "times fewer bytes than 12 a parameter at every save, exact saves included"
    chart.axes(x, y, across=across, upwards=f"Δ loss either way; nearer than {_LEAST:.5f} is on the last line")
    places = dict[str, Point]()
    for name, (times, of) in shown.items():
        places[name] = (x.at(times), y.at(max(abs(of.mean), _LEAST)))
        furthest = max(abs(of.low), abs(of.high))
        if math.isfinite(furthest):
            end = y.at(min(max(furthest, _LEAST), y.high))
            chart.line([places[name], (x.at(times), end)], _colour(settings, name))
        chart.dot(*places[name], _colour(settings, name))
    chart.labels(places)
    return chart.svg()


def movements(settings: Settings, found: Findings) -> str:
    """Draw how far each layer moved from save to save, in the mean over all jobs."""
    sums = dict[tuple[str, int], list[float]]()
    for (_, _, arm, step), row in found.saves.items():
        if arm == FULL:
            for layer, movement in row["movements"].items():
                sums.setdefault((layer, step), []).append(movement)
    saves = (row["layers"] for row in found.saves.values() if row["arm"] == FULL)
    order: Sequence[str] = next(saves, [])  # the model's own
    moved = {layer for layer, _ in sums}
    layers = [layer for layer in order if layer in moved]
    steps = sorted({step for _, step in sums})
    largest = max((mean(of) for of in sums.values()), default=1.0)
    chart = Chart(
        title="How far each layer moves from one save to the next",
        description=f"A row for each layer and a column for each save, darker where a layer moved further; the darkest "
        f"is {largest:.2%} of its length.",
        height=90 + 18 * len(layers),
    )
    chart.text(_RIGHT, 24, f"darkest: {largest:.2%} of its length", css="end")
    left, width = 170.0, (_RIGHT - 170.0) / max(len(steps), 1)
    for row_number, layer in enumerate(layers):
        top = 40.0 + 18 * row_number
        chart.text(left - 8, top + 13, layer, css="end")
        for column, step in enumerate(steps):
            if (layer, step) in sums:
                share = mean(sums[layer, step]) / largest if largest else 0.0
                chart.cell(left + column * width, top, width - 0.5, 17, share=share)
    bottom = 40.0 + 18 * len(layers)
    for column, step in enumerate(steps):
        if column % max(len(steps) // 8, 1) == 0:
            chart.text(left + (column + 0.5) * width, bottom + 16, str(step), css="middle")
    chart.text((left + _RIGHT) / 2, bottom + 34, "step of the save", css="middle")
    return chart.svg()


def recovery(settings: Settings, found: Findings) -> str:
    """Draw how the difference to the control changes after a resume, in the mean over all jobs and failures."""
    within = max(BOUNDS.values())
    names = [
        name
        for name in _names(settings)
        if name not in (FULL, *NOT_TRAINED) and not _resumes_often(settings, name) and found.keys(name)
        if abs(mean(found.differences(name, found.keys(name)))) <= within
    ]
    curves = {name: _curve(found, name) for name in names}
    said = "; ".join(f"{name} {curve[0][1]:+.4f} and {curve[-1][1]:+.4f}" for name, curve in curves.items() if curve)
    chart = Chart(
        title=f"After the resume: what is within {within:g} at the end",
        description="Held-out loss above the control's by steps since the resume, in the mean over jobs, right after "
        f"it and at the last step that all have: {said}.",
        height=380,
    )
    points = [point for curve in curves.values() for point in curve]
    x = spanning([steps for steps, _ in points], begin=_LEFT, end=_RIGHT)
    y = spanning([difference for _, difference in points], begin=320, end=106)
    chart.axes(x, y, across="steps after the resume", upwards="Δ loss")
    for name, curve in curves.items():
        path = [(x.at(steps), y.at(difference)) for steps, difference in curve]
        chart.line(path, _colour(settings, name), is_dashed=_is_dashed(settings, name))
    chart.legend(names, [_colour(settings, name) for name in names], y=46)
    return chart.svg()


def at_once(tried: Sequence[Row]) -> str:
    """Draw what each policy costs right after a resume, by how many times fewer bytes it saves."""
    damage, times = dict[str, list[float]](), dict[str, list[float]]()
    for row in tried:
        damage.setdefault(row["policy"], []).append(mean(row["damage"].values()))
        times.setdefault(row["policy"], []).append(row["times_fewer"])
    points = {name: (mean(times[name]), mean(of)) for name, of in damage.items()}
    families = ("in turns", "drift by norm", "drift by gradient", "drift decaying")
    curves = {family: sorted(at for name, at in points.items() if name.startswith(family)) for family in families}
    said = "; ".join(f"{name} {at:.1f} times at {of:+.4f}" for name, (at, of) in points.items())
    chart = Chart(
        title="Right after a resume, before training heals any of it",
        description=f"For each policy, how many times fewer bytes the later saves have, and Δ loss at once: {said}.",
        height=400,
    )
    x = spanning([at for at, _ in points.values()], begin=_LEFT, end=_RIGHT, is_logarithmic=True)
    y = spanning([of for _, of in points.values()], begin=340, end=90)
    chart.axes(x, y, across="times fewer bytes in the saves after the first", upwards="Δ loss at once")
    for curve, colour in zip(curves.values(), COLOURS, strict=False):
        path = [(x.at(at), y.at(of)) for at, of in curve]
        chart.line(path, colour)
        for place in path:
            chart.dot(*place, colour)
    chart.legend(families, COLOURS[: len(families)], y=46)
    for name, (at, of) in points.items():
        if not name.startswith(families):
            chart.dot(x.at(at), y.at(of), COLOURS[-1])
            chart.text(x.at(at) + 8, y.at(of) - 6, name)
    return chart.svg()


def _names(settings: Settings) -> list[str]:
    return [*(arm.name for arm in arms(settings)), *NOT_TRAINED]


def _resumes_often(settings: Settings, name: str) -> bool:
    """Return whether it is an arm that is shown already, and is resumed again and again here."""
    return any(arm.name == name and arm.resumes_often for arm in arms(settings))


def _colour(settings: Settings, name: str) -> str:
    """Return the arm's colour, the same in all pictures; what is only compared with is grey."""
    return COLOURS[-1] if name in (FULL, NOISE, *NOT_TRAINED) else COLOURS[_place(settings, name) % (len(COLOURS) - 1)]


def _is_dashed(settings: Settings, name: str) -> bool:
    """Return whether an arm before it has its colour already."""
    return name not in (FULL, NOISE, *NOT_TRAINED) and _place(settings, name) >= len(COLOURS) - 1


def _place(settings: Settings, name: str) -> int:
    return _names(settings).index(name) - 1


def _smoothed(losses: Sequence[float]) -> list[float]:
    return [mean(losses[end - _SMOOTHED : end]) for end in range(_SMOOTHED, len(losses) + 1)]


def _times_fewer(settings: Settings, found: Findings, name: str) -> float | None:
    if name in NOT_TRAINED:
        saves = settings.steps // settings.save_every
        return saves / -(-saves // taken_once_in(settings, name))
    times = found.times_fewer(name)
    return None if times is None else times[1]


def _curve(found: Findings, name: str) -> list[tuple[int, float]]:
    """Return the mean difference after so many steps, where every job and failure has one."""
    by_steps = dict[int, list[float]]()
    keys = found.keys(name)
    for key in keys:
        row, of_trunk = found.resumes[name, key], found.trunks[key.task, key.seed]["losses"]
        for step, value in row["losses"].items():
            by_steps.setdefault(int(step) - row["base"], []).append(value - of_trunk[step])
    return [(steps, mean(of)) for steps, of in sorted(by_steps.items()) if len(of) == len(keys)]
