"""
Parts of a remote's objects: resuming with another number of ranks needs only a stretch of each slice.

They are fetched in chunks of 16 MiB into a sparse file next to the objects, and each chunk is checked against the
digest in its version blob. Chunks that are there already are checked again, so no bookkeeping is needed.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor

from layerstore.disk import Files, NewFile, OpenFile, alone
from layerstore.errors import IntegrityError
from layerstore.hashing import check_chunk
from layerstore.layout import Layout
from layerstore.limits import VERIFY_CHUNK_BYTES
from layerstore.model import BlobRef, ObjectId, StoredObject
from layerstore.remote.bucket import in_parallel
from layerstore.remote.source import Source
from layerstore.storage import Stretch, read_chunks


class SparseObjects:
    """The folder ``sparse/``."""

    def __init__(
        self, layout: Layout, files: Files, source: Source, pool: Executor, *, make_room: Callable[[int], None]
    ) -> None:
        self._layout = layout
        self._files = files
        self._source = source
        self._pool = pool
        self._make_room = make_room
        self._digests: dict[ObjectId, bytes] = {}
        self.bytes_fetched = 0

    def know(self, objects: Iterable[StoredObject]) -> None:
        """Note the digests of those *objects* that are large enough to be fetched in parts."""
        self._digests.update((each.id, each.chunks) for each in objects if each.size_bytes > VERIFY_CHUNK_BYTES)

    def chunks(self, ref: BlobRef, stretches: Iterable[Stretch]) -> list[int]:
        """Return the numbers of the chunks that *stretches* of *ref* touch; none if *ref* can only be fetched whole."""
        if ref.id not in self._digests:
            return []
        found = {number for start, end in stretches for number in range(start // VERIFY_CHUNK_BYTES, _chunks_to(end))}
        return sorted(found) if len(found) < _chunks_to(ref.size_bytes) else []

    def open(self, ref: BlobRef, numbers: Sequence[int]) -> OpenFile:
        """
        Open a file that has the chunks *numbers* of *ref* in place; missing ones are fetched.

        Raises:
            IntegrityError: It is damaged in the bucket.
            NotFound: The bucket does not have it.
        """
        path = self._layout.sparse / ref.id
        with alone(self._layout.locks / f"sparse-{ref.id}"):
            if not self._files.exists(path):
                self._make(path.name, ref)
            source = self._files.open(path)
            try:
                with self._files.overwrite(path) as target:
                    in_parallel(self._pool, lambda number: self._bring(ref, number, source, target), numbers)
            except BaseException:
                source.close()
                raise
        self._files.touch(path)  # eviction is least recently used first
        return source

    def _make(self, name: str, ref: BlobRef) -> None:
        folder, made = self._layout.sparse, self._layout.tmp / secrets.token_hex(16)
        self._files.make_directory(folder, durable=False)
        with self._files.create(made) as file:
            file.write_at(ref.size_bytes - 1, b"\0")
        self._files.rename(made, folder / name)

    def _bring(self, ref: BlobRef, number: int, source: OpenFile, target: NewFile) -> None:
        start = number * VERIFY_CHUNK_BYTES
        size_bytes = min(VERIFY_CHUNK_BYTES, ref.size_bytes - start)
        digests = self._digests[ref.id]
        try:
            check_chunk(ref, digests, number, read_chunks(source, start, size_bytes))
        except IntegrityError:
            self._make_room(size_bytes)
            check_chunk(ref, digests, number, self._fetched(ref, start, size_bytes, target))
            self.bytes_fetched += size_bytes

    def _fetched(self, ref: BlobRef, start: int, size_bytes: int, target: NewFile) -> Iterator[memoryview]:
        """Yield a stretch of *ref* as it arrives, and write it to *target*: nobody uses it before it is checked."""
        at = start
        for data in self._source.bucket.chunks(self._layout.object_name(ref.id), start=start, size_bytes=size_bytes):
            target.write_at(at, data)
            at += len(data)
            yield data


def _chunks_to(end: int) -> int:
    return -(-end // VERIFY_CHUNK_BYTES)
