"""
Read the ranks' files, compare them with each other, and extract the model and its optimizer.

Errors name ranks that disagree, lengths that do not fit, and settings that keep state out of the files. The engine's
own loader would silently accept most of these.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from math import prod
from pathlib import PurePath
from struct import Struct
from typing import TypeGuard

from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.format import crc32
from layerstore.limits import INLINE_BYTES_MAX, WORKERS_MAX
from layerstore.model import Buffer, Parameter
from layerstore.tree import Located, Size, Tensor, Tree, with_content
from layerstore.zero3.discovery import RankFiles
from layerstore.zero3.filenames import SHARD_STEM, is_text
from layerstore.zero3.pt import Pickles, PtFile, read_pt
from layerstore.zero3.slices import slice_length
from layerstore.zero3.sourcefile import damaged, open_source
from layerstore.zero3.trees import (
    TreeView,
    config_of,
    optimizer_states,
    refuse_settings,
    sub_group_shapes,
    undivided_in,
)

MASTER = ""
"""The state name of a master's flat buffer."""

# States that Adam, Lion, SGD and similar optimizers keep for every element.
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})

STEP = "step"
"""The optimizer's update count, one per sub-group: an int in DeepSpeed's optimizers, a scalar tensor in torch's."""
_COUNTERS = {"F32": Struct("<f"), "F64": Struct("<d"), "I64": Struct("<q"), "I32": Struct("<i")}
"""The element types of such a tensor."""

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

    @property
    def optimizer(self) -> TreeView:
        """The tree of ``optim_states``."""
        return TreeView(self.optimizer_file.tree, path=self.optimizer_file.path)

    @property
    def fragments(self) -> dict[str, TreeView]:
        """This rank's slices of frozen parameters; empty if they were left out of the checkpoint."""
        found = self.model.get("frozen_param_fragments")
        return {} if found is None else {str(name): fragment for name, fragment in found.children()}

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The persistent buffers, in the model's order."""
        module = self.model["module"].mapping()
        names = self.model.get("buffer_names")
        found = {}
        for name in names.sequence() if names is not None else ():
            value = module.get(name)
            # Other buffers stay in the tree.
            if isinstance(name, str) and isinstance(value, Tensor) and value.is_contiguous and value.elements:
                found[name] = Buffer(name=name, dtype=value.storage.dtype, shape=tuple(value.shape))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Facts that all ranks of one save share."""

    dp_world_size: int
    global_steps: int
    param_shapes: Groups
    optimizer_states: list[tuple[str, int, str]]
    """State, sub-group and element type of every flat buffer."""
    optimizer_steps: list[int | None]
    """The optimizer's update count for each sub-group."""
    frozen_parameters: dict[str, tuple[Tree, str, int]]
    """Shape, element type and slice length of the frozen parameters whose weights the rank holds."""
    buffers: dict[str, Buffer]
    """In the model's order."""


def read_ranks(pairs: tuple[RankFiles, ...], allowed_globals: frozenset[str]) -> list[RankSource]:
    """Read every rank's pair of files; raises Unsupported if a setting kept state out of them."""

    pickles = Pickles(allowed_globals)

    def read(pair: RankFiles) -> RankSource:
        return rank_source(pair.rank, read_pt(pair.model, pickles), read_pt(pair.optimizer, pickles))

    # The first one before the others, which are copies of it.
    first = read(pairs[0])
    with ThreadPoolExecutor(WORKERS_MAX) as pool:
        return [first, *pool.map(read, pairs[1:])]


def rank_source(rank: int, model_file: PtFile, optimizer_file: PtFile) -> RankSource:
    """Return one rank's two files with their flat buffers; raises Unsupported if state was kept out of them."""
    model = TreeView(model_file.tree, path=model_file.path)
    optimizer = TreeView(optimizer_file.tree, path=optimizer_file.path)["optimizer_state_dict"]
    refuse_settings(model, optimizer)
    return RankSource(
        rank=rank, model_file=model_file, optimizer_file=optimizer_file, flats=tuple(_flats(optimizer, model))
    )


