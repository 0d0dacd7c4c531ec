"""What no engine's state has is refused, and nothing is called for it; what has state goes on from it."""

from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch

from layerstore.errors import Unsupported
from layerstore.live.deepspeed.load import zero_makers
from layerstore.live.engine.inert import Memory, inert
from layerstore.live.engine.revive import revive
from layerstore.tree import Global, Inert, Storage, Tree
from layerstore.zero3.pt import INERT
from tests.live.engine.test_inert import revived


def test_tensors_that_shared_memory_share_it_again() -> None:
    """Views share the new memory, and the original does not change."""
    base = torch.arange(6.0)

    made = revived({"base": base, "view": base[2:4]})
    made["view"].fill_(9)

    assert made["base"].tolist() == [0, 1, 9, 9, 4, 5]
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", [b"", b"losses"])
def test_a_buffer_of_bytes_has_its_bytes_and_its_position(content: bytes) -> None:
    """Trainers keep what they have saved on their own in such."""
    buffer = BytesIO(content)
    buffer.seek(len(content) // 2)

    made = revived({"losses": buffer})["losses"]

    assert type(made) is BytesIO
    assert (made.getvalue(), made.tell()) == (content, buffer.tell())


def test_a_scaler_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the saved counters: it skips the same updates and takes the same scales."""
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
        "numpy.load",
        "numpy.core.multiarray.fromfile",
        "torch.load",
        "collections.defaultdict",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    """They are neither created nor looked up, at any place in the tree."""
    named: list[Tree] = [Inert(name=name, arguments=("true",)), Global(name)]
    for tree in named:
        places: list[Tree] = [tree, [tree], {"a": (tree,)}, Inert(name="collections.Counter", arguments=(tree,))]
        for place in places:
            with pytest.raises(Unsupported, match=f"refers to {name}, which layerstore does not instantiate"):
                revive(place, refuse)


def test_every_name_that_is_read_is_made() -> None:
    """The reader's list of inert names equals the list of makers; only types and arrays are made of values."""
    from layerstore.live.engine.revive import _makers

    assert _makers().keys() | zero_makers().keys() == INERT
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
    """Their elements would be pointers, by the type, one of its fields, or forged flags."""
    objects = Inert(name="numpy.dtype", arguments=("O8", False, True))
    fields: Tree = {"a": (objects, 0)}
    forged = {
        "O": objects,
        "V8": described("V8", flags=0x3F),
        "fields": described("V8", flags=0x3F, names=("a",), fields=fields),
    }[dtype]

    for tree in (array_of(forged, [None]), array_of(forged, b"\x01" * 8)):
        with pytest.raises(Unsupported, match="a numpy array of objects, which layerstore does not instantiate"):
            revive(tree, refuse)


def test_fields_outside_of_their_elements_are_refused() -> None:
    """They would be read from memory outside of the array."""
    fields: Tree = {"a": (described("f8"), 4096)}
    forged = described("V8", fields=fields, names=("a",))

    with pytest.raises(Unsupported, match="fields outside of its elements"):
        revive(array_of(forged, b"\x01" * 8), refuse)
