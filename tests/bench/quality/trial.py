"""
What many policies would have saved of a job, and what their mixtures cost before training goes on.

    python -m tests.bench quality --trial --dir DIR

To train an arm takes minutes; this asks a policy in seconds, over the full history of a control. The first seed's jobs
keep theirs. The damage is that right after a resume: training heals some of it, so arms are still what counts.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

import layerstore
from layerstore.layers import layers_in_order
from layerstore.numbers.distance import Weighted, movement_of, weighted_movements
from layerstore.policy import Drift, Filter, Parity, Policy, Save
from layerstore.tree import Tree
from tests.bench.published import DEEPSPEED_BYTES
from tests.bench.quality.data import IGNORED, digest_of, task_data
from tests.bench.quality.settings import Settings, TaskName
from tests.bench.quality.training import DATA, llama, schedule
from tests.bench.report import Table
from tests.bench.rows import Row, Rows

if TYPE_CHECKING:
    import torch

Flat = npt.NDArray[np.float32]
Choice = Mapping[str, int]
"""The step that each layer of a mixture comes from."""

RUN = "job"
_POINTS = 9
EVALUATED = 96
"""Held-out sequences."""
_THRESHOLDS = (0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.04)


@dataclass(frozen=True, slots=True)
class Decaying:
    """Drift by gradient with a threshold that follows the learning rate down."""

    threshold: float
    stalest: int
    settings: Settings

    name = "drift, decaying"
    measures = True

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings."""
        return {"threshold": self.threshold}

    def due(self, save: Save) -> Collection[str]:
        """Return what drift takes at the threshold that the learning rate allows now."""
        share = schedule(steps=self.settings.steps, warmup=self.settings.warmup)
        now = self.threshold * share((save.number + 1) * self.settings.save_every)
        return Drift(threshold=now, stalest=self.stalest).due(save)


