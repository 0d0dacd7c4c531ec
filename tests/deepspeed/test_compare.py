"""The comparer sees every kind of difference: else what it finds equal would mean nothing."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.deepspeed.compare import (
    checkpoint_differences,
    load,
    tree_differences,
)

SHAPES = OrderedDict([("layers.0.w", torch.Size([3])), ("gain", torch.Size([1]))])
"""On two ranks: one element of padding for the first, and nothing but padding on rank 1 for the second."""


class Odd:
    """A class of which the comparer knows nothing."""

    def __init__(self, value: object) -> None:
        """Keep *value*."""
        self.value = value

    def __repr__(self) -> str:
        """Return a test's name for it, the same in every process."""
        return f"Odd({self.value!r})"


class Opaque:
    """A class whose state cannot be seen."""

    __slots__ = ("hidden",)


def tensor_of_bits(bits: int) -> torch.Tensor:
    """Return one float32 with just these *bits*."""
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def with_attribute(tensor: torch.Tensor, value: str) -> torch.Tensor:
    """Return *tensor* with the python attribute that DeepSpeed hangs on it."""
    tensor.ds_id = value  # type: ignore[attr-defined] # as DeepSpeed does
    return tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", b"1"),
        (None, False),
        ((1,), [1]),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "x"}, {True: "x"}),
        ({"a": 1}, OrderedDict(a=1)),
        ({1}, {2}),
        (torch.float16, torch.bfloat16),
        (torch.Size([1]), (1,)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (tensor_of_bits(0x7FC00000), tensor_of_bits(0x7FC00001)),
        (torch.tensor(1, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)),
        (with_attribute(torch.zeros(1), "0_1"), with_attribute(torch.zeros(1), "0_2")),
        (with_attribute(torch.zeros(1), "0_1"), torch.zeros(1)),
        (np.float32(1), np.float64(1)),
        (np.array([0.0]), np.array([-0.0])),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (Odd(1), Odd(2)),
    ],
    ids=repr,
)
def test_differences_are_seen_at_any_depth(one: Any, other: Any) -> None:
    """Two values that differ in type, order or any bit are reported, bare and deep in a tree, both ways."""
    for first, second in [(one, other), (other, one)]:
        assert tree_differences(first, second)
        assert tree_differences({"a": [(first,)]}, {"a": [(second,)]})


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        tensor_of_bits(0x7F800001),
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.arange(6).view(2, 3).t(),
        np.array([np.nan, -0.0]),
        Odd({"a": torch.Size([2])}),
        OrderedDict(a=(1, [2.5, None], {"x"})),
    ],
    ids=repr,
)
def test_a_value_equals_itself(value: object) -> None:
    """NaNs, empty tensors and strange strides are not differences."""
    assert tree_differences(value, value) == []


def test_what_cannot_be_looked_into_is_refused() -> None:
    """A type without visible state is an error, never an equal."""
    with pytest.raises(TypeError, match=r"\['a'\]: cannot compare two Opaque"):
        tree_differences({"a": Opaque()}, {"a": Opaque()})


def save_checkpoint(folder: Path, *, master: list[list[float]], moment: list[list[float]]) -> Path:
    """Write a checkpoint of two ranks whose only sub-group holds *SHAPES*, as DeepSpeed lays it out."""
    folder.mkdir()
    for rank in range(2):
        model_states = {
            "dp_world_size": 2,
            "param_shapes": [SHAPES],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
        }
        states = {
            "fp32_flat_groups": [torch.tensor(master[rank])],
            "optimizer_state_dict": {"state": {0: {"step": 2, "exp_avg": torch.tensor(moment[rank])}}},
        }
        torch.save(model_states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": states}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_only_the_padding_of_masters_is_left_out(tmp_path: Path) -> None:
    """Other padding in a master passes; another valid element, any of a moment, or a missing file does not."""
    zeros = [[0.0] * 3, [0.0] * 3]
    # Rank 1 holds one element of layers.0.w, then its padding, then gain's padding.
    plain = save_checkpoint(tmp_path / "plain", master=[[1, 2, 4], [3, 0, 0]], moment=zeros)
    padded = save_checkpoint(tmp_path / "padded", master=[[1, 2, 4], [3, 7, 8]], moment=zeros)
    wrong = save_checkpoint(tmp_path / "wrong", master=[[1, 2, 5], [3, 0, 0]], moment=zeros)
    moved = save_checkpoint(tmp_path / "moved", master=[[1, 2, 4], [3, 0, 0]], moment=[[0.0] * 3, [0, 0, 1.0]])

    assert checkpoint_differences(plain, padded) == []
    assert len(checkpoint_differences(plain, wrong)) == 1
    assert len(checkpoint_differences(plain, moved)) == 1
    (padded / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert len(checkpoint_differences(plain, padded)) == 1


def test_classes_of_deepspeed_are_told_apart_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in keeps name, arguments and attributes, so that another scaler or stage is a difference."""
    module = "deepspeed.runtime.fp16.loss_scaler"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        patch.setitem(sys.modules, module, ModuleType(module))
        for index, (name, scale) in enumerate([("Loss", 1.0), ("Loss", 0.5), ("Dynamic", 1.0)]):
            scaler = type(name, (Odd,), {"__module__": module})
            patch.setattr(sys.modules[module], name, scaler, raising=False)
            torch.save(scaler(scale), tmp_path / str(index))

    first, other_scale, other_class = (load(tmp_path / str(index)) for index in range(3))

    assert tree_differences(first, load(tmp_path / "0")) == []
    assert tree_differences(first, other_scale)
    assert tree_differences(first, other_class)
