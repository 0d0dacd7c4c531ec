"""The command line as a process: signals, closed pipes, and the terminal it writes to."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import layerstore

COMMAND = [sys.executable, "-m", "layerstore.cli"]

# Sends this process a signal when a given thing happens for the first time, then runs the command line.
SIGNALLED = """
import os, signal, sys
wanted_event, folder, number, words = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
signal.signal(signal.SIGINT, signal.default_int_handler)
sent = []

def watch(event, arguments):
    if event == wanted_event and not sent and str(arguments[0]).startswith(folder):
        sent.append(event)
        os.kill(os.getpid(), number)

sys.addaudithook(watch)
from layerstore.cli.app import main
code = main(words)
assert sent, "the thing never happened"
sys.exit(code)
"""


def _environment(**more: str) -> dict[str, str]:
    unwanted = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("LAYERSTORE_") and name not in unwanted
    }
    return {**kept, "TERM": "xterm-256color", **more}


def _run(*words: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *map(str, words)], cwd=cwd, env=_environment(**more), capture_output=True, check=False
    )


@pytest.mark.fault(10)
@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_stopped_ingest_leaves_no_temporary_file(store: Path, checkpoints: Path, number: int, code: int) -> None:
    """The signal comes while objects are staged: the exit code tells which, and the store is as before."""
    words = ["ingest", str(checkpoints / "global_step2"), "--run", "other", "--store", str(store), "--json"]

    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, "open", str(store / "tmp"), str(number), *words],
        env=_environment(),
        capture_output=True,
        check=False,
    )

    assert code == done.returncode, done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["error"]["code"] == code
    assert list((store / "tmp").iterdir()) == []
    assert _run("verify", "--read-data", "--store", store, cwd=store).returncode == 0


@pytest.mark.fault(10)
@pytest.mark.known_fault("llmtailor 10")
@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_stopped_compose_leaves_nothing(store: Path, tmp_path: Path, number: int, code: int) -> None:
    """Neither the folder nor its unfinished twin is there."""
    words = ["compose", "sft@2", "-o", str(tmp_path / "out"), "--store", str(store)]

    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, "open", str(tmp_path / "out.partial"), str(number), *words],
        env=_environment(),
        capture_output=True,
        check=False,
    )

    assert code == done.returncode, done.stderr
    assert done.stderr.startswith(b"error: ")
    assert b"Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# What a collection and a rebuild do to which folder when the signal comes.
MOMENTS = {
    "gc, moving aside": (["gc", "--keep-last", "1", "--yes"], "os.rename", "objects"),
    "gc, removing": (["gc", "--keep-last", "1", "--yes"], "os.remove", "gc/"),
    "gc, records": (["gc", "--keep-last", "1", "--yes"], "os.remove", "commits/"),
    "reindex": (["reindex"], "os.rename", "manifest"),
}


@pytest.mark.fault(10)
@pytest.mark.parametrize(("moment", "number"), list(zip(MOMENTS, (2, 15, 2, 15), strict=True)))
@pytest.mark.sample(2)
def test_a_stopped_collection_or_rebuild_loses_nothing(store: Path, moment: str, number: int) -> None:
    """The exit code tells which signal it was, nothing temporary is left, and the same command then succeeds."""
    words, event, where = MOMENTS[moment]
    for path in (store / "objects").rglob("*"):
        os.utime(path, (1, 1))
    with layerstore.open(store) as opened:
        opened.delete_pin("best")
        before = opened.log()

    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, event, str(store / where), str(number), *words, "--store", str(store)],
        env=_environment(),
        capture_output=True,
        check=False,
    )

    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.splitlines()[-1].startswith((b"error: ", b"hint: "))
    assert list((store / "tmp").iterdir()) == []
    with layerstore.open(store) as opened:
        assert opened.verify(read_data=True).ok
    assert _run(*words, "--store", store, cwd=store).returncode == 0
    with layerstore.open(store) as opened:
        assert opened.verify(read_data=True).ok
        assert opened.log() == (before if words == ["reindex"] else [entry for entry in before if entry.step == 4])
    assert list((store / "gc").glob("*/aside")) == []


@pytest.mark.fault(88)
@pytest.mark.parametrize("words", [["log"], ["log", "--json"], ["--help"]], ids=str)
def test_a_reader_that_goes_away_is_no_failure_worth_words(store: Path, words: list[str]) -> None:
    """As in `layerstore log | head -1`: exit code 141, and silence."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, *words], cwd=store, env=_environment(LAYERSTORE_STORE=str(store)), stdout=pipe,
            stderr=subprocess.PIPE, check=False,
        )  # fmt: skip

    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.fault(88)
