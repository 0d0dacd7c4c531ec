"""Live objects are taken apart into the tree that reading their ``torch.save`` file gives, and made again from it."""

import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerstore.live.deepspeed.load import zero_makers
from layerstore.live.engine.inert import Memory, NotPlain, check_client_state, inert
from layerstore.live.engine.revive import bytes_of, empty, revive
from layerstore.tree import Located, Storage, Tree
from layerstore.zero3.pt import read_pt
from tests.deepspeed import client_states
from tests.zero3.ptfiles import fingerprint, held

Make = Callable[[], object]


def ordered_with_attributes() -> object:
    """Return what ``state_dict`` gives: a mapping with metadata beside its items."""
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()


def shared_storages() -> object:
    """Return views of one storage, and the same tensor twice."""
    base = torch.arange(24, dtype=torch.float32)
    view = base[6:12].view(2, 3)
    return {"base": base, "view": view, "again": view, "transposed": base.view(4, 6).t(), "none": base[24:]}


def with_attributes() -> object:
    """Return tensors that somebody has put names on, as DeepSpeed does with its flat buffers."""
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    tensor.mark = {"ds_id": 7, "shape": torch.Size([2])}  # type: ignore[attr-defined]  # that is the point
    parameter.other = torch.zeros(1)  # type: ignore[attr-defined]  # likewise
    return [tensor, parameter]


def scalers() -> object:
    """Return DeepSpeed's loss scalers, which its checkpoints hold as objects."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    return {"static": LossScaler(scale=128.0), "dynamic": DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2, False)}


def zero_stage() -> dict[str, Any]:
    """Return the enumeration that DeepSpeed's checkpoints name their stage by."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return {"zero_stage": ZeroStageEnum.weights}


MADE: dict[str, Make] = {
    "plain": client_states.plain,
    "tensors": client_states.tensors,
    "numpy": client_states.numpy_values,
    "lightning": client_states.lightning,
    "state_dict": ordered_with_attributes,
    "ordered": lambda: OrderedDict([("b", 1), ("a", OrderedDict())]),
    "sets": lambda: [set(), {1, "x", (2, None)}, {2.5}],
    "size": lambda: {"shape": torch.Size([2, 0, 3]), "none": torch.Size([])},
    "parameter": lambda: [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), requires_grad=False)],
    "requires_grad": lambda: torch.ones(2, requires_grad=True),
    "attributes": with_attributes,
    "shared": shared_storages,
    "scalers": scalers,
    "zero_stage": zero_stage,
    "numpy scalars": lambda: [np.float64("nan"), np.bool_(True), np.uint8(3), np.complex64(1 - 2j)],
    "numpy text": lambda: np.array(["abc", "d"]),
    "numpy empty": lambda: np.zeros((0, 3), dtype=np.float16),
    "numpy generator": lambda: np.random.default_rng(0).bit_generator.state,
    "numpy legacy generator": lambda: np.random.RandomState(0).get_state(),
    "torch generator": torch.get_rng_state,
    "counter": lambda: {"milestones": Counter([3, 3, 7]), "empty": Counter[int]()},
    "complex": lambda: [1 - 2j, complex("inf"), -0.0 + 0j],
    "dtypes": lambda: [torch.float32, torch.bfloat16, torch.complex128],
    "device": lambda: torch.device("cpu"),
    "all dtypes": lambda: {
        str(dtype): torch.zeros(3, dtype=dtype)
        for dtype in (
            *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
            *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
            *(torch.uint16, torch.uint32, torch.uint64),
        )
    },
    "scheduler": lambda: torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), milestones=[2, 2, 5]
    ).state_dict(),
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1)).state_dict(),
}


def settled(tree: Tree, storages: tuple[Storage, ...], bytes_at: Callable[[Storage], bytes]) -> object:
    """Return a plain value of *tree*, equal for equal trees, with every storage's bytes in it."""
    for storage in storages:
        storage.content = bytes_at(storage)
    return fingerprint(tree)


def read_back(value: object, folder: Path) -> object:
    """Return what reading the file that ``torch.save`` makes of *value* gives."""
    path = folder / "value.pt"
    torch.save(value, path)
    file = read_pt(path)
    return settled(file.tree, file.storages, held)


def bytes_in(memory: Memory, place: Path) -> bytes:
    """Return a copy of what is at *place*."""
    found: bytes = memory.bytes_of(place).numpy().tobytes()
    return found


def as_it_is(value: object) -> object:
    """Return what taking *value* apart in memory gives."""
    memory = Memory("memory")
    tree = inert(value, memory)

    def bytes_at(storage: Storage) -> bytes:
        assert isinstance(storage.content, Located)
        return bytes_in(memory, storage.content.path)

    return settled(tree, memory.storages, bytes_at)


