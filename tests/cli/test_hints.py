"""Hints are commands to be typed as they stand: they are aimed at the store that the command was aimed at."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from layerstore.cli.app import command_line
from layerstore.cli.commands import COMMANDS
from layerstore.cli.render import output, with_store
from tests.cli.conftest import Run


@pytest.mark.parametrize("place", ["behind", "in front", "with ="])
def test_a_hint_names_the_store_that_was_named(run: Run, checkpoints: Path, tmp_path: Path, place: str) -> None:
    """Typed as it stands it is about that store, not the one in this folder."""
    run("init", tmp_path / ".layerstore")
    path = tmp_path / "my store"
    run("init", path)
    run("ingest", checkpoints, "--run", "sft", "--store", path)
    next(path.glob("objects/*/*")).unlink()
    places: dict[str, list[object]] = {
        "behind": ["verify", "--store", path],
        "in front": ["--store", path, "verify"],
        "with =": ["verify", f"--store={path}"],
    }
    words = places[place]

    hints = [
        run(*words).err.splitlines()[-1].removeprefix("hint: "),
        json.loads(run(*words, "--json").err)["error"]["hint"],
    ]

    for hint in hints:
        command = hint.partition(" says ")[0]
        assert command == f"layerstore --store '{path}' repair --dry-run"
        assert "lost" in run(*shlex.split(command)[1:]).out
    assert "--store" not in run("show").err


def test_suggestions_of_every_command_with_a_store_name_it() -> None:
    """Each says so itself; init and doctor are suggested with a place, estimate with its own option."""
    taking = {name for name in COMMANDS if any(param.name == "store" for param in command_line().load(name).params)}
    output.store = "elsewhere"

    try:
        named = {name for name in COMMANDS if "elsewhere" in with_store(f"layerstore {name}")}
    finally:
        output.store = None

    assert taking - {"init", "doctor", "estimate"} == named


def test_a_store_without_its_value_leads_to_the_help(run: Run) -> None:
    """Of no command: none was given."""
    assert run("--store").err.splitlines()[-1] == "hint: layerstore --help"


def test_a_folder_is_no_reference(run: Run, store: Path) -> None:
    """Who gives a checkpoint where a commit is wanted is told which is which."""
    for folder in ("out/checkpoint-2", "."):
        outcome = run("diff", folder, "sft", "--store", store)
        assert (outcome.code, outcome.err.count("is a path, not a reference to what the store holds")) == (2, 1)


def test_a_folder_where_a_remote_belongs_is_written_as_a_url(run: Run, store: Path, tmp_path: Path) -> None:
    """It is no reference, so nobody is told how to write one."""
    for command in ("push", "pull"):
        outcome = run(command, tmp_path, "--store", store)
        assert (outcome.code, outcome.err.splitlines()[-1]) == (2, f"hint: write {tmp_path.as_uri()}")
        mistyped = run(command, "a/b", "--store", store)
        assert mistyped.err.startswith(
            "error: 'a/b' is neither a remote nor a reference\nhint: a remote is a name or a URL"
        )


def test_a_store_where_a_run_belongs_is_named_with_its_option(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a path or a name, whether there is a store here or not; and so in the store's own folder."""
    named = f"hint: name the store with --store {store}"
    without = [run("stats", store), run("repair", "--from", store), run("show", "store")]
    inside = run("log", store, "--store", store)
    monkeypatch.chdir(store)
    here = run("stats")

    assert without[0].err.splitlines()[-1] == named
    assert "name the store" not in without[1].err
    assert without[2].err.splitlines()[-1] == "hint: name the store with --store store"
    assert inside.err.splitlines()[-1].startswith(named)
    assert here.err.splitlines()[-1] == "hint: this folder is a store itself: --store ."


@pytest.mark.parametrize(
    "words", [["show"], ["ls"], ["diff", "sft"], ["pin", "of_id"], ["compose", "--dry-run"], ["drop"], ["verify"]]
)
def test_the_beginning_of_an_id_names_the_commit(run: Run, store: Path, words: list[str]) -> None:
    """Four digits are enough where a REF is taken, visible or in the trash."""
    commit = run("show", "sft@2", "--json", "--store", store).fields["commit"]

    assert run(*words, commit[:4], "--store", store).code == 0
    assert run("show", commit[:7], "--json", "--store", store).fields["commit"] == commit
    assert run("log", "--before", commit[:4], "--json", "--store", store).code == (13 if words == ["drop"] else 0)
    assert run("undrop", commit[:4], "--store", store).code == (0 if words == ["drop"] else 13)


def test_a_store_is_made_at_one_place(run: Run, tmp_path: Path) -> None:
    """Two that differ are not both meant; nothing is made."""
    outcome = run("init", "b", "--store", "a")

    assert (outcome.code, list(tmp_path.iterdir())) == (2, [])
    assert outcome.err.startswith("error: two stores were given: b and --store a")
    assert run("init", "a", "--store", "./a/").code == 0


def test_what_was_taken_of_several_is_counted(run: Run, store: Path, checkpoints: Path, tmp_path: Path) -> None:
    """One that is missing stops all; one that proves damaged stops those after it."""
    first, second = checkpoints / "global_step2", checkpoints / "global_step4"
    torn = tmp_path / "torn" / "global_step9"
    shutil.copytree(second, torn, copy_function=shutil.copy)
    shard = next(torn.glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:1000])

    none = run("ingest", checkpoints / "global_step9", first, "--store", store)
    two = run("ingest", first, second, torn, "--run", "sft", "--store", store)
    assert "; none of 2 checkpoints were taken" in none.err
    assert "; 2 of 3 checkpoints were taken" in two.err
    assert " of 1 " not in run("ingest", "gone", "--store", store).err


def test_help_names_arguments_as_users_do(run: Run) -> None:
    """Not by the types of the language they are read with."""
    for command in ("ingest", "gc", "show", "init"):
        assert not re.search(r"<\w+(\[|>)", run(command, "--help").out)


def test_what_names_no_store_or_needs_none_stays_as_it_is() -> None:
    """Without the option a hint without it is right; paths and other commands are not commands on a store."""
    assert with_store("layerstore verify") == "layerstore verify"
    output.store = "a"
    try:
        for text in ("layerstore init DIR", "this layerstore reads", "layerstore log --store b", "~/layerstore logs"):
            assert with_store(text) == text
        assert with_store("layerstore verify, then layerstore gc") == (
            "layerstore --store a verify, then layerstore --store a gc"
        )
        assert with_store("layerstore repair --store-id 7") == "layerstore --store a repair --store-id 7"
    finally:
        output.store = None


def test_a_mistyped_remote_is_none_of_the_runs(run: Run, checkpoints: Path, tmp_path: Path) -> None:
    """What comes first after push may be either."""
    run("init", tmp_path / ".layerstore")
    run("ingest", checkpoints, "--run", "sft")
    run("remote", "add", "origin", f"file://{tmp_path}/bucket")

    outcome = run("push", "orgin")

    assert (outcome.code, outcome.err.splitlines()) == (
        13,
        [
            "error: 'orgin' is neither a remote nor a run or pin",
            "hint: did you mean origin? remotes here: origin; runs here: sft; a step is RUN@STEP",
        ],
    )
    hint = "hint: remotes here: origin; runs here: sft; a step is RUN@STEP"
    assert run("push", "elsewhere").err.splitlines()[-1] == hint
    assert [run("push", word).code for word in ("sft", "sft@4")] == [0, 0]
    assert "neither" not in run("pull", "new").err  # it may be a run of the remote
