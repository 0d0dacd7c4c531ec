"""
Plans of DeepSpeed's files: which bytes of which object go where, for each rank and for gathered weights.

The engine's loader checks little, so every length is computed and checked here. Only the trees of the base's files
are used. Padding is written as zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.format import combine_crc32, crc32, crc32_of_zeros
from layerstore.model import (
    BufferContent,
    FlatContent,
    FragmentContent,
    GatheredFile,
    GatheredTensor,
    Kind,
    ObjectContent,
    RankState,
    SourceFile,
    TensorSource,
    TreeFile,
)
from layerstore.tree import Size, Storage
from layerstore.zero3.pt import PtLayout, layout_pt
from layerstore.zero3.slices import Piece, Slices, slice_length, valid_elements
from layerstore.zero3.trees import TreeView, sub_group_shapes

BYTES_KEY = "bytes"
"""The name of the only tensor in an object that holds a file or a storage."""

Literals = tuple[tuple[int, bytes], ...]
"""(offset, bytes)."""

_Groups = Sequence[Mapping[str, Size]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file to be written; bytes that neither literals nor pieces cover are zero."""

    path: str
    """Below the checkpoint folder, with ``/``."""
    size_bytes: int
    executable: bool
    literals: Literals
    pieces: tuple[Piece, ...]
    finish: Callable[[Mapping[int, int]], Literals] | None = None
    """Returns the literals that depend on measured checksums, given these by offset in the file."""


