"""
DeepSpeed's files -> ``Checkpoint``: which bytes of which file are which slice of which parameter.

Nothing is guessed: ranks that disagree, a length that does not fit, a setting that keeps state out of the files
are errors that name what was found. Payloads are not read here, but for the buffers that ranks may share.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.format.hashing import ObjectHasher
from layerstore.format.objects import canonical_order
from layerstore.layers import layer_of, layers_in_order
from layerstore.limits import IO_CHUNK_BYTES, RECORD_BYTES_MAX, WORKERS_MAX
from layerstore.model import (
    Buffer,
    BufferContent,
    FlatContent,
    FragmentContent,
    Kind,
    Parameter,
    RankState,
    TreeFile,
)
from layerstore.tree import Located, Size, Tensor, Tree
from layerstore.zero3.checkpoint import Checkpoint, LayerSource, ObjectSource, SliceSource, StorageCheck
from layerstore.zero3.discover import FoundCheckpoint, RankFiles
from layerstore.zero3.gathered import read_gathered
from layerstore.zero3.ptfile import PtFile, read_pt
from layerstore.zero3.slices import elements_of, slice_length, valid_elements
from layerstore.zero3.sourcefile import open_source, read_source_file
from layerstore.zero3.trees import TreeView, refuse_settings, replace_tensors, with_content

MASTER = "master"
_KINDS = tuple(Kind)

# How torch keeps a step counter, as struct knows it.
_COUNTERS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}

Agreed = TypeVar("Agreed")
Groups = list[dict[str, Size]]
"""The parameters of every sub-group with their shapes, in flat order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """One flat buffer of one rank: a sub-group's masters, or one of its optimizer states."""

    state: str
    group: int
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """One rank's two files, read."""

    rank: int
    model_file: PtFile
    optimizer_file: PtFile
    flats: tuple[Flat, ...]

    @property
    def model(self) -> TreeView:
        """The tree of ``model_states``."""
        return TreeView(self.model_file.tree, path=self.model_file.path)


def read_checkpoint(
    found: FoundCheckpoint,
    *,
    layer_pattern: re.Pattern[str] | None = None,
    allowed_globals: frozenset[str] = frozenset(),
) -> Checkpoint:
    """
    Describe the checkpoint *found*.

    Raises:
        SourceCheckpoint: A file is damaged, incomplete or untrusted.
        LayoutMismatch: Its ranks do not fit each other, or a length does not fit its parameter.
        Unsupported: A setting kept state out of the files.
    """
    ranks = _read_ranks(found.ranks, allowed_globals)
    world_size = _world_size(ranks)
    engine_step = _agreed(ranks, "global_steps", lambda rank: rank.model["global_steps"].integer())
    groups = _agreed(ranks, "param_shapes", _param_shapes)
    _check_flats(ranks, groups, world_size)
    parameters = _parameters(ranks[0], groups)
    buffers = _buffers(ranks[0])
    gathered, files = read_gathered(found.others, parameters=parameters, buffers=buffers)
    return Checkpoint(
        found=found,
        step=_trainer_step(found, default=engine_step),
        world_size=world_size,
        layers=_layers(ranks, groups, parameters, buffers, layer_pattern),
        states=tuple(_state(rank, found.folder, buffers) for rank in ranks),
        gathered=gathered,
        files=files,
        checks=tuple(_checks(ranks)),
    )


# -- the files -----------------------------------------------------------------------------------------------------


def _read_ranks(pairs: tuple[RankFiles, ...], allowed_globals: frozenset[str]) -> list[RankSource]:
    def read(pair: RankFiles) -> RankSource:
        model_file = read_pt(pair.model, allowed_globals=allowed_globals)
        optimizer_file = read_pt(pair.optimizer, allowed_globals=allowed_globals)
        model = TreeView(model_file.tree, path=pair.model)
        optimizer = TreeView(optimizer_file.tree, path=pair.optimizer)["optimizer_state_dict"]
        refuse_settings(model, optimizer)
        return RankSource(
            rank=pair.rank,
            model_file=model_file,
            optimizer_file=optimizer_file,
            flats=tuple(_flats(optimizer, model)),
        )

    with ThreadPoolExecutor(WORKERS_MAX) as pool:
        return list(pool.map(read, pairs))


