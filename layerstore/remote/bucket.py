"""
A bucket: one prefix of S3, Google Cloud Storage or Azure, a folder, or this process's memory.

Transient failures are retried with growing pauses, and every retry is reported: as a warning, or to a callback.
"""

import copy
import errno as errnos
import itertools
import math
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from layerstore.disk import hours_on
from layerstore.errors import (
    IntegrityError,
    Internal,
    LayerstoreError,
    NoStore,
    NotFound,
    StorageIO,
)
from layerstore.limits import (
    REMOTE_PAUSE_SECONDS,
    REMOTE_REQUESTS_MAX,
    REMOTE_TRIES,
    REMOTE_UPLOAD_SECONDS,
)
from layerstore.remote.cloud import Cloud, first_line
from layerstore.remote.folder import Folder, Listed
from layerstore.remote.remotes import checked_url, credentials_hint, folder_at
from layerstore.threads import Threads, start

Answer = TypeVar("Answer")
Chunks = Callable[[], Iterable[bytes | memoryview]]
"""Returns the bytes to write, from the start at each call, because a request may be retried."""

OBJECT_FOLDERS = tuple(f"objects/{prefix:02x}" for prefix in range(256))
"""The folders that hold objects."""
COLLECTIONS_AT_WORK, COLLECTIONS_ENDED = "gc/at-work", "gc/ended"
"""Folders in which every collection leaves a mark for a day."""
LISTED_AT_ONCE = 1000
"""How many names a server lists per request."""
_QUICK_SECONDS = REMOTE_UPLOAD_SECONDS / 16
"""
If an upload in small parts takes less time than this, so does each of its parts. Two large parts, sent at once, have
eight times the bytes of a small one, and so fit into the timeout of a request. On a slow line, parts stay small.
"""
_REMOVED_AT_ONCE = 200
_RANDOM = random.SystemRandom()
"""Our own generator, so that those of the training program draw the same numbers with and without us."""

# Answers of the server, found in the text of obstore's message, after which a retry is pointless.
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
"""Names of obstore's errors that may be transient: a dropped connection, a busy server."""


class RemoteNotice(UserWarning):
    """A request to a remote failed and is retried."""


class NoBucket(NoStore):
    """The bucket itself does not exist."""


class _Download:
    """A download of a byte range; after an error it resumes where the stream was cut off."""

    def __init__(self, stream_of: Callable[[int, int], Iterator[Any]], at: int, end: int) -> None:
        self._stream_of = stream_of
        self._stream: Iterator[Any] | None = None
        self.at = at
        self.end = end

    def next_piece(self) -> memoryview:
        """Return the next bytes, empty at the end."""
        for _ in range(2):  # a stream that has ended is replaced once
            if self._stream is None:
                self._stream = self._stream_of(self.at, self.end)
            stream, self._stream = self._stream, None  # stays None if this raises
            piece = memoryview(next(stream, b""))
            # Kept only now: after an error or the end, the next call requests the rest in a new stream.
            if piece:
                self._stream = stream
                self.at += len(piece)
                return piece
        return memoryview(b"")