def whole(content: ObjectContent, offset: int) -> Piece:
    """Return the piece that copies a stored file or storage to *offset*."""
    # The payload ends where the object's file ends.
    start = content.object.size_bytes - content.size_bytes
    return Piece(object=content.object, object_offset=start, size_bytes=content.size_bytes, offset=offset)


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join pieces that are neighbours in the object and in the file: one call moves them."""
    current: Piece | None = None
    for piece in pieces:
        if current is None:
            current = piece
        elif _continues(current, piece):
            current = replace(current, size_bytes=current.size_bytes + piece.size_bytes, crc32=None)
        else:
            yield current
            current = piece
    if current is not None:
        yield current


def _continues(first: Piece, second: Piece) -> bool:
    # A conversion, and a checksum that is wanted, are of that piece alone.
    is_plain = not (first.rounding or second.rounding or first.is_measured or second.is_measured)
    return is_plain and (second.object, second.object_offset, second.offset) == (
        first.object,
        first.object_offset + first.size_bytes,
        first.offset + first.size_bytes,
    )


# -- one rank's files ----------------------------------------------------------------------------------------------


def plan_rank(
    state: RankState, slices: Slices, *, world_size: int, plan_file: Callable[[SourceFile], OutputFile]
) -> Iterator[OutputFile]:
    """
    Yield the files of one rank of *world_size*, without gathered weights: many ranks supply those.

    *plan_file* plans the files beside the trees.
    """
    groups = sub_group_shapes(TreeView.of(state.model))
    for file in (state.model, state.optimizer):
        yield _plan_tree_file(file, slices, groups, rank=state.rank, world_size=world_size)
    yield from map(plan_file, state.files)


def plan_source_file(file: SourceFile) -> OutputFile:
    """Return the plan of a file that is kept byte for byte."""
    content = file.content
    if isinstance(content, bytes):
        return literal_file(file.path, content, executable=file.executable)
    return OutputFile(
        path=file.path,
        size_bytes=content.size_bytes,
        executable=file.executable,
        literals=(),
        pieces=(whole(content, 0),),
    )


def literal_file(path: str, data: bytes, *, executable: bool = False) -> OutputFile:
    """Return the plan of a file that consists of *data*."""
    return OutputFile(path=path, size_bytes=len(data), executable=executable, literals=((0, data),), pieces=())


def _plan_tree_file(file: TreeFile, slices: Slices, groups: _Groups, *, rank: int, world_size: int) -> OutputFile:
    layout = layout_pt(file.tree, name=PurePosixPath(file.path).stem)
    checksums: dict[Storage, int] = {}
    unknown: dict[Storage, tuple[int, list[Piece]]] = {}
    literals: list[tuple[int, bytes]] = []
    pieces: list[Piece] = []
    for storage, offset in layout.storages:
        content = storage.content
        if isinstance(content, bytes):
            checksums[storage] = crc32(content)
            literals.append((offset, content))
        elif isinstance(content, ObjectContent):
            checksums[storage] = content.crc32
            pieces.append(whole(content, offset))
        else:
            filling = filling_of(storage, slices, groups, rank=rank, world_size=world_size, path=file.path)
            pieces += (
                replace(piece, offset=offset + piece.offset, is_measured=piece.crc32 is None) for piece in filling
            )
            if any(piece.crc32 is None for piece in filling):
                unknown[storage] = offset, filling
            else:
                checksums[storage] = _combined(storage, filling, offset, {})
    if not unknown:
        literals += layout.skeleton(checksums)
    return OutputFile(
        path=file.path,
        size_bytes=layout.size_bytes,
        executable=False,
        literals=tuple(literals),
        pieces=tuple(merged(pieces)),
        finish=partial(_skeleton, layout, checksums, unknown) if unknown else None,
    )


def _skeleton(
    layout: PtLayout,
    known: Mapping[Storage, int],
    unknown: Mapping[Storage, tuple[int, list[Piece]]],
    measured: Mapping[int, int],
) -> Literals:
    """Return the bytes around the payloads, given the *measured* checksums of pieces by offset in the file."""
    found = {storage: _combined(storage, filling, offset, measured) for storage, (offset, filling) in unknown.items()}
    return tuple(layout.skeleton({**known, **found}))


def _combined(storage: Storage, filling: list[Piece], offset: int, measured: Mapping[int, int]) -> int:
    """Return the checksum of a *storage* at *offset* in its file."""
    parts, end = [], 0
    for piece in filling:
        parts.append(_zeros(piece.offset - end))
        parts.append((measured[offset + piece.offset] if piece.crc32 is None else piece.crc32, piece.size_bytes))
        end = piece.offset + piece.size_bytes
    return combine_crc32([*parts, _zeros(_size_bytes(storage) - end)])


def _zeros(size_bytes: int) -> tuple[int, int]:
    return crc32_of_zeros(size_bytes), size_bytes


def _size_bytes(storage: Storage) -> int:
    return storage.elements * by_code(storage.dtype).bytes


def filling_of(
    storage: Storage, slices: Slices, groups: _Groups, *, rank: int, world_size: int, path: str
) -> list[Piece]:
    """
    Return what fills *storage*, in order, each piece with its offset in it; the bytes between are padding: zeros.

    Raises:
        LayoutMismatch: The chosen layers have more or fewer bytes for it.
    """
    filling: list[Piece] = []
    end = 0
    for kind, name, state in _members(storage, groups):
        if kind is Kind.BUFFERS:
            # Where every rank saved its own buffer, additional ranks get a copy of rank 0's.
            shard = rank if rank < slices.shards(kind, name) else 0
            filling.append(slices.find(kind, name, shard=shard).piece(end))
            end += filling[-1].size_bytes
            continue
        elements = prod(slices.parameter(name).shape)
        length, valid = slice_length(elements, world_size), valid_elements(elements, world_size, rank)
        if valid:
            begin = rank * length
            filling += slices.pieces(
                kind,
                name,
                state=state,
                dtype=storage.dtype,
                offset=end,
                begin=begin,
                end=begin + valid,
                as_stored=True,
            )
        end += length * by_code(storage.dtype).bytes
    if end != _size_bytes(storage):
        raise LayoutMismatch(f"{path}: the chosen layers fill {end} bytes of a buffer of {_size_bytes(storage)}")
    return filling


def _members(storage: Storage, groups: _Groups) -> Iterator[tuple[Kind, str, str]]:
    """Yield the slices in *storage*, in order, by kind, name and optimizer state."""
    match storage.content:
        case FlatContent(state=state, group=group):
            yield from ((Kind.OPTIMIZER if state else Kind.MASTER, name, state) for name in groups[group])
        case FragmentContent(parameter=name):
            yield Kind.WEIGHTS, name, ""
        case BufferContent(buffer=name):
            yield Kind.BUFFERS, name, ""
        case content:
            raise IntegrityError(f"a storage has content that cannot be written: {type(content).__name__}")


# -- gathered weights ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedCheck:
    """The checksum of a derived tensor as it was saved: rounding the master again must give it."""

    name: str
    offset: int
    """Where it starts in the file."""
    size_bytes: int
    crc32: int


def plan_gathered(file: GatheredFile) -> OutputFile:
    """Return the plan of *file* without its tensors, which `gathered_pieces` supplies rank by rank."""
    return OutputFile(
        path=file.path,
        size_bytes=len(file.header) + sum(_tensor_bytes(tensor) for tensor in file.tensors),
        executable=False,
        literals=((0, file.header),),
        pieces=(),
    )


def gathered_pieces(file: GatheredFile, slices: Slices, *, rank: int, world_size: int) -> Iterator[Piece]:
    """Yield the pieces that *rank* of *world_size* supplies to *file*; rank 0 supplies tensors that are not cut."""
    for tensor, offset in _placed_tensors(file):
        if tensor.source is TensorSource.PARAMETER:
            yield from _slice_pieces(tensor, slices, rank=rank, world_size=world_size, offset=offset)
        elif rank:
            continue
        elif tensor.source is TensorSource.BUFFER:
            yield slices.find(Kind.BUFFERS, tensor.layer_name, shard=0).piece(offset)
        else:
            assert tensor.stored is not None
            yield whole(tensor.stored, offset)


def derived_checks(file: GatheredFile, slices: Slices, *, unchanged: Callable[[str], bool]) -> Iterator[DerivedCheck]:
    """Yield the derived tensors whose checksums are known: those of parameters that are *unchanged* since the save."""
    for tensor, offset in _placed_tensors(file):
        if tensor.source is not TensorSource.PARAMETER or not tensor.elements or not unchanged(tensor.layer_name):
            continue
        if slices.weights_kind(tensor.layer_name, tensor.dtype) is Kind.MASTER:
            yield DerivedCheck(name=tensor.name, offset=offset, size_bytes=_tensor_bytes(tensor), crc32=tensor.crc32)


def _placed_tensors(file: GatheredFile) -> Iterator[tuple[GatheredTensor, int]]:
    offset = len(file.header)
    for tensor in file.tensors:
        yield tensor, offset
        offset += _tensor_bytes(tensor)


def _tensor_bytes(tensor: GatheredTensor) -> int:
    return tensor.elements * by_code(tensor.dtype).bytes


def _slice_pieces(
    tensor: GatheredTensor, slices: Slices, *, rank: int, world_size: int, offset: int
) -> Iterator[Piece]:
    """Yield the slices that *rank* supplies: those that its own files start with, whose objects are still cached."""
    name = tensor.layer_name
    kind = slices.weights_kind(name, tensor.dtype)
    shards = slices.shards(kind, name) or 1
    length = slice_length(tensor.elements, shards)
    first, last = (-(-number * shards // world_size) for number in (rank, rank + 1))
    begin, end = min(first * length, tensor.elements), min(last * length, tensor.elements)
    if begin < end:
        offset += begin * by_code(tensor.dtype).bytes
        yield from slices.pieces(kind, name, dtype=tensor.dtype, offset=offset, begin=begin, end=end)
