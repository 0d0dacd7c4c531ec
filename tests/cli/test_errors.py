"""What goes wrong is said in one line, with the exit code that the documentation lists."""

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerstore import errors
from layerstore.cli import app as cli
from layerstore.cli import commands, exits
from layerstore.limits import MIB
from tests.cli.conftest import Run
from tests.compat.format1 import as_format_1

CLI_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"

COMMANDS = {
    "init": ["init"],
    "ingest": ["ingest", "checkpoint"],
    "runs": ["runs"],
    "log": ["log"],
    "show": ["show"],
    "ls": ["ls"],
    "diff": ["diff", "sft@2", "sft@4"],
    "stats": ["stats"],
    "report": ["report", "-o", "report.html"],
    "bisect": ["bisect", "log"],
    "compose": ["compose", "--dry-run"],
    "apply": ["apply", "delta", "folder"],
    "pin": ["pin", "--list"],
    "drop": ["drop", "sft@2"],
    "undrop": ["undrop", "sft@2"],
    "gc": ["gc"],
    "verify": ["verify"],
    "repair": ["repair", "--dry-run"],
    "reindex": ["reindex"],
    "migrate": ["migrate"],
    "remote": ["remote", "list"],
    "push": ["push", "memory://elsewhere"],
    "pull": ["pull", "memory://elsewhere"],
    "clone": ["clone", "memory://elsewhere", "clone"],
    "doctor": ["doctor"],
    "estimate": ["estimate", "--params", "8B", "--layers", "32"],
}
ANYWHERE = {"apply", "init", "clone", "doctor", "estimate", "bisect"}
IN_A_STORE = [words for name, words in COMMANDS.items() if name not in ANYWHERE]


def _registered() -> list[str]:
    return [name for name in commands.COMMANDS if name != "demo"]


def test_every_command_is_tested_here() -> None:
    """A new command has to be added to the tests below."""
    assert sorted(COMMANDS) == sorted(_registered())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_whatever_is_wrong(run: Run, command: str) -> None:
    """One to four commands that work by being typed; without a store, and no line wider than a terminal."""
    outcome = run("--store", "nowhere", command, "-h")
    examples = re.findall(rf"^    layerstore {command}\b.*$", outcome.out, re.MULTILINE)

    assert (outcome.code, outcome.err) == (0, "")
    assert "--json" in outcome.out
    assert "--quiet" in outcome.out
    assert 1 <= len(examples) <= 4
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_the_help_of_compose_is_in_groups_and_has_defaults(run: Run) -> None:
    """With 25 options a list would not be read; what happens without one is said at its end."""
    out = run("compose", "--help").out
    words = " ".join(out.split())

    assert re.findall(r"^(\w+):$", out, re.MULTILINE) == [
        "Arguments",
        "Output",
        "Source",
        "Safety",
        "Average",
        "Options",
    ]
    assert re.findall(r"^\S.*:$", out, re.MULTILINE)[-1].startswith("Policy settings")
    assert "latest: each layer as the commit has it; exact: " in words
    assert "what changed in hf's weights since a commit. [default: shards; dcp if dcp saved REF]" in words
    assert "instead of REF. [at least 0]" in words


def test_without_a_command_there_is_help(run: Run) -> None:
    """It is wrong use all the same: a script with an empty variable must notice."""
    outcome = run()

    assert outcome.code == 2
    assert all(f"{name}:" in outcome.out.splitlines() for name in commands.sections())
    assert run("--json").error["kind"] == "usage"


@pytest.mark.parametrize("words", [[], ["--help"]], ids=["bare", "--help"])
def test_no_commands_summary_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """In 80 columns the list of commands has the whole first line of each one's own help."""
    monkeypatch.setenv("COLUMNS", "80")
    listed = re.findall(r"^  ([a-z]+) {2,}(\S.*)$", run(*words).out, re.MULTILINE)

    assert listed == [
        (name, inspect.cleandoc(cli.command_line().load(name).help or "").splitlines()[0]) for name in commands.COMMANDS
    ]


