"""
The format ``dcp``: a composite as a PyTorch distributed checkpoint, which FSDP2 loads on any number of ranks.

Several keys may share one archive: the keys of tied parameters, and torchtitan's and the HF Trainer's own keys.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from layerstore.assemble import (
    Archives,
    ExportPlan,
    OutputFile,
    literal_file,
    plan_source_file,
)
from layerstore.compose import Composition, cautions, load_versions
from layerstore.distcp.metadata import Chunk, Entry, metadata_bytes
from layerstore.distcp.names import Named, names_of
from layerstore.dtypes import by_code, dtype_name
from layerstore.filenames import DCP_METADATA, FSDP_FOLDERS, SUMMARY, TRAINER_STATE
from layerstore.handover import Held
from layerstore.hf import goes_along
from layerstore.limits import MIB, PAGE_BYTES
from layerstore.model import Kind
from layerstore.rank_options import AdamStep
from layerstore.slices import Piece, Slices
from layerstore.storage import Repository
from layerstore.tree import Storage, Tree, new_tensor

_CHUNK_BYTES = 256 * MIB
"""The limit for chunks of several rows: readers load whole chunks into memory, though each rank needs only a part."""

_PAGES_FROM_BYTES = 16 * PAGE_BYTES
"""Archives of at least this size are page-aligned, so that the kernel can copy or share pages."""

_ALIGNMENT_BYTES = 64
"""The alignment of all other archives, as in torch."""


def plan_dcp(repo: Repository, composition: Composition, *, adam_step: AdamStep) -> ExportPlan:
    """
    Decide which tensors go into which files; *adam_step* chooses the base's step counters or each layer's.

    Raises:
        LayoutMismatch: The layers do not fit together, or the base has no moments, or moments that belong to no
            single parameter.
    """
    started = time.monotonic()
    base = composition.base
    versions = load_versions(repo, composition)
    slices, state = composition.slices(repo, versions), repo.state(base.states[0])
    named, name_notes = names_of(repo, composition, versions, slices, adam_step=adam_step)
    notes = [*cautions(repo, composition), *name_notes]
    writer = _FilePlanner(slices)
    by_layer: dict[str, list[Named]] = {layer: [] for layer in (*(version.layer for version in versions), "")}
    for tensor in named:
        by_layer[tensor.layer].append(tensor)
    files = [writer.data_file(number, of_file) for number, of_file in enumerate(by_layer.values())]
    files.append(literal_file(DCP_METADATA, metadata_bytes(writer.entries())))
    beside = [file for file in state.files if goes_along(file.path, tag=base.layout.tag)]
    if any(file.path == TRAINER_STATE for file in state.files):
        beside += [file for file in state.files if file.path in {TRAINER_STATE, "scheduler.pt"}]
        # Accelerate and the Trainer read the model from one folder and the optimizer from another: each folder gets
        # metadata that refers to the data files above it.
        above = metadata_bytes(writer.entries(below="../"))
        files += (literal_file(f"{folder}/{DCP_METADATA}", above) for folder in FSDP_FOLDERS)
    trained = (
        tensor
        for tensor in named
        if tensor.held is not None and tensor.held.kind is Kind.MASTER and prod(tensor.shape) > 0
    )
    codes = {tensor.dtype for tensor in trained if tensor.dtype is not None}
    dtype = dtype_name(codes.pop()) if len(codes) == 1 else "mixed"
    summary = literal_file(SUMMARY, composition.summary_file(notes, format="dcp", dtype=dtype, adam_step=adam_step))
    return ExportPlan(
        composition=composition,
        format="dcp",
        dtype=dtype,
        files=(*files, *map(plan_source_file, beside), summary),
        notes=tuple(notes),
        seconds=time.monotonic() - started,
        signs=(DCP_METADATA,),
        is_older_form=_is_older_form,
        loading="load it with torch.distributed.checkpoint.load(state, checkpoint_id={folder})",
    )


def _is_older_form(path: Path) -> bool:
    return path.name == DCP_METADATA or path.suffix == ".distcp"


# -- files ---------------------------------------------------------------------------------------------------------


def _value(archives: Archives, value: Tree) -> Chunk:
    """Add a small *value*, and return its chunk."""
    begin, size_bytes = archives.add(value, alignment_bytes=_ALIGNMENT_BYTES)
    return Chunk(offsets=(), sizes=(), file=archives.path, offset_bytes=begin, size_bytes=size_bytes)


def _boxes(shape: tuple[int, ...], *, item_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield a tensor's chunks, which are whole rows: offsets, sizes, and the number of the first element."""
    row = prod(shape[1:])
    if not shape or not prod(shape):
        yield (0,) * len(shape), shape, 0
        return
    rows = max(1, _CHUNK_BYTES // (row * item_bytes))
    for first in range(0, shape[0], rows):
        yield (first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]), first * row


