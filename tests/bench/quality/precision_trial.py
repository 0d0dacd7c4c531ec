"""
What each precision loses before training goes on, by how many saves ago its keyframe was.

    python -m tests.bench quality --precision-trial --dir DIR

It takes minutes: nothing is trained, and the states are those of a control's full history. Three numbers for each: the
difference in held-out loss right after a resume, the error of the masters relative to how far they moved since the
keyframe, and that of Adam's next update.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import numpy as np

import layerstore
from tests.bench.quality.coded import WAYS, Floats, Lost, Parameter, Way, bytes_of, kept
from tests.bench.quality.data import digest_of, task_data
from tests.bench.quality.settings import Settings, TaskName
from tests.bench.quality.training import DATA, llama
from tests.bench.quality.trial import EVALUATED, RUN, held_out_loss, history_name
from tests.bench.report import Table
from tests.bench.rows import Row, Rows

State = dict[str, Parameter]

_POINTS = 3
"""Saves that are looked at for each distance, the newest among them."""


def points(settings: Settings, distance: int) -> list[int]:
    """Return the steps of the saves that are looked at, *distance* saves after a keyframe; none in a short run."""
    last = settings.steps // settings.save_every
    numbers = {last - (last - 1 - distance) * back // _POINTS for back in range(_POINTS)} if distance < last else set()
    return sorted(number * settings.save_every for number in numbers)


def run(settings: Settings, task: TaskName, *, work: Path, rows: Rows) -> None:
    """Look at what *rows* lack of the history of *task* in *work*."""
    of = {"kind": "precision", "made_by": settings.digest(digest_of(work / DATA)), "task": task}
    done = {(row["way"], row["distance"], row["step"]) for row in rows.find(**of)}
    judge = Judge(settings, work=work, task=task)
    with layerstore.open(work / history_name(task)) as store:
        for distance in settings.distances:
            for step in points(settings, distance):
                missing = [way for way in WAYS.values() if (way.name, distance, step) not in done]
                if not missing:
                    continue
                state = _state(store, step)
                keyframe = _masters(store, step - distance * settings.save_every)
                whole = judge.loss({name: parameter.master for name, parameter in state.items()})
                for way in missing:
                    found = _lost(judge, way, state, keyframe, whole)
                    rows.add({**of, "way": way.name, "distance": distance, "step": step, **found})
                print(f"  {task}: step {step}, keyframe {distance} saves ago", flush=True)


def _lost(judge: "Judge", way: Way, state: State, keyframe: dict[str, Floats], whole: float) -> Row:
    lost, masters = Lost(), dict[str, Floats]()
    for name, parameter in state.items():
        left = kept(way, parameter, keyframe=keyframe[name])
        lost.add(parameter, left, keyframe=keyframe[name])
        masters[name] = left.master
    shapes = [parameter.master.shape for parameter in state.values()]
    return {
        "damage": round(judge.loss(masters) - whole, 6),
        "error": lost.of_movement,
        "update_error": lost.of_update,
        "bytes": bytes_of(way, shapes),
        "parameters": sum(parameter.master.size for parameter in state.values()),
    }


def _state(store: layerstore.Store, step: int) -> State:
    composite = store.compose(f"{RUN}@{step}")
    first, second = (composite.tensors("optimizer", state=name, verify=False) for name in ("exp_avg", "exp_avg_sq"))
    masters = _masters(store, step)
    return {
        name: Parameter(master=master, first=np.array(first[name]), second=np.array(second[name]))
        for name, master in masters.items()
    }


def _masters(store: layerstore.Store, step: int) -> dict[str, Floats]:
    masters = store.compose(f"{RUN}@{step}").tensors("master", verify=False)
    return {name: np.array(masters[name], dtype=np.float32) for name in masters}


class Judge:
    """The model, filled with any masters."""

    def __init__(self, settings: Settings, *, work: Path, task: TaskName) -> None:
        import torch

        torch.set_num_threads(1)
        self._model = llama(settings).eval()
        tokens, labels = task_data(work / DATA, task, settings).held_out()
        self._held_out = tokens[:EVALUATED], labels[:EVALUATED]

    def loss(self, masters: dict[str, Floats]) -> float:
        """Return the held-out loss of *masters*."""
        import torch

        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(torch.from_numpy(masters[name]))
        return held_out_loss(self._model, *self._held_out)


def table(rows: Iterable[Row]) -> Table | None:
    """Return what every way loses, a column for each distance to the keyframe; None if nothing was looked at."""
    found = [row for row in rows if row["kind"] == "precision"]
    if not found:
        return None
    ways = list(dict.fromkeys(row["way"] for row in found))
    counts = Counter((row["distance"], row["way"]) for row in found)
    # A run that was interrupted has looked at fewer saves for some ways.
    distances = sorted(at for at in {at for at, _ in counts} if len({counts[at, way] for way in ways}) == 1)
    if not distances:
        return None
    lines = []
    for way in ways:
        of = [row for row in found if row["way"] == way]
        cells = [way]
        at = {distance: [row for row in of if row["distance"] == distance] for distance in distances}
        cells += [f"{mean(row['damage'] for row in here):+.5f}" for here in at.values()]
        cells += [f"{mean(row['error'] for row in at[distance]):.1%}" for distance in (distances[0], distances[-1])]
        lines.append((*cells, f"{mean(row['update_error'] for row in of):.1%}"))
    return Table(
        title="Right after a resume, by saves since the keyframe: Δ loss; the masters' error relative to their "
        "movement since then, and that of Adam's next update",
        header=(
            "",
            *(f"Δ, {distance}" for distance in distances),
            *(f"error, {distance}" for distance in (distances[0], distances[-1])),
            "next update",
        ),
        lines=tuple(lines),
    )
