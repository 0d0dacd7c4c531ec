"""
Typed views into the trees of DeepSpeed's files, and what is read through them: settings, update counts, and optimizer
state that cannot be split by layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import PurePath, PurePosixPath
from struct import Struct

from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.filenames import SHARD_STEM
from layerstore.format import encode_tree, pack
from layerstore.hashing import crc32
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.source import damaged, open_source
from layerstore.states import FlatContent, RankState, TreeFile
from layerstore.tree import Inert, Located, Size, Tensor, Tree, changed, replace_tensors, with_content

STAGE_3 = 3

# DeepSpeed's own keys in a rank's model_states; all others are the user's client_state.
_ENGINE_KEYS = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size checkpoint_parallel_dimensions num_experts ds_config ds_version ds_autoep_layers autoep_layers
    universal_checkpoint_info folding
"""
ENGINE_KEYS = frozenset(_ENGINE_KEYS.split())

# DeepSpeed's keys for the masters and for the wrapped optimizer's own state: first stage 3's, then stages 1 and 2's.
_MASTERS = ("fp32_flat_groups", "single_partition_of_fp32_groups")
_INNER = ("optimizer_state_dict", "base_optimizer_state")

STEP = "step"
"""The optimizer's update count, one per sub-group: an int in DeepSpeed's optimizers, a scalar tensor in torch's."""
_COUNTERS = {"F32": Struct("<f"), "F64": Struct("<d"), "I64": Struct("<q"), "I32": Struct("<i")}
"""The binary layout of a counter that is a scalar tensor, by element type."""


class TreeView:
    """A part of a file's tree, with its key path for error messages."""

    __slots__ = ("_where", "path", "value")

    def __init__(self, value: Tree, *, path: PurePath, where: str = "") -> None:
        self.value = value
        self.path = path
        self._where = where

    @classmethod
    def of(cls, file: TreeFile) -> "TreeView":
        """Return the whole tree of *file*."""
        return cls(file.tree, path=PurePosixPath(file.path))

    def __getitem__(self, key: str | int) -> "TreeView":
        value = self.get(key)
        if value is None:
            raise SourceCheckpoint(f"{self.path} lacks {self._name(key)}, which every ZeRO checkpoint has")
        return value

    def get(self, key: str | int) -> "TreeView | None":
        """Return the part under *key*, None if there is none."""
        holder = self.value
        if isinstance(holder, dict) and key in holder:
            return TreeView(holder[key], path=self.path, where=self._name(key))
        if isinstance(holder, list | tuple) and isinstance(key, int) and key < len(holder):
            return TreeView(holder[key], path=self.path, where=self._name(key))
        return None

    def optional(self, key: str | int) -> dict[Tree, Tree]:
        """Return the map under *key*, empty if there is none."""
        value = self.get(key)
        return {} if value is None else value.mapping()

    def integer(self) -> int:
        """Return this as an integer, also from a whole float: with an ``mpu``, DeepSpeed counts samples in floats."""
        if isinstance(self.value, float) and self.value.is_integer():
            return int(self.value)
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self._unlike("an integer")
        return self.value

    def mapping(self) -> dict[Tree, Tree]:
        """Return this as a map, empty for None."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self._unlike("a map")
        return self.value

    def sequence(self) -> list[Tree]:
        """Return this as a list."""
        if not isinstance(self.value, list | tuple):
            raise self._unlike("a list")
        return list(self.value)

    def tensor(self) -> Tensor:
        """Return this as a tensor."""
        if not isinstance(self.value, Tensor):
            raise self._unlike("a tensor")
        return self.value

    def children(self) -> "list[tuple[Tree, TreeView]]":
        """Return the entries of this map or list, by key or index."""
        if isinstance(self.value, list | tuple):
            pairs: list[tuple[Tree, Tree]] = list(enumerate(self.value))
        else:
            pairs = list(self.mapping().items())
        return [(key, TreeView(item, path=self.path, where=self._name(key))) for key, item in pairs]

    def _name(self, key: Tree) -> str:
        shown = key if isinstance(key, str) else repr(key)
        return f"{self._where}.{shown}" if self._where else shown

    def _unlike(self, expected: str) -> SourceCheckpoint:
        actual = type(self.value).__name__
        return SourceCheckpoint(f"{self.path}: {self._where} should be {expected}, found {actual}", path=str(self.path))


def sub_group_shapes(model: TreeView) -> list[dict[str, Size]]:
    """Return the parameters of each flat buffer with their shapes, in order, from ``param_shapes``."""
    groups = []
    for _, group in model["param_shapes"].children():
        shapes: dict[str, Size] = {}
        for name, shape in (group.value if isinstance(group.value, dict) else dict(group.children())).items():
            if not isinstance(shape, Size) or not isinstance(name, str):
                raise SourceCheckpoint(f"{model.path}: param_shapes holds something other than names and shapes")
            shapes[name] = shape
        groups.append(shapes)
    return groups


def stage_of(outer: TreeView) -> int:
    """
    Return the ZeRO stage, from the state of DeepSpeed's optimizer wrapper.

    DeepSpeed's optimizer that accumulates fp32 gradients for bf16 weights does not state its stage, which is always 1.
    """
    stage = outer.get("zero_stage")
    if stage is not None and isinstance(stage.value, Inert):
        number = next(iter(stage.value.arguments), None)
        return number if isinstance(number, int) else 0
    return 1 if stage is None and outer.get(_MASTERS[1]) is not None else 0


def masters_in(outer: TreeView) -> TreeView:
    """Return the flat buffers of masters, from the state of DeepSpeed's optimizer wrapper."""
    return outer.get(_MASTERS[1]) or outer[_MASTERS[0]]


