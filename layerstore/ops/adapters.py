"""
The files of PEFT's adapters in what is composed and exported: as the trainer wrote them, with the layers' own values.

Such a file is kept byte for byte. Tensors whose layers are of other saves than the base are put in their places.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, Unsupported
from layerstore.export.adapter import adapter_at, name_in_file, of_adapter, plain_name
from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.model import Kind, Parameter, SourceFile
from layerstore.ops.loading import header_of
from layerstore.storage.rooms import Rooms
from layerstore.zero3 import (
    GatheredSource,
    OutputFile,
    Piece,
    Slices,
    can_derive,
    merged,
    plan_source_file,
    tensors_in,
    valid_elements,
    whole,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """The file of an adapter's weights, as it was saved."""

    file: SourceFile
    header: bytes
    tensors: tuple[GatheredSource, ...]
    """In file order; each with the parameter that it is of."""
    size_bytes: int


def plan_beside(rooms: Rooms, file: SourceFile, slices: Slices, *, own: Iterable[str]) -> OutputFile:
    """
    Return the plan of a file beside the shards: as it is, or an adapter's with the chosen layers' values.

    *own* are the parameters whose layers the base itself has saved.

    Raises:
        Unsupported: Of some tensors of an adapter's it cannot be told which parameters they are.
    """
    older = slices.parameters.keys() - set(own)
    adapter = adapter_at(file.path)
    if not older or adapter is None or PurePosixPath(file.path).name != ADAPTER_WEIGHTS:
        return plan_source_file(file)
    found = read_adapter(rooms, file, slices, adapter)
    strange = [tensor.name for tensor in found.tensors if not tensor.supplier]
    lost = (older & of_adapter(older, adapter)) - {tensor.supplier for tensor in found.tensors}
    if strange and lost:
        raise Unsupported(
            f"{file.path} cannot be mixed of several saves: {strange[0]!r} in it is of no parameter, and "
            f"{min(lost)!r} is not in it",
            hint="--policy exact takes all of one save",
        )
    return patched(found, older, partial(_pieces, slices))


def read_adapter(rooms: Rooms, file: SourceFile, slices: Slices, adapter: str) -> AdapterFile:
    """Read the header of *file*, which holds *adapter*, and find the parameter of each tensor."""
    header, size_bytes = header_of(rooms, file)
    suppliers = _suppliers(slices.parameters.values(), adapter)
    tensors = tensors_in(Path(file.path), header, size_bytes, suppliers)
    return AdapterFile(file=file, header=header, tensors=tensors, size_bytes=size_bytes)


def _suppliers(parameters: Iterable[Parameter], adapter: str) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for parameter in parameters:
        supplier = parameter.name, prod(parameter.shape)
        for name in (parameter.name, *parameter.aliases):
            found.setdefault(name_in_file(name, adapter) or plain_name(name), supplier)
    return found


def patched(
    found: AdapterFile, names: Iterable[str], pieces: Callable[[GatheredSource], Iterable[Piece]]
) -> OutputFile:
    """Return the plan of the file *found* in which *pieces* supply the tensors of the parameters *names*."""
    wanted, file, begin = set(names), found.file, 0
    literals: list[tuple[int, bytes]] = []
    made: list[Piece] = []

    def keep(end: int) -> None:
        if isinstance(file.content, bytes):
            literals.append((begin, file.content[begin:end]))
        elif end > begin:
            start = whole(file.content, 0).object_offset + begin
            made.append(Piece(object=file.content.object, object_offset=start, size_bytes=end - begin, offset=begin))

    for tensor in found.tensors:
        if tensor.supplier in wanted:
            keep(tensor.offset_bytes)
            made += pieces(tensor)
            begin = tensor.offset_bytes + tensor.size_bytes
    keep(found.size_bytes)
    return OutputFile(
        path=file.path,
        size_bytes=found.size_bytes,
        executable=file.executable,
        literals=tuple(literals),
        pieces=tuple(merged(made)),
    )


def _pieces(slices: Slices, tensor: GatheredSource) -> Iterator[Piece]:
    """Yield what supplies *tensor*: the weights of its layer where these are stored as such, else its master."""
    name, offset = tensor.supplier, tensor.offset_bytes
    kind = Kind.WEIGHTS if slices.shards(Kind.WEIGHTS, name) else Kind.MASTER
    shards = slices.shards(kind, name) or 1  # none at all: the first will be missed
    for shard in range(shards):
        valid = valid_elements(tensor.elements, shards, shard)
        if not valid:
            break
        place = slices.find(kind, name, shard=shard)
        stored = place.tensor.dtype
        if place.tensor.elements != valid:
            raise LayoutMismatch(f"{name!r} is stored in a slice of {place.tensor.elements} elements, not {valid}")
        if not can_derive(stored, tensor.dtype):
            raise Unsupported(f"{name!r} is stored as {stored}, and the adapter's file has it as {tensor.dtype}")
        piece = place.piece(offset)
        yield piece if stored == tensor.dtype else replace(piece, rounding=(stored, tensor.dtype))
        offset += valid * by_code(tensor.dtype).bytes
