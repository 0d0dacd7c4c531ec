"""
Real servers: pushes that are killed, a corrupted object, two pushers beside a collection; nothing is lost.

Two of the servers overwrite silently where a condition was asked for, so nothing may rest on conditions.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.remote import Bucket
from tests.bench.generate import generate_size
from tests.faults.harness import seeded
from tests.remote.at_once import push_and_collect
from tests.remote.conftest import on_disk
from tests.remote.servers import SERVERS, credentials
from tests.unit.checkpoints import Checkpoints, digests, snapshot

# A server may be busy for a moment: that is told, and tried again.
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::layerstore.remote.RemoteNotice"),
]

KILLS = 10


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a folder on a disk."""
    with on_disk() as folder:
        yield folder


@pytest.fixture(scope="module", params=SERVERS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each server in turn."""
    with on_disk() as folder, SERVERS[request.param](folder) as found:
        yield found


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the URL of an empty prefix there."""
    for name, value in credentials(endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://first-bucket/{tmp_path.name}"


@pytest.fixture
def large(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints of 20 MB, with objects of more than one part."""
    return Checkpoints(tmp_path / "large", layers=2, hidden=256, vocab=4096)


@pytest.mark.sample(1, by="endpoint")
def test_a_push_that_is_killed_again_and_again(store: Store, large: Checkpoints, url: str, tmp_path: Path) -> None:
    """What shows there is whole at any moment; finished, it is the store, and composes the same bytes."""
    large.into(store, 2, 4)
    _push_and_kill(store, url, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("endpoint", ["seaweedfs"], indirect=True)
def test_gigabytes_that_are_killed_again_and_again(store: Store, url: str, tmp_path: Path) -> None:
    """The same with 2 GB, in two saves."""
    for step in (2, 4):
        store.ingest(generate_size(tmp_path / str(step), 1.0, layout="raw", step=step, seed=step), run="r")
        shutil.rmtree(tmp_path / str(step))
    _push_and_kill(store, url, tmp_path)


def _push_and_kill(store: Store, url: str, folder: Path) -> None:
    """Kill ten pushes of *store* at random points, finish, clone elsewhere, verify each byte, and compose."""
    chance = seeded("kills")
    whole_s, idle_s = (_finished(store, f"{url}-timed") for _ in range(2))  # the second one has nothing to send
    share_s = max(whole_s - idle_s, 0.0) / KILLS  # each sends about a tenth, so that the last ones have work, too
    moments = [chance.uniform(0.5, 1) * idle_s + chance.uniform(0, 2) * share_s for _ in range(KILLS)]
    killed = sum(_killed(store, url, after_seconds=moment) for moment in moments)
    assert killed

    with suppress(layerstore.errors.NoStore), layerstore.open(url) as there:
        shown = there.log()
        assert there.verify(read_data=True).ok
        print(f"{killed} of {KILLS} pushes were killed; {len(shown)} commits show")
    pushed = store.push(url)
    print(f"the last one sent {pushed.objects} objects, {pushed.bytes_sent:,} bytes")

    with layerstore.clone(url, folder / "clone") as clone:
        assert snapshot(clone) == snapshot(store)
        verdict = clone.verify(read_data=True)
        assert verdict.ok
        print(f"the clone has {verdict.objects} objects, {verdict.bytes_read:,} bytes")
        clone.compose("r@4", policy="parity").write(folder / "there")
    store.compose("r@4", policy="parity").write(folder / "here")
    assert digests(folder / "here") == digests(folder / "there")


def _finished(store: Store, url: str) -> float:
    """Push all of it; return how many seconds that took."""
    begun = time.monotonic()
    assert not _killed(store, url, after_seconds=None)
    return time.monotonic() - begun


def _killed(store: Store, url: str, *, after_seconds: float | None) -> bool:
    """Begin to push, and kill that; return whether it was still at work."""
    command = [sys.executable, "-m", "layerstore.cli", "push", url, "--store", str(store.path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=after_seconds, check=False)
    except subprocess.TimeoutExpired:
        return True  # it was killed
    assert done.returncode == 0, done.stderr
    return False


def test_a_corrupted_object_is_named_and_healed(store: Store, saved: Checkpoints, url: str) -> None:
    """By its name, from the store that has it sound."""
    saved.into(store, 2)
    store.push(url)
    bucket = Bucket(url)
    victim = max(bucket.objects(), key=lambda each: each.size_bytes)
    data = bytearray(bucket.read(victim.name, size_bytes_max=victim.size_bytes) or b"")
    data[len(data) // 2] ^= 1
    bucket.write(victim.name, lambda: [bytes(data)])

    verdict = layerstore.open(url).verify(read_data=True)
    assert [damage.path for damage in verdict.damaged] == [victim.name]

    assert [each.path for each in store.repair(remote=url, read_data=True).fetched] == [victim.name]
    assert layerstore.open(url).verify(read_data=True).ok


@pytest.mark.sample(1, by="endpoint")
def test_two_pushers_and_a_collection_at_once(
    store: Store, saved: Checkpoints, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a day is six seconds: what is pushed is whole at any moment."""
    push_and_collect(store, saved, url, tmp_path, monkeypatch, grace_seconds=6.0)
