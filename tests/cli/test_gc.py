"""``layerstore gc`` shows a plan, removes what it shows, and says what is in the way."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run

# Whose keys make signals: the terminal has to be the one of its session.
IN_A_TERMINAL = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background have it ignored
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from layerstore.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def logged(run: Run, store: Path) -> list[int]:
    """Return the steps that the log shows."""
    return [commit["step"] for commit in run("log", "--json", "--store", store).fields["commits"]]


def test_the_plan_is_the_deed(run: Run, store: Path) -> None:
    """The same fields; the plan changes nothing, and the deed says what it did."""
    run("pin", "--delete", "best", "--store", store)
    planned = run("gc", "--keep-last", "1", "--grace", "0s", "--dry-run", "--json", "--store", store)
    still = logged(run, store)
    done = run("gc", "--keep-last", "1", "--grace", "0s", "--json", "--store", store)

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
    assert " for good: " in lines[-1]
    assert lines[-1].endswith("nothing was changed")


def test_the_table_leaves_out_runs_that_were_not_asked_about(run: Run, store: Path, checkpoints: Path) -> None:
    """Only how many they are is said: with many runs they would be all that one sees."""
    run("pin", "--delete", "best", "--store", store)
    run("ingest", "--all", checkpoints, "--run", "other", "--store", store)

    out = run("gc", "sft", "--keep-last", "1", "--grace", "0s", "--dry-run", "--store", store).out

    assert "other@" not in out
    assert "… and 2 kept in runs that were not named; --json has them all" in out


def test_what_was_just_saved_is_not_freed_yet(run: Run, store: Path) -> None:
    """It is said why, and what to do."""
    run("pin", "--delete", "best", "--store", store)
    for path in (store / "objects").rglob("*"):
        path.touch()

    words = ("gc", "--keep-last", "1", "--dry-run", "--json", "--store", store)
    [young], [old] = (run(*words, *grace).fields["removed"] for grace in ((), ("--grace", "0s")))
    assert (young["bytes_freed"], young["bytes_freed_later"]) == (0, old["bytes_freed"])
    assert (old["bytes_freed"] > 0, old["bytes_freed_later"]) == (True, 0)

    outcome = run("gc", "--keep-last", "1", "--store", store)

    assert outcome.code == 0
    assert "too young to remove: " in outcome.out
    assert outcome.out.splitlines()[1].endswith("B later")
    assert "--grace 0s" in outcome.out


@pytest.mark.fault(131)
def test_plan_and_result_say_that_it_is_for_good(run: Run, store: Path) -> None:
    """Also where nobody can be asked; a drop can be undone, a collection cannot."""
    run("pin", "--delete", "best", "--store", store)
    words = ("gc", "--keep-last", "1", "--grace", "0s", "--store", store)

    planned, done = run(*words, "--dry-run").out, run(*words).out

    assert "would remove 1 commit, " in planned
    assert "removed 1 commit, " in done
    assert " for good: " in planned
    assert " for good: " in done


@pytest.mark.parametrize(
    ("keys", "code", "says", "left"),
    [
        pytest.param(b"n\n", 0, b"nothing was removed", [4, 2], id="no"),
        pytest.param(b"\n", 0, b"nothing was removed", [4, 2], id="enter"),
        pytest.param(b"\x04", 0, b"nothing was removed", [4, 2], id="Ctrl-D"),
        pytest.param(b"\x03", 130, b"", [4, 2], id="Ctrl-C"),
        pytest.param(b"y\n", 0, b"removed 1 commit", [4], id="yes"),
    ],
)
def test_it_asks_at_a_terminal(run: Run, store: Path, keys: bytes, code: int, says: bytes, left: list[int]) -> None:
    """And removes nothing without a yes; a no is not a failure, and no answer is a fault of ours."""
    run("pin", "--delete", "best", "--store", store)
    returncode, said = answered(keys, "gc", "--keep-last", "1", "--store", str(store))

    assert (returncode, says in said) == (code, True), said
    assert b"Traceback" not in said
    assert b"report it" not in said
    assert logged(run, store) == left


def test_it_asks_before_the_trash_is_emptied(run: Run, store: Path) -> None:
    """What was dropped can be had back until then."""
    run("drop", "sft@2", "--store", store)
    words = ["gc", "--empty-trash", "--grace", "0s", "--store", str(store)]

    assert b"nothing was removed" in answered(b"n\n", *words)[1]
    assert [each["step"] for each in run("log", "--dropped", "--json", "--store", store).fields["dropped"]] == [2]
    emptied = answered(b"y\n", *words)[1]
    assert b"1 file in the trash" in emptied
    assert b"would remove trash: sft@2" in emptied
    assert b"\nremoved trash: sft@2" in emptied.replace(b"\r", b"")
    assert run("log", "--dropped", "--json", "--store", store).fields["dropped"] == []


def answered(keys: bytes, *words: str) -> tuple[int, bytes]:
    """Run a command at a terminal, answer its question with *keys*, and return its exit code and what it said."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as asking:
        os.close(theirs)
        said = heard_until(terminal, b"Remove them for good? [y/N]: ")
        time.sleep(0.3)  # between the question and reading the answer Python can lose a signal; nobody types so fast
        os.write(terminal, keys)
        said += heard_until(terminal, None)
    os.close(terminal)
    return asking.returncode, said


def heard_until(terminal: int, end: bytes | None) -> bytes:
    """Return what comes until *end* was said, or with None until the other side is closed."""
    said = b""
    while end is None or end not in said:
        try:
            more = os.read(terminal, 4096)
        except OSError:  # how Linux says that nobody has the other side open
            more = b""
        if not more:
            break
        said += more
    return said


def test_what_stays_in_the_trash_is_named_where_nothing_goes(run: Run, store: Path) -> None:
    """Who has dropped commits for their room and collects is told why there is none yet."""
    assert "stay" not in run("gc", "--store", store).out
    run("drop", "sft@4", "--store", store)
    for more in ([], ["--dry-run"]):
        outcome = run("gc", *more, "--store", store)
        assert outcome.out.endswith("1 dropped commit stays in the trash: --empty-trash removes it\n")
