"""What a record needs: its version and state blobs, and every object that these name."""

from collections.abc import Iterable, Iterator

from layerstore.model import BlobRef, CommitRecord, LayerVersion, ObjectContent, Part, RankState
from layerstore.ops.rooms import Rooms
from layerstore.tree import Tensor
from layerstore.zero3.trees import replace_tensors


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


class Needs:
    """
    Every object that some records and parts need; a blob that many share is read once.

    Ids are kept as bytes: of a million objects that is a tenth of a gigabyte.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._ids: set[bytes] = set()

    def __contains__(self, object_id: object) -> bool:
        return isinstance(object_id, str) and bytes.fromhex(object_id) in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add_record(self, record: CommitRecord) -> list[BlobRef]:
        """
        Note what *record* needs; return what was not needed before.

        Raises:
            IntegrityError: A version or state blob is damaged or missing.
        """
        new = []
        for entry in record.layers:
            new += self.add_version(entry.version)
        for state in record.states:
            new += self.add_state(state)
        return new

    def add(self, refs: Iterable[BlobRef]) -> None:
        """Note that *refs* themselves are needed."""
        list(self._new(refs))

    def add_version(self, ref: BlobRef) -> list[BlobRef]:
        """Note what the version blob *ref* needs, itself included; return what was not needed before."""
        return [ref, *self._new(objects_of_version(self._rooms.version(ref)))] if self._add(ref) else []

    def add_state(self, ref: BlobRef) -> list[BlobRef]:
        """Note what the state blob *ref* needs, itself included; return what was not needed before."""
        return [ref, *self._new(objects_of_state(self._rooms.state(ref)))] if self._add(ref) else []

    def add_part(self, part: Part) -> None:
        """Note what *part* has written for a commit that is not complete yet."""
        for layer in part.layers:
            for stored in layer.objects:
                self._add(stored.ref)
        if part.state is not None:
            self.add_state(part.state)

    def _new(self, refs: Iterable[BlobRef]) -> Iterator[BlobRef]:
        return (ref for ref in refs if self._add(ref))

    def _add(self, ref: BlobRef) -> bool:
        object_id = bytes.fromhex(ref.id)
        if object_id in self._ids:
            return False
        self._ids.add(object_id)
        return True
