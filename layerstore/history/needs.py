"""What a record needs: its version and state blobs, and every object that these name."""

import struct
from collections.abc import Callable, Iterable, Iterator

from layerstore.errors import IntegrityError
from layerstore.format import STATE_MAGIC, decode_state, decode_version
from layerstore.layout import OBJECT_ID
from layerstore.model import BlobRef, CommitRecord, LayerVersion, ObjectContent, ObjectId, Part, RankState
from layerstore.storage import Repository
from layerstore.tree import Tensor
from layerstore.zero3 import replace_tensors

PARTS = 256
_ROW = struct.Struct(">16sQI")
_ENTRY = struct.Struct(">16sQ")
_SIZE_BYTES_MAX = 2**63
# Duplicates in a part are removed when it has twice its number of distinct rows, and so many more.
_SLACK_ROWS = 1024

# So many that even of millions of ids only a few are in one part, which is searched linearly.
_SMALL_PARTS = 65536
_TAIL_BYTES = 14
_NUMBER_BYTES = 4


class PackedRefs:
    """References, each with a number that says where it was named; equal rows count once. 28 bytes a row."""

    def __init__(self) -> None:
        self._parts = [bytearray() for _ in range(PARTS)]
        self._limits = [_SLACK_ROWS * _ROW.size] * PARTS

    def add(self, ref: BlobRef, number: int = 0) -> None:
        """
        Note *ref*, named at *number*.

        Raises:
            IntegrityError: It cannot be an object's.
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
        """Return the references whose ids begin with the byte *at*, in order, each with its numbers."""
        found: dict[BlobRef, list[int]] = {}
        for row in sorted(_rows(self._parts[at])):
            object_id, size_bytes, number = _ROW.unpack(row)
            found.setdefault(BlobRef(id=ObjectId(object_id.hex()), size_bytes=size_bytes), []).append(number)
        return found

    def __iter__(self) -> Iterator[tuple[BlobRef, list[int]]]:
        """Yield every reference, in order, with its numbers."""
        for at in range(PARTS):
            yield from self.part(at).items()


class PackedList:
    """References by position, 24 bytes each."""

    def __init__(self) -> None:
        self._rows = bytearray()

    def append(self, ref: BlobRef) -> int:
        """Append *ref*; return its position."""
        self._rows += _ENTRY.pack(bytes.fromhex(ref.id), ref.size_bytes)
        return len(self._rows) // _ENTRY.size - 1

    def __getitem__(self, number: int) -> BlobRef:
        object_id, size_bytes = _ENTRY.unpack_from(self._rows, number * _ENTRY.size)
        return BlobRef(id=ObjectId(object_id.hex()), size_bytes=size_bytes)


class NumberedIds:
    """Ids, each with the number that it was first added with, 18 bytes each."""

    def __init__(self) -> None:
        self._parts = [b""] * _SMALL_PARTS
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, object_id: object) -> bool:
        return isinstance(object_id, str) and self.number(ObjectId(object_id)) is not None

    def add(self, object_id: ObjectId, number: int) -> bool:
        """
        Add *object_id* with *number*; return whether it is new.

        Raises:
            IntegrityError: It cannot be an object's.
        """
        at, tail = _split(object_id)
        if _find(self._parts[at], tail) >= 0:
            return False
        self._parts[at] += tail + number.to_bytes(_NUMBER_BYTES, "big")
        self._count += 1
        return True

    def number(self, object_id: ObjectId) -> int | None:
        """Return the number of *object_id*, None if it was not added."""
        at, tail = _split(object_id)
        part = self._parts[at]
        start = _find(part, tail)
        return None if start < 0 else int.from_bytes(part[start + _TAIL_BYTES : start + _TAIL_BYTES + _NUMBER_BYTES])


def _split(object_id: ObjectId) -> tuple[int, bytes]:
    if not OBJECT_ID.fullmatch(object_id):
        raise IntegrityError(f"{object_id!r} is no id of an object")
    return int(object_id[:4], 16), bytes.fromhex(object_id[4:])


def _find(part: bytes, tail: bytes) -> int:
    """Return where the row of *tail* begins in *part*, -1 if there is none."""
    start = part.find(tail)
    while start > 0 and start % (_TAIL_BYTES + _NUMBER_BYTES):  # the same bytes across two rows
        start = part.find(tail, start + 1)
    return start


def _rows(part: bytearray) -> set[bytes]:
    view = bytes(part)
    return {view[start : start + _ROW.size] for start in range(0, len(view), _ROW.size)}


def objects_of_version(version: LayerVersion) -> list[BlobRef]:
    """Return the objects that a layer version needs."""
    return [stored.ref for stored in version.objects]


def objects_of_state(state: RankState) -> list[BlobRef]:
    """Return the objects that a rank's state needs."""
    contents: list[object] = [file.content for file in state.files]
    contents += [tensor.stored for file in state.gathered for tensor in file.tensors]

    def note(tensor: Tensor) -> Tensor:
        contents.append(tensor.storage.content)
        return tensor

    for file in (state.model, state.optimizer):
        replace_tensors(file.tree, note)
    return [content.object for content in contents if isinstance(content, ObjectContent)]


