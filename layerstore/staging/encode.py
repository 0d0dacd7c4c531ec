"""
Compact objects: slices are coded as their bytes are read, and decoded at once to measure the loss.

One pass is enough: blocks are small, scales follow the codes of their slice, and the reference is read alongside.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from layerstore.coding import BLOCK, CODINGS, Coded, Error, NotCodable
from layerstore.errors import LayerstoreError, Unsupported
from layerstore.framing import coded_frame, frame
from layerstore.hashing import crc32
from layerstore.history import NextCommit
from layerstore.model import BlobRef, Kind, LayerVersion, StoredObject, StoredTensor
from layerstore.precision import PRECISIONS, Precision
from layerstore.storage import Hashing, ObjectStore, Repository
from layerstore.zero3 import LayerSource, ObjectSource, SliceSource

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Compact:
    """How an object is kept in fewer bytes: its precision, and what its differences refer to."""

    precision: Precision
    reference: StoredObject | None = None


def _compact(source: ObjectSource, precision: Precision, older: LayerVersion) -> Compact | None:
    """Return how to keep *source* in *precision*; None if it is kept exactly, as no coding or no reference fits it."""
    codings = {precision.coding(source.kind, part.state, part.dtype) for part in source.slices} - {""}
    if not codings:
        return None
    if not any(CODINGS[name].needs_reference for name in codings):
        return Compact(precision)
    reference = _reference(source, older)
    return None if reference is None else Compact(precision, reference)


def _reference(source: ObjectSource, older: LayerVersion) -> StoredObject | None:
    """Return the exact masters of the same slices as *source*, from *older* or from the objects it refers to."""
    masters = (candidate for candidate in older.objects if candidate.kind is Kind.MASTER)
    for stored in (*older.references, *masters):
        # If the older version is itself compact, the exact masters are among its references.
        if (stored.shard, stored.shards) == (source.shard, source.shards) and _are_alike(stored, source.slices):
            return stored
    return None


def can_refer(layer: LayerSource, precision: Precision, older: LayerVersion) -> bool:
    """Whether *layer* can be kept in *precision*: if that takes differences, *older* must have all masters for them."""
    return older.cut == layer.cut and all(
        source.kind is not Kind.MASTER or not precision.master or _reference(source, older) for source in layer.objects
    )


def _are_alike(stored: StoredObject, slices: Sequence[SliceSource]) -> bool:
    of_source = [(part.key, part.dtype, part.elements, part.box) for part in slices]
    return (
        # Never a difference from a difference: errors would add up, and one damaged save would ruin all later ones.
        not stored.is_coded
        and [(tensor.key, tensor.dtype, tensor.elements, tensor.box) for tensor in stored.tensors] == of_source
    )


@dataclass(frozen=True, slots=True)
class CompactLayers:
    """The layers to keep compactly."""

    precision: Precision
    older: Mapping[str, LayerVersion]
    """By layer, an older version that differences can refer to, directly or through that version's references."""

    def plan(self, layer: str, source: ObjectSource) -> Compact | None:
        """Return how to keep *source*, an object of *layer*; None to keep it exactly."""
        return _compact(source, self.precision, self.older[layer]) if layer in self.older else None

    def references(self, layer: str) -> tuple[StoredObject, ...]:
        """Return the older objects that the objects of *layer* may refer to."""
        older = self.older.get(layer)
        return () if older is None else (*older.references, *older.objects)


def referable(
    repo: Repository, place: NextCommit, *, shard: int | None, world_size: int
) -> tuple[dict[str, LayerVersion], list[str]]:
    """
    Return which versions inherited at *place* differences can refer to, by layer; and the layers cut differently.

    *shard* is the only shard of each layer that this rank writes; None if the rank may write any shard.

    A version is left out if the store has lost any of its objects. If each rank knows only its own objects, different
    ranks may therefore get different results.
    """
    referred, others = {}, []
    for layer, entry in place.inherited.items():
        with suppress(LayerstoreError):  # damaged: the layer is kept exactly
            version = repo.whole_version_of(entry)
            # A different number of ranks has cut the slices differently, so none would match.
            if version is not None and version.world_size != world_size:
                others.append(layer)
            elif version is not None:
                referred[layer] = _of_shard(version, shard)
    return referred, others


def _of_shard(version: LayerVersion, shard: int | None) -> LayerVersion:
    """Return *version* with only its masters, and without the masters of other ranks."""
    return replace(
        version,
        objects=tuple(
            stored for stored in version.objects if stored.kind is Kind.MASTER and shard in {stored.shard, None}
        ),
        references=tuple(stored for stored in version.references if shard in {stored.shard, None}),
    )