def test_a_full_disk_behind_stdout_is_reported(store: Path) -> None:
    """Output that could not be written is a failure, and is said once."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "log", "--store", str(store)],
            env=_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )

    assert (done.returncode, done.stderr) == (23, b"error: the output: No space left on device\n")


@pytest.mark.fault(88)
def test_closed_descriptors_never_become_files_of_the_store(store: Path, checkpoints: Path) -> None:
    """With stdin, stdout and stderr closed the work is done all the same, and nothing is printed into it."""
    command = " ".join([*COMMAND, "ingest", str(checkpoints / "global_step2"), "--run", "other", "--store", str(store)])

    done = subprocess.run(["sh", "-c", f"exec {command} <&- >&- 2>&-"], env=_environment(), check=False)

    assert done.returncode == 0
    assert _run("verify", "--read-data", "--store", store, cwd=store).returncode == 0


@pytest.mark.fault(71, 88)
def test_names_that_are_not_text_are_printed_escaped(store: Path) -> None:
    """Bytes that are not Unicode, control characters and bidirectional marks reach no terminal as they are."""
    done = subprocess.run(
        [*map(os.fsencode, COMMAND), b"ingest", b"bad\xff\x1b[2J\xe2\x80\xae", b"--store", os.fsencode(store)],
        cwd=store, env=_environment(LC_ALL="C"), capture_output=True, check=False,
    )  # fmt: skip

    assert done.returncode == 21
    assert b"\\x1b[2J\\u202e" in done.stderr
    assert b"\\udcff" in done.stderr
    assert done.stderr.isascii()


def test_tables_in_a_pipe_are_not_cut(store: Path) -> None:
    """Where nobody looks at a terminal, long names stay on their line; where COLUMNS is set, they fold."""
    pin = "z" * 150
    _run("pin", pin, "sft@4", "--store", store, cwd=store)

    free = _run("log", "--store", store, cwd=store).stdout.decode()
    narrow = _run("log", "--store", store, cwd=store, COLUMNS="80").stdout.decode()

    assert pin in free
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.count("z") == 150


def _on_a_terminal(words: list[str], **more: str) -> str:
    """Run the command line with a terminal as stdout and stderr; return what that was sent."""
    outer, inner = pty.openpty()
    process = subprocess.Popen([*COMMAND, *words], stdout=inner, stderr=inner, env=_environment(**more))
    os.close(inner)
    sent = b""
    while True:
        try:
            data = os.read(outer, 65536)
        except OSError:  # how a terminal says that the other side is gone
            break
        if not data:
            break
        sent += data
    os.close(outer)
    process.wait()
    return sent.decode()


@pytest.mark.fault(88)
def test_colour_is_for_terminals_that_want_it(store: Path) -> None:
    """NO_COLOR switches it off."""
    words = ["log", "nope", "--store", str(store)]

    assert "\x1b[1;31merror:" in _on_a_terminal(words)
    assert "\x1b" not in _on_a_terminal(words, NO_COLOR="1")
    assert b"\x1b" not in _run(*words, cwd=store).stderr


def test_a_moving_line_is_shown_on_a_terminal_only(store: Path, checkpoints: Path) -> None:
    """Not in a pipe, not for programs, and not where it was switched off."""

    def words(run: str) -> list[str]:
        return ["ingest", str(checkpoints / "global_step2"), "--run", run, "--store", str(store)]

    shown = _on_a_terminal(words("first"))
    assert re.search(r"\r\w+ \[-+\] 0%, 0 B of [\d.]+ kB, 0 B/s +\r", shown)
    assert re.search(r"\r +\rsaved first@2", shown)
    assert "0%" not in _on_a_terminal([*words("second"), "--json"])
    assert "0%" not in _on_a_terminal(words("third"), LAYERSTORE_NO_PROGRESS="1")
    assert _run(*words("fourth"), cwd=store).stderr == b""


def test_a_traceback_is_for_those_who_ask(store: Path) -> None:
    """LAYERSTORE_DEBUG=1 shows where an error came from."""
    words = ["log", "nope", "--store", store]

    assert b"Traceback" in _run(*words, cwd=store, LAYERSTORE_DEBUG="1").stderr
    assert b"Traceback" not in _run(*words, cwd=store).stderr


# Sends this process SIGINT when a given module is about to be imported, then runs what the script runs.
INTERRUPTED_IMPORT = """
import os, signal, sys
wanted, words = sys.argv[1], sys.argv[2:]
signal.signal(signal.SIGINT, signal.default_int_handler)
sent = []

def watch(event, arguments):
    if event == "import" and arguments[0] == wanted and not sent:
        sent.append(event)
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(watch)
sys.argv = ["layerstore", *words]
from layerstore.cli.entry import main
sys.exit(main())
"""


@pytest.mark.fault(10)
@pytest.mark.parametrize("module", ["typer", "layerstore.cli.app", "layerstore.cli.options", "lmdb"])
def test_ctrl_c_is_quiet_from_the_first_import_on(store: Path, module: str) -> None:
    """Whatever is being imported: no traceback, and the exit code of an interruption."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module, "log", "--store", str(store)],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 130
    assert done.stderr in {"", "error: interrupted; nothing half-done is left behind\n"}


def test_a_job_in_the_background_stays_deaf_to_ctrl_c(store: Path) -> None:
    """Shells let what runs in the background ignore it: it is not heard again of our own accord."""
    deaf = INTERRUPTED_IMPORT.replace("signal.default_int_handler", "signal.SIG_IGN")
    done = subprocess.run(
        [sys.executable, "-c", deaf, "layerstore.cli.app", "log", "--store", str(store)],
        env=_environment(),
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, b"")
