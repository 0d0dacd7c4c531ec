"""``layerstore ingest --watch``: a job that nobody may touch is followed while it runs."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from tests.generated import generate

SMALL: dict[str, Any] = {"layers": 1, "hidden": 16, "vocab": 16}

PATIENCE_SECONDS = 60


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the output folder of a job that has saved step 10, a while ago."""
    at_rest(generate_step(tmp_path / "job", 10))
    layerstore.init(tmp_path / "store").close()
    return tmp_path / "job"


@pytest.fixture
def watcher(job: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start the command on the job's folder."""
    command = [
        sys.executable,
        "-m",
        "layerstore.cli",
        "ingest",
        "--watch",
        str(job),
        "--store",
        str(tmp_path / "store"),
    ]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def generate_step(job: Path, step: int) -> Path:
    """Let the job save *step*; return the folder."""
    folder = job / f"checkpoint-{step}"
    generate(folder, layout="hf", step=step, **SMALL)
    return folder


def at_rest(folder: Path) -> None:
    """Let all of *folder* look as if it had been written a minute ago."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 60,) * 2)


def steps(store: Path) -> list[int]:
    """Return the steps that *store* has."""
    with layerstore.open(store) as opened:
        return sorted(entry.step for entry in opened.log())


def wait_for(done: Callable[[], bool]) -> None:
    """Wait until *done* is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


@pytest.mark.full
def test_what_is_there_and_what_comes_is_saved_once_it_rests(
    job: Path, tmp_path: Path, watcher: "subprocess.Popen[str]"
) -> None:
    """What is still being written is left alone; when it is ended, all that was saved is told."""
    store = tmp_path / "store"
    wait_for(lambda: steps(store) == [10])
    fresh = generate_step(job, 20)
    torn = generate_step(job, 30)
    next(torn.rglob("*rank_1*optim_states.pt")).unlink()
    at_rest(torn)
    time.sleep(3)
    assert steps(store) == [10], "step 20 has only just been written, and step 30 lacks a file"

    at_rest(fresh)
    wait_for(lambda: steps(store) == [10, 20])
    shutil.copytree(job / "checkpoint-20", tmp_path / "unrelated")
    watcher.terminate()
    out, err = watcher.communicate(timeout=PATIENCE_SECONDS)

    fields = json.loads(out)
    assert [commit["step"] for commit in fields["commits"]] == [10, 20]
    assert [Path(problem["path"]).parent.name for problem in fields["problems"]] == ["checkpoint-30"]
    assert "checkpoint-30" in err


@pytest.mark.full
def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """The job may be started later than the watcher."""
    layerstore.init(tmp_path / "store").close()
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "layerstore.cli", "ingest", "--watch", str(tmp_path / "out")]
    process = subprocess.Popen([*command, "--store", str(tmp_path / "store")], stdout=subprocess.DEVNULL)
    try:
        time.sleep(2)
        assert process.poll() is None
        at_rest(generate_step(tmp_path / "out", 5))
        wait_for(lambda: steps(tmp_path / "store") == [5])
    finally:
        process.kill()
        process.wait()
