"""The whole experiment, in order: texts, base, then a job for every task and seed, one on each core."""

import os
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tests.bench.quality import data, means, page, precision_trial, real_model, table, trial
from tests.bench.quality.job import lacking
from tests.bench.quality.plots import draw
from tests.bench.quality.settings import TASKS, Settings, TaskName
from tests.bench.quality.training import BASE, DATA
from tests.bench.rows import Row, Rows
from tests.ranks.launch import Event, run_ranks

_ROOT = Path(__file__).parents[3]
COMMITTED = Path(__file__).parent / "rows"


def run(settings: Settings, *, folder: Path | None, rows: Path | None, seeds: int, plots: Path | None) -> None:
    """
    Run what *rows* lack, print the table, and draw the *plots*.

    *folder* is where texts, base and stores are kept, *rows* what was found. What was interrupted is begun anew there:
    the base at its newest save, a job at its trunk or at its next resume.
    """
    work = _work(settings, folder)
    rows = (rows or work / "rows").absolute()
    made_by = _make(settings, work=work, rows=rows, seeds=seeds)
    _show(settings, _of_one(_read(rows), made_by), plots=plots)


def try_policies(settings: Settings, *, folder: Path | None, rows: Path | None) -> None:
    """Ask the policies that *rows* lack over the histories that `run` has kept in *folder*, and print the tables."""
    work = _work(settings, folder)
    rows = (rows or work / "rows").absolute()
    for task in TASKS:
        if not (work / trial.history_name(task)).exists():
            raise SystemExit(f"{work} has no history of {task}: python -m tests.bench quality --dir DIR makes one")
        trial.run(settings, task, work=work, rows=Rows(rows / f"trial-{task}.jsonl"))
    _show(settings, _of_one(_read(rows)), plots=None)


def try_precisions(settings: Settings, *, folder: Path | None, rows: Path | None) -> None:
    """Ask what every precision loses of the histories that `run` has kept in *folder*, or of ones that are made now."""
    work = _work(settings, folder)
    rows = (rows or work / "rows").absolute()
    _prepare(settings, work=work, rows=rows)
    for task in TASKS:
        if not (work / trial.history_name(task)).exists():
            _job(settings, task, 0, work, rows, "--history")
        precision_trial.run(settings, task, work=work, rows=Rows(rows / f"precision-{task}.jsonl"))
    _show(settings, _of_one(_read(rows)), plots=None)


def try_real_model(size: real_model.Size, *, rows: Path | None) -> None:
    """Fine-tune a real model, resume it in every way, and print the table."""
    found = Rows((rows or Path(tempfile.gettempdir()) / "layerstore-quality/real") / "real.jsonl")
    real_model.run(size, rows=found, material=real_model.load(size))
    if (table := real_model.table(found.find())) is not None:
        print("\n".join(table.text()), flush=True)


def show(settings: Settings, *, rows: Path, plots: Path | None) -> None:
    """Print the table of *rows* that are there, and draw the *plots*."""
    _show(settings, _of_one(_read(rows)), plots=plots)


def write_page(settings: Settings, *, rows: Path, docs: Path = _ROOT / "docs") -> None:
    """Write what *rows* say into the page evidence.md of *docs*, and its pictures beside it."""
    page.write(settings, _of_one(_read(rows)), docs=docs)


def _read(rows: Path) -> list[Row]:
    return [row for path in sorted(rows.glob("*.jsonl")) for row in Rows(path).find()]


def _show(settings: Settings, found: list[Row], *, plots: Path | None) -> None:
    print("\n".join(table.lines(settings, found)), flush=True)
    if plots is not None and found:
        draw(settings, found, plots)


def _work(settings: Settings, folder: Path | None) -> Path:
    """Return the folder for these settings: texts, base and stores of others would be wrong for them."""
    folder = folder or Path(tempfile.gettempdir()) / "layerstore-quality"
    return (folder / f"{settings.name}-{settings.digest('')[:8]}").absolute()


def _prepare(settings: Settings, *, work: Path, rows: Path) -> str:
    """Make the texts and the base, unless they are there; return what marks rows as this experiment's."""
    work.mkdir(parents=True, exist_ok=True)
    data.make(work / DATA, settings)
    made_by = settings.digest(data.digest_of(work / DATA))
    base = rows / "base.jsonl"
    if not (work / BASE).exists() or not Rows(base).find(kind="base", made_by=made_by):
        print("training the base", flush=True)
        _launch("training", settings, work=work, rows=base, log=work / "base.log")
    return made_by


def _make(settings: Settings, *, work: Path, rows: Path, seeds: int) -> str:
    """Run what *rows* lack; return what marks them as this experiment's."""
    made_by = _prepare(settings, work=work, rows=rows)
    # Processes, not threads: Ctrl-C reaches each, and each ends its own ranks.
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(_job, settings, task, seed, work, rows)
            for seed in range(seeds)
            for task in TASKS
            if _is_lacking(settings, _rows_of(rows, task, seed), {"made_by": made_by, "task": task, "seed": seed})
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return made_by


def _is_lacking(settings: Settings, rows: Rows, of: Row) -> bool:
    return bool(lacking(settings, rows, of) or means.lacking(rows, of))


def _job(settings: Settings, task: TaskName, seed: int, work: Path, rows: Path, *options: str) -> None:
    _launch(
        "job",
        settings,
        work=work,
        rows=_rows_of(rows, task, seed).path,
        log=work / f"{task}-{seed}.log",
        arguments=["--task", task, "--seed", str(seed), *options],
    )


def _rows_of(folder: Path, task: TaskName, seed: int) -> Rows:
    return Rows(folder / f"{task}-{seed}.jsonl")


def _launch(
    module: str, settings: Settings, *, work: Path, rows: Path, log: Path, arguments: list[str] | None = None
) -> None:
    arguments = ["--size", settings.name, "--work", str(work), "--rows", str(rows), *(arguments or [])]
    log.unlink(missing_ok=True)  # else the events of the run before were heard again
    run_ranks(f"tests.bench.quality.{module}", arguments, count=1, folder=_ROOT, log=log, hear=_hear)


def _hear(event: Event) -> None:
    print(f"  {event['what']}: loss {event['loss']:.4f}, after {event['seconds']:.0f} s", flush=True)


def _of_one(rows: list[Row], made_by: str | None = None) -> list[Row]:
    """
    Return the rows of one experiment, that of most rows if it is not named: texts or settings of others differ.

    Those of the real model are an experiment of their own, and always there.
    """
    of_settings = [row for row in rows if row["kind"] != "real"]
    if made_by is None and of_settings:
        [(made_by, _)] = Counter(str(row["made_by"]) for row in of_settings).most_common(1)
    return [row for row in rows if row["made_by"] == made_by or row["kind"] == "real"]
