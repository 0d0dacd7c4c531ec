"""
The server of ``layerstore report --serve``: the page at ``/``, and at ``/version`` an id that changes with the commits.

The server only reads. Each look opens and closes the store, so a bucket is read in its current state, and nothing needs
to be cleaned up however the server ends. Only requests cause a look, and only a new version causes a new page.
"""

import hashlib
import ipaddress
import re
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

import layerstore
from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.inspect import make_report
from layerstore.policy import Keep
from layerstore.progress import Silent
from layerstore.storage import Repository

# The page asks every five seconds. However many browsers show it, the store is read no more often than this.
LOOK_SECONDS = 2.0

_TEXT = "text/plain; charset=utf-8"


class ReportServer(ThreadingMixIn, TCPServer):
    """A server that listens as soon as it is constructed, and answers in `serve_forever`."""

    allow_reuse_address = True  # otherwise, a restart must wait until the old connections time out
    daemon_threads = True  # a request that hangs must not keep the command from ending

    def __init__(self, store: str, *, host: str, port: int, run: str | None, keep: Keep | None) -> None:
        """Also make the first page, so that a problem with the store or the options fails the command."""
        self._store, self._run, self._keep = store, run, keep
        self._guard = threading.Lock()
        self._version, self._page, self._next_look = "", b"", 0.0
        # Before the server listens, so that no request comes before the first page exists.
        self.look()
        try:
            [(self.address_family, *_, (address, *_)), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            super().__init__((str(address), port), _Handler)
        except (OSError, OverflowError) as exc:
            raise InvalidInput(f"cannot listen on {host}, port {port}: {exc}", hint="choose another --port") from exc
        bound = ipaddress.ip_address(str(address))
        self.is_local = bound.is_loopback
        name = socket.gethostname() if bound.is_unspecified else host
        self._names = {"localhost", name.lower()}
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{self.server_address[1]}/"

    def look(self) -> tuple[str, bytes]:
        """Return version and page, at most `LOOK_SECONDS` old; raises LayerstoreError if the store cannot be read."""
        with self._guard:
            if time.monotonic() >= self._next_look:
                with layerstore.open(self._store) as store:
                    version = _version_of(store.repo)
                    if version != self._version:
                        _, self._page = make_report(
                            store.repo, None, run=self._run, keep=self._keep, progress=Silent(), version=version
                        )
                        self._version = version
                self._next_look = time.monotonic() + LOOK_SECONDS
            return self._version, self._page

    def is_meant(self, host: str) -> bool:
        """
        Whether a request for *host* is for this server.

        Another site may point its own host name at our address (DNS rebinding), and its page could then read the
        report through the browser of somebody who can reach us. A site cannot do so with a numeric address.
        """
        name = re.sub(r":[0-9]*$", "", host).strip("[]").lower()
        try:
            return ipaddress.ip_address(name).is_loopback or not self.is_local
        except ValueError:
            # The host is a name, not an address.
            return name in self._names

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "layerstore", ""
    timeout = 10  # a client that sends nothing for so long loses its connection and thread

    def do_GET(self) -> None:
        status, kind, body = HTTPStatus.OK, _TEXT, b""
        if not self.server.is_meant(self.headers.get("Host", "")):
            status, body = HTTPStatus.FORBIDDEN, b"not served under this name: use the printed URL\n"
        elif self.path not in {"/", "/version"}:
            status, body = HTTPStatus.NOT_FOUND, b"there is nothing but /\n"
        else:
            try:
                version, page = self.server.look()
                kind, body = (
                    (_TEXT, version.encode()) if self.path == "/version" else ("text/html; charset=utf-8", page)
                )
            except LayerstoreError as exc:
                status, body = HTTPStatus.SERVICE_UNAVAILABLE, f"{exc}\n".encode(errors="replace")
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in (headers | {"X-Content-Type-Options": "nosniff"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""


def _version_of(repo: Repository) -> str:
    """Return an id that changes with the names of the commits and pins; no record is read."""
    names = [(run, sorted(repo.records.listing(run))) for run in repo.records.runs()]
    return hashlib.sha256(repr((names, repo.records.pin_names())).encode()).hexdigest()[:16]
