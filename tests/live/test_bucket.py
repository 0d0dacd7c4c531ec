"""Ranks that share no disk save straight to a bucket: real ZeRO-3, each rank with a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import layerstore
from tests.forked import Nursery
from tests.hosts import Host, hosts_apart
from tests.live.launched import losses, one
from tests.live.module.models import FORMS
from tests.live.tiny import RUN, SAVED, STEPS
from tests.remote.faulty import TROUBLES, faulty
from tests.remote.servers import credentials, seaweedfs

PROGRAMS = "tests.live.in_bucket"

# Each change that a rank makes in the bucket for one save, in order; the first rank then makes the commit.
SHARE = ("before objects", "after objects", "before parts", "after parts")
COMMIT = ("before commits", "after commits", "removing parts")
CASES = [(host, request) for host, requests in ((0, (*SHARE, *COMMIT)), (1, SHARE)) for request in requests]


def in_a_folder(folder: Path, **saver: object) -> dict[str, Any]:
    """Return the options of ranks that save into a bucket that is a folder."""
    return {
        "url": f"file://{folder}/bucket",
        "environment": {},
        "caches": str(folder / "caches"),
        "saver": saver,
        "until": STEPS,
    }


def test_a_job_goes_on_from_what_another_one_uploaded(
    ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Each rank uploads its own slices; another job reads them, and every loss is the undisturbed one's."""
    options = in_a_folder(tmp_path) | {"until": 4}
    with ranks.launch(f"{PROGRAMS}:begun", options, folder=tmp_path, name="begun") as first:
        first.done()
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued") as second:
        second.done()

    assert one(second, "resumed")["step"] == 4
    assert losses(first) | losses(second) == undisturbed
    with layerstore.open(options["url"]) as store:
        assert [entry.step for entry in store.log(RUN)] == [*range(STEPS, 0, -1)]
        assert store.verify(read_data=True).damaged == ()
    assert not list(Path(tmp_path, "bucket", "parts").rglob("*.*"))


def test_the_same_commits_as_on_a_disk(ranks: Nursery, tmp_path: Path) -> None:
    """Under parity with differences, every commit in the bucket has the id of the one that a disk gets."""
    saver = {"policy": "parity", "precision": "delta8", "exact_every": 3}
    options = in_a_folder(tmp_path, **saver)
    on_disk = options | {"url": str(tmp_path / "store")}
    ids = []
    for each, name in ((options, "there"), (on_disk, "here")):
        with ranks.launch(f"{PROGRAMS}:begun", each, folder=tmp_path, name=name) as launch:
            launch.done()
        with layerstore.open(each["url"]) as store:
            ids.append([entry.commit for entry in store.log(RUN)])

    assert len(ids[0]) == STEPS - 1
    assert ids[0] == ids[1]


def test_what_need_not_be_kept_goes(ranks: Nursery, tmp_path: Path) -> None:
    """With keep=, records beyond it go to the bucket's trash; objects stay for its grace."""
    options = in_a_folder(tmp_path)
    with ranks.launch(f"{PROGRAMS}:kept", options, folder=tmp_path, name="kept") as launch:
        launch.done()

    assert one(launch, "status")["collection_error"] == ""
    with layerstore.open(options["url"]) as store:
        assert [entry.step for entry in store.log(RUN)] == [6, 5]
        assert store.verify(read_data=True).damaged == ()
    assert len(list(Path(tmp_path, "bucket", "trash").rglob("*.*"))) == 4


def test_training_goes_on_whatever_the_server_does(
    ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str], s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is late, or given up and says why; the next one has what it lacked."""
    environment = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")}
    with faulty(os.environ["AWS_ENDPOINT_URL"]) as endpoint:
        options = in_a_folder(tmp_path) | {"url": s3, "environment": environment | {"AWS_ENDPOINT_URL": endpoint}}
        with ranks.launch(f"{PROGRAMS}:troubled", options, folder=tmp_path, name="troubled") as launch:
            launch.done()

    assert losses(launch) == undisturbed
    lost = [number for number, trouble in enumerate(TROUBLES, 1) if trouble in {"fails", "refuses"}]
    with layerstore.open(s3) as store:
        assert sorted(entry.step for entry in store.log(RUN)) == sorted({*range(1, STEPS + 1)} - {*lost})
        assert store.verify(read_data=True).ok
    status = one(launch, "status")
    assert (status["saved"], status["failed"]) == (STEPS - len(lost), len(lost))
    assert "the server refuses this key" in status["errors"][-1]
    lines = launch.log.read_text().splitlines()
    retried = [line for line in lines if "trying again in" in line]
    counted = [line for line in lines if "requests retried, total of all ranks: " in line]
    assert 1 <= len(retried) <= len(TROUBLES)
    assert 1 <= len(counted) <= len(TROUBLES)
    assert all(line.startswith(f"layerstore: {s3}: ") for line in (*retried, *counted))


def test_modules_and_dcp_save_there(ranks: Nursery, tmp_path: Path) -> None:
    """What FSDP2, DDP and torch.distributed.checkpoint save comes back bit for bit, on other hosts."""
    runs = {form: [f"{form}2"] for form in FORMS[2]}
    options = in_a_folder(tmp_path) | {"out": str(tmp_path / "plain"), "runs": runs}
    with ranks.launch(f"{PROGRAMS}:modules", options, folder=tmp_path, name="first") as launch:
        launch.done()
    options["caches"] = str(tmp_path / "other-caches")
    with ranks.launch(f"{PROGRAMS}:modules_again", options, folder=tmp_path, name="again") as launch:
        launch.done()

    found = [event for kind in ("read", "resumed") for event in launch.events(kind)]
    assert len(found) == 2 * 4 * len(FORMS[2])
    assert [event["other"] for event in found] == [[]] * len(found)


# -- hosts apart -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], dict[str, str]]]:
    """Return six hosts that share no folder, and the keys and address of an S3 server that all of them reach."""
    folder = tmp_path_factory.mktemp("apart")
    with ExitStack() as stack:
        hosts, server = stack.enter_context(hosts_apart(folder, 6))
        served = folder / "served"
        served.mkdir()
        endpoint = stack.enter_context(seaweedfs(served, address=server.address, inside=server.namespace))
        yield hosts, credentials(endpoint)


def damaged_in(url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """Return what is damaged in the bucket at *url*, after reading every byte."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with layerstore.open(url) as store:
        return store.verify(read_data=True).damaged


