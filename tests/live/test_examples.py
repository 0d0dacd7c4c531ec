"""The examples of the documentation train, and started again they go on as if they had never ended."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

import layerstore
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, stop, train
from tests.live.cases import BUCKET, EXAMPLES, EXAMPLES_FOLDER
from tests.ranks.launch import cpu_environment, end_of, free_port
from tests.remote.servers import credentials, seaweedfs

pytestmark = pytest.mark.timeout(3 * LAUNCH_SECONDS_MAX)

RUN_OF = {
    "with_deepspeed": "plain",
    "with_slurm": "slurm",
    "with_bucket": "bucket",
    "with_trainer": "trainer",
    "with_accelerate": "accelerate",
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return what the examples left after four steps and, started again, four more; the first launch makes the stores.

    Meanwhile the store of with_bucket is lost with its machine, and another one reads from the bucket.
    """
    out = tmp_path_factory.mktemp("left")
    here = out / "bucket-store"
    with seaweedfs(tmp_path_factory.mktemp("server")) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in credentials(endpoint).items():
            patch.setenv(name, value)
        launch(out, "4", endpoint)
        here.rename(out / "lost")
        launch(out, "8", endpoint)
        layerstore.clone(BUCKET, out / "elsewhere").close()
    return out


def launch(out: Path, steps: str, endpoint: str) -> None:
    """Run all examples for *steps* steps; their bucket is at *endpoint*."""
    arguments = ["--out", str(out), "--steps", steps, "--endpoint", endpoint]
    train("tests.live.run_examples", arguments, log=out / f"{steps}.log")


def printed(out: Path, name: str) -> list[str]:
    """Return the lines that the example *name* printed about its steps, each once: some print older ones again."""
    lines = (out / f"{name}.txt").read_text().splitlines()
    return list(dict.fromkeys(line for line in lines if line.startswith("step ")))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_goes_on_when_it_is_started_again(left: Path, name: str) -> None:
    """Eight steps, each trained once; every second one is in the store, and the run has one attempt."""
    with layerstore.open(left / ("elsewhere" if name == "with_bucket" else "store")) as store:
        entries = store.log(RUN_OF[name])

    assert [line.split(":")[0] for line in printed(left, name)] == [f"step {step}" for step in range(1, 9)]
    assert [entry.step for entry in entries] == [8, 6, 4, 2]
    assert {entry.attempt for entry in entries} == {1}
    anew = [line for line in (left / "8.log").read_text().splitlines() if "from scratch" in line]
    assert ["run 'accelerate'" in line for line in anew] == [True]  # which is loaded once the saver is attached


def test_a_plain_job_shows_what_becomes_of_its_state(left: Path) -> None:
    """At the first launch that the store was made, and each time in one line where saves go; nobody set up logging."""
    store = left / "store"
    first, second = ((left / f"{steps}.log").read_text() for steps in (4, 8))

    assert first.count(f"layerstore: made a new store: {store}\n") == 1
    for run in ("plain", "slurm", "trainer", "accelerate"):
        assert first.count(f"layerstore: saving to {store}: run {run!r} begins\n") == 1
        assert second.count(f"layerstore: loaded {run}@4 from {store}\n") == 1
        assert second.count(f"layerstore: saving to {store}, newest {run}@4\n") == 1


def test_commits_have_what_training_measured(left: Path) -> None:
    """As the examples printed it: of save(metrics=…), and of the Trainer's log, which is written after the save."""
    with layerstore.open(left / "store") as store:
        plain, trainer = (store.log(run, metrics=True) for run in ("plain", "trainer"))

    printed_losses = dict(
        line.removeprefix("step ").split(", ")[0].split(": ") for line in printed(left, "with_deepspeed")
    )
    assert {str(entry.step): entry.metrics for entry in plain} == {
        step: {"loss": float(loss)} for step, loss in printed_losses.items() if int(step) % 2 == 0
    }
    assert {entry.step for entry in trainer if "loss" in (entry.metrics or {})} >= {2, 4, 6}


def test_a_bucket_has_all_and_each_machine_its_newest(left: Path) -> None:
    """What was pushed is whole; what ``keep`` does not name is removed once it was."""
    kept = {"elsewhere": [8, 6, 4, 2], "bucket-store": [8, 6], "lost": [4, 2]}
    for name, steps in kept.items():
        with layerstore.open(left / name) as store:
            assert [entry.step for entry in store.log("bucket")] == steps, name
            assert name != "elsewhere" or store.verify(read_data=True).ok


def test_examples_mark_what_is_layerstores() -> None:
    """Each is a training script with a handful of lines marked, and no other line of it knows layerstore."""
    # torchtitan's is its manager of checkpoints alone, and all of it is about layerstore.
    names = {path.stem for path in EXAMPLES_FOLDER.glob("*.py")} - {"with_torchtitan"}
    assert names == {*EXAMPLES, "with_ray"}
    for name in names:
        lines = (EXAMPLES_FOLDER / f"{name}.py").read_text().rpartition('"""\n\nimport')[2].splitlines()
        marked = [line for line in lines if "# layerstore" in line]
        code = [line for line in lines if "layerstore" in line.split("#")[0]]
        assert 3 <= len(marked) <= 5, name
        assert set(code) <= set(marked), name


@pytest.mark.exhaustive
def test_a_job_that_is_ended_goes_on(tmp_path: Path) -> None:
    """SIGTERM to torchrun: all ranks save the same step, the job fails, and the same line again goes on behind it."""
    layerstore.init(tmp_path / "store").close()
    with (tmp_path / "first.log").open("wb") as log, job(tmp_path, steps=100_000, log=log) as process:
        wait_for("step 3:", tmp_path / "first.log")
        process.terminate()
        assert process.wait(LAUNCH_SECONDS_MAX) != 0
    told = set(re.findall(r"stopped after step (\d+): the next launch", (tmp_path / "first.log").read_text()))
    with layerstore.open(tmp_path / "store") as store:
        newest = store.log("slurm")[0].step

    assert {str(newest)} == told
    with (tmp_path / "second.log").open("wb") as log, job(tmp_path, steps=newest + 2, log=log) as process:
        assert process.wait(LAUNCH_SECONDS_MAX) == 0, end_of(tmp_path / "second.log")
    steps = re.findall(r"^step (\d+):", (tmp_path / "second.log").read_text(), re.MULTILINE)
    assert steps == [str(newest + 1), str(newest + 2)]


@contextlib.contextmanager
def job(out: Path, *, steps: int, log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """Give the job of the guide to Slurm, launched as a batch script would; no process of it is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_port()), str(EXAMPLES_FOLDER / "with_slurm.py")]
    command += ["--store", str(out / "store"), "--steps", str(steps)]
    process = subprocess.Popen(command, env=cpu_environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        stop(process)


def wait_for(words: str, log: Path) -> None:
    """Return once *log* says *words*."""
    deadline = time.monotonic() + LAUNCH_SECONDS_MAX
    while words not in log.read_text():
        assert time.monotonic() < deadline, end_of(log)
        time.sleep(0.2)
