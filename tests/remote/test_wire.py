"""What goes over the wire between a store and a real server, counted by a proxy: what is needed, and little more."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import StorageIO
from layerstore.history import named_by, resolve
from layerstore.host import free_memory_bytes
from layerstore.limits import MIB, REMOTE_REQUESTS_MAX
from layerstore.model import BlobRef
from layerstore.progress import Silent
from layerstore.remote import Bucket, push
from layerstore.remote.cloud import part_bytes_for
from tests.bench.generate import generate
from tests.bench.measure import peak_bytes_of
from tests.remote.conftest import on_disk
from tests.remote.proxy import Wire, proxied
from tests.remote.servers import KEY, SECRET, seaweedfs
from tests.unit.checkpoints import Checkpoints, digests

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a folder on a disk."""
    with on_disk() as folder:
        yield folder


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Run a server."""
    with on_disk() as folder, seaweedfs(folder) as found:
        yield found


@pytest.fixture
def wire(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """Put a proxy in front of it, which is what remotes ask."""
    with proxied(endpoint) as (front, counted):
        for name, value in {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": front,
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield counted


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of an empty prefix there."""
    return f"s3://first-bucket/{tmp_path.name}"


@pytest.mark.full
def test_a_composite_receives_what_it_needs(store: Store, wire: Wire, url: str, tmp_path: Path) -> None:
    """Of two saves by parity, of 20 MB each, into an empty cache: at most 1.02 times its tensors, blobs and record."""
    Checkpoints(tmp_path / "large", layers=4, hidden=160, vocab=2048).into(store, 2, 4)
    store.push(url)
    composite = store.compose("r@4", policy="parity")
    composite.write(tmp_path / "here")
    chosen, repo = composite.composition, store.repo
    blobs = [*(entry.version for entry in chosen.layers), *chosen.base.states]
    tensors = _bytes_of(ref for blob in blobs for ref in named_by(repo, blob))
    record_bytes = sum(path.stat().st_size for path in (store.path / "commits/r").iterdir())
    wire.forget()

    with layerstore.open(url) as remote:
        remote.compose("r@4", policy="parity").write(tmp_path / "there")

    needed = tensors + _bytes_of(blobs) + record_bytes // 2
    print(
        f"received {wire.received_bytes:,} bytes, {wire.received_bytes / needed:.4f} of what is needed: "
        f"tensors {tensors:,}, blobs {_bytes_of(blobs):,}, records {record_bytes:,}, "
        f"headers and listings {wire.received_bytes - tensors - _bytes_of(blobs) - record_bytes:,}"
    )
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert needed < wire.received_bytes <= 1.02 * needed


@pytest.mark.exhaustive
def test_a_push_sends_what_is_due(store: Store, wire: Wire, url: str, tmp_path: Path) -> None:
    """Of the next save by filter, whose due layers have 0.7 GB: at most 0.1 % more, requests and headers included."""
    for step in (2, 4):
        source = generate(tmp_path / str(step), layers=6, hidden=1024, vocab=1024, step=step, seed=step)
        store.ingest(source, run="r", policy="filter")
        if step == 2:
            store.push(url)
    record = resolve(store.repo, "r@4").record
    saved = [entry.version for entry in record.layers if entry.saved_by(record)]
    due = _bytes_of(ref for blob in saved for ref in named_by(store.repo, blob))
    wire.forget()

    pushed = store.push(url)

    print(
        f"sent {wire.sent_bytes:,} bytes for {due:,} that are due, {wire.sent_bytes / due:.5f}; "
        f"{pushed.bytes_sent:,} of them in objects, blobs and the record"
    )
    assert 0 < len(saved) < len(record.layers)
    assert due < wire.sent_bytes <= 1.001 * due


@pytest.mark.full
@pytest.mark.parametrize("policy", ["full", "parity"])
def test_a_push_after_a_save_asks_for_little(
    store: Store, saved: Checkpoints, wire: Wire, url: str, policy: str
) -> None:
    """Beside what it writes, a few requests and one for each inherited layer; to compare all is a listing more."""
    bucket = Bucket(url)
    for step in (2, 4, 6):
        saved.into(store, step, policy=policy)
        wire.forget()
        pushed = push(store.repo, bucket, refs=None, runs=["r"], compares=False, progress=Silent())
    behind, record = Counter(wire.requests), resolve(store.repo, "r@6").record
    inherited = sum(not entry.saved_by(record) for entry in record.layers)
    wire.forget()
    assert store.push(url).commits == ()

    print(f"policy {policy}: {pushed.objects} objects, {inherited} layers inherited: {dict(behind)}")
    print(f"to compare all: {dict(wire.requests)}")
    assert behind["PUT"] == pushed.objects + 2  # the record, and the file that tells the time
    assert behind["LIST"] == 2 + 2  # records, and marks of collections
    assert behind["HEAD"] <= inherited + REMOTE_REQUESTS_MAX + 1
    assert wire.requests["LIST"] == 256 + 2


