"""
The requests to S3, Google Cloud Storage, Azure, or this process's memory.

Only this module uses obstore. It reads credentials and endpoints from the environment, as the clouds' own tools do.
"""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from layerstore.errors import InvalidInput, Unsupported
from layerstore.host import free_memory_bytes
from layerstore.limits import (
    IO_CHUNK_BYTES,
    MIB,
    REMOTE_PART_BYTES,
    REMOTE_PART_BYTES_LEAST,
    REMOTE_REQUESTS_MAX,
    REMOTE_SILENCE_SECONDS,
    REMOTE_UPLOAD_SECONDS,
)
from layerstore.redact import redacted
from layerstore.remote.credentials import s3_options
from layerstore.remote.folder import Listed
from layerstore.remote.remotes import credentials_hint

if TYPE_CHECKING:
    from obstore.store import ClientConfig
    from obstore.store import ObjectStore as Client

_PARTS_AT_ONCE = 2
"""How many parts of one object are uploaded at once while the next part is filled."""

_memories: dict[str, "Client"] = {}
"""One client per ``memory://`` URL, so that all buckets of this process with the same URL see the same bytes."""
_memories_guard = threading.Lock()


class Cloud:
    """One bucket of a server; `Folder` has the same methods."""

    def __init__(self, url: str) -> None:
        self._obstore = _imported()
        self._reader, self._writer = _clients_of(url)
        self.part_bytes = REMOTE_PART_BYTES_LEAST
        """The part size for multipart uploads; smaller objects take one request."""
        self._part_bytes_max = part_bytes_for(free_memory_bytes())

    def get(self, name: str, stretch: tuple[int, int] | None = None) -> tuple[int, Iterator[Any]]:
        """Return the size of *name*, and its bytes or a *stretch* of them."""
        answer = self._obstore.get(self._reader, name, options={} if stretch is None else {"range": stretch})
        return answer.meta["size"], iter(answer.stream(IO_CHUNK_BYTES))

    def head(self, name: str) -> Listed:
        """Return the size and time of *name*."""
        return _listed(self._obstore.head(self._reader, name))

    def list(self, folder: str) -> Iterator[Listed]:
        """Yield everything below *folder*."""
        for batch in self._obstore.list(self._reader, f"{folder}/", chunk_size=1000):
            yield from map(_listed, batch)

    def put(self, name: str, body: bytes | bytearray | Iterable[bytes | bytearray]) -> None:
        """Write *body* as *name*."""
        self._obstore.put(
            self._writer,
            name,
            body,
            use_multipart=not isinstance(body, bytes | bytearray),
            chunk_size=self.part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )

    def use_large_parts(self, are_large: bool) -> None:
        """From now on, upload in the smallest parts or, if *are_large*, in parts as large as memory allows."""
        self.part_bytes = self._part_bytes_max if are_large else REMOTE_PART_BYTES_LEAST

    def create(self, name: str, data: bytes) -> None:
        """Write *data* as *name* unless *name* exists; servers without conditional writes overwrite it."""
        errors = self._obstore.exceptions
        try:
            self._obstore.put(self._writer, name, data, mode="create")
        except (errors.AlreadyExistsError, errors.PreconditionError):
            pass  # the caller reads the existing data
        except errors.NotSupportedError:
            self.put(name, data)

    def delete(self, names: Sequence[str]) -> None:
        """Remove *names*."""
        self._obstore.delete(self._reader, names)


def part_bytes_for(free_bytes: int) -> int:
    """Return the part size for *free_bytes* of free memory."""
    ranks_here = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    room = free_bytes // 4 // ranks_here // REMOTE_REQUESTS_MAX // (_PARTS_AT_ONCE + 1)
    return max(REMOTE_PART_BYTES_LEAST, min(room // MIB * MIB, REMOTE_PART_BYTES))


def _imported() -> Any:
    try:
        import obstore
    except ImportError as exc:
        raise Unsupported("remotes need obstore", hint="pip install 'layerstore[remote]'") from exc
    return obstore


def _clients_of(url: str) -> "tuple[Client, Client]":
    """Return the clients for reading and for writing; the writer tolerates silence as long as an upload may take."""
    from obstore.store import MemoryStore

    scheme = urlsplit(url).scheme
    if scheme == "memory":
        with _memories_guard:
            memory = _memories.setdefault(url, MemoryStore())
        return memory, memory
    options = s3_options() if scheme == "s3" else {}
    # Downloads may take long; a download that is cut off after a day resumes.
    reader = _client(url, options, {"read_timeout": f"{REMOTE_SILENCE_SECONDS}s", "timeout": "1d"})
    return reader, _client(url, options, {"timeout": f"{REMOTE_UPLOAD_SECONDS}s"})


def _client(url: str, options: Mapping[str, Any], patience: "ClientConfig") -> "Client":
    from obstore.store import from_url

    client_options: ClientConfig = {"allow_http": True, **patience}
    # obstore would retry silently; we retry ourselves and report it.
    try:
        return from_url(url, retry_config={"max_retries": 0}, client_options=client_options, **options)
    except Exception as exc:  # noqa: BLE001  # each cloud has its own errors
        raise InvalidInput(f"{url} cannot be used: {first_line(exc)}", hint=credentials_hint(url)) from None


def _listed(meta: Any) -> Listed:
    modified: datetime = meta["last_modified"]
    return Listed(meta["path"], meta["size"], int(modified.timestamp() * 1e6) * 1000)


def first_line(exc: Exception) -> str:
    """Return the first line of *exc* without obstore's additions: its name for the service, durations, and XML."""
    line = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
    line = redacted(line)  # an endpoint may hold a key
    line = re.sub(r": <\?xml.*?<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?.*", r": \1: \2", line)
    line = re.sub(r"^Generic \S+ error: (Error performing )?| in [0-9.]+[µmn]?s(?= - )", "", line)
    return line if len(line) <= 300 else f"{line[:300]}…"
