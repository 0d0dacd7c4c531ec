"""The command line starts fast, because it loads nothing that it does not need."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.environment import processor_seconds

HELP_SECONDS_MAX = 0.3
IMPORT_SECONDS_MAX = 0.15
IMPORT_MODULES_MAX = 5
"""Modules that ``import layerstore`` loads and Python itself has not."""

# Runs one command, then tells which of the heavy modules it has loaded.
DRIVER = """
import json, sys
heavy, words = json.loads(sys.argv[1]), sys.argv[2:]
if words:
    from layerstore.cli.app import main
    code = main(words)
else:
    import layerstore
    layerstore.open, layerstore.Store
    code = 0
print(json.dumps({"code": code, "loaded": [name for name in heavy if name in sys.modules]}))
"""


def _loaded(heavy: list[str], *words: object, cwd: Path) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERSTORE_")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(heavy), *map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    # The doctor finds fault with a folder in memory, where tests may lie.
    assert told["code"] == 0 or words[0] == "doctor", done.stderr
    loaded: list[str] = told["loaded"]
    return loaded


@pytest.mark.fault(87)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["init", "new"],
        ["ingest", "{source}", "--store", "store", "--run", "again", "--tag", "global_step2"],
        ["log", "--store", "store"],
        ["show", "--store", "store"],
        ["ls", "--store", "store"],
        ["compose", "-o", "out", "--store", "store"],
        ["pin", "newest", "sft", "--store", "store"],
        ["verify", "--read-data", "--store", "store"],
        ["reindex", "--store", "store"],
        ["doctor", "store"],
        ["estimate", "--params", "8B", "--layers", "32"],
        ["report", "-o", "report.html", "--store", "store"],
        ["demo", "--help"],
    ],
    ids=lambda words: words[0] if words else "import layerstore",
)
@pytest.mark.sample(5)
def test_nothing_loads_torch(words: list[str], store: Path, checkpoints: Path) -> None:
    """Neither the library nor a command's real work loads torch or deepspeed."""
    words = [word.format(source=checkpoints) for word in words]

    assert _loaded(["torch", "deepspeed"], *words, cwd=store.parent) == []


def test_help_loads_no_library_at_all(tmp_path: Path) -> None:
    """What the help does not need is not loaded: that is what makes it fast."""
    heavy = ["torch", "deepspeed", "numpy", "lmdb", "msgpack", "xxhash", "rich", "pydantic", "layerstore.store"]

    assert _loaded(heavy, "--help", cwd=tmp_path) == []


def test_programs_do_not_load_what_draws_tables(store: Path) -> None:
    """With --json nothing is drawn."""
    assert _loaded(["rich"], "log", "--json", "--store", "store", cwd=store.parent) == []


def test_help_takes_less_than_300_ms(tmp_path: Path) -> None:
    """One of many starts, since other work on the machine only ever adds."""
    command = [sys.executable, "-m", "layerstore.cli", "--help"]
    start = partial(subprocess.run, command, cwd=tmp_path, check=True, capture_output=True)

    assert any(processor_seconds(start) < HELP_SECONDS_MAX for _ in range(25))


def test_importing_the_library_loads_next_to_nothing() -> None:
    """The front door loads what is asked for at first use: the store with its index, say, when it is opened."""
    count = "import sys; before = set(sys.modules); import layerstore; print(len(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    start = partial(subprocess.run, [sys.executable, "-c", "import layerstore"], check=True)

    assert int(found.stdout) <= IMPORT_MODULES_MAX
    assert any(processor_seconds(start) < IMPORT_SECONDS_MAX for _ in range(25))


def test_the_library_does_not_load_what_only_some_commands_need(tmp_path: Path) -> None:
    """Opening a store loads no verb's room, nor numpy, nor what parses recipes, draws tables or reads commands."""
    rooms = [
        f"layerstore.{room}" for room in ("zero3", "policy", "history", "ingest", "compose", "gc", "check", "inspect")
    ]
    others = ["numpy", "yaml", "rich", "typer", "click", "unittest", "asyncio"]

    assert _loaded([*rooms, *others], cwd=tmp_path) == []
