"""
How fast a checkpoint comes from a bucket, and goes there, beside a raw parallel download of the same bytes, a copy by
rclone and, where s3fs is installed, PyTorch's own distributed checkpoint of as many bytes, loaded into memory.

A real server (SeaweedFS) runs in a network namespace of its own, behind a link that carries 100 MB/s each way; that
wants root. Everything is measured in turns, with an empty cache each time.
"""

import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import layerstore
from layerstore import Store
from layerstore.limits import REMOTE_REQUESTS_MAX
from layerstore.remote import Bucket
from tests.bench.generate import generate_size
from tests.bench.measure import Contender, alternate, median_seconds, peak_bytes_of
from tests.remote.servers import KEY, SECRET, rclone_copy, seaweedfs

LINK_BYTES_PER_SECOND = 100_000_000
_BUCKET = "first-bucket"
_TENSOR_BYTES = 16_000_000


def run(folder: Path, *, gb: float, rounds: int) -> None:
    """Print what a composite, a clone and a push take, beside raw transfers of the same bytes."""
    source = generate_size(folder / "run" / "checkpoint-1", gb, layout="hf")
    store = layerstore.init(folder / "store")
    store.ingest(source, run="r")
    (folder / "server").mkdir()
    with slow_link() as (inside, address), seaweedfs(folder / "server", address=address, inside=inside) as endpoint:
        os.environ.update(
            AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_ENDPOINT_URL=endpoint, AWS_REGION="us-east-1"
        )
        os.environ["LAYERSTORE_CACHE_DIR"] = str(folder / "cache")
        url = f"s3://{_BUCKET}/store"
        store.push(url)
        rclone_copy(source, f"{_BUCKET}/plain", endpoint)
        size_bytes = sum(each.size_bytes for each in Bucket(url).objects())
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"  # s3fs
        state = _saved_by_torch(size_bytes) if find_spec("s3fs") else None
        print(f"{size_bytes / 1e9:.2f} GB of objects, {LINK_BYTES_PER_SECOND / 1e6:.0f} MB/s", flush=True)
        contenders = list(_contenders(store, folder, url, endpoint, state))
        timings = alternate(contenders, rounds=rounds, tell=lambda line: print(f"  {line}", flush=True))
        peaks = [_composing_bytes(folder, place) for place in (url, str(store.path))]
    raw = {name: median_seconds(timings[f"raw {name}"]) for name in ("download", "upload")}
    print(f"\n{'':<44}{'seconds':>9}{'x raw':>8}{'MB/s':>7}{'cpu':>7}{'others':>8}")
    for name, runs in timings.items():
        seconds, of = median_seconds(runs), raw["upload" if name in {"raw upload", "push"} else "download"]
        cpu = statistics.median(run.cpu_seconds for run in runs)
        others = statistics.mean(run.others_share for run in runs)
        rate = size_bytes / seconds / 1e6
        print(f"{name:<44}{seconds:>9.1f}{seconds / of:>8.2f}{rate:>7.0f}{cpu:>6.1f}s{others:>8.0%}")
    there, here = (peak / 1e6 for peak in peaks)
    print(f"memory of layerstore compose: {there:.0f} MB from the bucket, {here:.0f} MB from the store")


def _composing_bytes(folder: Path, place: str) -> int:
    """Return the most memory that the command holds which composes from the store at *place*, with an empty cache."""
    for name in ("out", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return peak_bytes_of("-m", "layerstore.cli", "--store", place, "compose", "r", "-o", str(folder / "out"))


def _contenders(
    store: Store, folder: Path, url: str, endpoint: str, state: dict[str, Any] | None
) -> Iterator[Contender]:
    out = folder / "out"

    def emptied() -> None:
        for name in ("out", "cache", "clone"):
            shutil.rmtree(folder / name, ignore_errors=True)
        out.mkdir()

    def new_prefix() -> None:
        emptied()
        for prefix in ("new", "raw"):
            bucket = Bucket(f"s3://{_BUCKET}/{prefix}")
            bucket.remove([each.name for each in bucket.listed("")])

    def compose() -> None:
        with layerstore.open(url) as there:
            there.compose("r").write(out / "composite")

    def push() -> None:
        store.push(f"s3://{_BUCKET}/new")

    def clone() -> None:
        layerstore.clone(url, folder / "clone").close()

    yield Contender("raw download", _in_parallel(lambda name: _downloaded(url, name, out), url), emptied)
    yield Contender("compose from the bucket", compose, emptied)
    yield Contender("clone", clone, emptied)
    yield Contender(
        "rclone copy of DeepSpeed's own files",
        lambda: rclone_copy(f"{_BUCKET}/plain", out / "plain", endpoint),
        emptied,
    )
    if state is not None:
        yield Contender("torch.distributed.checkpoint, loaded", lambda: _loaded_by_torch(state), emptied)
    yield Contender("raw upload", _in_parallel(lambda name: _uploaded(store, name), url), new_prefix)
    yield Contender("push", push, new_prefix)


def _in_parallel(move: Callable[[str], None], url: str) -> Callable[[], None]:
    names = [each.name for each in Bucket(url).objects()]

    def run() -> None:
        with ThreadPoolExecutor(REMOTE_REQUESTS_MAX) as pool:
            list(pool.map(move, names))

    return run


def _downloaded(url: str, name: str, out: Path) -> None:
    """Download an object as it is, in pieces, to a file."""
    bucket = Bucket(url)
    size_bytes = bucket.size(name) or 0
    with (out / name.rpartition("/")[2]).open("wb") as file:
        for piece in bucket.chunks(name, start=0, size_bytes=size_bytes, is_whole=True):
            file.write(piece)


def _uploaded(store: Store, name: str) -> None:
    def chunks() -> Iterator[bytes]:
        with (store.path / name).open("rb") as file:
            while data := file.read(1 << 20):
                yield data

    Bucket(f"s3://{_BUCKET}/raw").write(name, chunks)


def _saved_by_torch(size_bytes: int) -> dict[str, Any]:
    """Save tensors of as many bytes with PyTorch's own distributed checkpoint; return them."""
    import torch
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    count = max(1, size_bytes // _TENSOR_BYTES)
    state = {f"tensor {number}": torch.rand(size_bytes // count // 4) for number in range(count)}
    save(state, storage_writer=FsspecWriter(f"s3://{_BUCKET}/torch"), no_dist=True)
    return state


def _loaded_by_torch(state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FsspecReader(f"s3://{_BUCKET}/torch"), no_dist=True)


@contextmanager
def slow_link() -> Iterator[tuple[str, str]]:
    """Make a network namespace behind a slow link; yield its name, and the address that is reached through it."""
    name = f"layerstore-{os.getpid()}"
    here, there = f"ls{os.getpid()}a", f"ls{os.getpid()}b"
    rate = ["tbf", "rate", f"{LINK_BYTES_PER_SECOND * 8}bit", "burst", "512kb", "latency", "50ms"]
    _ip("netns", "add", name)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _ip("addr", "add", "10.213.7.1/30", "dev", here)
        _ip("link", "set", here, "up")
        for words in (
            ("ip", "addr", "add", "10.213.7.2/30", "dev", there),
            ("ip", "link", "set", there, "up"),
            ("ip", "link", "set", "lo", "up"),
            ("tc", "qdisc", "add", "dev", there, "root", *rate),
        ):
            _ip("netns", "exec", name, *words)
        subprocess.run(["tc", "qdisc", "add", "dev", here, "root", *rate], check=True)
        yield name, "10.213.7.2"
    finally:
        _ip("netns", "del", name)  # with it goes the link


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