class _FilePlanner:
    """Plans the data files, and collects the chunks in them."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._written: list[tuple[Named, tuple[Chunk, ...]]] = []

    def entries(self, below: str = "") -> Iterator[Entry]:
        """Yield everything planned so far, under all its keys; *below* is prefixed to all file paths."""
        for tensor, chunks in self._written:
            placed = tuple(replace(chunk, file=below + chunk.file) for chunk in chunks)
            # All keys have one path, so that a reader of the whole state builds the tensor once.
            for key in tensor.keys:
                yield Entry(key=key, path=tensor.path, dtype=tensor.dtype, shape=tensor.shape, chunks=placed)

    def data_file(self, number: int, named: Iterable[Named]) -> OutputFile:
        """Plan the file of one layer, or of all values; values that are the same object are written once."""
        archives = Archives(f"__{number}_0.distcp")
        places: dict[int, Chunk] = {}
        for tensor in named:
            if tensor.held is not None:
                self._written.append((tensor, tuple(self._chunks(archives, tensor, tensor.held))))
                continue
            if id(tensor.value) not in places:
                places[id(tensor.value)] = _value(archives, tensor.value)
            place = places[id(tensor.value)]
            self._written.append((tensor, (replace(place, offsets=(0,) * len(tensor.shape), sizes=tensor.shape),)))
        return archives.output()

    def _chunks(self, archives: Archives, named: Named, held: Held) -> Iterator[Chunk]:
        """Add a tensor in chunks of whole rows, and yield the chunks."""
        dtype = named.dtype
        assert dtype is not None, "layers hold tensors"
        for offsets, sizes, first in _boxes(named.shape, item_bytes=by_code(dtype).bytes):

            def fill(_: Storage, offset: int, begin: int = first, end: int = first + prod(sizes)) -> Iterator[Piece]:
                yield from held_pieces(self._slices, held, dtype=dtype, offset=offset, begin=begin, end=end)

            tensor = new_tensor(dtype, sizes)
            is_large = tensor.storage.size_bytes >= _PAGES_FROM_BYTES
            begin, size_bytes = archives.add(tensor, fill, alignment_bytes=PAGE_BYTES if is_large else _ALIGNMENT_BYTES)
            yield Chunk(offsets=offsets, sizes=sizes, file=archives.path, offset_bytes=begin, size_bytes=size_bytes)


def held_pieces(slices: Slices, held: Held, *, dtype: str, offset: int, begin: int, end: int) -> Iterator[Piece]:
    """Yield the pieces of *slices* that make up the elements *begin* to *end* of a tensor, to be put at *offset*."""
    if held.kind is Kind.BUFFERS:  # if the ranks' buffers differed, the first rank's is used
        yield slices.buffer(held.name).piece(offset, start=begin, elements=end - begin)
    elif begin < end:
        yield from slices.pieces(
            held.kind, held.name, state=held.state, dtype=dtype, offset=offset, begin=begin, end=end
        )
