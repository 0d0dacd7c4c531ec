"""Tiny checkpoints shaped like real ones, a store that holds two of them, and the command line in this process."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.cli.app import main
from tests.generated import generate


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def fields(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error on the last line of stderr."""
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return what runs the command line in an empty folder, without any setting from outside."""
    monkeypatch.chdir(tmp_path)
    for name in ("LAYERSTORE_STORE", "LAYERSTORE_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run_words(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return run_words


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a save folder with the tags global_step2 and global_step4, that nobody may write to."""
    folder = tmp_path_factory.mktemp("source") / "sft"
    for step in (2, 4):
        generate(folder, layers=2, hidden=16, vocab=32, step=step)
    return folder


@pytest.fixture(scope="session")
def pristine(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with sft@2, sft@4 and the pin best, to be copied."""
    path = tmp_path_factory.mktemp("pristine") / "store"
    with layerstore.init(path) as store:
        store.ingest(checkpoints / "global_step2", pin="best")
        store.ingest(checkpoints / "global_step4")
    return path


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    """Return a store with sft@2, sft@4 and the pin best."""
    return Path(shutil.copytree(pristine, tmp_path / "store"))