@pytest.mark.fault(75)
@pytest.mark.parametrize("words", IN_A_STORE, ids=lambda words: words[0])
def test_without_a_store_the_hint_names_or_makes_one(run: Run, words: list[str]) -> None:
    """Exit code 10; what only reads or maintains a store recommends no empty one."""
    hint = "name yours with --store or LAYERSTORE_STORE"
    if commands.about(words[0]).section in {"Save", "Elsewhere"}:
        hint = "layerstore init .layerstore, or name yours with --store"
    people = run(*words)
    programs = run(*words, "--json")

    assert (people.code, programs.code) == (10, 10)
    assert people.err.splitlines() == [
        "error: there is no store at .layerstore",
        f"hint: {hint}",
    ]
    assert programs.error == {
        "kind": "no_store",
        "code": 10,
        "message": "there is no store at .layerstore",
        "hint": hint,
    }
    assert programs.out == ""
    assert json.loads(programs.err)["schema"] == 1


# What may be wrong with a store, and the exit code of every command that opens one.
BAD_STORES = {"a file": 10, "an empty folder": 10, "damaged": 20, "newer": 16, "of another's": 12}


def _spoil(store: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = store / "store.json"
    if how in {"a file", "an empty folder"}:
        shutil.rmtree(store)
        store.touch() if how == "a file" else store.mkdir()
    elif how == "damaged":
        identity.write_text("{}")
    elif how == "newer":
        identity.write_text(json.dumps(json.loads(identity.read_text()) | {"format": 999, "checksum": "0" * 32}))
    else:

        def refuse(*_: object, **__: object) -> None:
            raise errors.StorageIO(f"{identity}: Permission denied", errno=errno.EACCES, filename=str(identity))

        monkeypatch.setattr("layerstore.disk.files.Files.read", refuse)  # root may read everything


@pytest.mark.parametrize("bad", BAD_STORES)
@pytest.mark.parametrize("words", IN_A_STORE, ids=lambda words: words[0])
@pytest.mark.sample(40)
def test_a_bad_store_has_its_code_whatever_is_asked_of_it(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], bad: str
) -> None:
    """One error line and at most one hint, for programs the same in their last line, and nothing on stdout."""
    _spoil(store, bad, monkeypatch)
    people = run(*words, "--store", store)
    programs = run(*words, "--store", store, "--json", "--quiet")
    labels = [line.partition(": ")[0] for line in people.err.splitlines()]

    assert people.code == programs.code == programs.error["code"] == BAD_STORES[bad]
    assert labels in (["error"], ["error", "hint"])
    assert people.err.splitlines()[0] == f"error: {programs.error['message']}"
    assert (people.out, programs.out) == ("", "")
    assert (programs.error["code"], programs.error["kind"]) in {(code, kind) for code, kind, _ in _documented()}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=lambda words: words[0])
def test_wrong_use_exits_2(run: Run, words: list[str]) -> None:
    """An unknown option is named, with the command whose help lists the real ones."""
    people = run(*words, "--no-such-option")
    programs = run(*words, "--no-such-option", "--json")

    assert (people.code, programs.code) == (2, 2)
    assert "--no-such-option" in people.err
    assert people.err.splitlines()[-1] == f"hint: layerstore {words[0]} --help"
    assert (programs.error["kind"], programs.error["code"]) == ("usage", 2)


