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
from layerstore.zero3.slices import Piece, Slices, StoragePart, slice_length, valid_elements
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
    """Returns the literals that depend on checksums of cut pieces, given these by offset in the file."""


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
            current = replace(current, size_bytes=current.size_bytes + piece.size_bytes)
        else:
            yield current
            current = piece
    if current is not None:
        yield current


def _continues(first: Piece, second: Piece) -> bool:
    # A conversion, and the checksum of a cut piece, are of that piece alone.
    is_plain = not (first.rounding or second.rounding or first.is_cut or second.is_cut)
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
    return OutputFile(
        path=file.path,
        size_bytes=len(content) if isinstance(content, bytes) else content.size_bytes,
        executable=file.executable,
        literals=((0, content),) if isinstance(content, bytes) else (),
        pieces=() if isinstance(content, bytes) else (whole(content, 0),),
    )


def _plan_tree_file(file: TreeFile, slices: Slices, groups: _Groups, *, rank: int, world_size: int) -> OutputFile:
    layout = layout_pt(file.tree, name=PurePosixPath(file.path).stem)
    checksums: dict[Storage, int] = {}
    unknown: dict[Storage, tuple[int, list[StoragePart]]] = {}
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
            pieces += _placed(filling, offset)
            if any(part.checksum is None for part in filling):
                unknown[storage] = offset, filling
            else:
                checksums[storage] = _combined(filling, offset, {})
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
    unknown: Mapping[Storage, tuple[int, list[StoragePart]]],
    cut: Mapping[int, int],
) -> Literals:
    """Return the bytes around the payloads, given the checksums of the *cut* pieces by offset in the file."""
    found = {storage: _combined(filling, offset, cut) for storage, (offset, filling) in unknown.items()}
    return tuple(layout.skeleton({**known, **found}))


def _combined(filling: list[StoragePart], offset: int, cut: Mapping[int, int]) -> int:
    parts = []
    for part in filling:
        parts.append((cut[offset] if part.checksum is None else part.checksum, part.size_bytes))
        offset += part.size_bytes
    return combine_crc32(parts)


def filling_of(
    storage: Storage, slices: Slices, groups: _Groups, *, rank: int, world_size: int, path: str
) -> list[StoragePart]:
    """
    Return what fills *storage*, in order: stretches of objects, and padding.

    Raises:
        LayoutMismatch: The chosen layers have more or fewer bytes for it.
    """
    filling = list(_filling(storage, slices, groups, rank=rank, world_size=world_size))
    expected = storage.elements * by_code(storage.dtype).bytes
    found = sum(part.size_bytes for part in filling)
    if found != expected:
        raise LayoutMismatch(f"{path}: the chosen layers fill {found} bytes of a buffer of {expected}")
    return filling


def _filling(storage: Storage, slices: Slices, groups: _Groups, *, rank: int, world_size: int) -> Iterator[StoragePart]:
    match storage.content:
        case FlatContent(state=state, group=group):
            kind = Kind.OPTIMIZER if state else Kind.MASTER
            for name in groups[group]:
                yield from _padded_slice(storage, slices, kind, name, state=state, rank=rank, world_size=world_size)
        case FragmentContent(parameter=name):
            yield from _padded_slice(storage, slices, Kind.WEIGHTS, name, state="", rank=rank, world_size=world_size)
        case BufferContent(buffer=name):
            # Where every rank saved its own buffer, additional ranks get a copy of rank 0's.
            shard = rank if rank < slices.shards(Kind.BUFFERS, name) else 0
            yield slices.find(Kind.BUFFERS, name, shard=shard).part()
        case content:
            raise IntegrityError(f"a storage has content that cannot be written: {type(content).__name__}")


def _padded_slice(
    storage: Storage, slices: Slices, kind: Kind, name: str, *, state: str, rank: int, world_size: int
) -> Iterator[StoragePart]:
    elements = prod(slices.parameter(name).shape)
    length, valid = slice_length(elements, world_size), valid_elements(elements, world_size, rank)
    if valid:
        begin = rank * length
        yield from slices.parts(kind, name, state=state, dtype=storage.dtype, begin=begin, end=begin + valid)
    padding = (length - valid) * by_code(storage.dtype).bytes
    if padding:
        yield StoragePart(size_bytes=padding, checksum=crc32_of_zeros(padding), source=None)


def _placed(filling: list[StoragePart], offset: int) -> Iterator[Piece]:
    for part in filling:
        if part.source is not None:
            ref, start = part.source
            is_cut = part.checksum is None
            yield Piece(object=ref, object_offset=start, size_bytes=part.size_bytes, offset=offset, is_cut=is_cut)
        offset += part.size_bytes


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
        is_derived = tensor.source is TensorSource.PARAMETER and slices.weights_kind(tensor.layer_name) is Kind.MASTER
        if is_derived and tensor.elements and unchanged(tensor.layer_name):
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
    kind = slices.weights_kind(name)
    shards = slices.shards(kind, name) or 1
    length = slice_length(tensor.elements, shards)
    first, last = (-(-number * shards // world_size) for number in (rank, rank + 1))
    begin, end = min(first * length, tensor.elements), min(last * length, tensor.elements)
    if begin < end:
        offset += begin * by_code(tensor.dtype).bytes
        yield from slices.pieces(kind, name, dtype=tensor.dtype, offset=offset, begin=begin, end=end)
