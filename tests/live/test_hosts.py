"""
Two hosts save into one folder that both have mounted: real ZeRO-3 over gloo between two network namespaces.

Each host has its own index, and may see late what the other one has written. One of them is killed at every phase of a
save; the job then begins again on the hosts the other way round.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

import layerstore
from layerstore.store import Store
from tests.environment import REPOSITORY
from tests.forked import Nursery
from tests.hosts import KINDS, Host, settle, two_hosts
from tests.live.launched import due, losses, one
from tests.live.tiny import RUN, SAVED, STEPS
from tests.ranks.launch import cpu_environment, end_of

PROGRAMS = "tests.live.on_hosts"
LAYERS = 6

# What each rank does in a save. Both write their shares; the first one then makes the commit of them.
SHARE = (
    "create tmp/*",
    "write tmp/*",
    "fsync tmp/*",
    "touch objects/*/*",
    "touch gc/*/*",
    "mkdir objects/*",
    "fsync objects",
    "link objects/*/*",
    "fsync objects/*",
    "link parts/*/*",
    "unlink tmp/*",
    "fsync parts/*",
    "rename parts/*/*",
)
COMMIT = (
    "mkdir commits/*",
    "fsync commits",
    "link commits/*/*",
    "fsync commits/*",
    "unlink parts/*/*",
    "mkdir stats",
    "mkdir stats/*",
    "append stats/*/*",
)
VISIBLE = COMMIT.index("fsync commits/*")
PHASES = {0: (*SHARE, *COMMIT), 1: SHARE}
CASES = [(kind, host, phase) for kind in KINDS for host in (0, 1) for phase in PHASES[host]]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Host, Host]]]:
    """Return what makes two hosts with a shared folder of some kind, once."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(two_hosts(tmp_path_factory.mktemp(kind), kind)))


@pytest.fixture(scope="module")
def unkilled(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, str]]:
    """Return the losses of jobs that ended in peace after a step, and went on from it, on one host."""
    folder = tmp_path_factory.mktemp("unkilled")
    layerstore.init(folder / "store").close()
    options = {"stores": [str(folder / "store")] * 2}
    with ranks.launch(f"{PROGRAMS}:unkilled", options, folder=folder, name="unkilled") as launch:
        launch.done()
    return {step: losses(launch, f"until{step}") for step in (SAVED, SAVED + 1)}


def made(hosts: tuple[Host, Host], name: str) -> list[str]:
    """Make a store in the shared folder; return its path on each host."""
    paths = [f"{host.shared}/{name}" for host in hosts]
    layerstore.init(paths[0]).close()
    return paths