NONE_COMPACT = CompactLayers(PRECISIONS["exact"], {})


class ObjectEncoding:
    """One object that is being coded, slice by slice."""

    def __init__(self, source: ObjectSource, how: Compact, objects: ObjectStore) -> None:
        codings = [how.precision.coding(source.kind, part.state, part.dtype) for part in source.slices]
        self.tensors = [stored_tensor(part, 0, coding) for part, coding in zip(source.slices, codings, strict=True)]
        """Each tensor's checksum is set once its slice is coded."""
        self.reference = how.reference
        self.losses: dict[str, Error] = {}
        """The coding errors, by optimizer state; the key is empty for masters."""
        self._name = self.reference.id if self.reference else ""
        self._frame, _ = coded_frame(self.tensors, reference=self._name)
        self._offsets = frame(self.tensors).offsets
        self._objects = objects
        # The reference is read anyway, so hash it as well: a difference from corrupt bytes could not be decoded.
        self._hashing = Hashing([self.reference.ref] if self.reference else [])
        self._file = objects.open(self.reference.ref) if self.reference else None
        self._decoded = memoryview(b"")

    @property
    def header(self) -> bytes:
        """All bytes of the file before the payload."""
        return self._frame.header

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self._frame.size_bytes

    def slice(self, number: int, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the stored form of slice *number*, whose bytes are *chunks*; if coded, all codes, then the scales."""
        tensor, checksum = self.tensors[number], 0
        if not tensor.coding:
            for chunk in chunks:
                checksum = crc32(chunk, checksum)
                yield chunk
        else:
            scales, offset = [], 0
            for values in _whole_blocks(chunks):
                decoded = self._room(len(values))
                coded = self._coded(number, values, offset, decoded)
                # The checksum covers what a reader will get, which coding has changed.
                checksum = crc32(decoded, checksum)
                offset += len(values)
                scales.append(coded.scales)
                yield coded.codes
            # Last: the file is written front to back, and a slice's scales come after all of its codes.
            yield from scales
        self.tensors[number] = replace(tensor, crc32=checksum)

    def _coded(self, number: int, values: memoryview, offset: int, decoded: memoryview) -> Coded:
        """Code *values*, which begin at byte *offset* of slice *number*; fill *decoded*."""
        tensor = self.tensors[number]
        coding, reference = CODINGS[tensor.coding], None
        if coding.needs_reference:
            assert self.reference is not None
            assert self._file is not None
            reference = decoded
            self._hashing.read_into(self.reference.ref, self._file, reference, self._offsets[number] + offset)
        try:
            coded = coding.encode(values, reference, decoded)
        except NotCodable as exc:
            what = f"{tensor.state} of {tensor.name!r}" if tensor.state else f"the master of {tensor.name!r}"
            raise Unsupported(f"{what} cannot be kept compactly: {exc}", hint="save it with precision exact") from exc
        self.losses[tensor.state] = self.losses.get(tensor.state, Error()) + coded.lost
        return coded

    def _room(self, size_bytes: int) -> memoryview:
        """Return *size_bytes* of the buffer for decoded bytes, which all chunks share."""
        if len(self._decoded) < size_bytes:
            self._decoded = memoryview(bytearray(size_bytes))
        return self._decoded[:size_bytes]

    def stored(self, source: ObjectSource, ref: BlobRef, chunks: bytes) -> StoredObject:
        """Return the finished object; raise IntegrityError if its reference is damaged."""
        self._hashing.check(self._objects)
        return StoredObject(
            id=ref.id,
            size_bytes=ref.size_bytes,
            kind=source.kind,
            shard=source.shard,
            shards=source.shards,
            tensors=tuple(self.tensors),
            chunks=chunks,
            reference=self._name,
        )

    def close(self) -> None:
        """Close the reference's file."""
        if self._file is not None:
            self._file.close()


def stored_tensor(part: SliceSource, checksum: int, coding: str = "") -> StoredTensor:
    """Return the description of *part* in its object."""
    return StoredTensor(
        name=part.name,
        state=part.state,
        dtype=part.dtype,
        elements=part.elements,
        crc32=checksum,
        coding=coding,
        box=part.box,
    )


def _whole_blocks(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of *chunks*, which may be cut anywhere, as stretches of whole blocks, and finally the rest."""
    block_bytes, left = BLOCK * _ITEM_BYTES, b""
    for chunk in chunks:
        data = memoryview(left + bytes(chunk)) if left else chunk
        end = len(data) - len(data) % block_bytes
        # A copy: a chunk is valid only until the next one is requested.
        left = bytes(data[end:])
        if end:
            yield data[:end]
    if left:
        yield memoryview(left)
