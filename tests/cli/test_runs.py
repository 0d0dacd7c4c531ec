"""``layerstore runs`` prints a line for each run, for people and for programs."""

from pathlib import Path

import pytest

import layerstore
from layerstore.tree import Tree
from tests.cli.conftest import Run
from tests.generated import generate


def test_a_line_for_each_run(run: Run, store: Path, tmp_path: Path) -> None:
    """Columns that say nothing are left out; the store may be named as a folder or a URL, and by --store."""
    url = (tmp_path / "bucket").as_uri()
    metrics: dict[Tree, Tree] = {"metrics": {"loss": 2.5, "eval_loss": 2.0}}
    measured = generate(tmp_path / "dpo", hidden=16, vocab=32, client_state=metrics)
    plain = run("runs", store).out.splitlines()
    run("ingest", measured, "--store", store)
    run("remote", "add", "origin", url, "--store", store)
    run("push", "--store", store)
    full = run("runs", "--store", store).out.splitlines()
    there = run("runs", url)

    assert plain[0].split() == ["RUN", "STEP", "SAVED", "SAVES", "SIZE", "POLICY", "HEALTH"]
    assert plain[1].split()[:2] == ["sft", "4"]
    assert plain[1].split()[-2:] == ["full", "ok"]
    assert full[0].split()[-4:] == ["POLICY", "PUSHED", "METRIC", "HEALTH"]
    assert full[1].split()[-4:] == ["origin", "eval_loss", "2", "ok"]
    assert full[2].split()[-3:] == ["origin", "-", "ok"]
    assert [line.split()[:2] for line in there.out.splitlines()[1:]] == [line.split()[:2] for line in full[1:]]


def test_json_has_the_same(run: Run, store: Path) -> None:
    """A line for each run, and what a program asks first: whether it is healthy."""
    [line] = run("runs", "--store", store, "--json").fields["runs"]

    with layerstore.open(store) as opened:
        commit = opened.show("sft").commit
    assert (line["run"], line["step"], line["saves"], line["commit"]) == ("sft", 4, 2, commit)
    assert (line["healthy"], line["problems"], line["pushed"], line["metrics"]) == (True, [], [], {})


def test_problems_follow_the_table(run: Run, store: Path) -> None:
    """The word in the table, and below it what is wrong; it is an answer, no failure."""
    files = [path for path in (store / "objects").rglob("*") if path.is_file()]
    biggest = max(path.stat().st_size for path in files)
    for path in files:
        if path.stat().st_size == biggest:
            path.unlink()

    outcome = run("runs", "--store", store)
    lines = outcome.out.splitlines()

    assert outcome.code == 0
    assert lines[1].split()[-1] == "problem"
    assert lines[3].startswith("sft: ")
    assert "layers of step 4 are not intact" in lines[3]


def test_no_run_is_no_failure_but_two_stores_are(run: Run, store: Path, tmp_path: Path) -> None:
    """An empty store has no lines; a store is named once."""
    run("init", tmp_path / "empty")

    assert run("runs", tmp_path / "empty").out == "no runs yet\n"
    assert run("runs", tmp_path / "empty", "--json").fields["runs"] == []
    assert run("runs", tmp_path / "empty", "--store", store).err.startswith("error: two stores were given: ")


@pytest.mark.filterwarnings("always::layerstore.history.PushedNotice")
def test_a_damaged_note_of_pushes_is_told_once(run: Run, store: Path, tmp_path: Path) -> None:
    """The table has the remote all the same."""
    run("remote", "add", "origin", (tmp_path / "bucket").as_uri(), "--store", store)
    run("push", "--store", store)
    (store / "pushed.json").write_text("[]")

    outcome = run("runs", "--store", store)

    assert outcome.err.count("so what was pushed is not known") == 1
    assert outcome.out.splitlines()[1].split()[-2:] == ["no", "ok"]


def test_a_run_in_the_place_of_a_store_leads_to_the_log(run: Run, store: Path) -> None:
    """Other commands take a run there."""
    outcome = run("runs", "sft")

    assert outcome.code == 10
    assert "layerstore log sft lists the saves of a run" in outcome.err