def _world_size(ranks: list[RankSource]) -> int:
    world_size = _agreed(ranks, "dp_world_size", lambda rank: rank.model["dp_world_size"].integer())
    _agreed(ranks, "partition_count", _partition_count, expected=world_size)
    if len(ranks) < world_size:
        lost = ", ".join(str(rank) for rank in range(len(ranks), world_size))
        raise SourceCheckpoint(
            f"{ranks[0].model.path.parent} is incomplete: it was saved by {world_size} ranks; missing: {lost}",
            hint="copy the missing files from the nodes that wrote them, or ingest another checkpoint",
        )
    if len(ranks) > world_size:
        raise LayoutMismatch(
            f"{ranks[0].model.path.parent} holds files of {len(ranks)} ranks, but was saved by {world_size}",
            hint="remove the files that an earlier save of another world size left behind",
        )
    return world_size


def _partition_count(rank: RankSource) -> int:
    tree = TreeView(rank.optimizer_file.tree, path=rank.optimizer_file.path)
    return tree["optimizer_state_dict"]["partition_count"].integer()


def _agreed(
    ranks: list[RankSource], what: str, look: Callable[[RankSource], Agreed], expected: Agreed | None = None
) -> Agreed:
    """Return what all ranks say of *what*; raise LayoutMismatch with the values where they differ."""
    values = [look(rank) for rank in ranks]
    first = values[0] if expected is None else expected
    for rank, value in zip(ranks, values, strict=True):
        if value != first:
            detail = f": {_short(first)} and {_short(value)}"
            raise LayoutMismatch(
                f"the files of {ranks[0].model.path.parent} are mixed: {what} differs at rank {rank.rank}{detail}",
                hint="ranks of one save belong together; ingest another checkpoint",
            )
    return first


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _trainer_step(found: FoundCheckpoint, *, default: int) -> int:
    """Return the trainer's own step where it left one: the engine's counter may have started elsewhere."""
    path = found.folder / "trainer_state.json"
    if path not in found.others:
        return default
    try:
        step = json.loads(read_source_file(path, size_bytes_max=RECORD_BYTES_MAX))["global_step"]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise SourceCheckpoint(f"{path} does not tell the step: {exc}", hint="was the save interrupted?") from exc
    if not isinstance(step, int) or step < 0:
        raise SourceCheckpoint(f"{path} has global_step {step!r}")
    return step


def _checks(ranks: list[RankSource]) -> Iterator[StorageCheck]:
    for rank in ranks:
        for file in (rank.model_file, rank.optimizer_file):
            for number, storage in enumerate(file.storages):
                assert isinstance(storage.content, Located)
                if storage.content.size_bytes:
                    yield StorageCheck(key=f"data/{number}", located=storage.content)


# -- flat buffers --------------------------------------------------------------------------------------------------


def _param_shapes(rank: RankSource) -> Groups:
    groups = []
    for _, group in rank.model["param_shapes"].children():
        shapes: dict[str, Size] = {}
        for name, shape in group.children():
            if not isinstance(shape.value, Size) or not isinstance(name, str):
                raise SourceCheckpoint(f"{rank.model.path}: param_shapes holds something else than names and shapes")
            shapes[name] = shape.value
        groups.append(shapes)
    return groups


def _flats(optimizer: TreeView, model: TreeView) -> Iterator[Flat]:
    masters = optimizer["fp32_flat_groups"].children()
    states = optimizer["optimizer_state_dict"]["state"]
    _check_states_present(states, len(masters), model)
    for group, (_, master) in enumerate(masters):
        yield Flat(state=MASTER, group=group, tensor=master.tensor())
        elements = master.tensor().elements
        state = states.get(group)
        for key, value in state.children() if state is not None else ():
            if isinstance(value.value, Tensor) and len(value.value.shape) == 1 and value.value.shape[0] == elements:
                if not isinstance(key, str):
                    raise SourceCheckpoint(f"{optimizer.path}: an optimizer state is called {key!r}")
                yield Flat(state=key, group=group, tensor=value.value)