def inner_in(outer: TreeView) -> TreeView:
    """Return the wrapped optimizer's own state, from inside the state of DeepSpeed's wrapper."""
    return outer.get(_INNER[1]) or outer[_INNER[0]]


def optimizer_states(optimizer: TreeView) -> TreeView:
    """Return the optimizer's states by sub-group, from the tree of ``optim_states``."""
    return inner_in(optimizer["optimizer_state_dict"])["state"]


def outer_optimizer(state: RankState) -> TreeView:
    """Return the state of DeepSpeed's optimizer wrapper."""
    return TreeView.of(state.optimizer)["optimizer_state_dict"]


def inner_optimizer(state: RankState) -> TreeView:
    """Return the wrapped optimizer's own state, from inside the state of DeepSpeed's wrapper."""
    return inner_in(outer_optimizer(state))


def leaves_out_frozen(state: RankState) -> bool:
    """Whether the save was told to leave frozen parameters out; False under stage 1, which does not record this."""
    shapes = TreeView.of(state.model).get("frozen_param_shapes")
    return shapes is not None and shapes.value is None and stage_of(outer_optimizer(state)) != 1


def with_optimizer(state: RankState, *, outer: Mapping[Tree, Tree], inner: Mapping[Tree, Tree]) -> Tree:
    """Return the ``optim_states`` tree with *outer* set in the wrapper's state, *inner* in the wrapped optimizer's."""
    within = changed(inner_optimizer(state).mapping(), inner)
    # Pass the state under both stages' keys: `changed` replaces only keys that exist.
    around = changed(outer_optimizer(state).mapping(), {**outer, **dict.fromkeys(_INNER, within)})
    return changed(TreeView.of(state.optimizer).mapping(), {"optimizer_state_dict": around})


def members_of(state: RankState) -> list[tuple[int, list[int]]]:
    """Return the param groups that have sub-groups, each with its sub-groups, in the order of the buffers."""
    view = inner_optimizer(state)["param_groups"]
    groups = [
        (number, [index for index in group["params"].sequence() if isinstance(index, int)])
        for number, (_, group) in enumerate(view.children())
    ]
    flats = len(masters_in(outer_optimizer(state)).sequence())
    if sorted(index for _, own in groups for index in own) != list(range(flats)):
        raise LayoutMismatch(
            f"{view.path}: the param groups do not share the {flats} sub-groups among them",
            hint="compose at the world size of the base, or from another base",
        )
    return sorted(((number, own) for number, own in groups if own), key=lambda item: item[1])


def refuse_settings(model: TreeView, optimizer: TreeView) -> None:
    """Raise Unsupported for a stage or setting that keeps part of the state out of the files."""
    for what, remedy in _unsupported_settings(model, optimizer):
        raise Unsupported(f"{model.path} {what}, which is not supported", hint=f"{remedy}, and save again")


