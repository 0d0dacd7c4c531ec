"""What a record needs: its version and state blobs, and every object that these name."""

from collections.abc import Callable, Iterable

from layerstore.format.blobs import STATE_MAGIC, decode_state, decode_version
from layerstore.history.packed import NumberedIds
from layerstore.model import BlobRef, CommitRecord, LayerVersion, ObjectContent, ObjectId, Part, RankState
from layerstore.storage.rooms import Rooms
from layerstore.tree import Tensor
from layerstore.zero3 import replace_tensors


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


def named_by(rooms: Rooms, blob: BlobRef) -> list[BlobRef]:
    """
    Return the objects that *blob*, a version or a rank's state, needs.

    Raises:
        IntegrityError: It is damaged, gone, or neither.
    """
    data = rooms.objects.read(blob)
    if data.startswith(STATE_MAGIC):
        return objects_of_state(decode_state(data, ref=blob))
    return objects_of_version(decode_version(data, ref=blob))


class Needs:
    """
    Every object that some records and parts need; a blob that many share is read once.

    Each is noted with a number, for whoever wants to know later with what it came. What is needed *besides* is left
    out, and not read.
    """

    def __init__(self, rooms: Rooms, *, besides: "Needs | None" = None) -> None:
        self._rooms = rooms
        self._besides = besides
        self._ids = NumberedIds()

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def number(self, object_id: ObjectId) -> int | None:
        """Return the number that *object_id* was first noted with, None where it was not."""
        return self._ids.number(object_id)

    def add_record(self, record: CommitRecord, *, number: int = 0) -> list[BlobRef]:
        """
        Note what *record* needs; return what was not needed before.

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
        """Note that *refs* themselves are needed; return those that were not before."""
        return [ref for ref in refs if self._add(ref, number)]

    def add_version(self, ref: BlobRef, *, number: int = 0) -> list[BlobRef]:
        """Note what the version blob *ref* needs, itself included; return what was not needed before."""
        return self._add_blob(ref, lambda: objects_of_version(self._rooms.version(ref)), number)

    def add_state(self, ref: BlobRef, *, number: int = 0) -> list[BlobRef]:
        """Note what the state blob *ref* needs, itself included; return what was not needed before."""
        return self._add_blob(ref, lambda: objects_of_state(self._rooms.state(ref)), number)

    def add_part(self, part: Part) -> None:
        """Note what *part* has written for a commit that is not complete yet."""
        self.add(stored.ref for layer in part.layers for stored in layer.objects)
        if part.state is not None:
            self.add_state(part.state)

    def _add_blob(self, ref: BlobRef, objects_in: Callable[[], list[BlobRef]], number: int) -> list[BlobRef]:
        if ref.id in self or self._is_left_out(ref):
            return []
        # The blob itself last: one that could not be read just now is not taken for known.
        inner = self.add(objects_in(), number=number)
        return [*inner, *self.add([ref], number=number)]

    def _is_left_out(self, ref: BlobRef) -> bool:
        return self._besides is not None and ref.id in self._besides

    def _add(self, ref: BlobRef, number: int) -> bool:
        return not self._is_left_out(ref) and self._ids.add(ref.id, number)