def _check_states_present(states: TreeView, groups: int, model: TreeView) -> None:
    """Refuse settings under which some moments live where no file holds them."""
    present = {key for key, state in states.children() if state.mapping()}
    has_stepped = model["global_steps"].integer() > model["skipped_steps"].integer()
    if (present and len(present) < groups) or (not present and has_stepped and groups):
        raise Unsupported(
            f"{states.path} holds the optimizer state of {len(present)} of {groups} sub-groups: "
            "the rest was never saved (Twin-Flow's offload ratio below 1, or SuperOffload)",
            hint="save without offload_optimizer.ratio and super_offload",
        )


def _check_flats(ranks: list[RankSource], groups: Groups, world_size: int) -> None:
    """Raise unless every flat buffer is exactly as long as its parameters' slices."""
    _agreed(ranks, "the optimizer's states", _kinds_of_flats)
    expected = [sum(slice_length(elements_of(shape), world_size) for shape in group.values()) for group in groups]
    for rank in ranks:
        path = rank.optimizer_file.path
        count = sum(flat.state == MASTER for flat in rank.flats)
        if count != len(groups):
            raise LayoutMismatch(f"{path} has {count} flat groups, param_shapes has {len(groups)}")
        for flat in rank.flats:
            found = flat.tensor.elements
            if found == 0 and expected[flat.group]:
                raise Unsupported(
                    f"{path}: flat group {flat.group} is empty: its optimizer was offloaded to NVMe",
                    hint="save with offload_optimizer.device 'cpu' or 'none'",
                )
            if found != expected[flat.group] or not flat.tensor.is_contiguous:
                raise LayoutMismatch(
                    f"{path}: {flat.state} of flat group {flat.group} has {found} elements, "
                    f"its parameters need {expected[flat.group]} (first: {next(iter(groups[flat.group]), 'none')})"
                )


def _kinds_of_flats(rank: RankSource) -> list[tuple[str, int, str]]:
    return [(flat.state, flat.group, flat.tensor.storage.dtype) for flat in rank.flats]


# -- parameters and buffers ----------------------------------------------------------------------------------------


def _parameters(rank: RankSource, groups: Groups) -> dict[str, Parameter]:
    """Return all parameters that have bytes of their own, in the model's order."""
    shapes: dict[str, Tree] = {name: shape for group in groups for name, shape in group.items()}
    frozen = {str(name): shape for name, shape in _optional(rank.model, "frozen_param_shapes").items()}
    fragments = _optional(rank.model, "frozen_param_fragments")
    module = _optional(rank.model, "module")
    aliases: dict[str, list[str]] = {}
    for alias, name in _optional(rank.model, "shared_params").items():
        aliases.setdefault(str(name), []).append(str(alias))
    unknown = sorted((shapes.keys() | frozen.keys()) - module.keys())
    if unknown:
        raise LayoutMismatch(f"{rank.model.path}: param_shapes names {unknown[0]!r}, which the module does not have")
    found = {}
    for name, placeholder in module.items():
        if not isinstance(name, str) or (name not in shapes and name not in frozen):
            continue
        holder = fragments.get(name, placeholder)
        if not isinstance(holder, Tensor):
            raise SourceCheckpoint(f"{rank.model.path}: parameter {name!r} is not a tensor")
        shape = shapes[name] if name in shapes else frozen[name]
        if not isinstance(shape, Size):
            raise SourceCheckpoint(f"{rank.model.path}: the shape of parameter {name!r} is not a shape")
        found[name] = Parameter(
            name=name,
            dtype=holder.storage.dtype,
            shape=tuple(shape),
            frozen=name in frozen,
            aliases=tuple(sorted(aliases.get(name, ()))),
        )
    return found


def _optional(view: TreeView, key: str) -> dict[Tree, Tree]:
    part = view.get(key)
    return {} if part is None else part.mapping()


def _buffers(rank: RankSource) -> dict[str, Buffer]:
    module = rank.model["module"].mapping()
    names = rank.model.get("buffer_names")
    found = {}
    for name in names.sequence() if names is not None else ():
        value = module.get(name)
        # What is not a plain block of memory stays in the tree, where every tensor has its place.
        if isinstance(name, str) and isinstance(value, Tensor) and value.is_contiguous and value.elements:
            found[name] = Buffer(name=name, dtype=value.storage.dtype, shape=tuple(value.shape))
    return found


