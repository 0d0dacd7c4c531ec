"""How long a server is waited for: as long as bytes move, and not much longer."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from layerstore.errors import StorageIO
from layerstore.remote import Bucket, RemoteNotice
from tests.remote.conftest import KEY, SECRET

PIECES, PIECE_BYTES, PAUSE_SECONDS = 8, 1000, 0.05
SILENCE_SECONDS = 0.2
MUTE_SECONDS = 10.0
MANY = 8


class _Slow(BaseHTTPRequestHandler):
    """
    Takes and sends a few bytes at a time; what is called ``silent`` it never sends.

    What is ``broken`` it answers once many have asked for it; who asks for ``mute`` gets a signal.
    """

    have_asked = threading.Barrier(MANY)

    def do_PUT(self) -> None:
        for _ in range(PIECES):
            self.rfile.read(PIECE_BYTES)
            time.sleep(PAUSE_SECONDS)
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        if self.path.endswith("broken"):
            self.have_asked.wait(60)
            answer = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>Try later</Message></Error>"
            self.send_response(500)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.send_response(200)
        for name, value in {"Content-Length": str(PIECES * PIECE_BYTES), "ETag": '"1"'}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.path.endswith("mute"):
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.path.endswith(("silent", "mute")):
            time.sleep(MUTE_SECONDS if self.path.endswith("mute") else 3 * SILENCE_SECONDS)
            return
        for _ in range(PIECES):
            self.wfile.write(bytes(PIECE_BYTES))
            self.wfile.flush()
            time.sleep(PAUSE_SECONDS)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return a bucket behind a slow link."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("layerstore.remote.cloud.REMOTE_SILENCE_SECONDS", SILENCE_SECONDS)
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_TRIES", 2)
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.001)
    yield Bucket("s3://bucket")
    server.shutdown()
    server.server_close()


def test_what_is_slow_is_waited_for(bucket: Bucket) -> None:
    """An upload and a download that take twice as long as silence may."""
    bucket.write("slow", lambda: [bytes(PIECES * PIECE_BYTES)])
    assert sum(map(len, bucket.chunks("slow", start=0, size_bytes=PIECES * PIECE_BYTES, is_whole=True))) == 8000


def test_silence_is_not_waited_for(bucket: Bucket) -> None:
    """The request is repeated, and then given up."""
    with pytest.warns(RemoteNotice, match="trying again"), pytest.raises(StorageIO, match="cannot read silent"):
        bucket.read("silent", size_bytes_max=10_000)


def test_retries_are_reported_to_who_asks(bucket: Bucket) -> None:
    """Each of them, and none is a warning until nobody asks any more."""
    reported: list[str] = []
    bucket.report_retries(reported.append)
    with pytest.raises(StorageIO):
        bucket.read("silent", size_bytes_max=10_000)
    bucket.report_retries(None)

    assert len(reported) == 1
    assert "trying again in" in reported[0]
    with pytest.warns(RemoteNotice), pytest.raises(StorageIO):
        bucket.read("silent", size_bytes_max=10_000)


def test_a_signal_is_heard_while_a_server_is_silent(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ctrl-C would wait for two minutes, and a scheduler kill what it asked to end."""
    monkeypatch.setattr("layerstore.remote.cloud.REMOTE_SILENCE_SECONDS", 2 * MUTE_SECONDS)
    patient = Bucket(bucket.url)
    # Not SIGINT: whatever a shell starts in the background ignores that.
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        patient.read("mute", size_bytes_max=10_000)
    signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - started < MUTE_SECONDS / 2


def test_what_many_requests_meet_is_told_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the server, without its XML; all of them are answered at once, twice."""
    monkeypatch.setattr("layerstore.remote.cloud.REMOTE_SILENCE_SECONDS", 60.0)
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.5)
    patient = Bucket(bucket.url)

    def read(_: int) -> None:
        with pytest.raises(StorageIO):
            patient.read("broken", size_bytes_max=10_000)

    with pytest.warns(RemoteNotice) as told, ThreadPoolExecutor(MANY) as pool:
        list(pool.map(read, range(MANY)))
    assert len(told) < MANY
    assert "InternalError: Try later" in str(told[0].message)
    assert "<" not in str(told[0].message)
