"""Type checkers find layerstore from outside the repository, and nothing wrong with programs that use it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

pytestmark = pytest.mark.full

GOOD = """\
import layerstore
from layerstore import Ingested, LogEntry, NotFound, Table


def saved(path: str) -> Ingested | None:
    try:
        with layerstore.open(path) as store:
            entries: Table[LogEntry] = store.log()
            print(entries, store.compose(policy=layerstore.Parity(fresh="odd")).state_dict(dtype="bf16"))
            return store.ingest("checkpoint-2", run="sft")
    except NotFound as error:
        print(error.hint)
        return None
"""
BAD = """\
import layerstore
import layerstore.transformers
from layerstore import Nothing

layerstore.open("store").compose().export("model", dtype="bfloat")
layerstore.transformers.LayerstoreCallback("store", run="sft", mode="fast")
"""


# What programs import besides is not what is looked at here, and takes a minute.
MYPY = """\
[mypy]
ignore_missing_imports = True
[mypy-torch.*,transformers.*,accelerate.*,deepspeed.*,lightning.*,ray.*,numpy.*,pandas.*]
follow_imports = skip
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder with the examples of the documentation and two programs, outside the repository."""
    for example in (DOCS / "examples").glob("*.py"):
        shutil.copy(example, tmp_path)
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    return tmp_path


def said_by(*words: str, cwd: Path) -> tuple[int, str]:
    """Return how a checker ended and what it said, of all programs but the bad one or of the one that is named."""
    names = [words[-1]] if words[-1].endswith(".py") else [path.name for path in cwd.glob("*.py") if path.stem != "bad"]
    options = words[:-1] if words[-1].endswith(".py") else words
    done = subprocess.run(
        [sys.executable, "-m", *options, *names], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_mypy_finds_everything_and_only_what_is_there(programs: Path) -> None:
    """It knows the exported names, and refuses one that is not there, or a word that is none of few."""
    code, text = said_by("mypy", cwd=programs)
    assert code == 0, text

    code, text = said_by("mypy", "bad.py", cwd=programs)

    assert code == 1
    assert 'Module "layerstore" has no attribute "Nothing"' in text
    assert 'Argument "dtype" to "export"' in text
    assert 'Argument "mode" to "LayerstoreCallback"' in text


@pytest.mark.exhaustive
def test_pyright_finds_everything_and_only_what_is_there(programs: Path) -> None:
    """As editors do; of ray, which nobody needs here, an import may be missing."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    try:
        code, _ = said_by("pyright", "--version", "good.py", cwd=programs)
    except subprocess.TimeoutExpired:
        code = 1
    if code:
        pytest.skip("pyright needs node, which is not to be had here")

    (programs / "pyrightconfig.json").write_text('{"reportMissingImports": "warning"}')
    # All at once: most of its time goes into what programs import besides.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--pythonpath",
            sys.executable,
            *(path.name for path in programs.glob("*.py")),
        ],
        cwd=programs,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    found = [line for line in done.stdout.splitlines() if " - error" in line]
    assert found
    assert all("bad.py" in line for line in found), done.stdout
    assert 'Import "layerstore' not in done.stdout
    assert '"Nothing" is unknown import symbol' in done.stdout
    assert '"dtype"' in done.stdout
    assert '"mode"' in done.stdout
