"""What a record needs: its version and state blobs, and every object that these refer to."""

import contextlib
import struct
from collections.abc import Iterable, Iterator

from layerstore.errors import IntegrityError, NotFound
from layerstore.format import STATE_MAGIC, decode_state, decode_version, named_in_version
from layerstore.model import BlobRef, CommitRecord, ObjectId
from layerstore.parts import Part
from layerstore.states import ObjectContent, RankState
from layerstore.storage import Repository
from layerstore.tree import Tensor, replace_tensors

_ROW = struct.Struct(">16sQ")  # an id and a size: sorting rows as bytes sorts them by id


class NumberedRefs:
    """References to objects, each with the numbers of all holders; about 110 bytes per reference."""

    PARTS = 256

    def __init__(self) -> None:
        # Most references have one number; a list around it would double their memory.
        self._parts: list[dict[bytes, int | list[int]]] = [{} for _ in range(self.PARTS)]

    def add(self, ref: BlobRef, number: int = 0) -> None:
        """Add *ref*, needed by the holder *number*."""
        row = _ROW.pack(bytes.fromhex(ref.id), ref.size_bytes)
        part = self._parts[row[0]]
        known = part.setdefault(row, number)
        if isinstance(known, list):
            known.append(number)
        elif known != number:
            part[row] = [known, number]

    def part(self, at: int) -> dict[BlobRef, list[int]]:
        """Return the references whose ids begin with the byte *at*, in order, each with its numbers."""
        part = {}
        for row, numbers in sorted(self._parts[at].items(), key=lambda item: item[0]):
            object_id, size_bytes = _ROW.unpack(row)
            distinct = [numbers] if isinstance(numbers, int) else sorted(set(numbers))
            part[BlobRef(id=ObjectId(object_id.hex()), size_bytes=size_bytes)] = distinct
        return part

    def __iter__(self) -> Iterator[tuple[BlobRef, list[int]]]:
        """Yield every reference, in order, with its numbers."""
        for at in range(self.PARTS):
            yield from self.part(at).items()


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


def named_by(repo: Repository, blob: BlobRef, *, reads_tensors: bool = True) -> list[BlobRef]:
    """
    Return the objects that *blob*, a version or a rank's state, needs.

    The tensors of a version, which are nearly all of its blob, are checked only with *reads_tensors*.

    Raises:
        IntegrityError: *blob* is damaged, missing, or a different kind of object.
    """
    data = repo.objects.read(blob)
    if data.startswith(STATE_MAGIC):
        return objects_of_state(decode_state(data, ref=blob))
    if reads_tensors:
        return [stored.ref for stored in decode_version(data, ref=blob).named]
    return named_in_version(data, ref=blob)


class Needs:
    """
    Every object that some records and parts need; a blob that many share is read once.

    Each object keeps the number that it was first added with. Objects already in *besides* are skipped.
    """

    def __init__(self, repo: Repository, *, besides: "Needs | None" = None) -> None:
        self._repo = repo
        self._besides = besides
        self._numbers: dict[bytes, int] = {}

    def __contains__(self, object_id: object) -> bool:
        return isinstance(object_id, str) and self.number(ObjectId(object_id)) is not None

    def number(self, object_id: ObjectId) -> int | None:
        """Return the number that *object_id* was first added with; None if it was not added."""
        return self._numbers.get(bytes.fromhex(object_id))

    def add_record(self, record: CommitRecord, *, number: int = 0) -> list[BlobRef]:
        """
        Add what *record* needs; return what is new.

        Raises:
            IntegrityError: A version or state blob is damaged or missing.
        """
        new = []
        for blob in record.blobs:
            new += self.add_blob(blob, number=number)
        return new

    def add_readable(self, record: CommitRecord) -> list[BlobRef]:
        """
        Add what *record* needs, except for damaged blobs, whose objects are unknown; return what is new.

        A damaged blob is itself left out: in ``objects/``, it would promise that everything it refers to exists.
        """
        new = []
        for blob in record.blobs:
            with contextlib.suppress(IntegrityError, NotFound):
                new += self.add_blob(blob)
        return new

    def add(self, refs: Iterable[BlobRef], *, number: int = 0) -> list[BlobRef]:
        """Add *refs* themselves; return those that are new."""
        return [ref for ref in refs if self._add(ref, number)]

    def add_blob(self, ref: BlobRef, *, number: int = 0) -> list[BlobRef]:
        """Add the version or state blob *ref* and what it needs; return what is new."""
        if ref.id in self or self._is_left_out(ref):
            return []
        # The blob itself is added last, so that an unreadable blob is tried again.
        # Tensors are not read, for speed: a collection reads every version that is kept.
        inner = self.add(named_by(self._repo, ref, reads_tensors=False), number=number)
        return [*inner, *self.add([ref], number=number)]

    def add_part(self, part: Part) -> None:
        """Add what *part* has written for a commit that is not complete yet."""
        self.add(stored.ref for layer in part.layers for stored in layer.named)
        if part.state is not None:
            self.add_blob(part.state)

    def _is_left_out(self, ref: BlobRef) -> bool:
        return self._besides is not None and ref.id in self._besides

    def _add(self, ref: BlobRef, number: int) -> bool:
        if ref.id in self or self._is_left_out(ref):
            return False
        self._numbers[bytes.fromhex(ref.id)] = number
        return True
