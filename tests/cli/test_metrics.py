"""The command line shows what training measured beside the commits."""

import math
from pathlib import Path

import pytest

import layerstore
from layerstore.errors import NotFound
from tests.cli.conftest import Run
from tests.unit.checkpoints import Checkpoints


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Return a store with two commits; the first has two metrics, the second one of them."""
    saved = Checkpoints(tmp_path)
    with layerstore.init(tmp_path / "measured") as store:
        store.ingest(saved(2, client_state={"metrics": {"loss": 2.25, "eval_loss": 1e-7}}), run="r")
        store.ingest(saved(4, client_state={"metrics": {"loss": math.nan}}), run="r")
        return store.path


def test_log_and_show_have_them(run: Run, measured: Path) -> None:
    """A column for each that is asked for, and all of a commit's own."""
    log = run("log", "--metric", "loss", "--metric", "eval_loss", "--store", measured)
    lines = [line.split() for line in log.out.splitlines()]

    assert lines[0][-2:] == ["LOSS", "EVAL_LOSS"]
    assert [line[-2:] for line in lines[1:]] == [["nan", "-"], ["2.25", "1e-07"]]
    assert "metrics      loss 2.25, eval_loss 1e-07" in run("show", "r@2", "--store", measured).out
    asked = run("log", "--metric", "loss", "--json", "--store", measured).fields["commits"]
    assert [entry["metrics"] for entry in asked] == [{"loss": None}, {"loss": 2.25}]
    assert "metrics" not in run("log", "--json", "--store", measured).fields["commits"][0]
    assert run("show", "--json", "r@2", "--store", measured).fields["metrics"] == {"loss": 2.25, "eval_loss": 1e-7}


def test_a_metric_that_no_commit_has(run: Run, measured: Path) -> None:
    """The nearest is named; gc names it, too, and changes nothing."""
    log = run("log", "--metric", "evalloss", "--store", measured)
    gc = run("gc", "--keep-best", "los", "--store", measured)

    assert (log.code, log.err.splitlines()) == (
        NotFound.exit_code,
        ["error: there is no metric 'evalloss' here", "hint: did you mean eval_loss or loss?"],
    )
    assert gc.code == 2
    assert gc.err.splitlines() == [
        "error: no commit has the metric 'los'; nothing was changed",
        "hint: did you mean loss? the newest commits have loss",
    ]
    assert len(run("log", "--json", "--store", measured).fields["commits"]) == 2
