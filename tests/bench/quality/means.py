"""
What the mean of the last saves is worth, over the full histories that the first seed's jobs have kept.

`quality --trial` asks it too: at every tenth save the held-out loss of the mean of the last five, ten and twenty saves,
beside that of the save itself. The learning rate decays over the job, which leaves less to gain than a constant one.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

import layerstore
from tests.bench.quality.data import IGNORED, digest_of, task_data
from tests.bench.quality.settings import Settings, TaskName
from tests.bench.quality.training import DATA, llama
from tests.bench.quality.trial import RUN, history_name
from tests.bench.report import Table
from tests.bench.rows import Row, Rows

COUNTS = (5, 10, 20)
_EVERY = 10
"""Saves from one that is looked at to the next."""


def run(settings: Settings, task: TaskName, *, work: Path, rows: Rows) -> None:
    """Evaluate the means that *rows* lack, of the history of *task* in *work*; tell and note what each gains."""
    of = {"kind": "mean", "made_by": settings.digest(digest_of(work / DATA)), "task": task}
    missing = set(COUNTS) - {row["count"] for row in rows.find(**of)}
    if not missing:
        return
    steps = range(settings.save_every, settings.steps + 1, settings.save_every)
    looked_at = [step for number, step in enumerate(steps, start=1) if number % _EVERY == 0]
    judge = _Judge(settings, work=work, task=task)
    with layerstore.open(work / history_name(task)) as store:
        plain = {step: judge.loss(store.compose(f"{RUN}@{step}")) for step in looked_at}
        for count in sorted(missing):
            reached = [step for step in looked_at if step >= count * settings.save_every]
            gains = {
                step: round(judge.loss(store.average(f"last:{count}", ref=f"{RUN}@{step}")) - plain[step], 5)
                for step in reached
            }
            rows.add({**of, "count": count, "differences": gains})
            print(
                f"  {task}, mean of {count}: {mean(gains.values()):+.4f}, at the end {gains[steps[-1]]:+.4f}",
                flush=True,
            )


class _Judge:
    """The model, filled with any composite."""

    def __init__(self, settings: Settings, *, work: Path, task: TaskName) -> None:
        import torch

        torch.set_num_threads(1)
        self._model = llama(settings).eval()
        self._tokens, self._labels = task_data(work / DATA, task, settings).held_out()

    def loss(self, composite: layerstore.Composite) -> float:
        """Return the held-out loss; the weights are rounded as they are trained."""
        import torch

        total, count = 0.0, 0
        with torch.no_grad():
            self._model.load_state_dict(composite.state_dict(dtype="bf16"), strict=False)
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
    found = {(row["count"], row["task"]): list(row["differences"].values()) for row in rows if row["kind"] == "mean"}
    if not found:
        return None
    tasks = list(dict.fromkeys(task for _, task in found))
    lines = []
    for count in COUNTS:
        cells = [f"the last {count}"]
        for task in tasks:
            values = found.get((count, task), [])
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            cells += [f"{values[-1]:+.4f}", f"{mean(values):+.4f}{spread}"] if values else ["", ""]
        lines.append(tuple(cells))
    return Table(
        title="The mean of the last saves of the first seed's histories: its held-out loss compared with that of the "
        "newest save, at the end, and over saves on the way there (mean and standard deviation)",
        header=("", *(cell for task in tasks for cell in (f"{task}, at the end", "on the way"))),
        lines=tuple(lines),
    )
