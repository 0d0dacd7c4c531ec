"""
Gathered weights as plans: the files of whole weights that a Trainer leaves beside the shards, made again.

Every rank supplies its share of the slices, so that an object is still warm from the rank's own files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from layerstore.dtypes import by_code
from layerstore.model import GatheredFile, GatheredTensor, Kind, TensorSource
from layerstore.zero3.places import OutputFile, Piece, Place, Slices, whole
from layerstore.zero3.slices import slice_length, valid_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedCheck:
    """A tensor of a gathered file that is rounded again, and the checksum that it had."""

    name: str
    offset: int
    """Where it starts in the file."""
    size_bytes: int
    crc32: int


def plan_gathered(file: GatheredFile) -> OutputFile:
    """Return the file without its tensors: each rank supplies its slices, see ``gathered_pieces``."""
    return OutputFile(
        path=file.path,
        size_bytes=len(file.header) + sum(_tensor_bytes(tensor) for tensor in file.tensors),
        executable=False,
        literals=((0, file.header),),
        pieces=(),
    )


def gathered_pieces(file: GatheredFile, slices: Slices, *, rank: int, world_size: int) -> Iterator[Piece]:
    """Yield what *rank* of *world_size* supplies to *file*; what is not cut into slices comes with rank 0."""
    offset = len(file.header)
    for tensor in file.tensors:
        yield from _tensor_pieces(tensor, slices, rank=rank, world_size=world_size, offset=offset)
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


def _tensor_pieces(
    tensor: GatheredTensor, slices: Slices, *, rank: int, world_size: int, offset: int
) -> Iterator[Piece]:
    if tensor.source is TensorSource.STORED:
        assert tensor.stored is not None
        yield from [whole(tensor.stored, offset)] if rank == 0 else []
    elif tensor.source is TensorSource.BUFFER:
        yield from [slices.find(Kind.BUFFERS, tensor.layer_name, shard=0).piece(offset)] if rank == 0 else []
    elif tensor.elements:  # no elements, no slice of them anywhere
        kind = Kind.WEIGHTS if slices.shards(Kind.WEIGHTS, tensor.layer_name) else Kind.MASTER
        # Stored by more ranks or by fewer: each slice comes with the rank whose files need its beginning.
        shards = slices.shards(kind, tensor.layer_name) or 1  # none at all: the first will be missed
        for shard in range(-(-rank * shards // world_size), -(-(rank + 1) * shards // world_size)):
            if valid_elements(tensor.elements, shards, shard):
                yield _slice_piece(tensor, slices.find(kind, tensor.layer_name, shard=shard), offset=offset)


def _slice_piece(tensor: GatheredTensor, place: Place, *, offset: int) -> Piece:
    length = slice_length(tensor.elements, place.object.shards)
    piece = place.piece(offset + place.object.shard * length * by_code(tensor.dtype).bytes)
    return piece if place.tensor.dtype == tensor.dtype else replace(piece, rounding=(place.tensor.dtype, tensor.dtype))
