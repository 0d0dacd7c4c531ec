"""A bisection of a store of twenty saves: every trial, in the order in which it was asked for, and its verdict."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import layerstore
from layerstore.bisect import Judged
from tests.docs.drawn.panels import Panel, picture
from tests.environment import memory
from tests.unit.checkpoints import Checkpoints

STEPS = range(100, 2001, 100)
BAD_SINCE, BAD_LAYER = 1100, "model.layers.2"

_LABELS, _CELL, _ROW, _WIDTH = 96, 20, 18, 528
_TRIAL = 48
"""The width of a trial in the grid of layers."""


@dataclass(frozen=True, slots=True)
class _Trial:
    number: int
    layers: dict[str, int]
    """The step that each layer is from."""
    is_good: bool


def bisection() -> str:
    """Draw which saves were judged, and then which mixtures of two."""
    trials, answer, good = _trials()
    saves = [trial for trial in trials if len(set(trial.layers.values())) == 1]
    mixtures = trials[len(saves) :]
    return picture(
        [_of_saves(saves), _of_layers(mixtures, good)],
        title="A bisection, trial by trial",
        description=f"First {len(saves)} trials of {len(STEPS)} saves: each judges the middle of those that are still "
        f"in question, until a good save and a bad one are neighbours. Then {len(mixtures)} trials of the last good "
        f"save with some layers of a later one: half of the layers that are still suspected, until one alone makes it "
        f"bad. The answer: {answer}.",
    )


def _trials() -> tuple[list[_Trial], str, int]:
    """Bisect a store; return every trial, the answer, and the step of the last good save."""
    judged = list[dict[str, int]]()

    def judge(folder: Path) -> Judged:
        described = json.loads((folder / "layerstore.json").read_text())["layers"]
        judged.append({layer: entry["step"] for layer, entry in described.items()})
        return Judged(verdict="bad" if judged[-1][BAD_LAYER] >= BAD_SINCE else "good")

    with tempfile.TemporaryDirectory(dir=memory()) as temporary:
        folder = Path(temporary)
        with layerstore.init(folder / "store") as store:
            Checkpoints(folder / "source", layers=8).into(store, *STEPS, run="sft")
            found = store.bisect(f"sft@{STEPS[0]}", "sft", judge, name="judge", folder=folder / "bisected")
    trials = [
        _Trial(trial.number, layers, trial.verdict == "good")
        for trial, layers in zip(found.trials, judged, strict=True)
    ]
    return trials, str(found), int(found.good.rpartition("@")[2])


def _of_saves(trials: Sequence[_Trial]) -> Panel:
    """Draw a column for each save and a row for each trial: which saves were in question, and which was judged."""
    marks, low, high = list[str](), STEPS[0], STEPS[-1]
    for row, trial in enumerate(trials):
        step, y = trial.layers[BAD_LAYER], 4 + row * _ROW
        marks.append(_text(_LABELS - 8, y + 13, f"trial {trial.number}", "end"))
        marks.append(_box("band", _column(low), y, _column(high) + _CELL - _column(low), _ROW - 1))
        marks.append(_verdict(_column(step) + _CELL / 2, y + _ROW / 2, trial.is_good))
        low, high = (step + STEPS.step, high) if trial.is_good else (low, step - STEPS.step)
    bottom = 4 + len(trials) * _ROW
    marks += [_text(_column(step) + _CELL / 2, bottom + 14, f"{step:,}", "middle") for step in STEPS if step % 200 == 0]
    legend = [
        ([_box("band", 1, 1, 20, 12)], "in question"),
        ([_verdict(11, 7, True)], "judged good"),
        ([_verdict(11, 7, False)], "judged bad"),
        ([_box("c0", 1, 4.5, 20, 5)], "layer of the last good save"),
        ([_box("c4", 1, 1, 20, 12)], "of a later one"),
    ]
    return Panel(f"Which save: {len(trials)} of {len(STEPS)} are judged", marks, _WIDTH, bottom + 18, legend)


def _of_layers(trials: Sequence[_Trial], good: int) -> Panel:
    """Draw a row for each layer and a column for each trial: where the layer is from."""
    marks = list[str]()
    layers = [*trials[0].layers]
    bottom = 4 + len(layers) * _ROW
    for row, layer in enumerate(layers):
        marks.append(_text(_LABELS - 8, 4 + row * _ROW + 13, layer.removeprefix("model."), "end"))
    for words, y in (("trial", bottom + 14), ("layers of step", bottom + 30), ("verdict", bottom + 46)):
        marks.append(_text(_LABELS - 8, y, words, "end"))
    for column, trial in enumerate(trials):
        x = _LABELS + column * _TRIAL
        for row, step in enumerate(trial.layers.values()):
            y = 4 + row * _ROW
            is_base = step == good
            marks.append(_box("c0", x, y + 6, _TRIAL - 2, 5) if is_base else _box("c4", x, y, _TRIAL - 2, _ROW - 1))
        later = max(trial.layers.values())
        marks.append(_text(x + _TRIAL / 2 - 1, bottom + 14, str(trial.number), "middle"))
        marks.append(_text(x + _TRIAL / 2 - 1, bottom + 30, f"{later:,}", "middle"))
        marks.append(_verdict(x + _TRIAL / 2 - 1, bottom + 42, trial.is_good))
    return Panel(
        f"Which layer: step {good:,}, the last good one, with some layers of a later one",
        marks,
        _WIDTH,
        bottom + 54,
        [],
    )


def _column(step: int) -> int:
    return _LABELS + STEPS.index(step) * _CELL


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def _verdict(x: float, y: float, is_good: bool) -> str:
    """Draw a dot for good and a cross for bad, to be told apart without colours, too."""
    if is_good:
        return f'<circle class="kept" cx="{x:g}" cy="{y:g}" r="5"/>'
    return f'<path class="removed" stroke-linecap="round" d="M{x - 5:g} {y - 5:g}l10 10m0 -10l-10 10"/>'
