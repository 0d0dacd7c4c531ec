"""
The format ``dcp``: a composite as a PyTorch distributed checkpoint, which FSDP2 loads on any number of ranks.

The names are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``, nested and flattened, below ``model``
and ``optim``. Several names may share one archive: tied parameters, and what torchtitan and the HF Trainer call the
same tensors. Weights are the fp32 masters.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from layerstore.assemble import (
    Archives,
    ExportPlan,
    OutputFile,
    export_notes,
    literal_file,
    plan_source_file,
)
from layerstore.compose import Composition, cautions, check_members
from layerstore.distcp.metadata import METADATA, Chunk, Entry, KeyPath, metadata_bytes
from layerstore.dtypes import by_code, dtype_name
from layerstore.filenames import SUMMARY, TRAINER_STATE
from layerstore.hf import goes_along
from layerstore.layers import unwrapped
from layerstore.limits import MIB, PAGE_BYTES
from layerstore.model import Kind, LayerVersion
from layerstore.rank_options import AdamStep
from layerstore.shards import plan_optimizer
from layerstore.slices import Piece, Slices
from layerstore.storage import Repository
from layerstore.tree import Storage, Tensor, Tree, new_tensor
from layerstore.zero3.reshard import OptimizerState

_CHUNK_BYTES = 256 * MIB
"""A reader takes whole chunks into memory, of which each rank needs a part."""

_PAGES_FROM_BYTES = 16 * PAGE_BYTES
"""Archives from this size lie on pages, so that the kernel can copy or share these."""

_ALIGNMENT_BYTES = 64
"""Of all others, as in torch."""

_MODEL, _OPTIMIZER = "model", "optim"
_MODEL_ALIASES = ("",)
"""torchtitan puts a model's tensors at the top."""
_OPTIMIZER_ALIASES = ("optimizer",)
"""The name in torchtitan, Accelerate and the Trainer."""

_TRAINER_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
"""Where the HF Trainer looks for the checkpoints of an FSDP training."""


def plan_dcp(repo: Repository, composition: Composition, *, adam_step: AdamStep) -> ExportPlan:
    """
    Decide which tensors go into which files; the step counters are the base's, or each layer's own.

    Raises:
        LayoutMismatch: The layers do not fit together, or the base has no moments, or moments of no one parameter.
    """
    started = time.monotonic()
    base = composition.base
    versions = check_members(repo, composition)
    slices, state = composition.slices(repo, versions), repo.state(base.states[0])
    optimizer = plan_optimizer(repo, composition, versions, adam_step=adam_step)
    notes = [*cautions(repo, composition), *optimizer.notes, *export_notes(state, versions, slices)]
    writer = _Writer(slices)
    files = [writer.data_file(number, version, optimizer) for number, version in enumerate(versions)]
    files.append(writer.file_of_values(len(versions), optimizer))
    files.append(literal_file(METADATA, metadata_bytes(writer.entries())))
    beside = [file for file in state.files if goes_along(file.path, tag=base.layout.tag)]
    if base.layout.flavour == "hf":
        beside += [file for file in state.files if file.path in {TRAINER_STATE, "scheduler.pt"}]
        above = metadata_bytes(writer.entries(below="../"))
        files += (literal_file(f"{folder}/{METADATA}", above) for folder in _TRAINER_FOLDERS)
    trained = (name for group in optimizer.groups for name in group.parameters if prod(slices.parameter(name).shape))
    codes = {slices.dtype(Kind.MASTER, name) for name in trained}
    dtype = dtype_name(codes.pop()) if len(codes) == 1 else "mixed"
    summary = literal_file(SUMMARY, composition.summary_file(notes, format="dcp", dtype=dtype, adam_step=adam_step))
    return ExportPlan(
        composition=composition,
        format="dcp",
        dtype=dtype,
        files=(*files, *map(plan_source_file, beside), summary),
        notes=tuple(notes),
        seconds=time.monotonic() - started,
        signs=(METADATA,),
        is_older_form=_is_older_form,
        loading="load it with torch.distributed.checkpoint.load(state, checkpoint_id={folder})",
    )


def _is_older_form(path: Path) -> bool:
    return path.name == METADATA or path.suffix == ".distcp"


# -- names ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Named:
    """What one archive, or the archives of one tensor, is called."""

    path: KeyPath
    aliases: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def entries(self, below: str) -> Iterator[Entry]:
        """Yield it under all its names; they lead to one place, so that a reader of everything makes it once."""
        chunks = tuple(replace(chunk, file=below + chunk.file) for chunk in self.chunks)
        for key in (".".join(map(str, self.path)), *self.aliases):
            yield Entry(key=key, path=self.path, dtype=self.dtype, shape=self.shape, chunks=chunks)


def _of_model(name: str, tied: Iterable[str] = ()) -> tuple[KeyPath, tuple[str, ...]]:
    names = [unwrapped(each) for each in (name, *tied)]
    prefixes = [_MODEL, *_MODEL_ALIASES]
    first, *others = (".".join(filter(None, (prefix, each))) for each in names for prefix in prefixes)
    assert first == f"{_MODEL}.{names[0]}"
    return (_MODEL, names[0]), tuple(others)


