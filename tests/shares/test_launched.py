"""Commands that launchers start many times: one process runs it, the others work for it, and any of them may die."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from tests.generated import generate
from tests.shares import launch
from tests.shares.launch import Job, Variables
from tests.unit.checkpoints import Checkpoints, digests

TELLS = "from layerstore.cli.shares import launched; print(launched())"

STARTS = """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout)
"""


def told(folder: Path, parent: str, environment: dict[str, str]) -> str:
    """Return what a process says of its launcher that a program called *parent* has started."""
    program = folder / parent
    program.write_text(STARTS)
    command = [sys.executable, str(program), TELLS]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout.strip()


FULL = [pytest.param(each, marks=pytest.mark.full) for each in (launch.slurm, launch.open_mpi, launch.mpich)]


@pytest.mark.parametrize("variables", [launch.torchrun, *FULL])
def test_a_process_is_of_the_job_that_its_launcher_started(tmp_path: Path, variables: Variables) -> None:
    """Not so what a training, a shell or a wrapper starts, which has the same variables; unless it says so."""
    assert told(tmp_path, "torchrun", variables(2, 3, 1)) == "(2, 3)"
    assert told(tmp_path, "torchrun", variables(0, 1, 1)) == "None"
    assert told(tmp_path, "train.py", variables(2, 3, 1)) == "None"
    assert told(tmp_path, "train.py", variables(2, 3, 1) | {"LAYERSTORE_SHARES": "1"}) == "(2, 3)"
    assert told(tmp_path, "torchrun", variables(2, 3, 1) | {"LAYERSTORE_SHARES": "0"}) == "None"


@pytest.mark.full
def test_torchrun_in_a_step_of_slurm_counts(tmp_path: Path) -> None:
    """The agent is one of Slurm's tasks; its children are torchrun's. What makes no sense does not count."""
    slurm = launch.slurm(0, 2, 1)
    assert told(tmp_path, "torchrun", slurm | launch.torchrun(1, 4, 1)) == "(1, 4)"
    assert told(tmp_path, "torchrun", slurm | {"RANK": "0", "WORLD_SIZE": "1"}) == "(0, 2)"
    assert told(tmp_path, "torchrun", {"RANK": "", "WORLD_SIZE": ""}) == "None"


# -- real processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints of four ranks with gathered weights."""
    return Checkpoints(tmp_path / "checkpoints", world_size=4, layout="hf")


@pytest.mark.full
def test_torchrun_runs_one_command(store: Store, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The real launcher: what is made is what one process makes, and only the first process speaks."""
    other = layerstore.init(tmp_path / "other")
    other.ingest(checkpoints(10), run="r")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "3"]
    words = ["-m", "layerstore.cli", "--local_rank=0", "ingest", str(checkpoints(10)), "--run", "r"]
    command = [*torchrun, "--", sys.executable, *words, "--store", str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("saved r@10") == 1
    assert digests(store.path / "objects") == digests(other.path / "objects")
    assert [entry.commit for entry in store.log()] == [entry.commit for entry in other.log()]


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(launch.slurm, marks=pytest.mark.full),
        pytest.param(launch.open_mpi, marks=pytest.mark.full),
        pytest.param(launch.mpich, marks=pytest.mark.exhaustive),
    ],
)
def test_other_launchers_run_one_command(
    store: Store, checkpoints: Checkpoints, tmp_path: Path, variables: Variables
) -> None:
    """Where nothing says where the first process is, it is found."""
    checkpoints.into(store, 10)
    store.compose("r@10").write(tmp_path / "alone")
    job = Job("compose", "--store", store.path, "r@10", "-o", tmp_path / "out", count=2, variables=variables)
    first, second = job.wait()
    assert (first.code, second) == (0, launch.Ended(0, "", "")), first
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")


@pytest.mark.full
def test_errors_are_told_once(store: Store) -> None:
    """By the first process, with its exit code; the others end in silence."""
    first, *others = Job("compose", "--store", store.path, "r@10", "-o", "out", count=3).wait()
    assert (first.code, first.err.count("error:")) == (13, 1)
    assert others == [launch.Ended(0, "", "")] * 2


@pytest.mark.parametrize(
    ("number", "how"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(0, signal.SIGTERM, marks=pytest.mark.full),
        *(
            pytest.param(number, how, marks=pytest.mark.exhaustive)
            for number, how in ((0, signal.SIGKILL), (1, signal.SIGTERM), (0, signal.SIGINT))
        ),
    ],
)
def test_a_process_that_ends_leaves_nothing_half(
    store: Store, tmp_path: Path, number: int, how: signal.Signals
) -> None:
    """No commit, no folder; the others notice, and the same command then succeeds."""
    source = generate(tmp_path / "big", step=10, layers=6, hidden=768, vocab=2048, world_size=4)
    job = Job("ingest", "--store", store.path, source, "--run", "r", count=3)
    job.end_one(number, how, once=lambda: len(list((store.path / "tmp").iterdir())) > 2)
    ended = job.wait()
    assert ended[0].code != 0
    assert store.runs() == []
    if number == 1:
        assert "another process of this job has ended" in ended[0].err
    if how is not signal.SIGKILL:
        assert not list((store.path / "tmp").iterdir())
    store.ingest(source, run="r")
    assert store.verify(read_data=True).ok


@pytest.mark.full
@pytest.mark.parametrize("verb", ["clone", "pull"])
def test_a_fetch_ends_where_a_process_of_it_has_ended(store: Store, tmp_path: Path, verb: str) -> None:
    """It says so, with no thread left that it would wait for; repeated, it fetches the rest."""
    source = generate(tmp_path / "big", step=10, layers=6, hidden=768, vocab=2048, world_size=4)
    url = f"file://{tmp_path}/bucket"
    if verb == "pull":
        store.push(url)
        layerstore.clone(url, tmp_path / "here").close()
    store.ingest(source, run="r")
    store.push(url)
    here = tmp_path / "here"
    words = ("clone", url, here) if verb == "clone" else ("pull", "--store", here)
    job = Job(*words, count=2)
    job.end_one(1, signal.SIGKILL, once=lambda: len(list(here.glob("tmp/*"))) > 2)
    first, _ = job.wait()
    assert (first.code, "another process of this job has ended" in first.err) == (1, True), first
    with layerstore.clone(url, here) as whole:
        assert whole.verify(read_data=True).ok
        assert [entry.step for entry in whole.log()] == [10]


@pytest.mark.full
def test_the_first_process_ends_between_question_and_answers(store: Store, checkpoints: Checkpoints) -> None:
    """It waits for the answers before it tells the others to end."""
    words = ("ingest", "--store", store.path, checkpoints(10), "--run", "r")
    first, *others = Job(*words, count=3, module="tests.shares.terminated_while_asking").wait()
    assert first.code == 128 + signal.SIGTERM, first
    assert others == [launch.Ended(0, "", "")] * 2
    assert (store.runs(), list((store.path / "tmp").iterdir())) == ([], [])


@pytest.mark.full
def test_a_process_that_sees_another_store_refuses(store: Store, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A copy under the same path, as on another host's own disk, is not what the first process means."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mounting wants root")
    checkpoints.into(store, 10)
    shutil.copytree(store.path, tmp_path / "copy")
    job = Job("verify", "--store", store.path, count=2, elsewhere=(tmp_path / "copy", store.path))
    first, _ = job.wait()
    assert (first.code, "is not the store that the first process has" in first.err) == (2, True), first
