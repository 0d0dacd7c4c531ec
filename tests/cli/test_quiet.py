"""With --quiet a command says what it was asked, and does the rest in silence."""

import shutil
from pathlib import Path

import pytest

import layerstore
from layerstore.cli.commands import COMMANDS, about
from tests.cli.conftest import Run
from tests.cli.test_errors import COMMANDS as WORDS

# Of each command that does something: how it is told to.
ACTS = {
    "init": ["init", "new"],
    "ingest": ["ingest", "{source}/global_step2", "--run", "other"],
    "report": ["report", "-o", "report.html"],
    "compose": ["compose", "sft@2", "-o", "out"],
    "apply": ["apply", "delta", "base"],
    "pin": ["pin", "second", "sft@2"],
    "drop": ["drop", "sft@2"],
    "undrop": ["undrop", "sft@2"],
    "gc": ["gc", "--keep-last", "1", "--yes"],
    "repair": ["repair"],
    "reindex": ["reindex"],
    "migrate": ["migrate"],
    "remote": ["remote", "add", "origin", "file://{source}/bucket"],
    "push": ["push", "file://{source}/bucket"],
    "pull": ["pull", "file://{source}/bucket"],
    "clone": ["clone", "file://{source}/bucket", "cloned"],
}
ANSWERING = {name for name in COMMANDS if about(name).answers}
PLANS = {
    "compose": ["compose", "--dry-run"],
    "pin": ["pin", "--list"],
    "drop": ["drop", "sft@2", "--dry-run"],
    "gc": ["gc", "--keep-last", "1", "--dry-run"],
    "repair": ["repair", "--dry-run"],
    "migrate": ["migrate", "--list"],
    "remote": ["remote", "list"],
}


@pytest.fixture(autouse=True)
def _there(store: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:  # run clears the variable
    monkeypatch.setenv("LAYERSTORE_STORE", str(store))


def test_every_command_is_of_one_kind() -> None:
    """A new command has to be one that answers or one that acts."""
    assert sorted(COMMANDS) == sorted([*ANSWERING, *ACTS])
    assert not ANSWERING & ACTS.keys()


@pytest.mark.parametrize("name", ACTS)
def test_what_is_done_is_done_in_silence(run: Run, checkpoints: Path, name: str) -> None:
    """Nothing at all is printed; without the option it is. Programs get their line all the same."""
    words = [word.format(source=checkpoints) for word in ACTS[name]]
    if name == "undrop":
        _undo(name)
    if name == "apply":
        run("compose", "sft@2", "--format", "hf", "-o", "base")
        run("compose", "sft@4", "--format", "hf", "--since", "sft@2", "-o", "delta")
    if name in {"pull", "clone"}:
        run(*(word.format(source=checkpoints) for word in ACTS["push"]))
    quiet = run(*words, "--quiet")
    _undo(name)
    loud = run(*words)
    _undo(name)
    fields = run("--quiet", *words, "--json")

    assert [outcome.code for outcome in (quiet, loud, fields)] == [0, 0, 0]
    assert (quiet.out, quiet.err) == ("", "")
    assert loud.out
    assert fields.fields["schema"] == 1


def _undo(name: str) -> None:
    """Let *name* be done again."""
    store = Path("store")
    if name in {"init", "compose", "clone"}:
        shutil.rmtree({"init": "new", "compose": "out", "clone": "cloned"}[name])
    if name in {"drop", "undrop"}:
        with layerstore.open(store) as opened:
            opened.undrop("sft@2") if name == "drop" else opened.drop("sft@2")
    if name == "pin":
        (store / "pins" / "second").unlink()


@pytest.mark.parametrize("name", sorted(ANSWERING - {"verify", "demo", "bisect"}))
def test_what_is_asked_is_answered(run: Run, name: str) -> None:
    """The table is what was asked for; -q is the same, in front of the command too."""
    words = [*WORDS[name], *(["-o", "page.html"] if name == "report" else [])]
    loud, behind, before = run(*words), run(*words, "--quiet"), run("-q", *words)

    assert loud.code == behind.code == before.code
    assert behind.out
    assert behind.out.splitlines()[0] == before.out.splitlines()[0] == loud.out.splitlines()[0]


@pytest.mark.parametrize("name", PLANS)
def test_plans_and_lists_are_answers_too(run: Run, checkpoints: Path, name: str) -> None:
    """A command that acts was asked for its plan, or for a list."""
    if name == "remote":
        run(*(word.format(source=checkpoints) for word in ACTS["remote"]))
    assert run(*PLANS[name], "--quiet").out == run(*PLANS[name]).out != ""


def test_verify_is_silent_where_all_is_well_and_names_what_is_not(run: Run, store: Path) -> None:
    """As a nightly job wants it: words only where somebody has to look."""
    assert (run("verify", "-q").out, run("verify", "-q").err) == ("", "")
    next(store.glob("objects/*/*")).unlink()
    hurt = run("verify", "-q")

    assert hurt.code == 20
    assert hurt.out.startswith("damaged object")
    assert hurt.err.startswith("error: ")


def test_errors_hints_and_warnings_stay(run: Run, store: Path) -> None:
    """What went wrong is not a note."""
    shutil.rmtree(store / "pins")
    (store / "pins").mkdir()
    next((store / "commits" / "sft").glob("2.*")).write_bytes(b"")

    assert run("log", "nope", "-q").err.startswith("error: there is no run 'nope'")
    assert "\nhint: " in run("log", "nope", "-q").err
    assert run("log", "-q").err.startswith("warning: sft@2 is left out")


def test_what_to_do_next_is_a_note(run: Run) -> None:
    """The table stays, the line below it goes; an empty list is empty."""
    assert "older commit" in run("log", "-n", "1").out
    assert "older commit" not in run("log", "-n", "1", "-q").out
    run("init", "empty")
    assert run("log", "--store", "empty", "-q").out == ""
    assert run("pin", "--list", "--store", "empty", "-q").out == ""


def test_a_quiet_command_does_not_silence_the_next(run: Run) -> None:
    """The voice is a command's, not the process's."""
    quiet, loud = run("pin", "a", "sft", "-q"), run("pin", "b", "sft")

    assert (quiet.out, bool(loud.out)) == ("", True)
