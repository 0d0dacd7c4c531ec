"""Buckets: a folder, this process's memory, and an S3 server that speaks the real protocol."""

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from layerstore import Store
from layerstore.remote import Bucket
from layerstore.remote.bucket import Chunks
from tests.ranks.launch import free_port
from tests.unit.checkpoints import Checkpoints

push = sys.modules["layerstore.remote.push"]  # the package's attribute of this name is the function

KEY, SECRET = "AKIAEXAMPLEEXAMPLE00", "a-secret-that-is-never-shown"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep mirrors apart from the user's own."""
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push beside a collection need not wait long for it: nobody's is slow here."""
    monkeypatch.setattr(push, "REMOTE_MOMENT_SECONDS", 0.01)


def watch_writes(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[Bucket, str], None] | None = None,
    after: Callable[[Bucket, str], None] | None = None,
) -> None:
    """Call *before* and *after* each write to a bucket, with its name."""
    write = Bucket.write

    def watched(self: Bucket, name: str, chunks: Chunks) -> None:
        if before is not None:
            before(self, name)
        write(self, name, chunks)
        if after is not None:
            after(self, name)

    monkeypatch.setattr(Bucket, "write", watched)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start an S3 server; return its endpoint."""
    port = free_port()
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new bucket, whose key and endpoint are in the environment."""
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{secrets.token_hex(8)}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}/pre/fix"


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.exhaustive)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty bucket of each kind."""
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}"
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    found: str = request.getfixturevalue("s3")
    return found


@contextmanager
def on_disk() -> Iterator[Path]:
    """Yield a folder for gigabytes, which other tests would miss in memory."""
    with TemporaryDirectory(prefix="layerstore-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def bucket(url: str) -> Bucket:
    """Return an empty bucket of each kind."""
    return Bucket(url, may_make=True)


@pytest.fixture
def pushed(store: Store, saved: Checkpoints, url: str) -> Store:
    """Return a store of three steps whose remote has it all."""
    saved.into(store, 2, 4, 6)
    store.remotes.add("origin", url)
    store.push()
    return store


@pytest.fixture
def pinned(store: Store, saved: Checkpoints, url: str) -> Store:
    """Return a store of three steps and a pin whose remote has it all."""
    saved.into(store, 2, 4, 6)
    store.pin("best", "r@4")
    store.remotes.add("origin", url)
    store.push()
    return store