def named_by(repo: Repository, blob: BlobRef) -> list[BlobRef]:
    """
    Return the objects that *blob*, a version or a rank's state, needs.

    Raises:
        IntegrityError: It is damaged, missing, or another kind of object.
    """
    data = repo.objects.read(blob)
    if data.startswith(STATE_MAGIC):
        return objects_of_state(decode_state(data, ref=blob))
    return objects_of_version(decode_version(data, ref=blob))


class Needs:
    """
    Every object that some records and parts need; a blob that many share is read once.

    Each object keeps the number that it was first added with. What is in *besides* is left out, and not read.
    """

    def __init__(self, repo: Repository, *, besides: "Needs | None" = None) -> None:
        self._repo = repo
        self._besides = besides
        self._ids = NumberedIds()

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def number(self, object_id: ObjectId) -> int | None:
        """Return the number that *object_id* was first added with, None if it was not."""
        return self._ids.number(object_id)

    def add_record(self, record: CommitRecord, *, number: int = 0) -> list[BlobRef]:
        """
        Add what *record* needs; return what is new.

        Raises:
            IntegrityError: A version or state blob is damaged or missing.
        """
        new = []
        for entry in record.layers:
            new += self.add_version(entry.version, number=number)
        for state in record.states:
            new += self.add_state(state, number=number)
        return new

    def add(self, refs: Iterable[BlobRef], *, number: int = 0) -> list[BlobRef]:
        """Add *refs* themselves; return those that are new."""
        return [ref for ref in refs if self._add(ref, number)]

    def add_version(self, ref: BlobRef, *, number: int = 0) -> list[BlobRef]:
        """Add the version blob *ref* and what it needs; return what is new."""
        return self._add_blob(ref, lambda: objects_of_version(self._repo.version(ref)), number)

    def add_state(self, ref: BlobRef, *, number: int = 0) -> list[BlobRef]:
        """Add the state blob *ref* and what it needs; return what is new."""
        return self._add_blob(ref, lambda: objects_of_state(self._repo.state(ref)), number)

    def add_part(self, part: Part) -> None:
        """Add what *part* has written for a commit that is not complete yet."""
        self.add(stored.ref for layer in part.layers for stored in layer.objects)
        if part.state is not None:
            self.add_state(part.state)

    def _add_blob(self, ref: BlobRef, objects_in: Callable[[], list[BlobRef]], number: int) -> list[BlobRef]:
        if ref.id in self or self._is_left_out(ref):
            return []
        # The blob itself last, so that one that could not be read is tried again.
        inner = self.add(objects_in(), number=number)
        return [*inner, *self.add([ref], number=number)]

    def _is_left_out(self, ref: BlobRef) -> bool:
        return self._besides is not None and ref.id in self._besides

    def _add(self, ref: BlobRef, number: int) -> bool:
        return not self._is_left_out(ref) and self._ids.add(ref.id, number)
