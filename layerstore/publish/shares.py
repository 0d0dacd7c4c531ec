"""One rank's share of a commit: staged, made durable, and left as a part for the rank that commits."""

from collections.abc import Callable, Hashable, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from layerstore.limits import INLINE_BYTES_MAX
from layerstore.model import Kind, LayerPart, ObjectContent, Part, SourceFile, StoredObject
from layerstore.publish.hashing import Checksums, Reader
from layerstore.publish.staging import Staging
from layerstore.publish.transaction import Transaction
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.parts import PartName
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import LayerSource, ObjectSource, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareWork:
    """What one rank is to write."""

    session: str
    save: int
    share: Share
    due: frozenset[str]
    """The layers to be stored."""
    files: Callable[[], tuple["KeptFile", ...]]
    """Returns what is kept byte for byte beside the rank's state, once it is all there."""
    mark: Callable[[ObjectSource], Hashable]
    """Returns what tells an object of frozen weights from every other one, without reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file beside a rank's state, whose bytes the reader has."""

    name: str
    """Below the checkpoint folder, with ``/``."""
    executable: bool
    place: Path
    size_bytes: int


def objects_due(share: Share, due: frozenset[str]) -> list[ObjectSource]:
    """Return the objects that a rank has of the layers *due*, in the order in which they are read."""
    return [source for layer in share.layers if layer.layer in due for source in layer.objects]


Frozen = MutableMapping[str, tuple[Hashable, StoredObject]]
"""The mark and the object of each layer's frozen weights."""


def write_share(rooms: Rooms, work: ShareWork, reader: Reader, *, frozen: Frozen) -> int:
    """
    Store what *work* says, and leave the part that says so; return how many bytes the store did not have.

    Frozen weights are read once: *frozen* has their objects, for as long as their marks stay and the store has them.

    Raises:
        Overtaken: An object vanished while the part that names it was written.
    """
    share = work.share
    with Transaction(rooms, past_cache=True) as tx:
        staging = Staging(
            tx.objects,
            lambda: reader,
            source="the engine",
            checksums=Checksums(),
            advance=lambda count: None,
            reads_once=True,  # what was copied is gone from the pool once it was read
        )
        layers = tuple(
            LayerPart(layer=layer.layer, objects=tuple(_objects(layer, work, staging, tx.objects, frozen)))
            for layer in share.layers
            if layer.layer in work.due
        )
        state = staging.state(share.state, [_kept(file, staging, reader) for file in work.files()])
        tx.leave(
            Part(
                session=work.session,
                save=work.save,
                rank=share.rank,
                agreement=share.agreement,
                layers=layers,
                state=state,
                bytes_new=tx.objects.bytes_new,
                bytes_reused=tx.objects.bytes_reused,
                failure="",
            )
        )
        return tx.objects.bytes_new


def _objects(
    layer: LayerSource, work: ShareWork, staging: Staging, writer: ObjectWriter, frozen: Frozen
) -> Iterable[StoredObject]:
    for source in layer.objects:
        if source.kind is not Kind.WEIGHTS:
            yield staging.object(source)
            continue
        mark = work.mark(source)
        known, stored = frozen.get(layer.layer, (None, None))
        if stored is None or known != mark or not writer.reuse(stored.ref):
            stored = staging.object(source)
            frozen[layer.layer] = mark, stored
        yield stored


def _kept(file: KeptFile, staging: Staging, reader: Reader) -> SourceFile:
    content: bytes | ObjectContent
    if file.size_bytes > INLINE_BYTES_MAX:
        content = staging.bytes_object(file.place, 0, file.size_bytes)
    else:
        content = b"".join(map(bytes, reader.chunks(file.place, 0, file.size_bytes)))
    return SourceFile(path=file.name, executable=file.executable, content=content)


def fail_share(rooms: Rooms, work: ShareWork, why: str) -> None:
    """Leave a part that says that this rank has failed, in the place of one that says otherwise."""
    name = PartName(work.session, work.save, work.share.rank)
    rooms.parts.withdraw(*name)
    rooms.parts.publish_failure(name, why)
