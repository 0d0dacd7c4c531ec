"""What the model consists of: its parameters and buffers, and how often the optimizer has updated them."""

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, SourceCheckpoint
from layerstore.format.hashing import crc32
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.model import Buffer, Parameter
from layerstore.tree import Located, Size, Tensor, Tree
from layerstore.zero3.counters import COUNTERS, STEP, count_of
from layerstore.zero3.ranks import Groups, RankSource
from layerstore.zero3.sourcefile import damaged, open_source
from layerstore.zero3.trees import TreeView


def parameters_of(rank: RankSource, groups: Groups) -> dict[str, Parameter]:
    """Return all parameters that have bytes of their own, in the model's order."""
    shapes: dict[str, Tree] = {name: shape for group in groups for name, shape in group.items()}
    frozen = {str(name): shape for name, shape in _optional(rank.model, "frozen_param_shapes").items()}
    fragments = _optional(rank.model, "frozen_param_fragments")
    module = _optional(rank.model, "module")
    aliases: dict[str, list[str]] = {}
    for alias, name in _optional(rank.model, "shared_params").items():
        aliases.setdefault(str(name), []).append(str(alias))
    for name in module:
        _check_text(name, rank)
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


def frozen_of(rank: RankSource) -> dict[str, tuple[Tree, str, int]]:
    """
    Return shape, type and slice length of every frozen parameter whose weights the rank holds.

    Raises:
        LayoutMismatch: The rank has a shape without a fragment, or a fragment without a shape.
    """
    shapes = _optional(rank.model, "frozen_param_shapes")
    fragments = rank.model.get("frozen_param_fragments")
    if fragments is None or fragments.value is None:
        return {}  # exclude_frozen_parameters: their weights live elsewhere
    held = {name: fragment.tensor() for name, fragment in fragments.children()}
    odd = sorted(str(name) for name in shapes.keys() ^ held.keys())
    if odd:
        raise LayoutMismatch(f"{rank.model.path}: frozen parameter {odd[0]!r} has only one of shape and fragment")
    return {str(name): (shapes[name], tensor.storage.dtype, tensor.elements) for name, tensor in held.items()}


def check_names(rank: RankSource, groups: Groups) -> None:
    """Raise unless every parameter has one place: in one sub-group, or among the frozen ones."""
    seen: set[str] = {str(name) for name in _optional(rank.model, "frozen_param_shapes")}
    for group in groups:
        twice = sorted(seen & group.keys())
        if twice:
            raise LayoutMismatch(
                f"{rank.model.path}: parameter {twice[0]!r} has two places, in two sub-groups or frozen and trained",
                hint="the file is damaged: ingest another checkpoint",
            )
        seen |= group.keys()


def _check_text(name: Tree, rank: RankSource) -> None:
    try:
        str(name).encode()
    except UnicodeEncodeError as exc:
        raise SourceCheckpoint(f"{rank.model.path}: the name {name!r} in the module is not valid Unicode") from exc


def _optional(view: TreeView, key: str) -> dict[Tree, Tree]:
    part = view.get(key)
    return {} if part is None else part.mapping()


def buffers_of(rank: RankSource) -> dict[str, Buffer]:
    """Return the persistent buffers, in the model's order."""
    module = rank.model["module"].mapping()
    names = rank.model.get("buffer_names")
    found = {}
    for name in names.sequence() if names is not None else ():
        value = module.get(name)
        # What is not a plain block of memory stays in the tree, where every tensor has its place.
        if isinstance(name, str) and isinstance(value, Tensor) and value.is_contiguous and value.elements:
            found[name] = Buffer(name=name, dtype=value.storage.dtype, shape=tuple(value.shape))
    return found


def optimizer_steps(rank: RankSource, groups: int) -> list[int | None]:
    """Return the optimizer's own counter for every sub-group."""
    states = TreeView(rank.optimizer_file.tree, path=rank.optimizer_file.path)
    states = states["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    found: list[int | None] = []
    for group in range(groups):
        state = states.get(group)
        counter = None if state is None else state.get(STEP)
        found.append(None if counter is None else _count(counter.value))
    return found


def _check_crc32(data: bytes, located: Located) -> None:
    if crc32(data) != located.crc32:
        raise damaged(located.path, "a step counter has another checksum than its file states")


def _count(counter: Tree) -> int | None:
    """Return a step counter as a number: an int in DeepSpeed's own optimizers, a scalar tensor in torch's."""
    if isinstance(counter, Tensor) and counter.elements == 1 and counter.storage.dtype in COUNTERS:
        located, dtype = counter.storage.content, counter.storage.dtype
        if isinstance(located, bytes):
            return count_of(located[counter.offset * by_code(dtype).bytes :][: by_code(dtype).bytes], dtype)
        assert isinstance(located, Located), "trees that were just read point into their files"
        with open_source(located.path) as file:
            # Its number is compared between ranks before the payloads are checked: rot must not pass for a mixture.
            if located.size_bytes <= INLINE_BYTES_MAX:
                _check_crc32(file.read_at(located.offset_bytes, located.size_bytes), located)
            size_bytes = by_code(dtype).bytes
            data = file.read_at(located.offset_bytes + counter.offset * size_bytes, size_bytes)
        return count_of(data, dtype)
    return counter if isinstance(counter, int) and not isinstance(counter, bool) else None