def revived(value: object) -> Any:
    """Return *value*, taken apart and made again from copies of its bytes."""
    memory = Memory("memory")

    def fill(storage: Storage) -> Any:
        made = empty(storage)
        assert isinstance(storage.content, Located)
        bytes_of(made)[:] = bytes_in(memory, storage.content.path)
        return made

    return revive(inert(value, memory), fill, zero_makers())


@pytest.mark.parametrize("name", MADE)
def test_live_objects_are_what_their_file_says_and_come_back(name: str, tmp_path: Path) -> None:
    """Types, order, sharing, attributes, devices and bytes are the same, taken apart and made again."""
    value = MADE[name]()

    assert as_it_is(value) == read_back(value, tmp_path)
    assert as_it_is(revived(value)) == as_it_is(value)


def test_an_enumeration_is_what_every_python_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early releases of Python 3.11 pickle it by its member's name."""
    kind = type(zero_stage()["zero_stage"])
    of_this_python = as_it_is(zero_stage())
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))

    assert as_it_is(zero_stage()) == read_back(zero_stage(), tmp_path) == of_this_python


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.booleans() | st.integers() | st.text() | st.tuples(st.text(), st.integers())
trees = st.recursive(
    scalars,
    lambda parts: st.one_of(
        st.lists(parts),
        st.lists(parts).map(tuple),
        st.dictionaries(keys, parts),
        st.dictionaries(keys, parts).map(OrderedDict),
        st.sets(keys),
        st.lists(st.integers(0, 5)).map(torch.Size),
    ),
    max_leaves=20,
)


@given(value=trees)
def test_any_tree_is_what_its_file_says_and_comes_back(value: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same holds for containers in any nesting."""
    assert as_it_is(value) == read_back(value, tmp_path_factory.getbasetemp())
    assert as_it_is(revived(value)) == as_it_is(value)


class Mine:
    """A class of the user's own."""

    def __reduce__(self) -> Any:
        """Fail the test: nothing of a stranger's is called."""
        raise AssertionError("it was pickled")


class MyDict(dict[str, int]):
    """A mapping that is more than a mapping."""


class MyTensor(torch.Tensor):
    """A tensor that is more than a tensor."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": [1, Mine()]}}, "client_state.a.b[1] is a tests.live.engine.test_inert.Mine"),
        ({"sets": {frozenset({1})}}, "client_state.sets is a builtins.frozenset"),
        ({"counts": MyDict()}, "client_state.counts is a tests.live.engine.test_inert.MyDict"),
        ({"call": pickle.dumps}, "client_state.call is a builtins.builtin_function_or_method"),
        ({"t": torch.ones(1).as_subclass(MyTensor)}, "client_state.t is a tests.live.engine.test_inert.MyTensor"),
        ({"t": torch.ones(1, device="meta")}, "client_state.t is a torch.Tensor on the meta device"),
        ({"t": torch.eye(2).to_sparse()}, "client_state.t is a torch.Tensor of torch.float32 in layout torch.sparse"),
        ({"t": torch.ones(1, dtype=torch.complex64).conj()}, "client_state.t is a torch.Tensor that is conjugated"),
        ({"t": torch.ones(1, dtype=torch.complex128)}, "client_state.t is a torch.Tensor of torch.complex128"),
        ({"np": np.array([Mine()], dtype=object)}, "client_state.np"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_checkpoint_may_hold_is_named_with_its_place(value: dict[str, object], where: str) -> None:
    """The user learns which key it is; nothing of the object's own is called."""
    with pytest.raises(NotPlain, match=re.escape(where)):
        check_client_state(value)


def test_all_that_cannot_be_kept_is_one_kind_of_error() -> None:
    """Also what recursion or a tensor's storage rules out."""
    cyclic: dict[str, object] = {}
    cyclic["self"] = cyclic
    base = torch.zeros(4)

    with pytest.raises(NotPlain, match="recursion"):
        check_client_state(cyclic)
    with pytest.raises(NotPlain, match="viewed as"):
        check_client_state({"a": base, "b": base.view(torch.int32)})
    check_client_state({"fine": [1, torch.ones(2), np.ones(2)]})


def test_nothing_is_copied_until_it_is_asked_for() -> None:
    """Trees point at live memory; a copy that is kept does not change with it."""
    memory, tensor = Memory("memory"), torch.zeros(3)
    inert({"tensor": tensor}, memory)
    (storage,) = memory.storages
    assert isinstance(storage.content, Located)
    place = storage.content.path

    tensor.fill_(1)
    assert bytes_in(memory, place) == tensor.numpy().tobytes()
    memory.keep_copy(place)
    tensor.fill_(2)

    assert bytes_in(memory, place) == torch.ones(3).numpy().tobytes()
    assert memory.holds(place)
    memory.settle(storage)  # it is small: the tree has it from now on
    assert not memory.holds(place)
    content: object = storage.content
    assert content == torch.ones(3).numpy().tobytes()
