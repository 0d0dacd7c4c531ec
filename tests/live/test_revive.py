"""What was taken apart comes back as it was; what no engine's state has is refused, and nothing is called for it."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from layerstore.errors import Unsupported
from layerstore.live.inert import Memory, inert
from layerstore.live.revive import bytes_of, empty, revive
from layerstore.tree import Global, Inert, Located, Storage, Tree
from layerstore.zero3.pt import INERT, read_pt
from tests.live.test_inert import MADE, as_it_is, trees
from tests.zero3.ptfiles import held


def revived(value: object) -> Any:
    """Return *value*, taken apart and made again from copies of its bytes."""
    memory = Memory("memory")
    return revive(inert(value, memory), filling(lambda place: memory.copied(place.path)))


def filling(bytes_at: Callable[[Located], bytes]) -> Callable[[Storage], Any]:
    """Return what fills storages with the bytes that *bytes_at* finds for them."""

    def fill(storage: Storage) -> Any:
        made = empty(storage)
        assert isinstance(storage.content, Located)
        bytes_of(made)[:] = bytes_at(storage.content)
        return made

    return fill


@pytest.mark.parametrize("name", MADE)
def test_everything_that_is_taken_apart_comes_back(name: str) -> None:
    """Types, order, sharing, attributes and bytes."""
    value = MADE[name]()

    assert as_it_is(revived(value)) == as_it_is(value)


@pytest.mark.parametrize("name", MADE)
def test_what_a_file_holds_comes_back(name: str, tmp_path: Path) -> None:
    """So it is for trees that were read from a file, as random states are."""
    value = MADE[name]()
    path = tmp_path / "value.pt"
    torch.save(value, path)

    def fill(storage: Storage) -> Any:
        made = empty(storage)
        bytes_of(made)[:] = held(storage)
        return made

    assert as_it_is(revive(read_pt(path).tree, fill)) == as_it_is(value)


@given(value=trees)
def test_any_tree_comes_back(value: object) -> None:
    """However it is nested."""
    assert as_it_is(revived(value)) == as_it_is(value)


def test_types_are_the_very_types() -> None:
    """A tree that looks alike is not enough: code asks for types."""
    value = {
        "counter": Counter("aab"),
        "ordered": OrderedDict(a=1),
        "complex": 1 - 2j,
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "float32": np.float32(0.1),
        "array": np.arange(3),
    }

    made = revived(value)

    assert {name: type(item) for name, item in made.items()} == {name: type(item) for name, item in value.items()}
    assert made["counter"].most_common(1) == [("a", 2)]
    assert made["dtype"] is torch.bfloat16


def test_tensors_that_shared_memory_share_it_again() -> None:
    """What is written to one is read from the other, and the original hears nothing of it."""
    base = torch.arange(6.0)

    made = revived({"base": base, "view": base[2:4]})
    made["view"].fill_(9)

    assert made["base"].tolist() == [0, 1, 9, 9, 4, 5]
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_array_may_be_written_to() -> None:
    """Trainers append to their histories in place."""
    made = revived(np.arange(3))

    made[1] = 7

    assert made.tolist() == [0, 7, 2]


def test_a_scaler_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters are those of the one that was saved: the same updates are skipped, the same scales follow."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # the first one tells of each overflow
    scaler = DynamicLossScaler(2.0**16, 2.0, 3, 1.0, 2, False)
    overflows = [False, True, False, False, False, True, True, False]
    for overflow in overflows[:4]:
        scaler.update_scale(overflow)
    made = revived(scaler)

    assert type(made) is DynamicLossScaler
    assert vars(made) == vars(scaler)
    for overflow in overflows[4:]:
        scaler.update_scale(overflow)
        made.update_scale(overflow)
        assert vars(made) == vars(scaler)


def refuse(storage: Storage) -> Any:
    """Fail the test: nothing is filled for a tree that is refused."""
    raise AssertionError(f"{storage} was asked for")


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "builtins.getattr",
        "collections.OrderedDict.fromkeys",
        "numpy.load",
        "numpy.core.multiarray.fromfile",
        "torch.load",
        "deepspeed.runtime.engine.DeepSpeedEngine",
        "collections.defaultdict",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    """Neither made nor looked up, wherever they stand."""
    named: list[Tree] = [Inert(name=name, arguments=("true",)), Global(name)]
    for tree in named:
        places: list[Tree] = [tree, [tree], {"a": (tree,)}, Inert(name="collections.Counter", arguments=(tree,))]
        for place in places:
            with pytest.raises(Unsupported, match=f"names {name}, which is not made here"):
                revive(place, refuse)


def test_every_name_that_is_read_is_made() -> None:
    """The reader's list of inert names and the list of what is made are one; of values types and arrays are made."""
    from layerstore.live.revive import _makers

    assert set(_makers()) == INERT
    for name in ("torch.float8_e5m2", "torch.uint16", "numpy.ndarray"):
        assert revive(Global(name), refuse) is not None
    for name in ("torch.Tensor", "torch.FloatStorage", "torch.nn.parameter.Parameter", "torch.load", "torch.nn"):
        with pytest.raises(Unsupported):
            revive(Global(name), refuse)


def described(dtype: str, *, flags: int | None = None, fields: Tree = None, names: Tree = None) -> Inert:
    """Return numpy's type *dtype* as a tree, its state as somebody may have forged it."""
    tree = inert(np.dtype(dtype), Memory("memory"))
    assert isinstance(tree, Inert)
    if flags is None and fields is None:
        return tree
    assert isinstance(tree.state, tuple)
    state = [*tree.state]
    state[3:5] = [names, fields]  # numpy's places for them; flags are the last but for time units
    if flags is not None:
        state[7] = flags
    return replace(tree, state=tuple(state), has_state=True)


def array_of(dtype: Tree, data: Tree) -> Inert:
    """Return an array of one element as a tree."""
    tree = inert(np.zeros(1), Memory("memory"))
    assert isinstance(tree, Inert)
    return replace(tree, state=(1, (1,), dtype, False, data), has_state=True)


@pytest.mark.parametrize("dtype", ["O", "V8", "fields"])
def test_arrays_of_objects_are_refused(dtype: str) -> None:
    """Their elements would be pointers: whether the type says so, a field of it, or forged flags."""
    objects = Inert(name="numpy.dtype", arguments=("O8", False, True))
    fields: Tree = {"a": (objects, 0)}
    forged = {
        "O": objects,
        "V8": described("V8", flags=0x3F),
        "fields": described("V8", flags=0x3F, names=("a",), fields=fields),
    }[dtype]

    for tree in (array_of(forged, [None]), array_of(forged, b"\x01" * 8)):
        with pytest.raises(Unsupported, match="a numpy array of objects, which is not made here"):
            revive(tree, refuse)


def test_fields_outside_of_their_elements_are_refused() -> None:
    """They would be read from memory that is none of the array's."""
    fields: Tree = {"a": (described("f8"), 4096)}
    forged = described("V8", fields=fields, names=("a",))

    with pytest.raises(Unsupported, match="fields outside of its elements"):
        revive(array_of(forged, b"\x01" * 8), refuse)


def test_the_trees_of_python_and_numpy_generators_come_back() -> None:
    """As files of random states hold them; what is drawn then is what would have been drawn."""
    state = {"python": random.Random(3).getstate(), "numpy": np.random.RandomState(3).get_state()}

    made = revived(state)
    own, legacy = random.Random(), np.random.RandomState()
    own.setstate(made["python"])
    legacy.set_state(made["numpy"])

    assert own.random() == random.Random(3).random()
    assert legacy.random_sample() == np.random.RandomState(3).random_sample()
