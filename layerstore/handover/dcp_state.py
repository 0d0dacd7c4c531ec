"""
What a DCP commit keeps besides its layers: the keys under which the layers' tensors were saved, and all values.

It is stored as a rank's state; the first rank's state has what all ranks share. Values are inert trees, as in the
states of a DeepSpeed commit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.filenames import DCP_METADATA
from layerstore.layers import unwrapped
from layerstore.limits import STEP_MAX
from layerstore.model import Kind
from layerstore.states import RankState, SourceFile, TreeFile
from layerstore.tree import Tensor, Tree
from layerstore.zero3.trees import number_of

KeyPath = tuple[str | int, ...]
"""The way to a value in a nested state."""

PARAM_GROUPS = "param_groups."
"""In the key of an optimizer's setting, the part before the group and the setting."""

CLIENT_STATE = "client_state"
"""The key of the state that a saver's user adds; ``history/metrics.py`` reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Where a layer holds a tensor."""

    kind: Kind
    name: str
    """The parameter."""
    state: str = ""
    """Which optimizer state; empty for the other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that a layer holds, and where it was saved."""

    path: KeyPath
    """Where it was in the nested state."""
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValue:
    """A value that no layer holds."""

    path: KeyPath
    tree: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpState:
    """Everything that was saved, by key; for tensors that layers hold, only where they are."""

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, SavedValue]
    counters: Mapping[str, str]
    """By parameter: the key of its update count, which is one of the values."""

    outside: frozenset[str]
    """Parameters that are not in the model; exports leave them out."""

    @classmethod
    def read(cls, state: RankState) -> "DcpState":
        """Reverse `kept`: return what *state* was made from; raises IntegrityError if *state* is something else."""
        match state.model.tree:
            case {
                "tensors": dict(tensors),
                "values": dict(values),
                "counters": dict(counters),
                "outside": list(outside),
            }:
                return cls(
                    tensors={str(key): _tensor(value) for key, value in tensors.items()},
                    values={str(key): _value(value) for key, value in values.items()},
                    counters={str(name): str(key) for name, key in counters.items()},
                    outside=frozenset(map(str, outside)),
                )
            case _:
                raise _unlike()

    def kept(self, files: Iterable[SourceFile] = ()) -> RankState:
        """Return the rank state in which the store keeps all this, with the *files* that were saved next to it."""
        tensors: dict[Tree, Tree] = {
            key: (tensor.path, str(tensor.held.kind), tensor.held.name, tensor.held.state)
            for key, tensor in self.tensors.items()
        }
        values: dict[Tree, Tree] = {key: (value.path, value.tree) for key, value in self.values.items()}
        tree: dict[Tree, Tree] = {
            "tensors": tensors,
            "values": values,
            "counters": dict(self.counters.items()),
            "outside": list[Tree](sorted(self.outside)),
        }
        return RankState(
            rank=0,
            model=TreeFile(path=DCP_METADATA, tree=tree),
            # A rank's state has two trees, and a DCP commit needs only one.
            optimizer=TreeFile(path=DCP_METADATA, tree={}),
            files=tuple(files),
            gathered=(),
        )


def _tensor(tree: Tree) -> SavedTensor:
    path, kind, name, state = _parts(tree, 4)
    if kind not in {*Kind} or not isinstance(kind, str) or not isinstance(name, str) or not isinstance(state, str):
        raise _unlike()
    return SavedTensor(path=_path(path), held=Held(kind=Kind(kind), name=name, state=state))


def _value(tree: Tree) -> SavedValue:
    path, value = _parts(tree, 2)
    return SavedValue(path=_path(path), tree=value)


def _parts(tree: Tree, count: int) -> tuple[Tree, ...]:
    if not isinstance(tree, tuple) or len(tree) != count:
        raise _unlike()
    return tree


def _path(steps: Tree) -> KeyPath:
    path = tuple(step for step in steps if isinstance(step, str | int)) if isinstance(steps, tuple) else ()
    if not path or path != steps:
        raise _unlike()
    return path


def _unlike() -> IntegrityError:
    return IntegrityError("the state of a commit of torch.distributed.checkpoint is malformed")


def group_settings(names: Iterable[str], values: Mapping[str, Tree]) -> dict[str, dict[str, Tree]]:
    """
    Return the settings of each parameter of *names*, whether groups are nested or flattened.

    Only the *values* whose keys contain `PARAM_GROUPS` are used.
    """
    settings_by_name = {name: dict[str, Tree]() for name in names}
    by_group: dict[str, dict[str, Tree]] = {}
    for key, value in values.items():
        if PARAM_GROUPS in key:
            # A nested group has a number for its name, and lists its members. In a flattened state, each parameter has
            # settings of its own, under its name.
            group_name, _, setting = key.partition(PARAM_GROUPS)[2].rpartition(".")
            by_group.setdefault(group_name, {})[setting] = value
    bare = {unwrapped(name): settings for name, settings in settings_by_name.items()}
    for name, own in bare.items():
        own.update(by_group.get(name, {}))
    for group in by_group.values():
        members = group.pop("params", None)
        for member in members if isinstance(members, list) else ():
            if member in bare:
                bare[member] |= group
    return settings_by_name


def plain_setting(tree: Tree, what: str) -> Tree:
    """Return a setting, a tensor of one number as that number; raises LayoutMismatch about *what* for other tensors."""
    if not isinstance(tree, Tensor):
        return tree
    number = number_of(tree)
    if number is None:
        raise LayoutMismatch(f"{what} is a tensor that is not a single number")
    return number


def updates_counted(tree: Tree) -> int | None:
    """Return how many updates *tree* counts; None unless that is a whole number, at least 0 and below `STEP_MAX`."""
    number = number_of(tree)
    return int(number) if number is not None and 0 <= number < STEP_MAX and number == int(number) else None
