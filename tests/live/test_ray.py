"""The example for Ray Train: a worker is killed, and those that come in its place go on where it was."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import layerstore
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, stop
from tests.environment import REPOSITORY
from tests.live.cases import EXAMPLES_FOLDER
from tests.live.test_examples import wait_for
from tests.ranks.launch import cpu_environment, end_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(3 * LAUNCH_SECONDS_MAX),
    pytest.mark.skipif(find_spec("ray") is None, reason="wants Ray: pip install 'ray[train]'"),
]

STEPS = 12


def test_workers_that_fail_are_replaced_and_go_on(tmp_path: Path) -> None:
    """One of the two is killed: the new ones begin behind the newest save, in the same attempt."""
    layerstore.init(tmp_path / "store").close()
    log = tmp_path / "log"
    command = [sys.executable, str(EXAMPLES_FOLDER / "with_ray.py"), "--store", "store", "--out", "out"]
    with tempfile.TemporaryDirectory(prefix="ray") as sockets, log.open("wb") as output:  # a short name: for sockets
        environment = cpu_environment() | {
            "PYTHONPATH": str(REPOSITORY),
            "RAY_TMPDIR": sockets,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        }
        process = subprocess.Popen(
            [*command, "--steps", str(STEPS)], cwd=tmp_path, env=environment, stdout=output, stderr=output
        )
        try:
            wait_for("step 4:", log)
            os.kill(int(workers(log, rank=1)[0]), signal.SIGKILL)
            assert process.wait(LAUNCH_SECONDS_MAX) == 0, end_of(log)
        finally:
            stop(process)

    first, second = (trained(log, pid) for pid in workers(log, rank=0))
    assert first == list(range(1, first[-1] + 1))
    assert second == list(range(second[0], STEPS + 1))
    assert second[0] in range(3, first[-1] + 2, 2)  # every second step is saved
    with layerstore.open(tmp_path / "store") as store:
        entries = store.log("ray")
    assert [entry.step for entry in entries] == list(range(STEPS, 0, -2))
    assert {entry.attempt for entry in entries} == {1}


def workers(log: Path, *, rank: int) -> list[str]:
    """Return the processes that have been *rank*, one after another; Ray may tell of them twice."""
    return list(dict.fromkeys(re.findall(rf"pid=(\d+)\) world_rank={rank}", log.read_text())))


def trained(log: Path, pid: str) -> list[int]:
    """Return the steps that the process *pid* has told of."""
    return list(dict.fromkeys(map(int, re.findall(rf"pid={pid}\)\S* step (\d+):", log.read_text()))))