def check_saved_as_named(ranks: list[RankSource]) -> None:
    """Raise if a file was renamed to another file's name, which only the folder inside its archive shows."""
    for file in (file for rank in ranks for file in (rank.model_file, rank.optimizer_file)):
        if SHARD_STEM.fullmatch(file.root) and file.root != file.path.stem:
            raise LayoutMismatch(
                f"{file.path} was saved as {file.root}.pt: it was copied or renamed, and is another rank's",
                hint="put every rank's own files back in their places",
            )


def common_of(rank: RankSource) -> Common:
    """Return the facts that *rank* must share with all others."""
    groups = sub_group_shapes(rank.model)
    return Common(
        dp_world_size=rank.model["dp_world_size"].integer(),
        global_steps=rank.model["global_steps"].integer(),
        param_shapes=groups,
        optimizer_states=[(flat.state, flat.group, flat.tensor.storage.dtype) for flat in rank.flats],
        optimizer_steps=_optimizer_steps(rank, len(groups)),
        frozen_parameters=_frozen(rank),
        buffers=rank.buffers,
    )


def agreed(ranks: list[RankSource]) -> Common:
    """Return the facts that *ranks* share; raises unless they are all the ranks of one save."""
    found = [common_of(rank) for rank in ranks]
    first, folder = found[0], ranks[0].model.path.parent
    for rank, other in zip(ranks, found, strict=True):
        partitions = rank.optimizer["optimizer_state_dict"]["partition_count"].integer()
        if partitions != other.dp_world_size:
            raise _mixed(folder, f"the optimizer was cut for {partitions} ranks, the model for {other.dp_world_size}")
        for field in fields(Common):
            ours, others = getattr(first, field.name), getattr(other, field.name)
            if ours != others:
                what = f"{field.name} differs at rank {rank.rank}"
                raise _mixed(folder, f"{what}: {_short(ours)} and {_short(others)}")
    world_size = first.dp_world_size
    if len(ranks) < world_size:
        raise SourceCheckpoint(
            f"{folder} is incomplete: it was saved by {world_size} ranks; "
            f"missing: {len(ranks)}{f' to {world_size - 1}' if world_size - len(ranks) > 1 else ''}",
            hint="copy the missing files from the nodes that wrote them, or ingest another checkpoint",
        )
    if len(ranks) > world_size:
        raise LayoutMismatch(
            f"{folder} holds files of {len(ranks)} ranks, but was saved by {world_size}",
            hint="remove the files that an earlier save of another world size left behind",
        )
    return first