class Bucket:
    """
    Names and bytes under one URL. Thread-safe, but not across a fork.

    Names are the same as in a store: ``objects/ab/…``, with ``/``. Writes are atomic.
    """

    def __init__(self, url: str, *, may_make: bool = False, on_made: Callable[[str], None] = lambda _: None) -> None:
        """
        Set up the bucket; no request is sent yet. When the bucket becomes a store, *on_made* is called with its URL.

        Raises:
            InvalidInput: *url* is not a bucket URL.
            NoStore: *url* is a folder that does not exist, and *may_make* is not set.
        """
        self.url = checked_url(url)
        self.on_made = on_made
        folder = folder_at(self.url)
        self._client = Cloud(self.url) if folder is None else Folder(folder, url=self.url, may_make=may_make)
        self._pid = os.getpid()
        self._retries = True
        self._report: Callable[[str], None] | None = None
        self._warned_until = 0.0
        """No further warning before this time: many requests fail at once for the same reason."""

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def without_retries(self) -> "Bucket":
        """Return the same bucket, but one that tries each request only once."""
        bucket = copy.copy(self)
        bucket._retries = False
        return bucket

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, name: str, *, size_bytes_max: int) -> bytes | None:
        """Return the bytes of *name*, None if it does not exist; raises IntegrityError if it is too large."""

        def once() -> bytes:
            size_bytes, pieces = self._client.get(name)
            if size_bytes > size_bytes_max:
                raise IntegrityError(
                    f"{self._url_of(name)} has {size_bytes} bytes, at most {size_bytes_max} were expected"
                )
            data = b"".join(pieces)
            if len(data) < size_bytes:
                raise ConnectionError("the answer ends early")
            return data

        return self._request(f"read {name}", once)

    def chunks(self, name: str, *, start: int, size_bytes: int, is_whole: bool = False) -> Iterator[memoryview]:
        """
        Yield *size_bytes* of *name* from *start*, in pieces; resumes after a dropped connection.

        *is_whole* means that these bytes are the whole object.

        Raises:
            NotFound: *name* does not exist.
            IntegrityError: The object is too short.
        """
        download = _Download(lambda at, end: self._stream(name, at, end, is_whole=is_whole), start, start + size_bytes)
        while download.at < download.end:
            piece = self._request(f"read {name}", partial(self._next_piece, name, download))
            if piece is None:
                raise NotFound(f"{self._url_of(name)} is not there")
            if not piece:
                raise self._too_short(name, download.end)
            yield piece

    def _next_piece(self, name: str, download: _Download) -> memoryview:
        """Return the next bytes of *name*, empty if the object ends here; raises if only the answer ended early."""
        piece = download.next_piece()
        if not piece and (self.size(name) or 0) >= download.end:
            raise ConnectionError("the answer ends early")
        return piece

    def _stream(self, name: str, start: int, end: int, *, is_whole: bool) -> Iterator[Any]:
        # For the whole object, send no range: some servers ignore such a range, and answer as if none had been sent.
        stretch = None if is_whole and not start else (start, end)
        try:
            _, pieces = self._client.get(name, stretch)
        except Exception as exc:
            if not _NO_SUCH_RANGE.search(str(exc)):
                raise
            raise self._too_short(name, end) from None
        return pieces

    def _too_short(self, name: str, end: int) -> IntegrityError:
        return IntegrityError(f"{self._url_of(name)} is shorter than the {end} bytes that were expected")

    def look(self, name: str) -> Listed | None:
        """Return the listing entry of *name*, None if *name* does not exist."""
        return self._request(f"look at {name}", lambda: self._client.head(name))

    def size(self, name: str) -> int | None:
        """Return the size of *name*, None if it does not exist."""
        entry = self.look(name)
        return None if entry is None else entry.size_bytes

    def listed(self, folder: str) -> list[Listed]:
        """Return everything below *folder*, by name; raises StorageIO if an empty answer cannot be trusted."""
        entries = self._request(f"list {folder}", lambda: list(self._client.list(folder)))
        if entries is None:
            raise StorageIO(
                f"{self.url}: cannot list {folder}: the server says that there is no such place",
                errno=errnos.EIO,
                filename=self.url,
                hint="servers list empty folders too: look for a proxy in front of this one",
            )
        return sorted(entries, key=attrgetter("name"))

    def objects(self) -> "list[Listed]":
        """Return all objects; lists the folders in parallel, since servers list only a thousand names per request."""
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="list") as pool:
            folders = pool.map(self.listed, OBJECT_FOLDERS)
            return [entry for entries in folders for entry in entries]

    def check_links(self) -> None:
        """Raise IntegrityError if a ``file://`` bucket contains a link; other buckets have none."""
        if isinstance(self._client, Folder):
            self._request("list all of it", self._client.check)

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, name: str, chunks: Chunks) -> None:
        """Write the bytes from *chunks* as *name*, replacing any old content; if *chunks* raises, write nothing."""

        def once() -> bool:
            body, began = _body(chunks(), self._client.part_bytes), hours_on()
            try:
                self._client.put(name, body)
            except Exception:
                self._client.use_large_parts(False)
                raise
            if not isinstance(body, bytearray) and hours_on() < began + _QUICK_SECONDS:
                self._client.use_large_parts(True)
            return True

        self._write(name, once)

    def _write(self, name: str, once: Callable[[], bool]) -> None:
        if not self._request(f"write {name}", once):
            raise StorageIO(
                f"{self.url}: cannot write {name}: the server says that there is no such place",
                errno=errnos.EIO,
                filename=self.url,
                hint="check the bucket's name and its rules for unfinished uploads, and repeat the command",
            )

    def create(self, name: str, data: bytes) -> None:
        """
        Write *data* as *name* unless *name* exists. The caller must read *name* back to see which writer won.

        Servers that do not support conditional writes overwrite an existing *name*.
        """

        def once() -> bool:
            self._client.create(name, data)
            return True

        self._write(name, once)

    def remove(self, names: Sequence[str], *, until: float = math.inf) -> bool:
        """Remove *names*, ignoring missing ones; return False if some were not removed before *until*."""

        def once(batch: Sequence[str]) -> bool:
            if hours_on() > until:
                return False
            try:
                self._client.delete(batch)
            except FileNotFoundError:
                # Some servers stop at the first missing name.
                return len(batch) == 1 or all(once([name]) for name in batch)
            except LayerstoreError:
                raise
            except Exception as exc:
                # Some servers delete the objects but send an answer that cannot be parsed.
                if not _BAD_ANSWER.search(str(exc)) or any(self.size(name) is not None for name in batch):
                    raise
            return True

        # In batches, none begun after *until*: some servers need one request per name, so thousands take long.
        batches = (names[at : at + _REMOVED_AT_ONCE] for at in range(0, len(names), _REMOVED_AT_ONCE))
        return all(self._request(f"remove {batch[0]}", partial(once, batch)) is not False for batch in batches)

    def now_ns(self) -> int:
        """Return the server's time, found by writing a file."""
        name = f"gc/clock-{_RANDOM.getrandbits(64):016x}"
        written_ns = self.mark(name)
        self.remove([name])
        return written_ns

    def mark(self, name: str) -> int:
        """Write a mark called *name*; return its time by the server's clock."""
        self.write(name, lambda: [b"what time is it?"])
        entry = self.look(name)
        if entry is None:
            raise IntegrityError(
                f"{self._url_of(name)} was just written and is not there",
                hint="a store needs a server that shows a write as soon as it has confirmed it",
            )
        return entry.modified_ns

    def check_process(self) -> None:
        """Raise Internal in a forked child of the process that opened the bucket."""
        if self._pid != os.getpid():
            raise Internal(
                f"this remote was opened in process {self._pid} and is used in its child {os.getpid()}",
                hint="open it again after the fork, or start workers with 'spawn'",
            )

    # -- failures ------------------------------------------------------------------------------------------------

    def report_retries(self, report: Callable[[str], None] | None) -> None:
        """Call *report* with one line per retry, from any thread, instead of warning; None restores the warnings."""
        self._report = report

    def _url_of(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _request(self, doing: str, send: Callable[[], Answer]) -> Answer | None:
        """Return the result of *send*, None if the name does not exist; retry transient failures."""
        self.check_process()
        tries = REMOTE_TRIES if self._retries else 1
        for attempt in range(1, tries + 1):
            try:
                return _interruptible(send)
            except LayerstoreError:
                raise
            except FileNotFoundError as exc:
                if _NO_BUCKET.search(str(exc)):
                    raise self._no_bucket() from None
                return None
            except Exception as exc:  # noqa: BLE001  # obstore's errors are recognised by name and text
                problem = self._problem(doing, exc)
                if problem is not None or attempt == tries:
                    # Drop the cause: its text is long and may contain secrets from the endpoint's URL.
                    raise problem or self._unavailable(doing, exc) from None
                pause = REMOTE_PAUSE_SECONDS * 2 ** (attempt - 1) * _RANDOM.uniform(0.5, 1.5)
                notice = RemoteNotice(
                    f"{self.url}: cannot {doing} ({first_line(exc)}); trying again in {pause:.1f} s "
                    f"({attempt} of {tries - 1})"
                )
                self._notify(notice, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _notify(self, notice: RemoteNotice, pause: float) -> None:
        if self._report is not None:
            self._report(str(notice))
        elif time.monotonic() >= self._warned_until:
            self._warned_until = time.monotonic() + pause
            warnings.warn(notice, stacklevel=4)

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
            return StorageIO(
                f"{self.url}: cannot {doing}: no room is left",
                errno=errnos.EDQUOT,
                filename=self.url,
                hint="make room there, and repeat the command",
            )
        if not kind.endswith("Error") or isinstance(exc, (TypeError, ValueError, AttributeError, MemoryError)):
            return exc  # a bug in our code, or no memory for a thread
        return None if kind in _PASSING else self._unavailable(doing, exc)

    def _unavailable(self, doing: str, exc: Exception) -> StorageIO:
        return StorageIO(
            f"{self.url}: cannot {doing}: {first_line(exc)}",
            errno=errnos.EIO,
            filename=self.url,
            hint="repeat the command once the server answers: what has arrived is not sent again",
        )

    def _no_bucket(self) -> NoBucket:
        return NoBucket(
            f"{self.url}: there is no such bucket", hint="make it with your cloud's own tool, or check its name"
        )


def _interruptible(send: Callable[[], Answer]) -> Answer:
    """
    Return the result of *send*; the main thread handles signals in the meantime.

    Python handles signals between bytecodes, and a call into obstore may block for minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        return send()
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(send())
        except BaseException as exc:  # noqa: BLE001  # it is raised below
            answer.set_exception(exc)

    start(threading.Thread(target=work, name="request", daemon=True))
    return answer.result()


def _body(chunks: Iterable[bytes | memoryview], part_bytes: int) -> bytearray | Iterator[bytes | bytearray]:
    """
    Return *chunks* joined if they fit into one part (a multipart upload takes three requests), otherwise one by one.

    Each chunk is copied once, because obstore keeps the chunk until it is sent.
    """
    rest = iter(chunks)
    first = bytearray()
    for chunk in rest:
        first += chunk
        if len(first) > part_bytes:
            return itertools.chain([first], map(bytes, rest))
    return first


def _code_of(text: str) -> str:
    """Return the code in a server's answer, in brackets: it distinguishes a wrong clock from a wrong key."""
    match = re.search(r"<Code>(\w+)</Code>", text)
    return f" ({match[1]})" if match else ""
