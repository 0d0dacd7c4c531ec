"""
What the mean of the last saves is worth: each job asks it of its own full history.

At every tenth save the held-out loss of the mean of the last five, ten and twenty saves, beside that of the save
itself. The learning rate decays over the job, which leaves less to gain than a constant one.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev

import layerstore
from tests.bench.quality.data import IGNORED, task_data
from tests.bench.quality.intervals import interval
from tests.bench.quality.settings import Settings, TaskName
from tests.bench.quality.training import DATA, llama
from tests.bench.quality.trial import RUN
from tests.bench.report import Table
from tests.bench.rows import Row, Rows

COUNTS = (5, 10, 20)
_EVERY = 10
"""Saves from one that is looked at to the next."""


def lacking(rows: Rows, of: Row) -> list[int]:
    """Return the numbers of saves of the job *of* that *rows* have no mean of."""
    return sorted(set(COUNTS) - {row["count"] for row in rows.find(kind="mean", **of)})


def run(settings: Settings, task: TaskName, *, store: Path, counts: Iterable[int], work: Path) -> Iterator[Row]:
    """Yield what the mean of the last *counts* saves gains, at steps of the history of *task* in *store*."""
    steps = range(settings.save_every, settings.steps + 1, settings.save_every)
    looked_at = [step for number, step in enumerate(steps, start=1) if number % _EVERY == 0 or step == settings.steps]
    judge = _Judge(settings, work=work, task=task)
    with layerstore.open(store) as history:
        plain = {step: judge.loss(history.compose(f"{RUN}@{step}")) for step in looked_at}
        for count in counts:
            differences = {
                step: round(judge.loss(history.average(f"last:{count}", ref=f"{RUN}@{step}")) - plain[step], 5)
                for step in looked_at
                if step >= count * settings.save_every
            }
            yield {"kind": "mean", "count": count, "differences": differences}


class _Judge:
    """The model, filled with any composite."""

    def __init__(self, settings: Settings, *, work: Path, task: TaskName) -> None:
        import torch

        torch.set_num_threads(1)
        self._model = llama(settings).eval()
        self._tokens, self._labels = task_data(work / DATA, task, settings).held_out()

    def loss(self, composite: layerstore.Composite) -> float:
        """Return the held-out loss."""
        import torch

        total, count = 0.0, 0
        with torch.no_grad():
            self._model.load_state_dict(composite.state_dict(), strict=False)
            for tokens, labels in zip(torch.split(self._tokens, 64), torch.split(self._labels, 64), strict=True):
                logits, wanted = self._model(input_ids=tokens).logits[:, :-1].float(), labels[:, 1:]
                total += float(
                    torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
                    )
                )
                count += int((wanted != IGNORED).sum())
        return total / count


def table(rows: Iterable[Row]) -> Table | None:
    """Return what the means gain, a row for each number of saves; None if nothing was evaluated."""
    found = {(row["count"], row["task"], row["seed"]): row["differences"] for row in rows if row["kind"] == "mean"}
    if not found:
        return None
    tasks, seeds = (list(dict.fromkeys(key[place] for key in found)) for place in (1, 2))
    lines = []
    for count in COUNTS:
        cells = [f"the last {count}"]
        for task in tasks:
            of_seeds = [list(found[key].values()) for seed in seeds if (key := (count, task, seed)) in found]
            if not all(of_seeds) or not of_seeds:
                cells += ["", ""]
                continue
            end = interval([differences[-1] for differences in of_seeds])
            way = [difference for differences in of_seeds for difference in differences]
            spread = f" ± {stdev(way):.4f}" if len(way) > 1 else ""
            cells += [f"{end.mean:+.4f} ± {end.half_width:.4f}", f"{mean(way):+.4f}{spread}"]
        lines.append(tuple(cells))
    return Table(
        title=f"The mean of the last saves of {len(seeds)} seeds' histories: its held-out loss compared with that of "
        "the newest save, at the end (mean and its 90 % interval over seeds), and over saves on the way there (mean "
        "and standard deviation)",
        header=("", *(cell for task in tasks for cell in (f"{task}, at the end", "on the way"))),
        lines=tuple(lines),
    )
