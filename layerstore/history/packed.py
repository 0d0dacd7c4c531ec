"""
Many references to objects in little memory: what a store of millions of them needs.

A `BlobRef` with its id as text takes 250 bytes, a row of `PackedRefs` 28. Rows lie in 256 parts by the first byte of
the id, as the objects do in their folders, and are looked at one part after another.

`NumberedIds` has 18 bytes for an id, and is asked for any one at any moment.
"""

import struct
from collections.abc import Iterator

from layerstore.errors import IntegrityError
from layerstore.model import BlobRef, ObjectId
from layerstore.storage.layout import OBJECT_ID

PARTS = 256
_ROW = struct.Struct(">16sQI")
_ENTRY = struct.Struct(">16sQ")
_SIZE_BYTES_MAX = 2**63
# A part is made distinct when it has twice as many rows as it had distinct ones, and so many more.
_SLACK_ROWS = 1024

# Of numbered ids so few lie in one part, also of millions, that looking through it takes no time.
_SMALL_PARTS = 65536
_TAIL_BYTES = 14
_NUMBER_BYTES = 4


class PackedRefs:
    """References, each with a number that says where it was named; one and the same row counts once."""

    def __init__(self) -> None:
        self._parts = [bytearray() for _ in range(PARTS)]
        self._limits = [_SLACK_ROWS * _ROW.size] * PARTS

    def add(self, ref: BlobRef, number: int = 0) -> None:
        """
        Note *ref*, named at *number*.

        Raises:
            IntegrityError: It is no reference that any object could have.
        """
        if not OBJECT_ID.fullmatch(ref.id) or not 0 <= ref.size_bytes < _SIZE_BYTES_MAX:
            raise IntegrityError(f"{ref.id!r} of {ref.size_bytes} bytes is no object")
        at = int(ref.id[:2], 16)
        part = self._parts[at]
        part += _ROW.pack(bytes.fromhex(ref.id), ref.size_bytes, number)
        if len(part) > self._limits[at]:
            part[:] = b"".join(sorted(_rows(part)))
            self._limits[at] = 2 * len(part) + _SLACK_ROWS * _ROW.size

    def part(self, at: int) -> dict[BlobRef, list[int]]:
        """Return the references whose ids begin with the byte *at*, by id, each with its numbers."""
        found: dict[BlobRef, list[int]] = {}
        for row in sorted(_rows(self._parts[at])):
            object_id, size_bytes, number = _ROW.unpack(row)
            found.setdefault(BlobRef(id=ObjectId(object_id.hex()), size_bytes=size_bytes), []).append(number)
        return found

    def __iter__(self) -> Iterator[tuple[BlobRef, list[int]]]:
        """Yield every reference, by id, with its numbers."""
        for at in range(PARTS):
            yield from self.part(at).items()


class PackedList:
    """References by number, in the order in which they came."""

    def __init__(self) -> None:
        self._rows = bytearray()

    def append(self, ref: BlobRef) -> int:
        """Note *ref*; return its number."""
        self._rows += _ENTRY.pack(bytes.fromhex(ref.id), ref.size_bytes)
        return len(self._rows) // _ENTRY.size - 1

    def __getitem__(self, number: int) -> BlobRef:
        object_id, size_bytes = _ENTRY.unpack_from(self._rows, number * _ENTRY.size)
        return BlobRef(id=ObjectId(object_id.hex()), size_bytes=size_bytes)


class NumberedIds:
    """Ids, each with the number that it had when it was first noted."""

    def __init__(self) -> None:
        self._parts = [b""] * _SMALL_PARTS
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, object_id: object) -> bool:
        return isinstance(object_id, str) and self.number(ObjectId(object_id)) is not None

    def add(self, object_id: ObjectId, number: int) -> bool:
        """
        Note *object_id* with *number*, unless it is there; return whether it was not.

        Raises:
            IntegrityError: It is no id that any object could have.
        """
        at, tail = _split(object_id)
        if _find(self._parts[at], tail) >= 0:
            return False
        self._parts[at] += tail + number.to_bytes(_NUMBER_BYTES, "big")
        self._count += 1
        return True

    def number(self, object_id: ObjectId) -> int | None:
        """Return the number of *object_id*, None where it was not noted."""
        at, tail = _split(object_id)
        part = self._parts[at]
        start = _find(part, tail)
        return None if start < 0 else int.from_bytes(part[start + _TAIL_BYTES : start + _TAIL_BYTES + _NUMBER_BYTES])


def _split(object_id: ObjectId) -> tuple[int, bytes]:
    if not OBJECT_ID.fullmatch(object_id):
        raise IntegrityError(f"{object_id!r} is no id of an object")
    return int(object_id[:4], 16), bytes.fromhex(object_id[4:])


def _find(part: bytes, tail: bytes) -> int:
    """Return where the row of *tail* begins in *part*, -1 where there is none."""
    start = part.find(tail)
    while start > 0 and start % (_TAIL_BYTES + _NUMBER_BYTES):  # the same bytes across two rows
        start = part.find(tail, start + 1)
    return start


def _rows(part: bytearray) -> set[bytes]:
    view = bytes(part)
    return {view[start : start + _ROW.size] for start in range(0, len(view), _ROW.size)}
