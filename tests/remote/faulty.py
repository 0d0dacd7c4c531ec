"""A server in front of an S3 server that stalls, fails, refuses or cuts bodies, as somebody tells it to."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TROUBLES = ("", "stalls", "fails twice", "cuts", "fails", "refuses")
_STALL_SECONDS = 0.3
_MOOD = "/-/"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    trouble = ""
    behind = ("", 0)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tried: dict[tuple[str, str], int] = {}
        self.guard = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client has hung up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _answer(self) -> None:
        server = self.server
        if self.path.startswith(_MOOD):
            server.trouble = self.path.removeprefix(_MOOD).replace("_", " ")
            server.tried.clear()
            self._reply(200, b"")
            return
        with server.guard:
            key = self.command, self.path
            server.tried[key] = tried = server.tried.get(key, 0) + 1
        trouble = server.trouble if self.command in {"PUT", "POST"} else ""
        length = int(self.headers.get("Content-Length") or 0)
        if trouble == "cuts" and tried <= 2:
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if trouble == "stalls":
            time.sleep(_STALL_SECONDS)
        if trouble == "fails" or (trouble == "fails twice" and tried <= 2):
            self._reply(500, b"<Error><Code>InternalError</Code></Error>")
        elif trouble == "refuses":
            self._reply(403, b"<Error><Code>AccessDenied</Code></Error>")
        else:
            self._forward(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 - http.server names them

    def _forward(self, body: bytes) -> None:
        far = http.client.HTTPConnection(*self.server.behind)
        try:
            far.request(self.command, self.path, body, dict(self.headers))
            answer = far.getresponse()
            data = answer.read()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN_HEADERS}
            size = answer.headers.get("Content-Length") if self.command == "HEAD" else None
            self._reply(answer.status, data, headers, size=size)
        finally:
            far.close()

    def _reply(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, *, size: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


_OWN_HEADERS = {"content-length", "transfer-encoding", "connection", "server", "date"}


@contextmanager
def faulty(endpoint: str) -> Iterator[str]:
    """Run it in front of *endpoint*; yield its own."""
    server = _Server()
    host, _, port = endpoint.removeprefix("http://").partition(":")
    server.behind = host, int(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def let(endpoint: str, trouble: str) -> None:
    """Let the server at *endpoint* make *trouble* from now on, or none."""
    urllib.request.urlopen(f"{endpoint}{_MOOD}{trouble.replace(' ', '_')}").read()
