"""The batch script of the guide, and commands in shares, on two nodes of Slurm: daemons, networks and jobs are real."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

import layerstore
from layerstore import Store
from tests.docs.pages import DOCS, blocks
from tests.live.cases import EXAMPLES_FOLDER
from tests.slurm.cluster import Cluster, cluster, until
from tests.unit.checkpoints import Checkpoints, digests

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

LAYERSTORE = (sys.executable, "-m", "layerstore.cli")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield two nodes."""
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


# -- a training ----------------------------------------------------------------------------------------------------


def test_the_batch_script_trains_to_the_end(nodes: Cluster, tmp_path: Path) -> None:
    """Its time runs out, all ranks save the same step, and the job is queued again and goes on behind it."""
    layerstore.init(tmp_path / "store").close()
    steps, output = tmp_path / "steps", tmp_path / "output"
    steps.write_text("100000")
    (tmp_path / "job.sh").write_text(fitted(batch_script(), tmp_path))
    job = nodes.run("sbatch", "--parsable", f"--chdir={EXAMPLES_FOLDER}", f"--output={output}", tmp_path / "job.sh")

    until(lambda: output.exists() and "the next launch goes on" in output.read_text(), told=lambda: said(output))
    (last,) = map(int, set(re.findall(r"stopped after step (\d+): the next launch", output.read_text())))
    steps.write_text(str(last + 2))
    until(lambda: "JobState=COMPLETED" in nodes.run("scontrol", "show", "job", job.strip()), told=lambda: said(output))

    printed = [int(step) for step in re.findall(r"^step (\d+):", output.read_text(), re.MULTILINE)]
    assert printed == [*range(1, last + 3)]
    assert "Restarts=1" in nodes.run("scontrol", "show", "job", job.strip())
    with layerstore.open(tmp_path / "store") as store:
        entries = store.log("slurm")
    assert {entry.step for entry in entries} == {last, *range(2, last + 3, 2)}
    assert {entry.attempt for entry in entries} == {1}


def batch_script() -> str:
    """Return the script of the guide."""
    return blocks(DOCS / "guides" / "slurm.md", "sh")[0].text


def fitted(script: str, folder: Path) -> str:
    """Return *script* for these nodes: without GPUs, and with minutes where it has hours."""
    for there, here in {
        "#SBATCH --gpus-per-node=8\n": "",
        "--nproc-per-node 8": "--nproc-per-node 1",
        "--time=24:00:00": "--time=3",
        "TERM@120": "TERM@90",
        "/shared/me/store": f"{folder}/store",
        "/local/$USER/layerstore": f"{folder}/index-of-$SLURMD_NODENAME",
        "--steps 100000": f"--steps $(cat {folder}/steps)",
    }.items():
        assert there in script
        script = script.replace(there, here)
    return script


def said(output: Path) -> str:
    """Return the end of what a job has said."""
    return output.read_text()[-4000:] if output.exists() else "nothing"


# -- commands in shares --------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints of four ranks with gathered weights."""
    return Checkpoints(tmp_path / "checkpoints", world_size=4, layout="hf")


LAUNCHERS = {
    "srun": "srun --nodes=2 --ntasks=2",
    "srun with PMI": "srun --nodes=2 --ntasks=4 --mpi=pmi2",
    "MPICH": "salloc --quiet --nodes=2 mpirun.mpich -np 2 -ppn 1",
    "MPICH on one node": "mpirun.mpich -np 2",
    "Open MPI": ("salloc --quiet --nodes=2 mpirun.openmpi -np 2 --map-by node -x MASTER_ADDR=n1 -x MASTER_PORT=29400"),
    "Open MPI on one node": "mpirun.openmpi -np 2 --oversubscribe",
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_commands_in_shares(nodes: Cluster, store: Store, checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """An ingest, a compose and a verify do with each launcher what they do alone, and one process speaks."""
    launcher = LAUNCHERS[name].split()
    for word in launcher:
        if word.startswith("mpirun") and which(word) is None:
            pytest.skip(f"{word} is not installed")
    other = layerstore.init(tmp_path / "other")
    checkpoints.into(other, 10)
    other.compose("r@10").write(tmp_path / "alone")

    def told(*words: str | Path) -> str:
        return nodes.run(*launcher, *LAYERSTORE, *words, "--store", store.path, **AS_ROOT)

    ingested = told("ingest", checkpoints(10), "--run", "r")
    composed = told("compose", "r@10", "-o", tmp_path / "out")
    verified = told("verify", "--read-data", "--json")

    assert ingested.count("saved r@10") == composed.count("r@10") == verified.count('"ok": true') == 1
    assert digests(store.path / "objects") == digests(other.path / "objects")
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")
