"""`layerstore bisect`: commands as judges, the log, and wrong use."""

import sys
from pathlib import Path

import pytest

import layerstore
from tests.cli.conftest import Outcome, Run
from tests.unit.checkpoints import checkpoint


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of eight saves."""
    folder = tmp_path_factory.mktemp("eight")
    with layerstore.init(folder / "store") as store:
        for step in range(1, 9):
            store.ingest(checkpoint(folder / "in", step=step))
    return folder / "store"


@pytest.fixture
def store(eight: Path) -> Path:
    """Return the store that is bisected; nothing here writes to it."""
    return eight


JUDGE = """
import json, sys
from pathlib import Path
config = Path(sys.argv[1], "layerstore.json")
step = min(layer["step"] for layer in json.loads(config.read_text())["layers"].values())
print("looking at", sys.argv[1])
"""


def bisected(run: Run, store: Path, folder: Path, ending: str, *options: str) -> Outcome:
    """Bisect in *folder* by a judge that ends like that."""
    judge = folder.with_suffix(".py")
    judge.write_text(JUDGE + ending)
    place = ["--store", store, "--dir", folder]
    return run("bisect", "sft@1", "sft@8", *place, *options, "--", sys.executable, judge, "{}")


def test_the_command_line_bisects_by_exit_code_and_by_metric(run: Run, store: Path, tmp_path: Path) -> None:
    """What the command prints is heard; the answer is one sentence, and the log has the trials."""
    for number, (ending, options) in enumerate(
        [
            ("sys.exit(step >= 5)", []),
            ("print(json.dumps({'eval_loss': step / 10}))", ["--metric", "eval_loss", "--threshold", "0.45"]),
            ("print(1 - step / 10)", ["--metric", "accuracy:max", "--threshold", "0.55"]),
        ]
    ):
        folder = tmp_path / f"b{number}"
        outcome = bisected(run, store, folder, ending, "--steps-only", *options)

        assert outcome.code == 0, outcome.err
        assert outcome.out.splitlines()[0] == "bad since sft@5"
        assert "looking at" in outcome.err
        assert "trial 1: sft@1: good" in outcome.err
        assert "trial 2: sft@5: bad" in outcome.err
        log = run("bisect", "log", "--dir", folder)
        assert "sft@5" in log.out
        assert "bad" in log.out


def test_a_judge_that_does_not_run_ends_it_after_one_trial(run: Run, store: Path, tmp_path: Path) -> None:
    """A mistyped script exits with 2, as if every save were bad: GOOD is judged first, and the hint says to try it."""
    words = ["sft@1", "sft@8", "--store", store, "--dir", tmp_path / "b"]

    outcome = run("bisect", *words, "--", sys.executable, tmp_path / "jugde.py", "{}")

    assert outcome.code == 15
    (trial,) = [line for line in outcome.err.splitlines() if line.startswith("trial")]
    assert trial.startswith("trial 1: sft@1: bad")
    assert "sft@1 is said to be good, and the command says bad" in " ".join(outcome.err.split())
    assert "does it run? layerstore" in outcome.err


@pytest.mark.parametrize(
    ("ending", "options", "code", "says"),
    [
        ("sys.exit(126)", [], 2, "ended with 126, which is not a verdict"),
        ("sys.exit(1)", ["--metric", "loss", "--threshold", "1"], 2, "which is not a verdict with --metric"),
        ("print('no')", ["--metric", "loss", "--threshold", "1"], 2, "last line has no loss: 'no'"),
        ("", ["--metric", "loss"], 2, "--metric and --threshold go together"),
    ],
)
def test_a_command_without_a_verdict_ends_it(
    run: Run, store: Path, tmp_path: Path, ending: str, options: list[str], code: int, says: str
) -> None:
    """It is never taken for good or bad."""
    outcome = bisected(run, store, tmp_path / "b", ending, *options)

    assert outcome.code == code
    assert says in outcome.err


def test_a_command_that_is_not_there_is_told(run: Run, store: Path) -> None:
    """In one line, with a hint."""
    outcome = run("bisect", "sft@1", "sft@8", "--store", store, "--", "no-such-command", "{}")

    error, hint = outcome.err.splitlines()
    assert outcome.code == 2
    assert error.startswith("error: the command cannot be run")
    assert hint.startswith("hint: try it by hand")