def _mixed(folder: PurePath, why: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"the files of {folder} are mixed: {why}",
        hint="ranks of one save belong together; ingest another checkpoint",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _flats(optimizer: TreeView, model: TreeView) -> Iterator[Flat]:
    masters = optimizer["fp32_flat_groups"].children()
    states = optimizer["optimizer_state_dict"]["state"]
    _check_states_present(states, len(masters), model)
    lengths = {group: master.tensor().elements for group, (_, master) in enumerate(masters)}
    names = _sliced(states, lengths)
    # Quantized moments are never slices, whatever their length: they are meaningless without their block's scale.
    is_whole = bool(undivided_in(states, lambda key, _: key in names))
    for group, (_, master) in enumerate(masters):
        yield Flat(state=MASTER, group=group, tensor=master.tensor())
        state = None if is_whole else states.get(group)
        for key, value in state.children() if state is not None else ():
            if _is_flat(value.value, lengths[group]):
                if not isinstance(key, str) or key == MASTER:
                    raise SourceCheckpoint(f"{optimizer.path}: an optimizer state is called {key!r}")
                yield Flat(state=key, group=group, tensor=value.value)


def _sliced(states: TreeView, lengths: Mapping[int, int]) -> set[Tree]:
    """Return the names of the states that have one number per element of a sub-group."""
    found = {
        key
        for group, elements in lengths.items()
        if (state := states.get(group)) is not None
        for key, value in state.children()
        if _is_flat(value.value, elements)
    }
    return found | _MOMENTS


def _is_flat(value: Tree, elements: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and tuple(value.shape) == (elements,)


def _check_states_present(states: TreeView, groups: int, model: TreeView) -> None:
    """Refuse a checkpoint whose settings kept some moments out of the files."""
    filled = sum(bool(state.mapping()) for _, state in states.children())
    has_stepped = model["global_steps"].integer() > model["skipped_steps"].integer()
    if 0 < filled < groups or (not filled and has_stepped and groups and not _may_be_stateless(model)):
        raise Unsupported(
            f"{states.path} holds the optimizer state of {filled} of {groups} sub-groups: "
            "the rest was never saved (Twin-Flow's offload ratio below 1, or SuperOffload)",
            hint="save without offload_optimizer.ratio and super_offload",
        )


def _may_be_stateless(model: TreeView) -> bool:
    """Whether the optimizer may have no state, like plain SGD, because nothing was offloaded."""
    zero = (config_of(model) or {}).get("zero_optimization")
    if not isinstance(zero, dict):
        return False  # unknown: refusing is better than losing moments
    offload = zero.get("offload_optimizer")
    return offload is None or (isinstance(offload, dict) and offload.get("device") in {None, "none"})


def check_rank(rank: RankSource, common: Common) -> None:
    """Raise unless every flat buffer is as long as its parameters' slices, and each parameter occurs once."""
    _check_names(rank, common.param_shapes)
    _check_flats(rank, common)
    _check_states(rank)


def _check_flats(rank: RankSource, common: Common) -> None:
    path, groups = rank.optimizer_file.path, common.param_shapes
    count = sum(flat.state == MASTER for flat in rank.flats)
    if count != len(groups):
        raise LayoutMismatch(f"{path} has {count} flat groups, param_shapes has {len(groups)}")
    for flat in rank.flats:
        shapes, found = groups[flat.group], flat.tensor.elements
        expected = sum(slice_length(prod(shape), common.dp_world_size) for shape in shapes.values())
        if found == 0 and expected:
            raise Unsupported(
                f"{path}: flat group {flat.group} is empty: its optimizer was offloaded to NVMe",
                hint="save with offload_optimizer.device 'cpu' or 'none'",
            )
        if found != expected or not flat.tensor.is_contiguous:
            raise LayoutMismatch(
                f"{path}: {flat.state or 'master'} of flat group {flat.group} has {found} elements, "
                f"its parameters need {expected} (first: {next(iter(shapes), 'none')})"
            )


def _check_states(rank: RankSource) -> None:
    """
    Raise unless a state that is sliced in one sub-group is sliced in all that have it.

    Otherwise, a moment of another length would be taken for a scalar of its sub-group and lost to its layers.
    """
    lengths = {flat.group: flat.tensor.elements for flat in rank.flats if flat.state == MASTER}
    states = optimizer_states(rank.optimizer)
    sliced = _sliced(states, lengths)
    for group, state in states.children():
        for key, value in state.children():
            tensor, length = value.value, lengths.get(group, -1) if isinstance(group, int) else -1
            if key in sliced and isinstance(tensor, Tensor) and not _is_flat(tensor, length):
                raise LayoutMismatch(
                    f"{rank.optimizer_file.path}: {key!r} of flat group {group!r} has shape {tuple(tensor.shape)}, "
                    "which is not the length of its parameters",
                    hint="the file is damaged, or its optimizer is not supported",
                )


def _check_names(rank: RankSource, groups: Groups) -> None:
    seen: set[str] = {str(name) for name in rank.model.optional("frozen_param_shapes")}
    for group in groups:
        twice = sorted(seen & group.keys())
        if twice:
            raise LayoutMismatch(
                f"{rank.model.path}: parameter {twice[0]!r} has two places, in two sub-groups or frozen and trained",
                hint="the file is damaged: ingest another checkpoint",
            )
        seen |= group.keys()


# -- the parts of the model ------------------------------------------------------------------------------------------


def parameters_of(rank: RankSource, groups: Groups) -> dict[str, Parameter]:
    """Return all parameters in the model's order; aliases are fields of their parameter."""
    shapes: dict[str, Tree] = {name: shape for group in groups for name, shape in group.items()}
    frozen = {str(name): shape for name, shape in rank.model.optional("frozen_param_shapes").items()}
    fragments = rank.model.optional("frozen_param_fragments")
    module = rank.model.optional("module")
    aliases: dict[str, list[str]] = {}
    for alias, name in rank.model.optional("shared_params").items():
        aliases.setdefault(str(name), []).append(str(alias))
    for name in map(str, module):
        if not is_text(name):
            raise SourceCheckpoint(f"{rank.model.path}: the name {name!r} in the module is not valid Unicode")
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


def _frozen(rank: RankSource) -> dict[str, tuple[Tree, str, int]]:
    shapes = rank.model.optional("frozen_param_shapes")
    fragments = rank.model.get("frozen_param_fragments")
    if fragments is None or fragments.value is None:
        return {}  # exclude_frozen_parameters: their weights are elsewhere
    held = {name: fragment.tensor() for name, fragment in rank.fragments.items()}
    odd = sorted(str(name) for name in shapes.keys() ^ held.keys())
    if odd:
        raise LayoutMismatch(f"{rank.model.path}: frozen parameter {odd[0]!r} has only one of shape and fragment")
    return {name: (shapes[name], tensor.storage.dtype, tensor.elements) for name, tensor in held.items()}


def _optimizer_steps(rank: RankSource, groups: int) -> list[int | None]:
    states = optimizer_states(rank.optimizer)
    found: list[int | None] = []
    for group in range(groups):
        state = states.get(group)
        counter = None if state is None else state.get(STEP)
        found.append(None if counter is None else count_of(counter.value))
    return found


def count_of(counter: Tree) -> int | None:
    """Return a step counter as a number; None if it is not a counter."""
    number = number_of(counter)
    return int(number) if number is not None and math.isfinite(number) else None


def number_of(counter: Tree) -> float | None:
    """Return a number, or a tensor that is one; None if it is neither."""
    if not (isinstance(counter, Tensor) and counter.elements == 1 and counter.storage.dtype in _COUNTERS):
        return counter if isinstance(counter, int) and not isinstance(counter, bool) else None
    content, layout = counter.storage.content, _COUNTERS[counter.storage.dtype]
    start = counter.offset * layout.size
    if isinstance(content, bytes):
        data = content[start : start + layout.size]
    else:
        assert isinstance(content, Located), "trees that were just read point into their files"
        with open_source(content.path) as file:
            # Ranks compare this number before payloads are verified: bit rot must not look like a mixed checkpoint.
            if content.size_bytes <= INLINE_BYTES_MAX:
                stored = file.read_at(content.offset_bytes, content.size_bytes)
                if crc32(stored) != content.crc32:
                    raise damaged(content.path, "a step counter has another checksum than its file states")
            data = file.read_at(content.offset_bytes + start, layout.size)
    value: float = layout.unpack(data)[0]
    return value


def counter_like(old: Tree, count: int) -> Tree:
    """Return a step counter like *old* with the value *count*; raises LayoutMismatch if *old* is not a counter."""
    if isinstance(old, Tensor) and old.elements == 1 and old.storage.dtype in _COUNTERS:
        return with_content(old, _COUNTERS[old.storage.dtype].pack(count))
    if isinstance(old, int) and not isinstance(old, bool):
        return count
    raise LayoutMismatch(
        f"the base's optimizer counts its steps in a {type(old).__name__}, which cannot be set",
        hint="compose with --adam-step unify",
    )