def _of_optimizer(*path: str | int, flat: Iterable[str] = ()) -> tuple[KeyPath, tuple[str, ...]]:
    """Return the path below the optimizer, and all other keys; *flat* are those that flattening gives it."""
    keys = [".".join(map(str, path)), *flat]
    _, *others = (f"{prefix}.{key}" for key in keys for prefix in (_OPTIMIZER, *_OPTIMIZER_ALIASES))
    return (_OPTIMIZER, *path), tuple(others)


# -- files ---------------------------------------------------------------------------------------------------------


def _value(archives: Archives, value: Tree) -> Chunk:
    """Add a small *value*, and return its place."""
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


class _Writer:
    """Plans the data files, and collects the names of what is in them."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._named: list[_Named] = []

    def entries(self, below: str = "") -> Iterator[Entry]:
        """Yield everything that was planned so far, under all its names; its files are *below* another folder."""
        for named in self._named:
            yield from named.entries(below)

    def data_file(self, number: int, version: LayerVersion, optimizer: OptimizerState) -> OutputFile:
        """Plan the file of one layer: its parameters, buffers and moments."""
        archives = Archives(f"__{number}_0.distcp")
        for parameter in version.parameters:
            kind = Kind.MASTER if self._slices.shards(Kind.MASTER, parameter.name) else Kind.WEIGHTS
            names = _of_model(parameter.name, parameter.aliases)
            self._tensor(archives, names, kind, parameter.name, parameter.shape, default=parameter.dtype)
            for state in optimizer.sliced.get(parameter.name, ()):
                key = ("state", unwrapped(parameter.name), state)
                names = _of_optimizer(*key)
                self._tensor(archives, names, Kind.OPTIMIZER, parameter.name, parameter.shape, state=state)
        for buffer in version.buffers:
            names = _of_model(buffer.name)
            self._tensor(archives, names, Kind.BUFFERS, buffer.name, buffer.shape, default=buffer.dtype)
        return archives.output()

    def file_of_values(self, number: int, optimizer: OptimizerState) -> OutputFile:
        """Plan the file of everything that is not as large as a parameter."""
        archives = Archives(f"__{number}_0.distcp")
        for state, value, names in optimizer.alike():
            chunk = _value(archives, value)
            for name in names:
                path, aliases = _of_optimizer("state", unwrapped(name), state)
                self._add(path, aliases, value, chunk)
        for index, group in enumerate(optimizer.groups):
            for key, value in {**optimizer.torch_settings, **group.settings}.items():
                flat = [f"param_groups.{unwrapped(name)}.{key}" for name in group.parameters]
                path, aliases = _of_optimizer("param_groups", index, key, flat=flat)
                self._add(path, aliases, value, _value(archives, value))
            members: list[Tree] = [unwrapped(name) for name in group.parameters]
            path, aliases = _of_optimizer("param_groups", index, "params")
            self._add(path, aliases, members, _value(archives, members))
        return archives.output()

    def _add(self, path: KeyPath, aliases: tuple[str, ...], value: Tree, chunk: Chunk) -> None:
        dtype: str | None = None
        shape: tuple[int, ...] = ()
        if isinstance(value, Tensor):
            dtype, shape = value.storage.dtype, tuple(value.shape)
            chunk = replace(chunk, offsets=(0,) * len(shape), sizes=shape)
        self._named.append(_Named(path, aliases, dtype, shape, (chunk,)))

    def _tensor(
        self,
        archives: Archives,
        names: tuple[KeyPath, tuple[str, ...]],
        kind: Kind,
        name: str,
        shape: tuple[int, ...],
        *,
        state: str = "",
        default: str = "F32",
    ) -> None:
        """Add a tensor in chunks of whole rows; *default* is the type of one without elements."""
        slices = self._slices
        dtype = slices.dtype(kind, name, state=state) if prod(shape) else default
        chunks = []
        for offsets, sizes, first in _boxes(shape, item_bytes=by_code(dtype).bytes):

            def fill(_: Storage, offset: int, begin: int = first, end: int = first + prod(sizes)) -> Iterator[Piece]:
                if kind is Kind.BUFFERS:  # if ranks differed, the first one's
                    stored = slices.find(kind, name, shard=0)
                    yield stored.piece(offset, start=begin, elements=end - begin)
                elif begin < end:
                    yield from slices.pieces(kind, name, state=state, dtype=dtype, offset=offset, begin=begin, end=end)

            tensor = new_tensor(dtype, sizes)
            is_large = tensor.storage.size_bytes >= _PAGES_FROM_BYTES
            begin, size_bytes = archives.add(tensor, fill, alignment_bytes=PAGE_BYTES if is_large else _ALIGNMENT_BYTES)
            chunks.append(
                Chunk(offsets=offsets, sizes=sizes, file=archives.path, offset_bytes=begin, size_bytes=size_bytes)
            )
        path, aliases = names
        self._named.append(_Named(path, aliases, dtype, shape, tuple(chunks)))