def check(host: Host, store: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps that *host* sees, after checking every byte; its index is on its own disk, and right."""
    settle(host, setenv=monkeypatch.setenv)
    with Store(store) as opened:
        assert opened.verify(read_data=True).damaged == ()
        index = [path for path in Path(host.own, "index").iterdir() if path.name.startswith(opened.id)]
        assert [(path / "data.mdb").is_file() for path in index] == [True]
        assert not Path(store, "manifest").exists()
        return sorted(entry.step for entry in opened.log(RUN))


@pytest.mark.parametrize("kind", ["juicefs", pytest.param("bindfs", marks=pytest.mark.exhaustive)])
def test_two_hosts_save_into_one_folder(
    kind: str,
    hosts: Callable[[str], tuple[Host, Host]],
    ranks: Nursery,
    tmp_path: Path,
    undisturbed: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training goes over their network, each save is whole for both, and `PHASES` names all that a save does."""
    both = hosts(kind)
    stores = made(both, "whole")
    before = [host.received_bytes for host in both]
    with ranks.launch(f"{PROGRAMS}:phases", {"stores": stores}, folder=tmp_path, name="whole", hosts=both) as launch:
        launch.done()

    assert losses(launch) == undisturbed
    assert [len(layers) for layers in due(launch).values()] == [LAYERS, *[LAYERS // 2] * (STEPS - 1)]
    assert all(host.received_bytes - start > 100_000 for host, start in zip(both, before, strict=True))
    found = {event["rank"]: set(event["phases"]) for event in launch.events("phases")}
    assert found == {rank: set(phases) for rank, phases in PHASES.items()}
    for host, store in zip(both, stores, strict=True):
        assert check(host, store, monkeypatch) == list(range(1, STEPS + 1))


@pytest.mark.fault(104, 105, 106)
@pytest.mark.parametrize(("kind", "host", "phase"), CASES, ids=lambda value: str(value).replace("/", ":"))
@pytest.mark.sample(3)
def test_a_host_that_is_killed_loses_nothing(
    kind: str,
    host: int,
    phase: str,
    hosts: Callable[[str], tuple[Host, Host]],
    ranks: Nursery,
    tmp_path: Path,
    unkilled: dict[int, dict[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every save that was reported stays, and the job goes on, elsewhere, as if nothing had happened, bit for bit."""
    both = hosts(kind)
    stores = made(both, tmp_path.name)
    options = {"stores": stores, "host": host, "phase": phase}
    with ranks.launch(f"{PROGRAMS}:killed", options, folder=tmp_path, name="killed", hosts=both) as killed:
        killed.until("held")
        killed.kill(host)
        assert killed.statuses()[host] == -9, killed.tail()

    other = (both[1], both[0])
    options["stores"] = stores[::-1]
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued", hosts=other) as requeued:
        requeued.done()

    resumed = one(requeued, "resumed")
    assert resumed["step"] in (SAVED, SAVED + 1)
    if host == 0:
        assert resumed["step"] == SAVED + (phase in COMMIT[VISIBLE:])
    assert resumed["client_state"] == {"epoch": resumed["step"]}
    assert losses(requeued) == unkilled[resumed["step"]]
    assert one(requeued, "status")["errors"] == []
    for each, store in zip(both, stores, strict=True):
        assert check(each, store, monkeypatch) == list(range(1, STEPS + 1))


# -- as a cluster launches it ----------------------------------------------------------------------------------------

EXAMPLE = REPOSITORY / "docs" / "examples" / "with_slurm.py"
JOB_SECONDS_MAX = 240


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_torchrun_goes_on_after_a_host_has_died(
    kind: str, hosts: Callable[[str], tuple[Host, Host]], tmp_path: Path
) -> None:
    """The example of the guide to Slurm, one torchrun a host: launched again, it trains as if nothing had happened."""
    both = hosts(kind)
    with job(both, made(both, "undisturbed"), tmp_path / "undisturbed.log") as launched:
        assert [process.wait(JOB_SECONDS_MAX) for process in launched] == [0, 0], end_of(tmp_path / "undisturbed.log")
    expected = told(tmp_path / "undisturbed.log")
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]

    stores = made(both, "torchrun")
    with job(both, stores, tmp_path / "first.log") as launched:
        deadline = time.monotonic() + JOB_SECONDS_MAX
        while 3 not in told(tmp_path / "first.log"):
            assert time.monotonic() < deadline, end_of(tmp_path / "first.log")
            time.sleep(0.05)
        both[1].kill()
        assert launched[0].wait(JOB_SECONDS_MAX) != 0  # it notices by itself
    with job((both[1], both[0]), stores[::-1], tmp_path / "second.log") as launched:
        assert [process.wait(JOB_SECONDS_MAX) for process in launched] == [0, 0], end_of(tmp_path / "second.log")

    again = told(tmp_path / "second.log")
    assert min(again) in (1, 3, 5)
    assert expected == {step: again.get(step, loss) for step, loss in expected.items()}
    with Store(stores[0]) as store:
        assert store.verify(read_data=True).ok
        assert [entry.step for entry in store.log("slurm")][:2] == [6, 4]


def told(log: Path) -> dict[int, str]:
    """Return the losses that the first rank has written into *log*, by step."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): (.+)$", log.read_text(), re.MULTILINE)}


@contextmanager
def job(hosts: tuple[Host, Host], stores: list[str], log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the example on *hosts*, the first one leading; no process of it is left."""
    with log.open("wb") as output, ExitStack() as stack:
        launched = []
        for number, (host, store) in enumerate(zip(hosts, stores, strict=True)):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            words += ["--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", "29500"]
            environment = cpu_environment() | {"GLOO_SOCKET_IFNAME": host.interface}
            settle(host, setenv=environment.__setitem__)
            process = subprocess.Popen(
                host.command(*words, str(EXAMPLE), "--store", store, "--steps", "6"),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(host.kill)
            launched.append(process)
        yield launched
