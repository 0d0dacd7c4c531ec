"""
Layer versions and rank states -> DeepSpeed's files, as plans: which bytes of which object go where.

The loader checks little, so all lengths are made here and nothing is taken from the source's files but their trees.
Padding is written as zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.format.hashing import combine_crc32, crc32, crc32_of_zeros
from layerstore.format.objects import frame, slice_bytes
from layerstore.model import (
    BlobRef,
    BufferContent,
    FlatContent,
    FragmentContent,
    GatheredFile,
    GatheredTensor,
    Kind,
    LayerVersion,
    ObjectContent,
    Parameter,
    RankState,
    SourceFile,
    StoredObject,
    StoredTensor,
    TensorSource,
    TreeFile,
)
from layerstore.tree import Size, Storage
from layerstore.zero3.ptfile import layout_pt
from layerstore.zero3.slices import elements_of, slice_length, valid_elements
from layerstore.zero3.trees import TreeView

# An object that holds a file or a storage has one tensor, of this name.
BYTES_KEY = "bytes"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file to be written; what neither literals nor pieces cover is zero."""

    path: str
    """Below the checkpoint folder, with ``/``."""
    size_bytes: int
    executable: bool
    literals: tuple[tuple[int, bytes], ...]
    """(offset, bytes)."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one slice lies."""

    object: StoredObject
    tensor: StoredTensor
    offset: int

    @property
    def size_bytes(self) -> int:
        return self.tensor.elements * by_code(self.tensor.dtype).bytes

    def piece(self, offset: int) -> Piece:
        """Return the piece that copies the slice to *offset*."""
        ref = BlobRef(id=self.object.id, size_bytes=self.object.size_bytes)
        return Piece(object=ref, object_offset=self.offset, size_bytes=self.size_bytes, offset=offset)


class Slices:
    """The slices of a composite's layers, found by what they are of."""

    def __init__(self, versions: Iterable[LayerVersion]) -> None:
        self.parameters: dict[str, Parameter] = {}
        self._places: dict[tuple[Kind, str, str, int], _Place] = {}
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
            place = _Place(object=stored, tensor=tensor, offset=offset)
            self._places[stored.kind, tensor.name, tensor.state, stored.shard] = place
            self._shards[stored.kind, tensor.name] = stored.shards

    @property
    def size_bytes(self) -> int:
        """The size of all slices."""
        return sum(slice_bytes(place.tensor) for place in self._places.values())

    def find(self, kind: Kind, name: str, *, shard: int, state: str = "") -> _Place:
        """Return one slice; raises LayoutMismatch where the layer has none."""
        place = self._places.get((kind, name, state, shard))
        if place is None:
            what = f"{kind}{f' {state}' if state else ''}"
            raise LayoutMismatch(f"no {what} of {name!r} for rank {shard} is stored in the chosen layers", name=name)
        return place

    def shards(self, kind: Kind, name: str) -> int:
        """Return into how many slices *name* was cut; 0 where this kind of it is not stored."""
        return self._shards.get((kind, name), 0)

    def parameter(self, name: str) -> Parameter:
        """Return what is known of the parameter *name*."""
        if name not in self.parameters:
            raise LayoutMismatch(f"parameter {name!r} is in none of the chosen layers", name=name)
        return self.parameters[name]


# -- one rank's .pt files ------------------------------------------------------------------------------------------


def plan_rank(state: RankState, slices: Slices, *, world_size: int) -> Iterator[OutputFile]:
    """Yield the files of one rank, gathered weights left out: many ranks supply those."""
    groups = _groups(state.model)
    for file in (state.model, state.optimizer):
        yield _plan_tree_file(file, slices, groups, rank=state.rank, world_size=world_size)
    yield from (_plan_source_file(file) for file in state.files)


def _groups(model: TreeFile) -> list[dict[str, Sequence[int]]]:
    view = TreeView(model.tree, path=PurePosixPath(model.path))
    return [
        {str(name): shape.value for name, shape in group.children() if isinstance(shape.value, Size)}
        for _, group in view["param_shapes"].children()
    ]


