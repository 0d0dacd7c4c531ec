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

    assert lines[0][-2:] == ["loss", "eval_loss"]
    assert [line[-2:] for line in lines[1:]] == [["nan", "-"], ["2.25", "1e-07"]]
    assert "metrics      loss 2.25, eval_loss 1e-07" in run("show", "r@2", "--store", measured).out
    asked = run("log", "--metric", "loss", "--json", "--store", measured).fields["commits"]
    assert [entry["metrics"] for entry in asked] == [{"loss": None}, {"loss": 2.25}]
    assert "metrics" not in run("log", "--json", "--store", measured).fields["commits"][0]
    assert run("show", "--json", "r@2", "--store", measured).fields["metrics"] == {"loss": 2.25, "eval_loss": 1e-7}


def test_names_may_be_any(run: Run, tmp_path: Path) -> None:
    """Two that differ by case are two columns, and none takes the place of a column of the log's."""
    source = Checkpoints(tmp_path)(7, client_state={"metrics": {"loss": 1.5, "Loss": 2.5, "STEP": 3.5}})
    with layerstore.init(tmp_path / "odd") as store:
        store.ingest(source, run="r")
    words = ("--metric", "loss", "--metric", "Loss", "--metric", "STEP")

    header, line = (row.split() for row in run("log", *words, "--store", tmp_path / "odd").out.splitlines())

    assert (header[1], header[-3:]) == ("STEP", ["loss", "Loss", "STEP"])
    assert (line[1], line[-3:]) == ("7", ["1.5", "2.5", "3.5"])


def test_another_page_may_have_it(run: Run, measured: Path) -> None:
    """On this one there are dashes and a note; nothing is refused, and what is damaged is a question mark."""
    page = run("log", "--metric", "eval_loss", "--limit", "1", "--store", measured)
    for state in measured.glob("objects/*/*"):
        if state.stat().st_size < 8000:  # no tensors: states of ranks, among others
            state.chmod(0o600)
            state.write_bytes(b"x" * state.stat().st_size)
    hurt = run("log", "--metric", "loss", "--store", measured)

    assert (page.code, page.out.splitlines()[1].split()[-1]) == (0, "-")
    assert "none of these commits has eval_loss; older ones may" in page.out
    assert [line.split()[-1] for line in hurt.out.splitlines()[1:3]] == ["?", "?"]
    assert "warning: the metrics of 2 commits cannot be read" in hurt.err


def test_a_metric_that_no_commit_has(run: Run, measured: Path) -> None:
    """The nearest is named; gc names it, too, and changes nothing."""
    log = run("log", "--metric", "evalloss", "--store", measured)
    gc = run("gc", "--keep-best", "evalloss", "--store", measured)

    assert (log.code, log.err.splitlines()) == (
        NotFound.exit_code,
        ["error: there is no metric 'evalloss' here", "hint: did you mean eval_loss or loss?"],
    )
    assert gc.code == 2
    assert gc.err.splitlines() == [
        "error: no commit has the metric 'evalloss'; nothing was changed",
        "hint: did you mean loss? the newest commits have loss",
    ]
    assert len(run("log", "--json", "--store", measured).fields["commits"]) == 2
