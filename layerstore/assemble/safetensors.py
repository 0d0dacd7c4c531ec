"""
Plan the weights files of an export: which tensors are in which safetensors file, and where their bytes come from.

Other programs read these files, so their names, their metadata and the order of the index are Transformers' own.
Within these limits, we pad the header and put whole pages first, so that payloads start on pages and can be reflinked.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from layerstore.assemble.assemble import DerivedCheck, OutputFile, merged, whole
from layerstore.dtypes import by_code
from layerstore.errors import Unsupported
from layerstore.filenames import WEIGHTS
from layerstore.framing import Frame, framed
from layerstore.limits import PAGE_BYTES, SAFETENSORS_HEADER_BYTES_MAX
from layerstore.slices import Piece, Slices
from layerstore.states import ObjectContent, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements that are contiguous in a parameter or buffer."""

    name: str
    start: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One tensor of a weights file."""

    name: str
    """In the file."""
    dtype: str
    """Element type of its bytes in the file."""
    shape: tuple[int, ...]
    source: TensorSource = TensorSource.STORED
    layer_name: str = ""
    """The parameter or buffer that supplies the tensor, or at least its first elements; empty when stored."""
    runs: tuple[Run, ...] = ()
    """Where its elements come from, if not from all of *layer_name*."""
    stored: ObjectContent | None = None
    crc32: int | None = None
    """Checksum of this tensor in the base's own file, if the bytes written must equal the bytes in that file."""

    @property
    def size_bytes(self) -> int:
        """The size in the file."""
        return prod(self.shape) * by_code(self.dtype).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One safetensors file."""

    name: str
    tensors: tuple[WeightTensor, ...]
    """In file order."""
    frame: Frame
    """Where everything lies in the file."""

    def tensor_at(self, offset: int) -> WeightTensor:
        """Return the tensor that holds the byte at *offset*."""
        return self.tensors[bisect_right(self.frame.offsets, offset) - 1]

    def output(self, slices: Slices) -> OutputFile:
        """Plan the file, filled from *slices*."""
        placed = zip(self.tensors, self.frame.offsets, strict=True)
        return OutputFile(
            path=self.name,
            size_bytes=self.frame.size_bytes,
            literals=((0, self.frame.header),),
            pieces=merged(piece for tensor, offset in placed for piece in _pieces(tensor, slices, offset)),
        )

    def checks(self) -> Iterator[DerivedCheck]:
        """Yield the tensors whose checksums are known in advance."""
        for tensor, offset in zip(self.tensors, self.frame.offsets, strict=True):
            if tensor.crc32 is not None:
                yield DerivedCheck(name=tensor.name, offset=offset, size_bytes=tensor.size_bytes, crc32=tensor.crc32)


# -- which tensors are in which file -------------------------------------------------------------------------------


def weights_files(tensors: Iterable[WeightTensor], *, shard_bytes_max: int) -> tuple[WeightsFile, ...]:
    """
    Distribute *tensors* over files, in their order, as Transformers does.

    A file is closed when the next tensor would exceed *shard_bytes_max*; a larger tensor has a file of its own.
    """
    shards = list(_split(tensors, shard_bytes_max)) or [[]]
    count = len(shards)
    if count == 1:
        return (weights_file(WEIGHTS, shards[0]),)
    return tuple(
        weights_file(f"model-{number:05d}-of-{count:05d}.safetensors", shard) for number, shard in enumerate(shards, 1)
    )


def _split(tensors: Iterable[WeightTensor], shard_bytes_max: int) -> Iterator[list[WeightTensor]]:
    current: list[WeightTensor] = []
    current_bytes = 0
    for tensor in tensors:
        if tensor.size_bytes > shard_bytes_max:
            yield [tensor]
            continue
        if current_bytes + tensor.size_bytes > shard_bytes_max:
            yield current
            current, current_bytes = [], 0
        current.append(tensor)
        current_bytes += tensor.size_bytes
    if current:
        yield current


def weights_file(name: str, tensors: Iterable[WeightTensor]) -> WeightsFile:
    """Lay out *tensors* in one file called *name*."""
    # Tensors of whole pages first, so that each starts on a page; then larger element types, so that all are aligned.
    ordered = sorted(
        tensors, key=lambda tensor: (tensor.size_bytes % PAGE_BYTES != 0, -by_code(tensor.dtype).bytes, tensor.name)
    )
    # The metadata of Transformers' own files.
    frame = framed(((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered), metadata={"format": "pt"})
    if len(frame.header) > SAFETENSORS_HEADER_BYTES_MAX:
        raise Unsupported(
            f"the header of {name} would have {len(frame.header)} bytes", hint="choose a smaller maximum per shard"
        )
    return WeightsFile(name=name, tensors=tuple(ordered), frame=frame)


# -- where the bytes of a tensor come from -------------------------------------------------------------------------


def _pieces(tensor: WeightTensor, slices: Slices, offset: int) -> Iterator[Piece]:
    if not prod(tensor.shape):
        return
    if tensor.source is TensorSource.STORED:
        assert tensor.stored is not None
        yield whole(tensor.stored, offset)
    elif tensor.source is TensorSource.BUFFER:
        yield slices.buffer(tensor.layer_name).piece(offset)
    else:
        for run in tensor.runs or (Run(name=tensor.layer_name, start=0, elements=prod(tensor.shape)),):
            yield from slices.pieces(
                slices.weights_kind(run.name, tensor.dtype),
                run.name,
                dtype=tensor.dtype,
                offset=offset,
                begin=run.start,
                end=run.start + run.elements,
            )
            offset += run.elements * by_code(tensor.dtype).bytes
