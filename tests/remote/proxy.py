"""A proxy that counts what goes over the wire."""

import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

_CONNECTIONS_MAX = 1000
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (/\S*) HTTP/1\.1\r\n")


class Wire:
    """What has gone through a proxy."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._guard = threading.Lock()
        self.sent_bytes = self.received_bytes = 0
        """By whoever asks: with every header, listing and repetition."""
        self.requests = Counter[str]()
        """How many there were, by method; a listing is a ``LIST``."""

    def forget(self) -> None:
        """Count anew."""
        with self._guard:
            self.sent_bytes = self.received_bytes = 0
            self.requests.clear()

    def serve(self, server: socket.socket) -> None:
        """Pass on what comes to *server*, until that is shut down."""
        with ExitStack() as stack, suppress(OSError):
            # In the end its connections are shut, their threads joined, and the sockets closed.
            pool = stack.enter_context(ThreadPoolExecutor(_CONNECTIONS_MAX))
            while True:
                near = server.accept()[0]
                stack.callback(near.close)
                far = socket.create_connection(self._address)
                stack.callback(far.close)
                for source, target, is_sent in ((near, far, True), (far, near, False)):
                    stack.callback(_shut, source)
                    pool.submit(self._pass_on, source, target, is_sent=is_sent)

    def _pass_on(self, source: socket.socket, target: socket.socket, *, is_sent: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                with self._guard:
                    if is_sent:
                        self.sent_bytes += len(data)
                        self.requests.update(map(_kind_of, _REQUEST.findall(data)))
                    else:
                        self.received_bytes += len(data)
                target.sendall(data)
        _shut(target)


def _kind_of(request: tuple[bytes, bytes]) -> str:
    method, path = request
    return "LIST" if b"list-type=" in path else method.decode()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(endpoint: str) -> Iterator[tuple[str, Wire]]:
    """Run a proxy in front of *endpoint*; yield its own, and what it counts."""
    wire = Wire(endpoint)
    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=wire.serve, args=(server,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", wire
        finally:
            server.shutdown(socket.SHUT_RDWR)
            serving.join()
