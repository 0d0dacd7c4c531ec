"""Precision on the command line: asked for, told, and refused in one line."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.unit.checkpoints import Checkpoints

SAID = "masters and moments were kept in 8 bits: this resume is not bit for bit; the newest exact save is sft@1 (use"


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    """Return the folder of three checkpoints, the first of which is in a store as it is, the second in ``delta8``."""
    source = Checkpoints(tmp_path / "sft")
    for step in (1, 2, 3):
        source(step)
    run("init")
    run("ingest", "sft/1-1", "sft/2-2", "--run", "sft", "--precision", "delta8")
    return tmp_path / "sft"


def test_an_ingest_says_how_many_layers_are_compact(run: Run, saved: Path) -> None:
    """And how many are exact all the same; people read the precision beside the layers, programs both counts."""
    said = run("ingest", saved / "3-3", "--run", "sft", "--precision", "delta4", "--exact-every", "none").out
    again = run("ingest", saved / "3-3", "--run", "sft", "--json").fields

    whole = run("ingest", saved / "1-1", "--run", "other", "--precision", "delta4").out

    assert ": 5 layers, 4 in delta4, 1 exactly, " in said or ": 5 layers in delta4, " in said
    assert ": 5 layers exactly, " in whole
    assert (again["precision"], again["layers"] - again["layers_compact"]) in {("delta4", 0), ("delta4", 1)}


def test_an_estimate_of_a_compact_commit_says_that_it_counts_exact_saves(run: Run, saved: Path) -> None:
    """With the option that counts others; of an exact commit there is nothing to say."""
    told = {
        words: run("estimate", *words).out for words in (("sft@1",), ("sft@2",), ("sft@2", "--precision", "delta8"))
    }

    said = "every save is exact; sft@2 is kept in delta8 (--precision delta8)"
    assert [said in " ".join(out.split()) for out in told.values()] == [False, True, False]
    assert "every save is exact" not in told["sft@1",]


def test_the_log_has_a_column_only_where_a_commit_is_not_exact(run: Run, saved: Path) -> None:
    """So does the list of pins; programs always get the field."""
    run("pin", "best", "sft@1")
    pins = run("pin", "--list").out
    warned = run("pin", "last", "sft@2").err
    log = run("log").out.splitlines()

    assert "PRECISION" not in pins
    assert "PRECISION" in run("pin", "--list").out
    assert SAID in warned
    assert [line.split()[-2 if "best" in line or "last" in line else -1] for line in log[1:]] == ["delta8", "exact"]
    assert [of["precision"] for of in run("log", "--json").fields["commits"]] == ["delta8", "exact"]
    run("drop", "sft@2")
    assert "PRECISION" not in run("log").out
    assert [line.split()[-1] for line in run("log", "--dropped").out.splitlines()[:2]] == ["PRECISION", "delta8"]
    run("undrop", "sft@2")
    run("drop", "sft@1")
    assert "PRECISION" not in run("log", "--dropped").out


def test_show_and_ls_say_what_a_layer_refers_to_and_has_lost(run: Run, saved: Path) -> None:
    """And that of all layers together; of an exact commit beside them that it is exact, and in another run nothing."""
    run("ingest", "sft/1-1", "--run", "other")
    assert "precision" not in run("show", "other").out

    shown, exact = run("show", "sft@2").out, run("show", "sft@1").out

    assert "precision    delta8, " in shown
    assert "lost         master 0." in shown
    assert "worst error  master 0." in shown
    assert "REFERS TO" in shown
    assert "REFERS TO" in run("ls", "sft@2").out
    assert "precision    exact, 5 of 5 layers bit for bit" in exact
    assert not any(word in exact + run("ls", "sft@1").out for word in ("REFERS TO", "LOST", "lost", "worst"))
    assert {of["refers_to"] for of in run("ls", "sft@2", "--json").fields["layers"]} <= {"sft@1", None}


def test_compose_says_that_it_is_not_exact_and_takes_what_is(run: Run, saved: Path) -> None:
    """As loudly as of a mixture; with ``--exact`` it says what is taken instead, if it is another save."""
    warned = run("compose", "sft", "-o", "out")
    exact = run("compose", "sft", "--exact", "-o", "exact")
    refused = run("compose", "sft", "--exact", "--policy", "parity", "--dry-run")

    assert SAID in warned.err
    assert (exact.code, exact.err) == (
        0,
        "warning: sft@2 was not kept bit for bit: using sft@1, 1 step before\n",
    )
    assert run("compose", "sft@1", "--exact", "--dry-run").err == ""
    assert "exact: sft@1, policy latest" in exact.out
    assert run("compose", "sft", "--dry-run", "--json").fields["compact"]
    assert (refused.code, refused.err.splitlines()[0]) == (2, "error: an exact save takes no layer from others")


def test_the_two_meanings_of_exact_cannot_be_confused(run: Run) -> None:
    """Each is told in the words of what it does."""
    text = " ".join(run("compose", "--help").out.split())

    assert "--exact Instead of REF, take the newest save up to REF that was kept bit for bit." in text
    assert "exact: every layer from the very step of REF, or an error" in text


def test_removing_the_last_exact_save_warns_in_one_line(run: Run, saved: Path) -> None:
    """People on stderr, also of a plan; programs in the field *notes*, which is empty otherwise."""
    note = "no exact save of sft is left: sft@2 was not kept bit for bit"
    keep_last = ("gc", "--keep-last", "1", "--dry-run")

    assert run(*keep_last).err == f"warning: {note}\n"
    assert run(*keep_last, "--json").fields["notes"] == [note]
    assert run("drop", "sft@1", "--dry-run", "--json").fields["notes"] == [note]
    assert run("drop", "sft@2", "--dry-run", "--json").fields["notes"] == []
    assert run("drop", "sft@1").err == f"warning: {note}\n"
