"""Mistakes that people make at the command line: each gets its exit code and an answer, and changes nothing."""

import errno
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line that cannot be meant, and its answer."""

    words: str
    code: int
    error: str
    """What the error says."""
    hint: str
    """What the hint says."""


MISTAKES = [
    # a name of the other kind
    Mistake("log best", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("stats best", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("gc best --keep-last 1", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("report --run best -o page.html", 13, "'best' is a pin, not a run", "layerstore show best"),
    Mistake("log sft@4", 13, "no run 'sft@4'", "layerstore show sft@4"),
    Mistake("gc sft@4 --keep-last 1", 13, "no run 'sft@4'", "layerstore show sft@4"),
    Mistake("show 4", 13, "no run '4'", "sft@4"),
    Mistake("drop best", 2, "'best' is a pin", "layerstore pin --delete best"),
    Mistake("show .layerstore", 2, "is a path, not a reference", "RUN@STEP"),
    Mistake("diff sft@2 sft/global_step4", 2, "is a path, not a reference", "RUN@STEP"),
    # the wrong order, or something left out
    Mistake("pin sft@4 nice", 2, "pin takes NAME, then REF: 'sft@4'", "layerstore pin nice sft@4"),
    Mistake("pin sft nice", 2, "pin takes NAME, then REF: 'sft'", "layerstore pin nice sft"),
    Mistake("pin best nice", 2, "pin takes NAME, then REF: 'best'", "layerstore pin nice best"),
    Mistake("pin nice", 2, "the REF for 'nice' is missing", "layerstore pin nice RUN@STEP"),
    Mistake("pin sft@4", 2, "the NAME for 'sft@4' is missing", "layerstore pin NAME sft@4"),
    Mistake("remote add origin", 2, "remote add takes NAME and URL", "layerstore remote --help"),
    Mistake("compose sft@4", 2, "does not know where to write", "-o DIR"),
    Mistake("compose sft@4 out", 2, "compose takes REF; unexpected: out", "-o DIR"),
    Mistake("report", 2, "a report needs a file", "-o report.html"),
    # several where one is taken: the first is not touched
    Mistake("drop", 2, "drop takes REFs, or --run RUN", "layerstore drop --help"),
    Mistake("drop sft@2 sft@9", 13, "run 'sft' has no step 9", "did you mean sft@4"),
    Mistake("drop sft@2 best", 2, "'best' is a pin", "layerstore pin --delete best"),
    Mistake("verify sft@2 sft@9", 2, "verify takes REF; unexpected: sft@9", "one commit at a time"),
    Mistake("undrop", 2, "undrop takes REFs, or --run RUN", "layerstore undrop --help"),
    Mistake("undrop sft@2 sft@9", 13, "sft@2 is not in the trash", "layerstore log --dropped"),
    Mistake("reindex now", 2, "reindex takes no argument; unexpected: now", "layerstore reindex --help"),
    Mistake("push origin sft@2 sft@9", 13, "has no step 9", "sft@4"),
    Mistake("gc sft other --keep-last 1", 13, "no run 'other'", "runs here: sft"),
    Mistake(
        "ingest SOURCE/global_step2 SOURCE/global_step9 --run new",
        21,
        "does not exist; a ZeRO checkpoint is a folder; none of 2 checkpoints were taken",
        "SOURCE/global_step2",
    ),
    # other tools' verbs
    Mistake("inspect sft", 2, "no such command 'inspect'", "did you mean show?"),
    Mistake("get sft@2", 2, "no such command 'get'", "did you mean compose?"),
    Mistake("rename best better", 2, "no such command 'rename'", "layerstore pin NEW OLD"),
    Mistake("tags", 2, "no such command 'tags'", "layerstore pin --list"),
    Mistake("unpin best", 2, "no such command 'unpin'", "layerstore pin --delete PIN"),
    Mistake("forget sft@2", 2, "no such command 'forget'", "layerstore drop REF"),
    Mistake("snapshots", 2, "no such command 'snapshots'", "did you mean log?"),
    Mistake("help", 2, "no such command 'help'", "layerstore --help"),
    Mistake("help gc", 2, "no such command 'help'", "layerstore COMMAND --help"),
    Mistake("undelete sft@2", 2, "no such command 'undelete'", "did you mean undrop?"),
    # places
    Mistake("ingest SOURCE/global_step", 21, "does not exist", "did you mean SOURCE/global_step"),
    Mistake("report -o pgae/report.html", 2, "there is no folder pgae for a report", "mkdir -p pgae"),
    Mistake("estimate meta-llama/Llama-3.1-8B", 2, "estimate downloads nothing", "hf download meta-llama/Llama-3.1-8B"),
    Mistake("estimate gone", 13, "gone is not a file or folder", "runs here: sft"),
    Mistake("show --store SOURCE", 10, "there is no store at SOURCE", "name yours with --store"),
    # numbers and words of options
    Mistake("gc --keep 3", 2, "no such option: --keep", "--keep-last"),
    Mistake("gc --keep-within 3", 2, "'3' is not a duration", "36h"),
    Mistake(
        "compose --format safetensors -o out",
        2,
        "'safetensors' is not one of 'shards', 'zero3', 'hf'",
        "compose --help",
    ),
    Mistake("verify --read-data-subset 200%", 2, "'200%' is not a sample", "10%"),
]


def _everything(folder: Path) -> dict[Path, str]:
    """Return what every file below *folder* holds, apart from those that reading alone may touch."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
        if not {"manifest", "locks"} & {*path.parts}
    }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_is_answered_and_changes_nothing(
    run: Run, store: Path, checkpoints: Path, tmp_path: Path, mistake: Mistake
) -> None:
    """The exit code, what is wrong, and what to type instead."""
    shutil.move(store, tmp_path / ".layerstore")
    run("remote", "add", "origin", f"file://{tmp_path}/bucket")
    before = _everything(tmp_path), _everything(checkpoints)

    outcome = run(*(word.replace("SOURCE", str(checkpoints)) for word in mistake.words.split()))

    error, hint = outcome.err.splitlines()
    assert (mistake.code, "") == (outcome.code, outcome.out)
    assert mistake.error.replace("SOURCE", str(checkpoints)) in error.removeprefix("error: ")
    assert mistake.hint.replace("SOURCE", str(checkpoints)) in hint.removeprefix("hint: ")
    assert before == (_everything(tmp_path), _everything(checkpoints))


