"""
Where every slice of a composite's layers lies, and what of it goes where: the words in which files are planned.

Layers may have been stored by any number of ranks, each by another; whoever asks for elements need not know.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.format.objects import frame, slice_bytes
from layerstore.model import BlobRef, Kind, LayerVersion, ObjectContent, Parameter, StoredObject, StoredTensor
from layerstore.zero3.slices import elements_of, stretches, valid_elements

# An object that holds a file or a storage has one tensor, of this name.
BYTES_KEY = "bytes"

Literals = tuple[tuple[int, bytes], ...]
"""(offset, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of an object and where they go."""

    object: BlobRef
    object_offset: int
    size_bytes: int
    """In the object."""
    offset: int
    """In the output file."""
    rounding: tuple[str, str] | None = None
    """From which element type to which; None to copy the bytes as they are."""
    is_cut: bool = False
    """Whether it is only a part of a stored slice: then nobody knows its checksum before it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file to be written; what neither literals nor pieces cover is zero."""

    path: str
    """Below the checkpoint folder, with ``/``."""
    size_bytes: int
    executable: bool
    literals: Literals
    pieces: tuple[Piece, ...]
    finish: Callable[[Mapping[int, int]], Literals] | None = None
    """Gives the literals that depend on checksums of cut pieces, once these are known by offset in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a storage: of a stored slice, or zeros where there is none."""

    size_bytes: int
    checksum: int | None
    """None for a part of a slice: only that of the whole is stored."""
    source: tuple[BlobRef, int] | None
    """Object and offset in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one slice lies."""

    object: StoredObject
    tensor: StoredTensor
    offset: int

    @property
    def size_bytes(self) -> int:
        """The size of the slice."""
        return slice_bytes(self.tensor)

    def piece(self, offset: int) -> Piece:
        """Return the piece that copies the slice to *offset*."""
        return Piece(object=self.object.ref, object_offset=self.offset, size_bytes=self.size_bytes, offset=offset)

    def part(self, start: int = 0, elements: int | None = None) -> Part:
        """Return *elements* of the slice from *start* on; without them, all."""
        count = self.tensor.elements if elements is None else elements
        item_bytes = by_code(self.tensor.dtype).bytes
        return Part(
            size_bytes=count * item_bytes,
            checksum=self.tensor.crc32 if count == self.tensor.elements else None,
            source=(self.object.ref, self.offset + start * item_bytes),
        )


class Slices:
    """The slices of a composite's layers, found by what they are of."""

    def __init__(self, versions: Iterable[LayerVersion]) -> None:
        self.parameters: dict[str, Parameter] = {}
        self._places: dict[tuple[Kind, str, str, int], Place] = {}
        self._shards: dict[tuple[Kind, str], int] = {}
        for version in versions:
            self.parameters |= {parameter.name: parameter for parameter in version.parameters}
            for stored in version.objects:
                self._add(stored)

    def _add(self, stored: StoredObject) -> None:
        framing = frame(stored.tensors)
        if framing.size_bytes != stored.size_bytes:
            raise IntegrityError(f"object {stored.id} is listed with a size that its tensors do not have")
        for tensor, offset in zip(stored.tensors, framing.offsets, strict=True):
            place = Place(object=stored, tensor=tensor, offset=offset)
            self._places[stored.kind, tensor.name, tensor.state, stored.shard] = place
            self._shards[stored.kind, tensor.name] = stored.shards

    @property
    def size_bytes(self) -> int:
        """The size of all slices."""
        return sum(place.size_bytes for place in self._places.values())

    def find(self, kind: Kind, name: str, *, shard: int, state: str = "") -> Place:
        """Return one slice; raises LayoutMismatch where the layer has none."""
        place = self._places.get((kind, name, state, shard))
        if place is None:
            what = f"{kind}{f' {state}' if state else ''}"
            raise LayoutMismatch(f"no {what} of {name!r} for rank {shard} is stored in the chosen layers", name=name)
        return place

    def parts(self, kind: Kind, name: str, *, state: str = "", dtype: str, begin: int, end: int) -> Iterator[Part]:
        """
        Yield what makes up the elements *begin* to *end* of a parameter, in whatever slices they were stored.

        Raises:
            LayoutMismatch: They are not stored, or not as *dtype*.
        """
        elements = elements_of(self.parameter(name).shape)
        shards = self.shards(kind, name) or 1  # none at all: the first that is looked for will be missed
        for stretch in stretches(elements, shards, begin=begin, end=end):
            place = self.find(kind, name, shard=stretch.shard, state=state)
            self._check_whole(place, valid_elements(elements, shards, stretch.shard), dtype)
            yield place.part(stretch.start, stretch.elements)

    def _check_whole(self, place: Place, elements: int, dtype: str) -> None:
        tensor = place.tensor
        if tensor.elements != elements:
            raise LayoutMismatch(
                f"slice {place.object.shard} of {place.object.shards} of {tensor.name!r} is stored with "
                f"{tensor.elements} elements, its shape asks for {elements}",
                name=tensor.name,
            )
        if tensor.dtype != dtype:
            what = tensor.state or place.object.kind
            raise LayoutMismatch(
                f"{what} of {tensor.name!r} is stored as {tensor.dtype}, the base has it as {dtype}", name=tensor.name
            )

    def shards(self, kind: Kind, name: str) -> int:
        """Return into how many slices *name* was cut; 0 where this kind of it is not stored."""
        return self._shards.get((kind, name), 0)

    def buffers(self) -> set[str]:
        """Return the names of all buffers."""
        return {name for kind, name in self._shards if kind is Kind.BUFFERS}

    def rank_buffers(self) -> dict[str, int]:
        """Return the buffers of which every rank saved its own, and how many ranks that were."""
        return {name: shards for (kind, name), shards in self._shards.items() if kind is Kind.BUFFERS and shards > 1}

    def parameter(self, name: str) -> Parameter:
        """Return what is known of the parameter *name*."""
        if name not in self.parameters:
            raise LayoutMismatch(f"parameter {name!r} is in none of the chosen layers", name=name)
        return self.parameters[name]


def whole(content: ObjectContent, offset: int) -> Piece:
    """Return the piece that copies a stored file or storage to *offset*."""
    # The payload of such an object ends with its file.
    start = content.object.size_bytes - content.size_bytes
    return Piece(object=content.object, object_offset=start, size_bytes=content.size_bytes, offset=offset)


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join neighbours that are neighbours in the object too: one call moves them."""
    current: Piece | None = None
    for piece in pieces:
        if current is not None and _continues(current, piece):
            current = replace(current, size_bytes=current.size_bytes + piece.size_bytes)
            continue
        if current is not None:
            yield current
        current = piece
    if current is not None:
        yield current


def _continues(first: Piece, second: Piece) -> bool:
    return (
        first.rounding is None
        and second.rounding is None
        # Of a cut piece somebody wants the checksum of just these bytes.
        and not first.is_cut
        and not second.is_cut
        and first.object == second.object
        and first.object_offset + first.size_bytes == second.object_offset
        and first.offset + first.size_bytes == second.offset
    )
