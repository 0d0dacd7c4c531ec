"""
Optimizer states that cannot be cut into layers: numbers that several parameters of a sub-group share.

8-bit optimizers keep their moments in blocks, whose scales belong to no layer; others keep factors of a whole matrix.
Such an optimizer's state is kept as it is, rank by rank, and serves only the very save that it is of.
"""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from layerstore.model import FlatContent, RankState
from layerstore.tree import Tensor, Tree
from layerstore.zero3.trees import TreeView, replace_tensors


def undivided(state: RankState) -> str:
    """Return what of the optimizer's state in *state* belongs to no layer, in words; empty where nothing does."""
    view = TreeView(state.optimizer.tree, path=PurePosixPath(state.optimizer.path))
    states = view["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    return undivided_in(states, lambda _, tensor: isinstance(tensor.storage.content, FlatContent))


def undivided_in(states: TreeView, is_sliced: Callable[[Tree, Tensor], bool]) -> str:
    """Return the first tensor in the *states* of all sub-groups that is neither sliced nor one number, in words."""
    for group, state in states.children():
        for key, tensor in _tensors("", state.value):
            if tensor.elements > 1 and not is_sliced(key, tensor):
                shape = "×".join(map(str, tensor.shape))
                return f"{key!r} ({shape} of {tensor.storage.dtype}) for all of sub-group {group!r}"
    return ""


def _tensors(key: Tree, tree: Tree) -> Iterator[tuple[Tree, Tensor]]:
    """Yield every tensor in *tree* with the innermost key that leads to it."""
    if isinstance(tree, dict):
        for inner, value in tree.items():
            yield from _tensors(inner, value)
        return
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace_tensors(tree, note)
    yield from ((key, tensor) for tensor in found)