def test_an_unreadable_source_is_a_matter_of_permission(
    run: Run, store: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying it again would not help: the hint shows whose it is."""

    def refuse(path: Path) -> list[str]:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("layerstore.zero3.discovery.os.listdir", refuse)  # root may read everything

    outcome = run("ingest", checkpoints, "--store", store)

    assert outcome.code == 12
    assert outcome.err.splitlines() == [
        f"error: cannot list {checkpoints}: Permission denied",
        f"hint: ls -ld {checkpoints} shows who may read it",
    ]


def test_the_store_of_a_folder_above_is_found(
    run: Run, store: Path, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git finds its own; which one it is goes to stderr, and a nearer one wins."""
    shutil.move(store, tmp_path / ".layerstore")
    below = tmp_path / "job" / "logs"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)

    found = run("log", "--json")
    saved = run("ingest", checkpoints / "global_step4", "--run", "other")
    quiet = run("log", "--quiet")
    run("init", tmp_path / "job" / ".layerstore")
    nearer = run("log", "--json")

    assert [len(outcome.fields["commits"]) for outcome in (found, nearer)] == [2, 0]
    assert f"using the store {tmp_path}/.layerstore\n" == saved.err
    assert (saved.code, quiet.code, quiet.err) == (0, 0, "")
    assert f"using the store {tmp_path}/job/.layerstore\n" == nearer.err


def test_a_store_above_the_home_folder_is_not_looked_for(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies outside of a user's own folders is another's; without a store, this folder's is missing."""
    shutil.move(store, tmp_path / ".layerstore")
    home = tmp_path / "home"
    (home / "job").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "job")

    outcome = run("log")

    assert (outcome.code, outcome.err.splitlines()[0]) == (10, "error: there is no store at .layerstore")