# -- layers --------------------------------------------------------------------------------------------------------


def _layers(
    ranks: list[RankSource],
    groups: Groups,
    parameters: Mapping[str, Parameter],
    buffers: Mapping[str, Buffer],
    pattern: re.Pattern[str] | None,
) -> tuple[LayerSource, ...]:
    def layer(name: str) -> str:
        return layer_of(name, pattern=pattern)

    objects: dict[str, list[ObjectSource]] = {}
    for rank in ranks:
        slices = [*_flat_slices(rank, groups, len(ranks)), *_frozen_slices(rank, parameters, len(ranks))]
        for name, source in _by_layer(slices, layer, shard=rank.rank, shards=len(ranks)):
            objects.setdefault(name, []).append(source)
    for name, source in _buffer_objects(ranks, buffers, layer):
        objects.setdefault(name, []).append(source)
    steps = _optimizer_steps(ranks[0], len(groups))
    module = [str(name) for name in ranks[0].model["module"].mapping() if name in parameters or name in buffers]
    return tuple(
        LayerSource(
            layer=name,
            parameters=tuple(parameters[member] for member in sorted(members) if member in parameters),
            buffers=tuple(buffers[member] for member in sorted(members) if member in buffers),
            objects=tuple(sorted(objects.get(name, ()), key=lambda source: (_KINDS.index(source.kind), source.shard))),
            optimizer_step=_common_step(steps[group] for group, of in enumerate(groups) if of.keys() & set(members)),
        )
        for name, members in layers_in_order(module, pattern=pattern).items()
    )


