"""
A bucket: one prefix of S3, Google Cloud Storage or Azure, a folder, or this process's memory.

Only this module uses obstore, which reads credentials and endpoints from the environment as the clouds' own tools do.
Transient failures are retried with growing pauses, and every retry is reported.
"""

import errno as errnos
import itertools
import math
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from layerstore.errors import (
    IntegrityError,
    Internal,
    InvalidInput,
    LayerstoreError,
    NoStore,
    NotFound,
    StorageIO,
    Unsupported,
)
from layerstore.limits import (
    IO_CHUNK_BYTES,
    REMOTE_PART_BYTES,
    REMOTE_PAUSE_SECONDS,
    REMOTE_REQUESTS_MAX,
    REMOTE_SILENCE_SECONDS,
    REMOTE_TRIES,
    REMOTE_UPLOAD_SECONDS,
)
from layerstore.remote.credentials import checked_url, credentials_hint, s3_options

if TYPE_CHECKING:
    from obstore.store import ClientConfig
    from obstore.store import ObjectStore as Client

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Chunks = Callable[[], Iterable[bytes | memoryview]]
"""Returns the bytes to write, from the start each time: a request may be retried."""

OBJECT_FOLDERS = tuple(f"objects/{prefix:02x}" for prefix in range(256))
"""The folders that hold objects."""
COLLECTIONS_AT_WORK, COLLECTIONS_ENDED = "gc/at-work", "gc/ended"
"""Each collection of the last day leaves a mark here."""
_REMOVED_AT_ONCE = 200

# Answers, in the first line of obstore's message, after which a retry is pointless.
_REFUSED = re.compile(
    r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|AuthenticationFailed"
    r"|status: 40[13]|40[13] (Forbidden|Unauthorized)",
    re.IGNORECASE,
)
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|status: 507|507 |No space left|XAmzQuota", re.IGNORECASE)
_NO_SUCH_RANGE = re.compile(r"Invalid ?Range|status: 416|416 Range", re.IGNORECASE)
_BAD_ANSWER = re.compile(r"invalid DeleteObjects response", re.IGNORECASE)
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound", re.IGNORECASE)

_PASSING = frozenset({"GenericError", "JoinError", "TimeoutError", "ConnectionError", "OSError"})
"""Names of errors that may be transient: a dropped connection, a busy server."""

_memories: dict[str, "Client"] = {}
"""One client per ``memory://`` URL: all buckets of this process with the same URL see the same bytes."""
_memories_guard = threading.Lock()


class RemoteNotice(UserWarning):
    """A request to a remote failed and is retried."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One name in a bucket."""

    name: str
    size_bytes: int
    modified_ns: int
    """By the server's clock."""


class _Download:
    """A download of a byte range; after an error it resumes where the old stream was cut."""

    def __init__(self, stream_of: Callable[[int, int], Iterator[Any]], at: int, end: int) -> None:
        self._stream_of = stream_of
        self._stream: Iterator[Any] | None = None
        self.at = at
        self.end = end

    def next_piece(self) -> memoryview:
        """Return the next bytes, empty at the end."""
        for _ in range(2):  # a stream that ended early is replaced by another
            if self._stream is None:
                self._stream = self._stream_of(self.at, self.end)
            stream, self._stream = self._stream, None  # stays None if this raises
            piece = memoryview(next(stream, b""))
            if piece:
                self._stream = stream
                self.at += len(piece)
                return piece
        return memoryview(b"")