def _unsupported_settings(model: TreeView, optimizer: TreeView) -> Iterator[tuple[str, str]]:
    """Yield each unsupported setting, and how to train without it."""
    shapes = model.get("param_shapes")
    # Without ZeRO, DeepSpeed saves None for the shapes.
    stage = 0 if shapes is not None and shapes.value is None else stage_of(optimizer)
    if stage not in {1, 2, 3}:
        yield f"was saved under ZeRO stage {stage}", "train with zero_optimization.stage 1, 2 or 3"
    if (stage == STAGE_3) != bool(SHARD_STEM.fullmatch(model.path.stem)):
        named = "stages 1 and 2" if stage == STAGE_3 else "stage 3"
        yield (
            f"has a name of {named}, but the optimizer was saved under ZeRO stage {stage}",
            "remove the files that an earlier save left in the folder",
        )
    if isinstance(inner_in(optimizer).value, list):
        yield "was saved with elastic_checkpoint", "unset zero_optimization.elastic_checkpoint"
    for key, what in (("ds_zero_partition_groups", "AutoEP expert parallelism"), ("ds_autoep_layers", "AutoEP layers")):
        if any(part.value for view in (model, optimizer) if (part := view.get(key)) is not None):
            yield f"was saved with {what}", "train without expert parallelism"
    degree = model["mp_world_size"].integer()
    if degree != 1:
        yield f"was saved with tensor parallelism of degree {degree}", "train without tensor parallelism"
    config = config_of(model) or {}
    # DeepSpeed makes a mesh of these two sizes, but divides the state only along one dimension of the mesh.
    job = prod(
        size if isinstance(size := config.get(f"{kind}_parallel_size"), int) else 0 for kind in ("data", "sequence")
    )
    if job and (shared := model["dp_world_size"].integer()) < job:
        yield (
            f"was saved by {job} ranks whose state was shared among {shared}, so several wrote the same file",
            "for sequence parallelism, give deepspeed.initialize an mpu, unset data_parallel_size",
        )
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return  # DeepSpeed was given a path to its config, so these settings are unknown
    offload = zero.get("offload_param")
    if model.optional("frozen_param_fragments"):
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            yield "was saved while frozen weights were offloaded to NVMe", "set offload_param.device to 'cpu'"
        if zero.get("zero_quantized_nontrainable_weights"):
            yield "was saved while frozen weights were quantized", "unset zero_quantized_nontrainable_weights"
    # -1 is DeepSpeed's default.
    if zero.get("mics_shard_size", -1) not in {-1, None}:
        yield "was saved under MiCS", "unset mics_shard_size"


def config_of(model: TreeView) -> dict[Tree, Tree] | None:
    """Return DeepSpeed's config from the file; None if DeepSpeed was given the path of a config instead."""
    config = model.get("ds_config")
    return config.value if config is not None and isinstance(config.value, dict) else None


def undivided(state: RankState) -> str:
    """
    Describe the first part of the optimizer's state that several parameters of a sub-group share; empty if none.

    8-bit optimizers keep moments in blocks whose scales belong to no layer; some others keep factors of a whole matrix.
    Such state is kept unchanged, rank by rank, and can be used only with the save that it came from.
    """
    return undivided_in(
        optimizer_states(TreeView.of(state.optimizer)),
        lambda _, tensor: isinstance(tensor.storage.content, FlatContent),
    )


def undivided_in(states: TreeView, is_sliced: Callable[[Tree, Tensor], bool]) -> str:
    """Describe the first tensor in *states* that is neither sliced nor one number; empty if there is none."""
    for group, state in states.children():
        for key, tensor in _tensors("", state.value):
            if tensor.elements > 1 and not is_sliced(key, tensor):
                shape = "×".join(map(str, tensor.shape))
                return f"{key!r} ({shape} of {tensor.storage.dtype}) for all of sub-group {group!r}"
    return ""


def _tensors(key: Tree, tree: Tree) -> Iterator[tuple[Tree, Tensor]]:
    """Yield every tensor in *tree* with the innermost key that leads to it."""
    match tree:
        case Tensor():
            yield key, tree
        case dict():
            for inner, value in tree.items():
                yield from _tensors(inner, value)
        case list() | tuple():
            for value in tree:
                yield from _tensors(key, value)
        case Inert():
            parts: list[Tree] = [tree.arguments, tree.state, tree.appended, tree.items]
            yield from _tensors(key, parts)


def same_bytes(tree: Tree) -> bytes:
    """Return bytes that are equal for equal trees; the devices of tensors are ignored."""

    def anywhere(tensor: Tensor) -> Tensor:
        return replace(tensor, storage=replace(tensor.storage, device=""))

    # Content that is not in the tree is represented by its location.
    return pack(encode_tree(replace_tensors(tree, anywhere), content_to_plain=repr))


# -- update counts -----------------------------------------------------------------------------------------------------


def count_of(counter: Tree) -> int | None:
    """Return a step counter as a number; None if *counter* is no counter, or is not finite."""
    number = number_of(counter)
    return int(number) if number is not None and math.isfinite(number) else None


def number_of(counter: Tree) -> float | None:
    """Return the value of an integer or of a one-element tensor; None if *counter* is neither."""
    if not (isinstance(counter, Tensor) and counter.elements == 1 and counter.storage.dtype in _COUNTERS):
        return counter if isinstance(counter, int) and not isinstance(counter, bool) else None
    content, layout = counter.storage.content, _COUNTERS[counter.storage.dtype]
    start = counter.offset * layout.size
    if isinstance(content, bytes):
        data = content[start : start + layout.size]
    else:
        assert isinstance(content, Located), "trees that were just read point into their files"
        with open_source(content.path) as file:
            # Check now: ranks compare counters before payloads are verified, and rot would look like a mixed save.
            if content.size_bytes <= INLINE_BYTES_MAX:
                stored = file.read_at(content.offset_bytes, content.size_bytes)
                if crc32(stored) != content.crc32:
                    raise damaged(content.path, "a step counter does not match the checksum in its file")
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
