"""
Read the ranks' files, compare them with each other, and extract the model and its optimizer.

Errors report ranks that disagree, lengths that do not fit, and settings that keep state out of the files. The engine's
own loader would silently accept most of these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import PurePath
from typing import TypeGuard, cast

from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.filenames import SHARD_STEM, is_text
from layerstore.limits import WORKERS_MAX
from layerstore.model import Buffer, Parameter
from layerstore.threads import Threads
from layerstore.tree import Inert, Size, Tensor, Tree
from layerstore.zero3.discovery import RankFiles
from layerstore.zero3.pt import Pickles, PtFile, read_pt
from layerstore.zero3.trees import (
    STAGE_3,
    STEP,
    Fragment,
    Sharding,
    TreeView,
    config_of,
    count_of,
    inner_in,
    is_dealt,
    masters_in,
    optimizer_states,
    refuse_settings,
    sharding_of,
    stage_of,
    undivided_in,
)

MASTER = ""
"""The state name of a master's flat buffer."""

# States that Adam, Lion, SGD and similar optimizers keep for every element.
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})

_EXTRA_STATE = "_extra_state"
"""The ending of names under which torch's modules keep state other than parameters and buffers."""

SubGroupShapes = list[dict[str, Size]]
"""For each sub-group: its parameters with their shapes, in the order of the flat buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """One flat buffer of one rank: a sub-group's masters, or one of its optimizer states."""

    state: str
    group: int
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class RankSource:
    """One rank's two files, read."""

    rank: int
    model_file: PtFile
    """Under stages 1 and 2, all ranks share one file."""
    optimizer_file: PtFile
    flats: tuple[FlatBuffer, ...]
    sharding: Sharding

    def fragments_of(self, group: Tree) -> list[Fragment]:
        """Return this rank's fragments in the flat buffer *group*, in order; none if there is no such buffer."""
        return self._fragments[group] if isinstance(group, int) and group < len(self._fragments) else []

    @cached_property
    def _fragments(self) -> list[list[Fragment]]:
        return [list(self.sharding.fragments(group, self.rank)) for group in range(len(self.sharding.groups))]

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return stage_of(self.optimizer["optimizer_state_dict"])

    @property
    def has_whole_model(self) -> bool:
        """Whether the model's file has whole weights, as under stages 1 and 2; only the first rank's are used."""
        return self.stage != STAGE_3

    @property
    def model(self) -> TreeView:
        """The tree of ``model_states``."""
        return TreeView(self.model_file.tree, path=self.model_file.path)

    @property
    def optimizer(self) -> TreeView:
        """The tree of ``optim_states``."""
        return TreeView(self.optimizer_file.tree, path=self.optimizer_file.path)

    @cached_property
    def frozen_shapes(self) -> dict[str, Tree]:
        """The shapes of frozen parameters, by name."""
        if self.has_whole_model:
            return {name: weights.tensor().shape for name, weights in self.fragments.items()}
        return {str(name): shape for name, shape in self.model.optional("frozen_param_shapes").items()}

    @cached_property
    def fragments(self) -> dict[str, TreeView]:
        """
        This rank's slices of frozen parameters; empty if they were left out of the checkpoint.

        Under stages 1 and 2, each is a whole parameter: any tensor in the module that is neither trained nor a buffer.
        """
        if self.has_whole_model:
            return {name: weights for name, weights in self.weights.items() if name not in self._trained}
        frozen = self.model.get("frozen_param_fragments")
        return {} if frozen is None else {str(name): fragment for name, fragment in frozen.children()}

    @cached_property
    def weights(self) -> dict[str, TreeView]:
        """
        The whole weights in the model's file, by name; of names that share memory, a trained one or else the first.

        Names share memory if their tensors begin at the same element: only the first rank's file records which do.
        """
        weights_by_place: dict[object, tuple[str, TreeView]] = {}
        for name, weights in self._of_module():
            tensor = weights.tensor()
            place = tensor.storage, tensor.offset
            if tensor.elements and (place not in weights_by_place or name in self._trained):
                weights_by_place[place] = name, weights
        return dict(weights_by_place.values())

    def _of_module(self) -> Iterator[tuple[str, TreeView]]:
        """Yield the module's parameters: under stage 1, which lists no frozen ones, all tensors but buffers."""
        names, frozen = self.model.get("buffer_names"), self.model.get("frozen_param_shapes")
        left_out = {*self.model.optional("shared_params"), *(names.sequence() if names is not None else ())}
        known = None if frozen is None or frozen.value is None else frozen.mapping().keys() | self._trained
        for name, weights in self.model["module"].children():
            if not isinstance(name, str) or not isinstance(weights.value, Tensor) or name.endswith(_EXTRA_STATE):
                continue
            if name not in left_out and (known is None or name in known):
                yield name, weights

    @cached_property
    def _trained(self) -> set[str]:
        return {name for group in self.sharding.groups for name in group}

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The persistent buffers, in the model's order."""
        module = self.model["module"].mapping()
        names = self.model.get("buffer_names")
        buffers = {}
        for name in names.sequence() if names is not None else ():
            value = module.get(name)
            # Empty or non-contiguous buffers stay in the tree.
            if isinstance(name, str) and isinstance(value, Tensor) and value.is_contiguous and value.elements:
                buffers[name] = Buffer(name=name, dtype=value.storage.dtype, shape=tuple(value.shape))
        return buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Facts that all ranks of one save share."""

    stage: int
    dp_world_size: int
    global_steps: int
    param_shapes: SubGroupShapes
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
        model_file = first.model_file if pair.model == first.model_file.path else read_pt(pair.model, pickles)
        return rank_source(pair.rank, model_file, read_pt(pair.optimizer, pickles))

    # Read the first rank before the others: their pickles are mostly equal to the first rank's, whose trees are reused.
    first = rank_source(pairs[0].rank, read_pt(pairs[0].model, pickles), read_pt(pairs[0].optimizer, pickles))
    with Threads(WORKERS_MAX) as pool:
        return [first, *pool.map(read, pairs[1:])]


def rank_source(rank: int, model_file: PtFile, optimizer_file: PtFile) -> RankSource:
    """Return one rank's two files with their flat buffers; raises Unsupported if state was kept out of them."""
    model = TreeView(model_file.tree, path=model_file.path)
    optimizer = TreeView(optimizer_file.tree, path=optimizer_file.path)["optimizer_state_dict"]
    refuse_settings(model, optimizer)
    sharding = sharding_of(model, optimizer)
    return RankSource(
        rank=rank,
        model_file=model_file,
        optimizer_file=optimizer_file,
        flats=tuple(_flats(optimizer, model, sharding, rank)),
        sharding=sharding,
    )


