"""``layerstore gc`` shows a plan, removes what it shows, and says what is in the way."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

FIELDS = [
    "schema",
    "dry_run",
    "commits_removed",
    "objects_removed",
    "bytes_freed",
    "removed",
    "kept",
    "pins",
    "orphans",
    "young",
    "unfinished",
    "waiting",
    "unserved",
]


def logged(run: Run, store: Path) -> list[int]:
    """Return the steps that the log shows."""
    return [commit["step"] for commit in run("log", "--json", "--store", store).fields["commits"]]


def test_the_plan_is_the_deed(run: Run, store: Path) -> None:
    """The same fields; the plan changes nothing, and the deed says what it did."""
    run("pin", "--delete", "best", "--store", store)
    planned = run("gc", "--keep-last", "1", "--grace", "0s", "--dry-run", "--json", "--store", store)
    still = logged(run, store)
    done = run("gc", "--keep-last", "1", "--grace", "0s", "--json", "--store", store)

    assert list(planned.fields) == FIELDS
    assert planned.fields | {"dry_run": False} == done.fields
    assert (still, logged(run, store)) == ([4, 2], [4])
    assert done.fields["commits_removed"] == 1
    assert done.fields["bytes_freed"] > 0
    assert done.fields["removed"][0]["step"] == 2
    assert done.fields["kept"][0]["reason"] == "newest, last 1"
    assert run("verify", "--read-data", "--store", store).code == 0


def test_the_table_says_what_goes_and_why(run: Run, store: Path) -> None:
    """What goes first, then what stays, and a line with the sum."""
    run("pin", "--delete", "best", "--store", store)

    lines = run("gc", "--keep-last", "1", "--grace", "0s", "--dry-run", "--store", store).out.splitlines()

    assert lines[0].split() == ["COMMIT", "SAVED", "WHY", "FREES"]
    assert lines[1].startswith("sft@2")
    assert "no rule keeps it" in lines[1]
    assert "newest, last 1" in lines[2]
    assert lines[-1].startswith("would remove 1 commit, ")
    assert lines[-1].endswith("nothing was changed")


def test_what_was_just_saved_is_not_freed_yet(run: Run, store: Path) -> None:
    """It is said why, and what to do."""
    run("drop", "sft@4", "--store", store)
    for path in (store / "objects").rglob("*"):
        path.touch()

    outcome = run("gc", "--store", store)

    assert outcome.code == 0
    assert "too young to go: " in outcome.out
    assert "--grace 0s" in outcome.out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--keep-last", "0"], 2, "keep last is 0"),
        (["--keep-within", "2 weeks"], 2, "'2 weeks' is no duration"),
        (["--keep-best", "eval_loss:x"], 2, "does not name the best"),
        (["--keep-best", "f1"], 2, "no commit has 'f1'"),
        (["--grace", "soon"], 2, "'soon' is no duration"),
        (["other", "--keep-last", "1"], 13, "there is no run 'other'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line(run: Run, store: Path, options: list[str], code: int, message: str) -> None:
    """With the right exit code, and nothing is removed."""
    outcome = run("gc", *options, "--store", store)

    assert (outcome.code, len(outcome.err.splitlines())) == (code, 2)
    assert message in outcome.err
    assert logged(run, store) == [4, 2]


@pytest.mark.parametrize(("answer", "left"), [("n", [4, 2]), ("y", [4])])
def test_it_asks_at_a_terminal(run: Run, store: Path, answer: str, left: list[int]) -> None:
    """And removes nothing without a yes."""
    run("pin", "--delete", "best", "--store", store)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "layerstore.cli", "gc", "--keep-last", "1", "--store", str(store)]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as asking:
        os.write(ours, f"{answer}\n".encode())
        said, _ = asking.communicate(timeout=60)

    assert b"Remove them?" in said
    assert logged(run, store) == left