def _optimizer_steps(rank: RankSource, groups: int) -> list[int | None]:
    """Return the optimizer's own counter for every sub-group."""
    states = TreeView(rank.optimizer_file.tree, path=rank.optimizer_file.path)
    states = states["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    found: list[int | None] = []
    for group in range(groups):
        state = states.get(group)
        counter = None if state is None else state.get("step")
        found.append(None if counter is None else _count(counter.value))
    return found


def _count(counter: Tree) -> int | None:
    """Return a step counter as a number: an int in DeepSpeed's own optimizers, a scalar tensor in torch's."""
    if isinstance(counter, Tensor) and counter.elements == 1 and counter.storage.dtype in _COUNTERS:
        (source,) = _slice(counter, 0, 1, name="step", state="")
        with open_source(source.path) as file:
            (value,) = struct.unpack(_COUNTERS[source.dtype], file.read_at(source.offset_bytes, source.size_bytes))
        return int(value) if math.isfinite(value) else None
    return counter if isinstance(counter, int) and not isinstance(counter, bool) else None


def _common_step(steps: Iterable[int | None]) -> int | None:
    found = set(steps)
    return found.pop() if len(found) == 1 else None


def _flat_slices(rank: RankSource, groups: Groups, world_size: int) -> Iterator[tuple[Kind, SliceSource]]:
    for flat in rank.flats:
        kind = Kind.MASTER if flat.state == MASTER else Kind.OPTIMIZER
        start = 0
        for name, shape in groups[flat.group].items():
            elements = elements_of(shape)
            valid = valid_elements(elements, world_size, rank.rank)
            state = "" if kind is Kind.MASTER else flat.state
            yield from ((kind, source) for source in _slice(flat.tensor, start, valid, name=name, state=state))
            start += slice_length(elements, world_size)


def _frozen_slices(
    rank: RankSource, parameters: Mapping[str, Parameter], world_size: int
) -> Iterator[tuple[Kind, SliceSource]]:
    fragments = rank.model.get("frozen_param_fragments")
    for name, fragment in fragments.children() if fragments is not None else ():
        elements = elements_of(parameters[str(name)].shape)
        tensor = fragment.tensor()
        if tensor.elements != slice_length(elements, world_size) or not tensor.is_contiguous:
            raise LayoutMismatch(
                f"{rank.model.path}: the fragment of frozen parameter {name!r} has {tensor.elements} elements, "
                f"expected {slice_length(elements, world_size)}"
            )
        valid = valid_elements(elements, world_size, rank.rank)
        yield from ((Kind.WEIGHTS, source) for source in _slice(tensor, 0, valid, name=str(name), state=""))


def _slice(tensor: Tensor, start: int, elements: int, *, name: str, state: str) -> Iterator[SliceSource]:
    """Yield the slice of *tensor* from element *start* on, or nothing where all of it is padding."""
    located = tensor.storage.content
    assert isinstance(located, Located), "trees that were just read point into their files"
    if elements:
        yield SliceSource(
            name=name,
            state=state,
            dtype=tensor.storage.dtype,
            elements=elements,
            path=located.path,
            offset_bytes=located.offset_bytes + (tensor.offset + start) * by_code(tensor.storage.dtype).bytes,
        )


def _by_layer(
    slices: Iterable[tuple[Kind, SliceSource]], layer: Callable[[str], str], *, shard: int, shards: int
) -> Iterator[tuple[str, ObjectSource]]:
    found: dict[tuple[str, Kind], list[SliceSource]] = {}
    for kind, source in slices:
        found.setdefault((layer(source.name), kind), []).append(source)
    for (name, kind), members in found.items():
        yield name, ObjectSource(kind=kind, shard=shard, shards=shards, slices=tuple(canonical_order(members)))


def _buffer_objects(
    ranks: list[RankSource], buffers: Mapping[str, Buffer], layer: Callable[[str], str]
) -> Iterator[tuple[str, ObjectSource]]:
    """Yield one object per layer where all ranks hold the same buffers, else one per rank."""
    by_rank = [
        dict(_by_layer(_buffer_slices(rank, buffers), layer, shard=rank.rank, shards=len(ranks))) for rank in ranks
    ]
    for name, source in by_rank[0].items():
        others = [objects.get(name) for objects in by_rank[1:]]
        if any(other is None or len(other.slices) != len(source.slices) for other in others):
            raise LayoutMismatch(f"the ranks of {ranks[0].model.path.parent} hold different buffers in layer {name!r}")
        if all(other is not None and _digests(other) == _digests(source) for other in others):
            yield name, ObjectSource(kind=Kind.BUFFERS, shard=0, shards=1, slices=source.slices)
        else:
            yield from ((name, objects[name]) for objects in by_rank)


def _buffer_slices(rank: RankSource, buffers: Mapping[str, Buffer]) -> Iterator[tuple[Kind, SliceSource]]:
    module = rank.model["module"]
    for name, buffer in buffers.items():
        tensor = module[name].tensor()
        if tuple(tensor.shape) != buffer.shape or tensor.storage.dtype != buffer.dtype or not tensor.is_contiguous:
            raise LayoutMismatch(f"{rank.model.path}: buffer {name!r} has another shape or type than on rank 0")
        yield from ((Kind.BUFFERS, source) for source in _slice(tensor, 0, tensor.elements, name=name, state=""))


def _digests(source: ObjectSource) -> str:
    hasher = ObjectHasher()
    for part in source.slices:
        with open_source(part.path) as file:
            for start in range(0, part.size_bytes, IO_CHUNK_BYTES):
                hasher.update(file.read_at(part.offset_bytes + start, min(IO_CHUNK_BYTES, part.size_bytes - start)))
    return hasher.id()


# -- what is left --------------------------------------------------------------------------------------------------


def _state(rank: RankSource, folder: Path, buffers: Mapping[str, Buffer]) -> RankState:
    """Return the rank's trees with the layers' bytes left out."""
    contents: dict[int, object] = {
        id(flat.tensor): FlatContent(state=flat.state, group=flat.group) for flat in rank.flats
    }
    fragments = rank.model.get("frozen_param_fragments")
    for name, fragment in fragments.children() if fragments is not None else ():
        contents[id(fragment.value)] = FragmentContent(parameter=str(name))
    for name in buffers:
        contents[id(rank.model["module"][name].value)] = BufferContent(buffer=name)

    def replacement(tensor: Tensor) -> Tensor:
        content = contents.get(id(tensor))
        return tensor if content is None else with_content(tensor, content)

    def file(source: PtFile) -> TreeFile:
        path = source.path.relative_to(folder).as_posix()
        return TreeFile(path=path, tree=replace_tensors(source.tree, replacement))

    return RankState(
        rank=rank.rank, model=file(rank.model_file), optimizer=file(rank.optimizer_file), files=(), gathered=()
    )