def _plan_tree_file(
    file: TreeFile, slices: Slices, groups: list[dict[str, Sequence[int]]], *, rank: int, world_size: int
) -> OutputFile:
    layout = layout_pt(file.tree, name=PurePosixPath(file.path).stem)
    checksums: dict[Storage, int] = {}
    literals: list[tuple[int, bytes]] = []
    pieces: list[Piece] = []
    for storage, offset in layout.storages:
        content = storage.content
        if isinstance(content, bytes):
            checksums[storage] = crc32(content)
            literals.append((offset, content))
        elif isinstance(content, ObjectContent):
            checksums[storage] = content.crc32
            pieces.append(_whole(content, offset))
        else:
            filling = list(_filling(content, slices, groups, rank=rank, world_size=world_size))
            _check_length(storage, filling, file)
            checksums[storage] = combine_crc32((part.checksum, part.size_bytes) for part in filling)
            pieces += _placed(filling, offset)
    return OutputFile(
        path=file.path,
        size_bytes=layout.size_bytes,
        executable=False,
        literals=tuple(literals + layout.skeleton(checksums)),
        pieces=tuple(merged(pieces)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A stretch of a storage: a slice, or zeros where there is none."""

    size_bytes: int
    checksum: int
    place: _Place | None


def _filling(
    content: object, slices: Slices, groups: list[dict[str, Sequence[int]]], *, rank: int, world_size: int
) -> Iterator[_Part]:
    match content:
        case FlatContent(state=state, group=group):
            kind = Kind.OPTIMIZER if state else Kind.MASTER
            for name in groups[group]:
                yield from _padded_slice(slices, kind, name, state=state, rank=rank, world_size=world_size)
        case FragmentContent(parameter=name):
            yield from _padded_slice(slices, Kind.WEIGHTS, name, state="", rank=rank, world_size=world_size)
        case BufferContent(buffer=name):
            shard = rank if slices.shards(Kind.BUFFERS, name) > 1 else 0
            yield _part(slices.find(Kind.BUFFERS, name, shard=shard))
        case _:
            raise IntegrityError(f"a storage has content that cannot be written: {type(content).__name__}")


def _padded_slice(slices: Slices, kind: Kind, name: str, *, state: str, rank: int, world_size: int) -> Iterator[_Part]:
    elements = elements_of(slices.parameter(name).shape)
    valid = valid_elements(elements, world_size, rank)
    item_bytes = 0
    if valid:
        place = slices.find(kind, name, shard=rank, state=state)
        if place.tensor.elements != valid or place.object.shards != world_size:
            raise LayoutMismatch(
                f"{name!r} is stored in {place.object.shards} slices, {world_size} are asked for", name=name
            )
        item_bytes = by_code(place.tensor.dtype).bytes
        yield _part(place)
    else:
        # A rank of pure padding: the element type is what the first rank has.
        item_bytes = by_code(slices.find(kind, name, shard=0, state=state).tensor.dtype).bytes if elements else 0
    padding = (slice_length(elements, world_size) - valid) * item_bytes
    if padding:
        yield _Part(size_bytes=padding, checksum=crc32_of_zeros(padding), place=None)


def _part(place: _Place) -> _Part:
    return _Part(size_bytes=place.size_bytes, checksum=place.tensor.crc32, place=place)


def _check_length(storage: Storage, filling: list[_Part], file: TreeFile) -> None:
    expected = storage.elements * by_code(storage.dtype).bytes
    found = sum(part.size_bytes for part in filling)
    if found != expected:
        raise LayoutMismatch(f"{file.path}: the chosen layers fill {found} bytes of a buffer of {expected}")


def _placed(filling: list[_Part], offset: int) -> Iterator[Piece]:
    for part in filling:
        if part.place is not None:
            yield part.place.piece(offset)
        offset += part.size_bytes


def _whole(content: ObjectContent, offset: int) -> Piece:
    # The payload of such an object ends with its file.
    start = content.object.size_bytes - content.size_bytes
    return Piece(object=content.object, object_offset=start, size_bytes=content.size_bytes, offset=offset)


def _plan_source_file(file: SourceFile) -> OutputFile:
    content = file.content
    literal, pieces, size_bytes = (
        (((0, content),), (), len(content))
        if isinstance(content, bytes)
        else ((), (_whole(content, 0),), content.size_bytes)
    )
    return OutputFile(
        path=file.path, size_bytes=size_bytes, executable=file.executable, literals=literal, pieces=pieces
    )


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join neighbours that are neighbours in the object too: one call moves them."""
    current: Piece | None = None
    for piece in pieces:
        if current is not None and _continues(current, piece):
            current = Piece(
                object=current.object,
                object_offset=current.object_offset,
                size_bytes=current.size_bytes + piece.size_bytes,
                offset=current.offset,
                rounding=current.rounding,
            )
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
        and first.object == second.object
        and first.object_offset + first.size_bytes == second.object_offset
        and first.offset + first.size_bytes == second.offset
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedCheck:
    """A tensor of a gathered file that is rounded again, and the checksum that it had."""

    name: str
    offset: int
    """Where it starts in the file."""
    size_bytes: int
    crc32: int


# -- gathered weights ----------------------------------------------------------------------------------------------


def plan_gathered(file: GatheredFile) -> OutputFile:
    """Return the file without its tensors: each rank supplies its slices, see ``gathered_pieces``."""
    return OutputFile(
        path=file.path,
        size_bytes=len(file.header) + sum(_tensor_bytes(tensor) for tensor in file.tensors),
        executable=False,
        literals=((0, file.header),),
        pieces=(),
    )


def gathered_pieces(file: GatheredFile, slices: Slices, *, rank: int) -> Iterator[Piece]:
    """Yield what *rank* supplies to *file*; what is not cut into slices comes with rank 0."""
    offset = len(file.header)
    for tensor in file.tensors:
        yield from _tensor_pieces(tensor, slices, rank=rank, offset=offset)
        offset += _tensor_bytes(tensor)


def derived_checks(file: GatheredFile, slices: Slices, *, unchanged: Callable[[str], bool]) -> Iterator[DerivedCheck]:
    """Yield the tensors whose bytes are known beforehand: of parameters whose layers are *unchanged* since."""
    offset = len(file.header)
    for tensor in file.tensors:
        size_bytes = _tensor_bytes(tensor)
        is_derived = tensor.source is TensorSource.PARAMETER and not slices.shards(Kind.WEIGHTS, tensor.layer_name)
        if is_derived and size_bytes and unchanged(tensor.layer_name):
            yield DerivedCheck(name=tensor.name, offset=offset, size_bytes=size_bytes, crc32=tensor.crc32)
        offset += size_bytes


def _tensor_bytes(tensor: GatheredTensor) -> int:
    return tensor.elements * by_code(tensor.dtype).bytes


def _tensor_pieces(tensor: GatheredTensor, slices: Slices, *, rank: int, offset: int) -> Iterator[Piece]:
    if tensor.source is TensorSource.STORED:
        assert tensor.stored is not None
        yield from [_whole(tensor.stored, offset)] if rank == 0 else []
    elif tensor.source is TensorSource.BUFFER:
        yield from [slices.find(Kind.BUFFERS, tensor.layer_name, shard=0).piece(offset)] if rank == 0 else []
    else:
        kind = Kind.WEIGHTS if slices.shards(Kind.WEIGHTS, tensor.layer_name) else Kind.MASTER
        yield from _parameter_piece(tensor, slices, kind, rank=rank, offset=offset)


def _parameter_piece(tensor: GatheredTensor, slices: Slices, kind: Kind, *, rank: int, offset: int) -> Iterator[Piece]:
    shards = slices.shards(kind, tensor.layer_name)
    if not tensor.elements:
        return  # no elements, no slice of them anywhere
    if shards and (rank >= shards or not valid_elements(tensor.elements, shards, rank)):
        return
    place = slices.find(kind, tensor.layer_name, shard=rank)
    start = offset + rank * slice_length(tensor.elements, shards) * by_code(tensor.dtype).bytes
    piece = place.piece(start)
    if place.tensor.dtype == tensor.dtype:
        yield piece
        return
    yield Piece(
        object=piece.object,
        object_offset=piece.object_offset,
        size_bytes=piece.size_bytes,
        offset=start,
        rounding=(place.tensor.dtype, tensor.dtype),
    )
