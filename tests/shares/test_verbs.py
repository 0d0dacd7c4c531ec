"""Every verb that works in shares does with any number of processes what it does alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import IntegrityError, SourceCheckpoint
from tests.shares.rehearsal import Rehearsal
from tests.unit.checkpoints import Checkpoints, digests, snapshot

COUNTS = (3, pytest.param(2, marks=pytest.mark.full), pytest.param(7, marks=pytest.mark.full))
"""The checkpoints are of four ranks: some processes get more than one rank's files, some none."""


@pytest.fixture(params=COUNTS)
def job(request: pytest.FixtureRequest) -> Iterator[Rehearsal]:
    """Return so many processes."""
    with Rehearsal(request.param) as made:
        yield made


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints of four ranks with gathered weights."""
    return Checkpoints(tmp_path / "checkpoints", world_size=4, layout="hf")


def raise_on_all(store: Store, job: Rehearsal) -> Store:
    """Return *store*, opened by the first process of *job*."""
    return Store(store.path, shares=job)


def test_an_ingest_stores_what_one_process_stores(
    store: Store, checkpoints: Checkpoints, job: Rehearsal, tmp_path: Path
) -> None:
    """Objects, commits and what is told of them, also where a part is there already, and where all of it is."""
    other = layerstore.init(tmp_path / "other")
    with other, raise_on_all(other, job) as shared:
        for step, policy in ((10, "full"), (20, "parity"), (30, "parity"), (30, "parity")):
            alone = store.ingest(checkpoints(step), run="r", policy=policy)
            found = shared.ingest(checkpoints(step), run="r", policy=policy)
            for name in ("commit", "is_new", "layers_saved", "objects_new", "bytes_new", "objects_reused"):
                assert getattr(found, name) == getattr(alone, name), name
            assert (found.bytes_reused, found.bytes_derived) == (alone.bytes_reused, alone.bytes_derived)
        assert set(job.asked_for) == {"stage_share"}
        mine, theirs = snapshot(store), snapshot(other)
        assert {name for name in mine if name.startswith("objects")} == {
            name for name in theirs if name.startswith("objects")
        }
        assert other.verify(read_data=True).ok
    job.__exit__()
    assert not list((other.path / "tmp").iterdir())


def test_a_damaged_object_is_written_again(store: Store, checkpoints: Checkpoints, job: Rehearsal) -> None:
    """Whichever process meets it."""
    store.ingest(checkpoints(10), run="r")
    sizes = {path: path.stat().st_size for path in store.path.glob("objects/*/*")}
    for path in sorted(sizes, key=lambda each: sizes[each])[-8:]:
        path.write_bytes(bytes(sizes[path]))
    with raise_on_all(store, job) as shared:
        assert shared.ingest(checkpoints(10), run="r").objects_healed == 8
    assert store.verify(read_data=True).ok


def test_a_damaged_source_is_refused(store: Store, checkpoints: Checkpoints, job: Rehearsal) -> None:
    """Its checksums are put together of what all processes have read."""
    source = checkpoints(10)
    for path in source.glob("*/*rank_3*optim*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with raise_on_all(store, job) as shared, pytest.raises(SourceCheckpoint, match="is damaged"):
        shared.ingest(source, run="r")
    job.__exit__()
    assert not list((store.path / "tmp").iterdir())
    assert store.runs() == []


@pytest.mark.parametrize("world_size", [4, 1, 6])
def test_a_compose_writes_what_one_process_writes(
    store: Store, checkpoints: Checkpoints, job: Rehearsal, tmp_path: Path, world_size: int
) -> None:
    """Every byte of every file, for as many ranks and for others."""
    checkpoints.into(store, 10, 20)
    alone = store.compose("r@20", policy="parity").write(tmp_path / "alone", world_size=world_size)
    with raise_on_all(store, job) as shared:
        found = shared.compose("r@20", policy="parity").write(tmp_path / "shared", world_size=world_size)
    assert job.asked_for == ["write_ranks"]
    assert digests(tmp_path / "shared") == digests(tmp_path / "alone")
    assert found.bytes_written == alone.bytes_written


def test_a_compose_that_one_process_refuses_leaves_nothing(
    store: Store, checkpoints: Checkpoints, job: Rehearsal, tmp_path: Path
) -> None:
    """A damaged object is told by whoever reads it."""
    checkpoints.into(store, 10)
    for path in sorted(store.path.glob("objects/*/*"), key=lambda each: each.stat().st_size)[-12:]:
        path.write_bytes(bytes(path.stat().st_size))
    with raise_on_all(store, job) as shared, pytest.raises(IntegrityError, match="hash to"):
        shared.compose("r@10").write(tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_a_verify_finds_what_one_process_finds(store: Store, checkpoints: Checkpoints, job: Rehearsal) -> None:
    """What is damaged, what that costs, and how much was read."""
    checkpoints.into(store, 10, 20)
    objects = sorted(store.path.glob("objects/*/*"), key=lambda each: each.stat().st_size)
    objects[-1].unlink()
    for path in objects[-30:-1:5]:
        path.write_bytes(bytes(path.stat().st_size))
    for options in ({}, {"read_data": True}, {"read_data_subset": "1/3"}, {"ref": "r@20", "read_data": True}):
        alone = store.verify(**options)
        with raise_on_all(store, job) as shared:
            found = shared.verify(**options)
        assert sorted(found.damaged, key=str) == sorted(alone.damaged, key=str)
        for name in ("standing", "orphans", "records", "objects", "objects_read", "bytes_read"):
            assert getattr(found, name) == getattr(alone, name), name


def test_a_push_sends_and_a_pull_fetches_what_one_process_does(
    store: Store, checkpoints: Checkpoints, job: Rehearsal, tmp_path: Path
) -> None:
    """And a second time nothing."""
    pytest.importorskip("obstore")
    url = (tmp_path / "bucket").as_uri()
    checkpoints.into(store, 10, 20)
    with raise_on_all(store, job) as shared:
        first = shared.push(url)
        assert (len(first.commits), shared.push(url).commits) == (2, ())
    alone = store.push((tmp_path / "alone").as_uri())
    assert (first.objects, first.bytes_sent) == (alone.objects, alone.bytes_sent)
    with layerstore.clone(url, tmp_path / "clone", shares=job) as clone:
        assert clone.verify(read_data=True).ok
        assert {"send_share", "fetch_share"} <= set(job.asked_for)
        assert digests(clone.path / "objects") == digests(store.path / "objects")