def test_the_store_may_be_named_in_four_places(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the command wins over in front of it, that over the environment, that over the default."""
    behind = run("--store", "nowhere", "log", "--store", store)
    before = run("--store", store, "log")
    monkeypatch.setenv("LAYERSTORE_STORE", "nowhere")
    over_environment = run("--store", store, "log")
    only_environment = run("log")
    monkeypatch.delenv("LAYERSTORE_STORE")
    shutil.move(store, ".layerstore")
    default = run("log")

    found = (behind, before, over_environment, only_environment, default)
    assert [outcome.code for outcome in found] == [0, 0, 0, 10, 0]


def test_json_may_stand_in_front(run: Run, store: Path) -> None:
    """Both places mean the same."""
    assert run("--json", "log", "--store", store).fields == run("log", "--store", store, "--json").fields


@pytest.mark.fault(47)
def test_another_writer_is_named(run: Run, store: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held lock is waited for until the deadline; then the code is 11."""
    from layerstore.disk import lock

    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", "0.1")
    with lock(store / "locks" / "run-sft.lock", what="run 'sft'", deadline_seconds=0):
        outcome = run("ingest", checkpoints / "global_step2", "--store", store)

    assert outcome.code == 11
    assert f"pid {os.getpid()}" in outcome.err


@pytest.mark.parametrize("words", [["gc"], ["migrate"]])
def test_a_link_in_the_place_of_a_lock_is_refused_with_the_way_out(
    run: Run, store: Path, tmp_path: Path, words: list[str]
) -> None:
    """It is not followed; what it is and what to do about it is said, and removing it is enough."""
    if words == ["migrate"]:
        store = as_format_1(store)
    lock = store / "locks" / "gc.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(tmp_path / "elsewhere")

    outcome = run(*words, "--store", store)

    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        f"error: cannot open the lock {lock}: it is a link, which is never followed",
        f"hint: remove {lock} by hand, and find out who put it there; it is created again when needed",
    ]
    assert not (tmp_path / "elsewhere").exists()
    lock.unlink()
    assert run(*words, "--store", store).code == 0


# Imports and the parser of options come first: compilers of classes, and pydantic, which typer loads, report a lack of
# memory in odd ways.
LAUNCH = """
import contextlib, io, resource, sys
from layerstore.cli.app import main
import layerstore.ingest, layerstore.store
with contextlib.redirect_stdout(io.StringIO()):
    main(["ingest", "--help"])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.full
@pytest.mark.parametrize("left_bytes", [MIB, 4 * MIB, 16 * MIB])
def test_too_little_memory_is_said_in_one_line(store: Path, checkpoints: Path, left_bytes: int) -> None:
    """It is nobody's fault that has to be reported; what to do is said, and nothing half-done is left."""
    words = ["ingest", str(checkpoints / "global_step2"), "--run", "other", "--store", str(store)]

    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(left_bytes), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "LAYERSTORE_NO_INDEX": "1"},
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("error: memory ran out")
    assert "ulimit -v" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list((store / "tmp").iterdir())


def test_a_forbidden_folder_is_a_matter_of_permission(run: Run) -> None:
    """Exit code 12; nobody, root included, may make folders in /sys."""
    assert run("init", "/sys/layerstore").code == 12


# -- the documented table ------------------------------------------------------------------------------------------


def _documented() -> set[tuple[int, str, str]]:
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\| (?:`(\w+)`)? ?\|", CLI_PAGE.read_text(), re.MULTILINE)
    return {(int(code), kind, name) for code, kind, name in rows}


def _defined() -> set[tuple[int, str, str]]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    of_disk = [errors.StorageIO("", errno=number, filename="") for number in (errno.EIO, errno.EACCES, errno.ENOSPC)]
    return {
        (0, "", ""),
        *((error.exit_code, error.kind, "StorageIO") for error in of_disk),
        *((kind.exit_code, kind.kind, kind.__name__) for kind in classes if issubclass(kind, errors.LayerstoreError)),
        (exits.EXIT_NO_MEMORY, "no_memory", ""),
        (exits.EXIT_USAGE, "usage", ""),
        (exits.EXIT_INTERRUPTED, "interrupted", ""),
        (exits.EXIT_CLOSED_PIPE, "closed_pipe", ""),
        (exits.EXIT_TERMINATED, "terminated", ""),
    }


def test_the_documented_exit_codes_are_the_real_ones() -> None:
    """Every class, kind and code stands in the table of the command line's page, and nothing else does."""
    assert _defined() == _documented()