def check_saved_as_named(ranks: list[RankSource]) -> None:
    """Raise if a file was renamed to another file's name; only the folder inside its archive has the old name."""
    for file in (file for rank in ranks for file in (rank.model_file, rank.optimizer_file)):
        if SHARD_STEM.fullmatch(file.root) and file.root != file.path.stem:
            raise LayoutMismatch(
                f"{file.path} was saved as {file.root}.pt: it is another rank's file, copied or renamed",
                hint="restore every rank's own files under their own names",
            )


def common_of(rank: RankSource) -> Common:
    """Return the facts that *rank* must share with all others."""
    groups = cast("SubGroupShapes", list(rank.sharding.groups))  # `sub_group_shapes` checked them
    return Common(
        stage=rank.stage,
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
    facts_of_ranks = [common_of(rank) for rank in ranks]
    first, folder = facts_of_ranks[0], ranks[0].model.path.parent
    for rank, other in zip(ranks, facts_of_ranks, strict=True):
        stated = rank.optimizer["optimizer_state_dict"]["partition_count"]
        counts = [view.integer() for _, view in stated.children()] if rank.has_whole_model else [stated.integer()]
        for count in counts:
            if count != other.dp_world_size:
                raise _mixed(folder, f"the optimizer is for {count} ranks, the model for {other.dp_world_size}")
        for field in fields(Common):
            ours, others = getattr(first, field.name), getattr(other, field.name)
            if ours != others:
                what = f"{field.name} differs at rank {rank.rank}"
                raise _mixed(folder, f"{what}: {_short(ours)} and {_short(others)}")
    world_size = first.dp_world_size
    if len(ranks) < world_size:
        raise SourceCheckpoint(
            f"{folder} is incomplete: it was saved by {world_size} ranks; missing: "
            f"{f'ranks {len(ranks)} to {world_size - 1}' if world_size - len(ranks) > 1 else f'rank {len(ranks)}'}",
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
        hint="the files of all ranks must come from one save; ingest another checkpoint",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _flats(optimizer: TreeView, model: TreeView, sharding: Sharding, rank: int) -> Iterator[FlatBuffer]:
    masters = masters_in(optimizer).children()
    states = inner_in(optimizer)["state"]
    _check_states_present(states, len(masters), model)
    lengths = _state_lengths(masters, sharding, rank)
    names = _sliced(states, lengths)
    # Quantized moments are never slices, whatever their length: they are meaningless without their block's scale.
    is_whole = bool(undivided_in(states, lambda key, _: key in names))
    for group, (_, master) in enumerate(masters):
        yield FlatBuffer(state=MASTER, group=group, tensor=master.tensor())
        state = None if is_whole else states.get(group)
        for key, value in state.children() if state is not None else ():
            if _is_flat(value.value, lengths[group]):
                if not isinstance(key, str) or key == MASTER:
                    raise SourceCheckpoint(f"{optimizer.path}: an optimizer state is called {key!r}")
                yield FlatBuffer(state=key, group=group, tensor=value.value)


def _state_lengths(masters: list[tuple[Tree, TreeView]], sharding: Sharding, rank: int) -> dict[int, int]:
    """Return the length of each flat buffer's states: the master's length, plus its padding under stages 1 and 2."""
    lengths = {group: master.tensor().elements for group, (_, master) in enumerate(masters)}
    groups = range(min(len(lengths), len(sharding.groups)))
    padded = {group: sharding.elements(group, rank) for group in groups if lengths[group] == sharding.lean(group, rank)}
    return lengths | padded


def _sliced(states: TreeView, lengths: Mapping[int, int]) -> set[Tree]:
    """Return the names of the states that have one number per element of a sub-group."""
    sliced = {
        key
        for group, elements in lengths.items()
        if (state := states.get(group)) is not None
        for key, value in state.children()
        if _is_flat(value.value, elements)
    }
    return sliced | _MOMENTS


def _is_flat(value: Tree, elements: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and tuple(value.shape) == (elements,)


def _check_states_present(states: TreeView, groups: int, model: TreeView) -> None:
    """Refuse a checkpoint whose settings kept some moments out of the files."""
    filled = sum(bool(state.mapping()) for _, state in states.children())
    if model["global_steps"].integer() <= model["skipped_steps"].integer():
        return  # before the first step Muon has its momentum already, and Adam nothing
    if 0 < filled < groups or (not filled and groups and not _may_be_stateless(model)):
        raise Unsupported(
            f"{states.path} holds the optimizer state of {filled} of {groups} sub-groups: "
            "the rest was never saved (Twin-Flow's offload ratio below 1, or SuperOffload)",
            hint="save without offload_optimizer.ratio and super_offload",
        )


def _may_be_stateless(model: TreeView) -> bool:
    """Whether the optimizer may be one without state, like plain SGD: possible only if nothing was offloaded."""
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
    _check_addresses(rank)
    _check_blocks(rank)


def _check_flats(rank: RankSource, common: Common) -> None:
    path, groups = rank.optimizer_file.path, common.param_shapes
    count = sum(flat.state == MASTER for flat in rank.flats)
    if count != len(groups):
        raise LayoutMismatch(f"{path} has {count} flat groups, param_shapes has {len(groups)}")
    for flat in rank.flats:
        shapes, actual = groups[flat.group], flat.tensor.elements
        expected = rank.sharding.elements(flat.group, rank.rank)
        if not flat.state and actual == rank.sharding.lean(flat.group, rank.rank):
            expected = actual  # stages 1 and 2 save a master without the padding at its end
        if actual == 0 and expected:
            raise Unsupported(
                f"{path}: flat group {flat.group} is empty: its optimizer was offloaded to NVMe",
                hint="save with offload_optimizer.device 'cpu' or 'none'",
            )
        if actual != expected or not flat.tensor.is_contiguous:
            raise LayoutMismatch(
                f"{path}: {flat.state or 'master'} of flat group {flat.group} has {actual} elements, "
                f"its parameters need {expected} (first: {next(iter(shapes), 'none')})"
            )


def _check_states(rank: RankSource) -> None:
    """
    Raise unless a state that is sliced in one sub-group is sliced in all sub-groups that have it.

    Otherwise, a moment of another length would be taken for a scalar of its sub-group and lost to its layers.
    """
    masters = masters_in(rank.optimizer["optimizer_state_dict"]).children()
    lengths = _state_lengths(masters, rank.sharding, rank.rank)
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


def _check_blocks(rank: RankSource) -> None:
    """Raise unless whole weights are contiguous in the order of their shapes."""
    for name, weights in rank._of_module() if rank.has_whole_model else ():
        if not weights.tensor().is_contiguous:
            raise Unsupported(
                f"{rank.model.path}: the weights of {name!r} are not stored in the order of their shape "
                "(channels_last, or transposed), which is not supported",
                hint="make them contiguous before training, or train under stage 3",
            )


def _check_addresses(rank: RankSource) -> None:
    """
    Under stages 1 and 2, raise unless the fragments are at the addresses that the file records.

    With round_robin_gradients, nothing is checked: DeepSpeed then records the addresses of a save without this setting.
    """
    mappings = rank.optimizer["optimizer_state_dict"].get("param_slice_mappings")
    if mappings is None or is_dealt(rank.model, rank.optimizer["optimizer_state_dict"]):
        return
    for group, mapping in mappings.children():
        expected = {repr(part.name): {"numel": part.elements, "start": part.start} for part in rank.fragments_of(group)}
        actual = {repr(name): view.value.state for name, view in mapping.children() if isinstance(view.value, Inert)}
        odd = next((name for name in [*actual, *expected] if actual.get(name) != expected.get(name)), None)
        if odd is not None:
            raise LayoutMismatch(
                f"{rank.optimizer_file.path}: {odd} is at {actual.get(odd)!r} of flat group {group!r}, but the order "
                f"of its parameters puts it at {expected.get(odd)}",
                hint="the file is damaged; or round_robin_gradients reordered them, which is visible only in the "
                "checkpoint's ds_config: pass DeepSpeed its config as a dictionary",
            )


def _check_names(rank: RankSource, groups: SubGroupShapes) -> None:
    seen: set[str] = set(rank.frozen_shapes)
    for group in groups:
        twice = sorted(seen & group.keys())
        if twice:
            raise LayoutMismatch(
                f"{rank.model.path}: parameter {twice[0]!r} occurs twice, in two sub-groups or frozen and trained",
                hint="the file is damaged: ingest another checkpoint",
            )
        seen |= group.keys()


# -- the parts of the model ------------------------------------------------------------------------------------------


def parameters_of(rank: RankSource, groups: SubGroupShapes) -> dict[str, Parameter]:
    """Return all parameters in the model's order; aliases are fields of their parameter."""
    shapes: dict[str, Tree] = {name: shape for group in groups for name, shape in group.items()}
    frozen = rank.frozen_shapes
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
    parameters = {}
    for name, placeholder in module.items():
        if not isinstance(name, str) or (name not in shapes and name not in frozen):
            continue
        holder = fragments.get(name, placeholder)
        if not isinstance(holder, Tensor):
            raise SourceCheckpoint(f"{rank.model.path}: parameter {name!r} is not a tensor")
        shape = shapes[name] if name in shapes else frozen[name]
        if not isinstance(shape, Size):
            raise SourceCheckpoint(f"{rank.model.path}: the shape of parameter {name!r} is not a shape")
        if rank.has_whole_model and holder.shape != shape:
            shapes_found = f"{tuple(holder.shape)} in the module, {tuple(shape)} in param_shapes"
            raise LayoutMismatch(f"{rank.model.path}: the shape of parameter {name!r} is {shapes_found}")
        parameters[name] = Parameter(
            name=name,
            dtype=holder.storage.dtype,
            shape=tuple(shape),
            frozen=name in frozen,
            aliases=tuple(sorted(aliases.get(name, ()))),
        )
    return parameters


def _frozen(rank: RankSource) -> dict[str, tuple[Tree, str, int]]:
    shapes = rank.frozen_shapes
    fragments = rank.model.get("frozen_param_fragments")
    if not rank.has_whole_model and (fragments is None or fragments.value is None):
        return {}  # exclude_frozen_parameters: their weights are elsewhere
    held = {name: fragment.tensor() for name, fragment in rank.fragments.items()}
    odd = sorted(str(name) for name in shapes.keys() ^ held.keys())
    if odd:
        raise LayoutMismatch(f"{rank.model.path}: frozen parameter {odd[0]!r} has only one of shape and fragment")
    return {name: (shapes[name], tensor.storage.dtype, tensor.elements) for name, tensor in held.items()}


def _optimizer_steps(rank: RankSource, groups: int) -> list[int | None]:
    states = optimizer_states(rank.optimizer)
    steps: list[int | None] = []
    for group in range(groups):
        state = states.get(group)
        counter = None if state is None else state.get(STEP)
        steps.append(None if counter is None else count_of(counter.value))
    return steps
