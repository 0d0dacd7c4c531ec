"""``layerstore bisect``: which save went bad, and which of its layers."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, one_of, opened
from layerstore.cli.render import (
    Column,
    counted,
    print_aside,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_paragraph,
    print_rows,
    shown,
    with_store,
)
from layerstore.dtypes import DTypeName
from layerstore.errors import InvalidInput
from layerstore.json_fields import json_fields
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.bisect import Bisected, Trial

ABOUT = About("Look", store="anywhere", answers=True)

LOG = "log"
_FOLDER = Path("layerstore-bisect")


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="A save that is good, or `log`.")],
    bad: Annotated[str | None, typer.Argument(metavar="BAD", help="A later save that is bad.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND {}", help="Judges a folder, whose path replaces {}.")
    ] = None,
    *,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="COMMAND prints this number last, alone or in JSON; NAME:min if smaller is better."
        ),
    ] = None,
    threshold: Annotated[float | None, typer.Option(metavar="X", help="With --metric: worse than X is bad.")] = None,
    dtype: Annotated[
        DTypeName | None, typer.Option(metavar=one_of(DTypeName), help="The element type. [default: as trained]")
    ] = None,
    steps_only: Annotated[bool, typer.Option("--steps-only", help="Do not look for the layers.")] = False,
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="The folder for trials and the log.")] = _FOLDER,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Find the save that went bad, and the layers that make it bad.

    COMMAND judges a folder as compose --format hf writes it: exit 0 for good, 125 for cannot tell, 1 to 124 for bad.
    bisect finds the step first, then a minimal set of its layers that makes the last good save bad.
    Repeat an interrupted command to continue it; `layerstore bisect log` shows the trials.

    \b
    Examples:
      layerstore bisect sft@100 sft@1200 -- python judge.py {}
      layerstore bisect sft@100 sft --metric loss --threshold 2 -- ./evaluate {}
      layerstore bisect log
    """
    from layerstore.bisect import command_judge

    if good == LOG and bad is None:
        _print_log(folder, as_json=as_json)
        return
    if bad is None or not command:
        raise InvalidInput(
            "bisect takes GOOD, BAD and a command", hint="layerstore bisect RUN@STEP RUN@STEP -- python judge.py {}"
        )
    new_trials: list[Trial] = []
    with opened(store) as opened_store, _reporting_kept_log(folder, new_trials):
        result = opened_store.bisect(
            good,
            bad,
            command_judge(command, metric=metric, threshold=threshold, on_output=_pass_on),
            name=shlex.join(command) + ("" if metric is None else f" ({metric}, threshold {threshold:g})"),
            folder=folder,
            dtype=dtype,
            steps_only=steps_only,
            on_trial=lambda trial: _record_trial(trial, new_trials),
        )
    if as_json:
        print_json(json_fields(result) | {"sentence": str(result), "bytes_written": result.bytes_written})
    else:
        _print_result(result, is_new=bool(new_trials), folder=folder)


@contextlib.contextmanager
def _reporting_kept_log(folder: Path, new_trials: "list[Trial]") -> Iterator[None]:
    """If the user interrupts, print that the log is kept."""
    try:
        yield
    except KeyboardInterrupt:
        print_aside(
            f"{counted(len(new_trials), 'new trial')} and the log are in {folder}: the same command resumes from there"
        )
        raise


def _pass_on(output: str) -> None:
    """Show the output of the command that judges."""
    for line in output.splitlines():
        print_aside(line)


def _record_trial(trial: "Trial", new_trials: "list[Trial]") -> None:
    new_trials.append(trial)
    print_aside(_line(trial))


def _line(trial: "Trial") -> str:
    number = "" if trial.metric is None else f" ({trial.metric:g})"
    written = f"{size(trial.bytes_written)}, {trial.seconds:.1f} s"
    return f"trial {trial.number}: {shown(trial.asked)}: {trial.verdict}{number}; {written}"


def _print_result(result: "Bisected", *, is_new: bool, folder: Path) -> None:
    print_paragraph(shown(str(result)), indent=2)
    print_note(f"{counted(len(result.trials), 'trial')}, {size(result.bytes_written)} written")
    if not is_new:
        print_note(f"all results come from the log in {folder}; remove that folder to judge again")
    print_note(with_store(f"next: layerstore diff {result.good} {result.bad} --stat shows how far the layers moved"))


def _print_log(folder: Path, *, as_json: bool) -> None:
    from layerstore.bisect import read_trials

    question, trials, answer = read_trials(folder)
    if as_json:
        fields = {"bisection": json_fields(question), "trials": [json_fields(trial) for trial in trials]}
        print_json(fields | {"answer": answer or None})
        return
    print_facts({"good": question.good, "bad": question.bad, "judge": question.judge, "answer": answer or "none yet"})
    print_line()
    columns = {
        Column("TRIAL", "right"): lambda trial: str(trial.number),
        Column("ASKED", folds=True): lambda trial: trial.asked,
        Column("VERDICT"): lambda trial: trial.verdict,
        Column("METRIC", "right", drops=1): lambda trial: "" if trial.metric is None else f"{trial.metric:g}",
        Column("WRITTEN", "right", drops=1): lambda trial: size(trial.bytes_written),
        Column("TOOK", "right", drops=2): lambda trial: f"{trial.seconds:.1f} s",
    }
    print_rows(columns, trials)