class Bucket:
    """
    Names and bytes under one URL. Thread-safe, but not across a fork.

    Names are as in a store: ``objects/ab/…``, with ``/``. Writes are atomic.
    """

    def __init__(self, url: str, *, may_make: bool = False) -> None:
        """
        Name the bucket; no request is sent yet.

        Raises:
            InvalidInput: *url* is not a bucket URL.
            NoStore: It is a folder that does not exist, unless it *may be made*.
        """
        self.url = checked_url(url)
        self._obstore = _imported()
        self._client, self._writer = _clients_of(self.url, may_make=may_make)
        self._pid = os.getpid()
        self._told_until = 0.0
        """No further failures are reported before this time: many requests fail at once for the same reason."""

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, name: str, *, size_bytes_max: int) -> bytes | None:
        """Return the bytes of *name*, None if it does not exist; raises IntegrityError if there are too many."""

        def once() -> bytes:
            found = self._obstore.get(self._client, name)
            size_bytes = found.meta["size"]
            if size_bytes > size_bytes_max:
                raise IntegrityError(
                    f"{self._called(name)} has {size_bytes} bytes, at most {size_bytes_max} were expected"
                )
            return bytes(found.bytes())

        return self._answer(f"read {name}", once)

    def chunks(self, name: str, *, start: int, size_bytes: int, is_whole: bool = False) -> Iterator[memoryview]:
        """
        Yield *size_bytes* of *name* from *start*, in pieces; resumes after a dropped connection.

        *is_whole* says that this is all of it.

        Raises:
            NotFound: There is no such name.
            IntegrityError: It is shorter.
        """
        download = _Download(lambda at, end: self._stream(name, at, end, is_whole=is_whole), start, start + size_bytes)
        while download.at < download.end:
            piece = self._answer(f"read {name}", download.next_piece)
            if piece is None:
                raise NotFound(f"{self._called(name)} is not there")
            if not piece:
                raise self._too_short(name, download.end)
            yield piece

    def _stream(self, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[Any]:
        # If the range covers the whole object, some servers answer as if there had been no range.
        options = {} if is_whole and not start else {"range": (start, end)}
        try:
            found = self._obstore.get(self._client, name, options=options)
        except Exception as exc:
            if not _NO_SUCH_RANGE.search(str(exc)):
                raise
            raise self._too_short(name, end) from None
        return iter(found.stream(IO_CHUNK_BYTES))

    def _too_short(self, name: str, end: int) -> IntegrityError:
        return IntegrityError(f"{self._called(name)} is shorter than the {end} bytes that were expected")

    def _look(self, name: str) -> Listed | None:
        """Return the listing entry of *name*, None if there is none."""
        return self._answer(f"look at {name}", lambda: _listed(self._obstore.head(self._client, name)))

    def size(self, name: str) -> int | None:
        """Return the size of *name*, None if it does not exist."""
        found = self._look(name)
        return None if found is None else found.size_bytes

    def listed(self, folder: str) -> list[Listed]:
        """Return everything below *folder*, by name; raises StorageIO if an empty answer cannot be trusted."""
        found = self._answer(
            f"list {folder}", lambda: [_listed(each) for batch in self._batches(folder) for each in batch]
        )
        if found is None:
            raise StorageIO(
                f"{self.url}: cannot list {folder}: the server says that there is no such place",
                errno=errnos.EIO,
                filename=self.url,
                hint="an empty folder is listed as empty; is there a proxy before the server?",
            )
        return sorted(found, key=attrgetter("name"))

    def objects(self) -> "list[Listed]":
        """Return all objects; lists the folders in parallel, since a listing comes a thousand names at a time."""
        with ThreadPoolExecutor(REMOTE_REQUESTS_MAX, thread_name_prefix="list") as pool:
            folders = pool.map(self.listed, OBJECT_FOLDERS)
            return [each for listed in folders for each in listed]

    def _batches(self, folder: str) -> Iterable[Any]:
        return cast("Iterable[Any]", self._obstore.list(self._client, f"{folder}/", chunk_size=1000))

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, name: str, chunks: Chunks) -> None:
        """Write what *chunks* yields as *name*, replacing any old content; if it raises, nothing is written."""

        def once() -> bool:
            body = _body(chunks())
            self._obstore.put(
                self._writer,
                name,
                body,
                use_multipart=not isinstance(body, bytes),
                chunk_size=REMOTE_PART_BYTES,
                max_concurrency=2,
            )
            return True

        self._write(name, once)

    def _write(self, name: str, once: Callable[[], bool]) -> None:
        if not self._answer(f"write {name}", once):
            raise StorageIO(
                f"{self.url}: cannot write {name}: the server says that there is no such place",
                errno=errnos.EIO,
                filename=self.url,
                hint="check the bucket's name and its rules for unfinished uploads, and repeat the command",
            )

    def create(self, name: str, data: bytes) -> None:
        """
        Write *data* as *name* unless it exists. Read it afterwards to see whose it is.

        Servers that do not support conditions overwrite it.
        """
        known = self._obstore.exceptions

        def once() -> bool:
            try:
                self._obstore.put(self._writer, name, data, mode="create")
            except (known.AlreadyExistsError, known.PreconditionError):
                pass  # the caller reads what is there
            except known.NotSupportedError:
                self._obstore.put(self._writer, name, data)
            return True

        self._write(name, once)

    def remove(self, names: Sequence[str], *, until: float = math.inf) -> bool:
        """Remove *names*, ignoring missing ones; return False if this could not be done by *until*."""

        def once(some: Sequence[str]) -> bool:
            if hours_on() > until:
                return False
            try:
                self._obstore.delete(self._client, some)
            except FileNotFoundError:
                # Some servers stop at the first missing name.
                return len(some) == 1 or all(once([name]) for name in some)
            except self._obstore.exceptions.GenericError as exc:
                # Some servers delete the objects but send an answer that cannot be parsed.
                if not _BAD_ANSWER.search(str(exc)) or any(self.size(name) is not None for name in some):
                    raise
            return True

        # In batches: some servers take one request per name, and thousands would not finish by *until*.
        batches = (names[at : at + _REMOVED_AT_ONCE] for at in range(0, len(names), _REMOVED_AT_ONCE))
        return all(self._answer(f"remove {some[0]}", partial(once, some)) is not False for some in batches)

    def now_ns(self) -> int:
        """Return the time by the server's clock; writes a file to learn it."""
        name = f"gc/clock-{random.getrandbits(64):016x}"
        written_ns = self.mark(name)
        self.remove([name])
        return written_ns

    def mark(self, name: str) -> int:
        """Write a mark called *name*; return its time by the server's clock."""
        self.write(name, lambda: [b"what time is it?"])
        found = self._look(name)
        if found is None:
            raise IntegrityError(
                f"{self._called(name)} was just written and is not there",
                hint="a store needs a server that shows at once what it has taken",
            )
        return found.modified_ns

    def check_process(self) -> None:
        """Raise Internal in a child of the process that opened it."""
        if self._pid != os.getpid():
            raise Internal(
                f"this remote was opened in process {self._pid} and is used in its child {os.getpid()}",
                hint="open it again after the fork, or start workers with 'spawn'",
            )

    # -- trouble -------------------------------------------------------------------------------------------------

    def _called(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _answer(self, doing: str, ask: Callable[[], Answer]) -> Answer | None:
        """Return what *ask* returns, None if the name does not exist; retry transient failures."""
        self.check_process()
        for tried in range(1, REMOTE_TRIES + 1):
            try:
                return _interruptible(ask)
            except LayerstoreError:
                raise
            except FileNotFoundError as exc:
                if _NO_BUCKET.search(str(exc)):
                    raise self._no_bucket() from None
                return None
            except Exception as exc:  # noqa: BLE001  # told apart by name and text
                problem = self._problem(doing, exc)
                if problem is not None or tried == REMOTE_TRIES:
                    # Drop the cause: its text is long and may hold secrets from the endpoint's URL.
                    raise problem or self._gave_up(doing, exc) from None
                pause = REMOTE_PAUSE_SECONDS * 2 ** (tried - 1) * random.uniform(0.5, 1.5)
                if time.monotonic() >= self._told_until:
                    self._told_until = time.monotonic() + pause
                    warnings.warn(
                        f"{self.url}: cannot {doing} ({_first_line(exc)}); trying again in {pause:.1f} s "
                        f"({tried} of {REMOTE_TRIES - 1})",
                        RemoteNotice,
                        stacklevel=3,
                    )
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _problem(self, doing: str, exc: Exception) -> Exception | None:
        """Return the error for a permanent failure, None for one that may be transient."""
        text, kind = str(exc), type(exc).__name__
        if _NO_BUCKET.search(text):
            return self._no_bucket()
        if kind in {"PermissionDeniedError", "UnauthenticatedError"} or _REFUSED.search(text):
            return StorageIO(
                f"{self.url}: cannot {doing}: the server refuses this key{_code_of(text)}",
                errno=errnos.EACCES,
                filename=self.url,
                hint=credentials_hint(self.url),
            )
        if _FULL.search(text):
            return StorageIO(f"{self.url}: cannot {doing}: no room is left", errno=errnos.EDQUOT, filename=self.url)
        if not kind.endswith("Error") or isinstance(exc, (TypeError, ValueError, AttributeError)):
            return exc  # a bug of ours
        return None if kind in _PASSING else self._gave_up(doing, exc)

    def _gave_up(self, doing: str, exc: Exception) -> StorageIO:
        return StorageIO(
            f"{self.url}: cannot {doing}: {_first_line(exc)}",
            errno=errnos.EIO,
            filename=self.url,
            hint="repeat the command once the server answers: what has arrived is not sent again",
        )

    def _no_bucket(self) -> NoStore:
        return NoStore(
            f"{self.url}: there is no such bucket", hint="make it with your cloud's own tool, or check its name"
        )


def _interruptible(ask: Callable[[], Answer]) -> Answer:
    """
    Return what *ask* returns; the main thread stays responsive to signals meanwhile.

    Python handles signals between bytecodes, and a call into obstore may block for minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        return ask()
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as exc:  # noqa: BLE001  # it is raised below
            answer.set_exception(exc)

    threading.Thread(target=work, name="request", daemon=True).start()
    return answer.result()


def hours_on() -> float:
    """Return a clock in seconds that keeps running while the process is stopped or the machine asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def in_parallel(pool: Executor, work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Do *work* on all *items*; if one fails, raise only once nothing is running any more."""
    futures = [pool.submit(work, item) for item in items]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise


def _imported() -> Any:
    try:
        import obstore
    except ImportError as exc:
        raise Unsupported("remotes need obstore", hint="pip install 'layerstore[remote]'") from exc
    return obstore


def _clients_of(url: str, *, may_make: bool) -> "tuple[Client, Client]":
    """Return the clients for reading and for writing; the writer may stay silent for as long as an upload takes."""
    from obstore.store import LocalStore, MemoryStore

    parts = urlsplit(url)
    if parts.scheme == "memory":
        with _memories_guard:
            memory = _memories.setdefault(url, MemoryStore())
        return memory, memory
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if not (may_make or path.is_dir()):
            raise NoStore(f"there is no folder {path}", hint="check its name; a push from a store makes one")
        folder = LocalStore(path, mkdir=may_make)
        return folder, folder
    options = s3_options() if parts.scheme == "s3" else {}
    # Downloads may take long; one that is cut after a day resumes.
    reader = _client(url, options, {"read_timeout": f"{REMOTE_SILENCE_SECONDS}s", "timeout": "1d"})
    return reader, _client(url, options, {"timeout": f"{REMOTE_UPLOAD_SECONDS}s"})


def _client(url: str, options: Mapping[str, Any], patience: "ClientConfig") -> "Client":
    from obstore.store import from_url

    client_options: ClientConfig = {"allow_http": True, **patience}
    # obstore would retry silently; we retry ourselves and report it.
    try:
        return from_url(url, retry_config={"max_retries": 0}, client_options=client_options, **options)
    except Exception as exc:  # noqa: BLE001  # each cloud has its own
        raise InvalidInput(f"{url} cannot be used: {_first_line(exc)}", hint=credentials_hint(url)) from None


def _listed(meta: Any) -> Listed:
    modified: datetime = meta["last_modified"]
    return Listed(meta["path"], meta["size"], int(modified.timestamp() * 1e6) * 1000)


def _body(chunks: Iterable[bytes | memoryview]) -> bytes | Iterator[bytes]:
    """
    Return *chunks* joined if they fit into one part, since a multipart upload takes three requests; else one by one.

    The chunks are copied: obstore holds on to them until they are sent.
    """
    rest = (bytes(chunk) for chunk in chunks)
    first = bytearray()
    for chunk in rest:
        first += chunk
        if len(first) > REMOTE_PART_BYTES:
            return itertools.chain([bytes(first)], rest)
    return bytes(first)


def _code_of(text: str) -> str:
    """Return which of its codes a server's answer gives, in brackets: a wrong clock is refused as a wrong key is."""
    found = re.search(r"<Code>(\w+)</Code>", text)
    return f" ({found[1]})" if found else ""


def _first_line(exc: Exception) -> str:
    """Return the message of *exc* without what obstore adds: its name for the service, microseconds, and XML."""
    line = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
    line = re.sub(r"//[^/\s]*@", "//…@", line)
    line = re.sub(r": <\?xml.*?<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?.*", r": \1: \2", line)
    line = re.sub(r"^Generic \S+ error: (Error performing )?| in [0-9.]+[µmn]?s(?= - )", "", line)
    return line if len(line) <= 300 else f"{line[:300]}…"
