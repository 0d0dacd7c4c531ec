"""
The checksums of the format. Only this module uses xxhash and isal.

xxh3_128 gives content its id, xxh3_64 checks 16 MiB at a time, and zip archives need crc32. All three detect
accidents, not attacks.
"""

from collections.abc import Iterable
from typing import TypeAlias

import xxhash
from isal import isal_zlib

from layerstore.errors import DAMAGED_HINT, IntegrityError
from layerstore.limits import VERIFY_CHUNK_BYTES
from layerstore.model import BlobRef, ObjectId

# ``Buffer`` is only in Python 3.12's collections.abc.
Bytes: TypeAlias = bytes | bytearray | memoryview

DIGEST_BYTES = 16

# Up to this size, the two widths of xxh3 have nothing in common.
_SHORT_BYTES = 240


def digest(data: Bytes) -> bytes:
    """Return the xxh3_128 of *data*, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def object_id(data: Bytes) -> ObjectId:
    """Return the name of *data* in the store."""
    return ObjectId(digest(data).hex())


crc32 = isal_zlib.crc32
"""The zip checksum of bytes; an optional second argument is the checksum of the bytes before. An alias, for speed."""


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """
    Return the checksum of the concatenation of *parts*, given as (crc32, size in bytes).

    >>> combine_crc32([(crc32(b"layer"), 5), (crc32(b"store"), 5)]) == crc32(b"layerstore")
    True
    """
    total = 0
    for checksum, size_bytes in parts:
        if size_bytes:
            total = isal_zlib.crc32_combine(total, checksum, size_bytes)
    return total


def crc32_of_zeros(size_bytes: int) -> int:
    """
    Return the checksum of *size_bytes* zero bytes without making them.

    >>> crc32_of_zeros(1000) == crc32(bytes(1000))
    True
    """
    total, block = 0, crc32(b"\0")
    for bit in range(size_bytes.bit_length()):
        if size_bytes >> bit & 1:
            total = isal_zlib.crc32_combine(total, block, 1 << bit)
        block = isal_zlib.crc32_combine(block, block, 1 << bit)
    return total


class NameHasher:
    """Computes an object's name while its bytes stream by."""

    __slots__ = ("_whole", "size_bytes")

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self.size_bytes = 0

    def update(self, data: Bytes) -> None:
        """Take the next bytes of the object."""
        self._whole.update(data)
        self.size_bytes += len(data)

    def id(self) -> ObjectId:
        """Return the name of the bytes so far."""
        return ObjectId(self._whole.hexdigest())


class ObjectHasher(NameHasher):
    """
    Digests an object while its bytes stream by: as a whole, and every 16 MiB of it.

    For more than 240 bytes, xxh3_64 is the lower half of xxh3_128. So the first chunk, which is the whole of most
    objects, is hashed only once for both digests.
    """

    __slots__ = ("_chunk", "_chunk_left_bytes", "_chunks")

    def __init__(self) -> None:
        super().__init__()
        self._chunk: xxhash.xxh3_64 | None = None
        """The hasher of the current chunk; None during the first chunk, which the hasher of the whole object covers."""
        self._chunk_left_bytes = VERIFY_CHUNK_BYTES
        self._chunks: list[bytes] = []

    def update(self, data: Bytes) -> None:
        """Take the next bytes of the object."""
        view = memoryview(data)
        while view:
            part, view = view[: self._chunk_left_bytes], view[self._chunk_left_bytes :]
            super().update(part)
            if self._chunk is not None:
                self._chunk.update(part)
            self._chunk_left_bytes -= len(part)
            if not self._chunk_left_bytes:
                self._chunks.append(self._of_chunk())
                self._chunk, self._chunk_left_bytes = xxhash.xxh3_64(), VERIFY_CHUNK_BYTES

    def _of_chunk(self) -> bytes:
        if self._chunk is not None:
            return self._chunk.digest()
        assert self.size_bytes > _SHORT_BYTES, "every object starts with a header of a page"
        return self._whole.digest()[DIGEST_BYTES // 2 :]

    def chunks(self) -> bytes:
        """Return the digests of all chunks, including a last chunk of less than 16 MiB."""
        tail = [self._of_chunk()] if self._chunk_left_bytes < VERIFY_CHUNK_BYTES else []
        return b"".join(self._chunks + tail)


def check_chunk(ref: BlobRef, digests: bytes, number: int, pieces: Iterable[Bytes]) -> None:
    """Raise IntegrityError unless *pieces* together are chunk *number* of *ref*, whose chunks have *digests*."""
    hasher, size_bytes = xxhash.xxh3_64(), 0
    for data in pieces:
        hasher.update(data)
        size_bytes += len(data)
    actual = hasher.digest()
    if digests[number * len(actual) :][: len(actual)] != actual:
        start = number * VERIFY_CHUNK_BYTES
        raise IntegrityError(
            f"object {ref.id} is damaged between {start} and {start + size_bytes} bytes",
            hint=DAMAGED_HINT,
            object_id=ref.id,
        )