@pytest.mark.full
def test_a_large_object_takes_few_requests(wire: Wire, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 MiB once an upload was quick; what fits into one part is one request."""
    monkeypatch.setattr("layerstore.remote.bucket._QUICK_SECONDS", inf)
    bucket = Bucket(url)
    client: Any = bucket._client
    client._part_bytes_max = 64 * MIB
    sizes = {15: (1, 0), 40: (3, 2), 60: (1, 0), 130: (3, 2)}  # small parts at first
    for mib, requests in sizes.items():
        wire.forget()
        bucket.write(f"objects/{mib}", partial(_mebibytes, mib))
        assert (wire.requests["PUT"], wire.requests["POST"]) == requests
        pieces = bucket.chunks(f"objects/{mib}", start=0, size_bytes=mib * MIB, is_whole=True)
        assert b"".join(pieces) == b"".join(_mebibytes(mib))


def _mebibytes(count: int) -> Iterator[bytes]:
    return (bytes([number]) * MIB for number in range(count))


@pytest.mark.parametrize(
    ("free", "ranks", "mib"), [(0, 1, 16), (2, 1, 16), (8, 1, 42), (12, 1, 64), (500, 1, 64), (16, 8, 16), (64, 4, 64)]
)
def test_parts_are_as_large_as_memory_allows(free: int, ranks: int, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of each of 16 objects, on each rank of this host, in a quarter of what is free."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert part_bytes_for(free << 30) == mib * MIB
    assert free_memory_bytes() > 0


def test_parts_stay_small_on_a_slow_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And become so again where an upload has failed."""
    bucket = Bucket(f"memory://{tmp_path.name}")
    client: Any = bucket._client
    client._part_bytes_max = 64 * MIB
    with monkeypatch.context() as patch:
        patch.setattr("layerstore.remote.bucket._QUICK_SECONDS", 0.0)
        bucket.write("objects/slow", partial(_mebibytes, 20))
        assert client.part_bytes == 16 * MIB
        patch.setattr("layerstore.remote.bucket._QUICK_SECONDS", inf)
        bucket.write("objects/quick", partial(_mebibytes, 20))
    assert client.part_bytes == 64 * MIB

    with monkeypatch.context() as patch:
        patch.setattr(client, "put", _refuse)
        with pytest.raises(StorageIO):
            bucket.write("objects/failed", partial(_mebibytes, 1))
    assert client.part_bytes == 16 * MIB


def _refuse(*_: object) -> None:
    raise OSError("507 No space left")


@pytest.mark.full
def test_a_save_sends_what_is_due(wire: Wire, url: str, tmp_path: Path) -> None:
    """Straight to a bucket, of the next save by parity, of 88 MB: at most 0.1 % more, requests and headers included."""
    shape: dict[str, Any] = {"layers": 4, "hidden": 512, "vocab": 1024}
    with layerstore.init(url) as store:
        store.ingest(generate(tmp_path / "2", step=2, seed=2, **shape), run="r", policy="parity")
        source = generate(tmp_path / "4", step=4, seed=4, **shape)
        wire.forget()
        store.ingest(source, run="r", policy="parity")
        sent = wire.sent_bytes
        record = resolve(store.repo, "r@4").record
        saved = [entry.version for entry in record.layers if entry.saved_by(record)]
        due = _bytes_of(ref for blob in saved for ref in named_by(store.repo, blob))

    print(f"sent {sent:,} bytes for {due:,} that are due, {sent / due:.5f}")
    assert 0 < len(saved) < len(record.layers)
    assert due < sent <= 1.001 * due


_RANK = """
import sys
import layerstore
from layerstore.shards import RankLoad
from layerstore.dtypes import by_code
from layerstore.zero3.pt import layout_pt

store = layerstore.open(sys.argv[1])
load = RankLoad(store.repo, store.compose("r").composition, rank=1, world_size=3)
for storage, _ in layout_pt(load.state.optimizer.tree, name="any").storages:
    load.fill(storage, memoryview(bytearray(storage.elements * by_code(storage.dtype).bytes)))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("who", ["compose", "a rank of three"])
def test_memory_does_not_grow_with_what_is_fetched(
    store: Store, wire: Wire, url: str, tmp_path: Path, who: str
) -> None:
    """At most 300 MB more are held than with the store at hand, of 1 GB with objects of many chunks."""
    store.ingest(generate(tmp_path / "source", layers=2, hidden=1536, vocab=8192), run="r")
    store.push(url)
    wire.forget()

    there, here = (
        peak_bytes_of("-m", "layerstore.cli", "--store", place, "compose", "r", "-o", str(tmp_path / name))
        if who == "compose"
        else peak_bytes_of("-c", _RANK, place)
        for name, place in (("there", url), ("here", str(store.path)))
    )

    print(f"{who}: {there / 1e6:.0f} MB for {wire.received_bytes:,} bytes from the bucket, {here / 1e6:.0f} MB here")
    assert wire.received_bytes > 200e6
    assert there <= here + 300e6


def _bytes_of(refs: "Iterator[BlobRef] | list[BlobRef]") -> int:
    return sum(ref.size_bytes for ref in set(refs))
