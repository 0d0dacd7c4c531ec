"""
The pictures that are drawn from the rows.

Training with its spread, every arm's difference beside the noise, bytes against damage, which layers move when, how a
resumed training recovers, and what many policies cost at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from tests.bench.chart import COLOURS, WIDTH, Chart, spanning
from tests.bench.quality.arms import FULL, NOISE, NOT_TRAINED, arms, taken_once_in
from tests.bench.quality.intervals import interval, root_mean_square
from tests.bench.quality.settings import TASKS, Settings
from tests.bench.quality.table import Findings
from tests.bench.rows import Row

_LEFT, _RIGHT = 70, WIDTH - 20
_SMOOTHED = 20
"""Steps of the training loss that are averaged: a batch is small."""


def draw(settings: Settings, rows: Sequence[Row], folder: Path) -> None:
    """Write the pictures to *folder*."""
    found = Findings(rows)
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Settings, Findings], str]] = {
        "loss": loss,
        "differences": differences,
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


def differences(settings: Settings, found: Findings) -> str:
    """Draw every arm's difference to the control with its interval, and how far other batches alone move the loss."""
    names = [name for name in _names(settings) if found.keys(name)]
    intervals = {name: interval(found.differences(name, found.keys(name))) for name in names}
    said = "; ".join(f"{name} {of.mean:+.4f}" for name, of in intervals.items())
    chart = Chart(
        title="Held-out loss at the end, beside the job that never failed",
        description="One line for each arm: mean over seeds and its 90 % interval. Shaded is what other batches do. "
        f"The means: {said}.",
        height=110 + 30 * len(names),
    )
    band = root_mean_square(found.differences(NOISE, found.keys(NOISE)) or [0.0])
    ends = [end for of in intervals.values() for end in (of.mean, of.low, of.high)]
    x = spanning([*ends, band, -band], begin=_LEFT + 90, end=_RIGHT)
    y = spanning([0.0, float(len(names))], begin=60 + 30 * len(names), end=50)
    chart.band(x.at(-band), y.end, x.at(band) - x.at(-band), y.begin - y.end)
    for tick in x.ticks():
        chart.text(x.at(tick), y.begin + 16, f"{tick:+g}", css="middle")
    chart.text((x.begin + x.end) / 2, y.begin + 34, "nats a token; right is worse", css="middle")
    chart.line([(x.at(0), y.begin), (x.at(0), y.end)], COLOURS[-1], is_dashed=True)
    for number, (name, of) in enumerate(intervals.items()):
        height = 68.0 + 30 * number
        low, high = max(of.low, x.low), min(of.high, x.high)
        chart.text(x.begin - 8, height + 4, name, css="end")
        chart.line([(x.at(low), height), (x.at(high), height)], COLOURS[0])
        chart.dot(x.at(of.mean), height, COLOURS[0])
    return chart.svg()


def frontier(settings: Settings, found: Findings) -> str:
    """Draw bytes against damage: an arm to the right saves less, one further down harms less."""
    points = {}
    for name in _names(settings):
        times = _times_fewer(settings, found, name)
        if times is not None and found.keys(name):
            points[name] = (times, interval(found.differences(name, found.keys(name))))
    said = "; ".join(f"{name} {times:.1f} times at {of.mean:+.4f}" for name, (times, of) in points.items())
    chart = Chart(
        title="Bytes saved and what that costs",
        description="For each arm, how many times fewer bytes a whole run saves, and by how much its loss is higher: "
        f"{said}.",
        height=400,
    )
    x = spanning([times for times, _ in points.values()], begin=_LEFT, end=_RIGHT, is_logarithmic=True)
    y = spanning([end for _, of in points.values() for end in (of.mean, of.low, of.high)], begin=340, end=60)
    chart.axes(
        x, y, across="times fewer bytes than 12 a parameter at every save, first save included", upwards="Δ loss"
    )
    for name, (times, of) in points.items():
        colour = _colour(settings, name)
        low, high = max(of.low, y.low), min(of.high, y.high)
        chart.line([(x.at(times), y.at(low)), (x.at(times), y.at(high))], colour)
        chart.dot(x.at(times), y.at(of.mean), colour)
        is_right = x.at(times) > (x.begin + x.end) / 2
        chart.text(x.at(times) + (-8 if is_right else 8), y.at(of.mean) - 6, name, css="end" if is_right else "")
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
    names = [name for name in _names(settings) if name not in (FULL, *NOT_TRAINED) and found.keys(name)]
    curves = {name: _curve(found, name) for name in names}
    said = "; ".join(f"{name} {curve[0][1]:+.4f} and {curve[-1][1]:+.4f}" for name, curve in curves.items() if curve)
    chart = Chart(
        title="After the resume",
        description="Held-out loss above the control's by steps since the resume, in the mean over jobs, right after "
        f"it and at the last step that all have: {said}.",
        height=380,
    )
    points = [point for curve in curves.values() for point in curve]
    x = spanning([steps for steps, _ in points], begin=_LEFT, end=_RIGHT)
    y = spanning([difference for _, difference in points], begin=320, end=100)
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