@pytest.mark.sample(3)
@pytest.mark.parametrize("are_there", [True, False], ids=["processes", "hosts"])
@pytest.mark.parametrize(("host", "request_"), [(0, "before objects"), (1, "after objects"), (0, "before commits")])
def test_a_level_in_each_host_survives_the_processes(
    host: int,
    request_: str,
    are_there: bool,
    apart: tuple[list[Host], dict[str, str]],
    ranks: Nursery,
    tmp_path: Path,
    undisturbed: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save that no host has sent yet is sent by the next job on these hosts; with the hosts, it is lost."""
    hosts, environment = apart
    name = f"near-{host}-{request_.replace(' ', '-')}-{are_there}"
    options = {"url": f"s3://first-bucket/{name}", "environment": environment, "saver": {}, "near": name}
    killed = options | {"host": host, "request": request_}
    with ranks.launch(f"{PROGRAMS}:killed", killed, folder=tmp_path, name="killed", hosts=hosts[:2]) as first:
        first.until("held")
        first.until("durable", count=2)
        first.kill()
    left = hosts[:2] if are_there else hosts[2:4]
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued", hosts=left) as second:
        second.done()

    assert one(second, "resumed")["step"] == SAVED + are_there
    assert losses(first) | losses(second) == undisturbed
    assert damaged_in(f"s3://first-bucket/{name}", environment, monkeypatch) == ()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("host", "request_"), CASES, ids=[f"{host}-{each.replace(' ', '-')}" for host, each in CASES])
def test_a_killed_host_costs_what_was_not_reported(
    host: int,
    request_: str,
    apart: tuple[list[Host], dict[str, str]],
    ranks: Nursery,
    tmp_path: Path,
    undisturbed: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever request a host dies at, what was saved before is whole, and the job goes on from it without a trace."""
    hosts, environment = apart
    url = f"s3://first-bucket/{host}-{request_.replace(' ', '-')}"
    options = {"url": url, "environment": environment, "saver": {}, "host": host, "request": request_}
    with ranks.launch(f"{PROGRAMS}:killed", options, folder=tmp_path, name="killed", hosts=hosts[:2]) as first:
        first.until("held")
        first.kill()
    # The disks of the next two hosts are empty.
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued", hosts=hosts[2:4]) as second:
        second.done()

    # The first rank commits as soon as both parts are there, and that may be before the kill.
    visible = {True} if request_ in COMMIT[1:] else {True, False} if request_ == SHARE[-1] else {False}
    assert one(second, "resumed")["step"] - SAVED in visible
    assert losses(first) | losses(second) == undisturbed
    assert damaged_in(url, environment, monkeypatch) == ()


def test_four_hosts_go_on_as_two(
    apart: tuple[list[Host], dict[str, str]], ranks: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four dies amid a save; two others, whose disks are empty, have every bit of the last that was saved."""
    hosts, environment = apart
    url = "s3://first-bucket/four"
    options = {"url": url, "environment": environment, "saver": {}, "whole": True}
    doomed = options | {"host": 3, "request": "before parts"}
    with ranks.launch(f"{PROGRAMS}:killed", doomed, folder=tmp_path, name="killed", hosts=hosts[:4]) as first:
        first.until("held")
        first.kill()
    assert damaged_in(url, environment, monkeypatch) == ()
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert {entry.step for entry in clone.log(RUN)} == {*range(1, SAVED + 1)}
        assert clone.show(f"{RUN}@{SAVED}").world_size == 4
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued", hosts=hosts[4:]) as second:
        second.done()
    # Two ranks draw other numbers than four did: what they go on with is compared, and how they do with a clone.
    on_a_disk = options | {"url": str(tmp_path / "clone"), "environment": {}}
    with ranks.launch(f"{PROGRAMS}:requeued", on_a_disk, folder=tmp_path, name="on-a-disk") as third:
        third.done()

    for launch in (second, third):
        assert one(launch, "resumed")["step"] == SAVED
        whole = [event["digests"] for event in launch.events("whole")]
        assert whole == [one(first, "whole")["digests"]] * 2
    assert losses(second) == losses(third)
    assert sorted(losses(second)) == [*range(SAVED + 1, STEPS + 1)]
    assert damaged_in(url, environment, monkeypatch) == ()
    with layerstore.open(url) as store:
        assert store.show(f"{RUN}@{STEPS}").world_size == 2