def policies(settings: Settings) -> dict[str, Policy]:
    """Return what is tried, by name."""
    # Every layer has its turn twice in a run, so that the threshold decides.
    stalest = max(settings.steps // settings.save_every // 2, 1)
    turns = {f"in turns of {count}": Drift(threshold=math.inf, stalest=count) for count in (2, 4, 8)}
    weighed: tuple[Literal["norm", "gradient"], ...] = ("norm", "gradient")
    drift = {
        f"drift by {by}, {threshold}": Drift(threshold=threshold, stalest=stalest, by=by)
        for by in weighed
        for threshold in _THRESHOLDS
    }
    decaying = {f"drift decaying from {of}": Decaying(of, stalest, settings) for of in (0.01, 0.02, 0.04)}
    return {"parity": Parity(), "filter": Filter(), **turns, **drift, **decaying, "drift, as it is": Drift()}


def run(settings: Settings, task: TaskName, *, work: Path, rows: Rows) -> None:
    """Try every policy that *rows* lack over the history of *task* in *work*; tell and note what each costs."""
    of = {"kind": "trial", "made_by": settings.digest(digest_of(work / DATA)), "task": task}
    done = {row["policy"] for row in rows.find(**of)}
    missing = {name: policy for name, policy in policies(settings).items() if name not in done}
    if not missing:
        return
    started = time.monotonic()
    history = History(settings, work / history_name(task))
    judge = Judge(settings, history, work=work, task=task)
    print(f"  {task}: history read, after {time.monotonic() - started:.0f} s", flush=True)
    points = history.steps[len(history.steps) // _POINTS :: max(len(history.steps) // _POINTS, 1)]
    for name, policy in missing.items():
        choices = list(history.choices(policy))
        damage = {step: round(judge.damage(choices[history.steps.index(step)], step), 5) for step in points}
        oldest = max(
            step - saved for step, choice in zip(history.steps, choices, strict=True) for saved in choice.values()
        )
        fewer = round(history.times_fewer(choices), 2)
        rows.add({**of, "policy": name, "times_fewer": fewer, "oldest": oldest, "damage": damage})
        print(f"  {task}, {name}: {fewer}x, {mean(damage.values()):+.4f} at once", flush=True)


def history_name(task: TaskName) -> str:
    """Return the name of the store with the full history of *task*."""
    return f"history-{task}"


class History:
    """The masters of every save of a control, and the size of their gradients."""

    def __init__(self, settings: Settings, store: Path) -> None:
        """Read all of it into memory."""
        self.steps = range(settings.save_every, settings.steps + 1, settings.save_every)
        self._masters, self._gradients = dict[int, dict[str, Flat]](), dict[int, dict[str, Flat]]()
        with layerstore.open(store) as opened:
            for step in self.steps:
                composite = opened.compose(f"{RUN}@{step}")
                masters = composite.tensors("master", verify=False)
                squares = composite.tensors("optimizer", state="exp_avg_sq", verify=False)
                self.names = layers_in_order(masters)
                self.shapes = {name: masters[name].shape for name in masters}
                self._masters[step] = {layer: _flat(masters, names) for layer, names in self.names.items()}
                self._gradients[step] = {layer: np.sqrt(_flat(squares, names)) for layer, names in self.names.items()}
        self.sizes = {layer: of.size * DEEPSPEED_BYTES for layer, of in self._masters[self.steps[0]].items()}

    def parameters(self, layer: str, step: int) -> Iterator[tuple[str, Flat]]:
        """Yield the masters of *layer* at *step*, by name."""
        flat, begin = self._masters[step][layer], 0
        for name in self.names[layer]:
            size = math.prod(self.shapes[name])
            yield name, flat[begin : begin + size].reshape(self.shapes[name])
            begin += size

    def choices(self, policy: Policy) -> Iterator[Choice]:
        """Yield the mixture that each save would have left under *policy*; the first save is full."""
        layers = tuple(self.sizes)
        saved = dict.fromkeys(layers, self.steps[0])
        yield dict(saved)
        for number, step in enumerate(self.steps[1:], start=1):
            ages = {layer: number - self.steps.index(of) for layer, of in saved.items()}
            save = Save(number=number, layers=layers, ages=ages)
            if getattr(policy, "measures", False):
                relative, weighted = self._movements(step, saved)
                save = replace(save, movements=relative, weighted_movements=weighted, sizes=self.sizes)
            saved |= dict.fromkeys(policy.due(save), step)
            yield dict(saved)

    def times_fewer(self, choices: Sequence[Choice]) -> float:
        """Return how many times fewer bytes than all of them the saves after the first had."""
        written = sum(
            self.sizes[layer]
            for step, choice in zip(self.steps[1:], choices[1:], strict=True)
            for layer, of in choice.items()
            if of == step
        )
        return sum(self.sizes.values()) * (len(self.steps) - 1) / max(written, 1)

    def _movements(self, step: int, saved: Choice) -> tuple[dict[str, float], dict[str, float]]:
        relative, sums = dict[str, float](), dict[str, Weighted]()
        for layer, now in self._masters[step].items():
            then, gradients = self._masters[saved[layer]][layer], self._gradients[step][layer]
            moved = now - then
            relative[layer] = movement_of(dd=float(moved @ moved), aa=float(then @ then), elements=now.size)
            sums[layer] = Weighted(
                moved=float(gradients @ np.abs(moved)), lengths=float(gradients @ np.abs(then)), elements=now.size
            )
        return relative, weighted_movements(sums)


def _flat(tensors: Mapping[str, Any], names: Iterable[str]) -> Flat:
    return np.concatenate([np.asarray(tensors[name], dtype=np.float32).ravel() for name in names])


class Judge:
    """The model, filled with any mixture of a history."""

    def __init__(self, settings: Settings, history: History, *, work: Path, task: TaskName) -> None:
        import torch

        torch.set_num_threads(1)
        self._history, self._model = history, llama(settings).eval()
        self._parameters = dict(self._model.named_parameters())
        tokens, labels = task_data(work / DATA, task, settings).held_out()
        self._held_out = tokens[:EVALUATED], labels[:EVALUATED]
        self._whole = dict[int, float]()

    def damage(self, choice: Choice, step: int) -> float:
        """Return by how much the loss of the mixture *choice* is larger than that of the whole model at *step*."""
        if step not in self._whole:
            self._whole[step] = self._loss(dict.fromkeys(choice, step))
        return self._loss(choice) - self._whole[step]

    def _loss(self, choice: Choice) -> float:
        import torch

        tokens, labels = self._held_out
        with torch.no_grad():
            for layer, step in choice.items():
                for name, master in self._history.parameters(layer, step):
                    self._parameters[name].copy_(torch.from_numpy(master))
        return held_out_loss(self._model, tokens, labels)


def held_out_loss(model: Any, tokens: "torch.Tensor", labels: "torch.Tensor") -> float:
    """Return the loss of *model* over *tokens*, in nats a token that counts."""
    import torch

    with torch.no_grad():
        logits, wanted = model(input_ids=tokens).logits[:, :-1].float(), labels[:, 1:]
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED))


# -- what came out -------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> Table | None:
    """Return all that was tried, a column of bytes and one of damage for each task; None if nothing was."""
    found = {(row["policy"], row["task"]): row for row in rows if row["kind"] == "trial"}
    if not found:
        return None
    tasks = list(dict.fromkeys(task for _, task in found))
    lines = [
        (name, *(cell for task in tasks for cell in _cells(found.get((name, task)))))
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return Table(
        title=f"Right after a resume, at {_POINTS} saves of each of the first seed's histories: how many times fewer "
        "bytes the later saves have, and the mean and the worst Δ loss",
        header=("", *(cell for task in tasks for cell in (task, "Δ at once", "worst"))),
        lines=tuple(lines),
    )


def _cells(row: Row | None) -> tuple[str, ...]:
    if row is None:
        return "", "", ""
    damage = list(row["damage"].values())
    return f"{row['times_fewer']:.1f}x", f"{mean(damage):+.4f}", f"{max(damage):+.4f}"
