"""What is compared before a resume changes an engine: without any engine."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from layerstore.errors import LayoutMismatch
from layerstore.live.deepspeed.capture import SavedStates
from layerstore.live.deepspeed.load import check_fits, schedule_notes


def states() -> SavedStates:
    """Return what an engine of three trained parameters, a frozen one and a buffer saves on one rank."""
    shapes = [
        OrderedDict(a=torch.Size([2, 3]), b=torch.Size([3])),
        OrderedDict(c=torch.Size([4])),
    ]
    module = {name: torch.zeros(0, dtype=torch.bfloat16) for name in "abc"} | {
        "ice": torch.zeros(0),
        "run": torch.ones(5),
    }
    inner = {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}
    return SavedStates(
        model={
            "module": module,
            "buffer_names": ["run"],
            "param_shapes": shapes,
            "frozen_param_shapes": {"ice": torch.Size([7])},
            "lr_scheduler": {"last_epoch": 1},
        },
        model_path=Path("model"),
        optimizer={
            "optimizer_state_dict": {
                "fp32_flat_groups": [torch.zeros(9), torch.zeros(4)],
                "optimizer_state_dict": inner,
            }
        },
        optimizer_path=Path("optimizer"),
    )


def compare(saved: SavedStates) -> None:
    """Compare *saved* with the engine."""
    check_fits(saved.model, saved.optimizer, states(), frozen={"ice": (7,)})


def outer(of: SavedStates) -> Any:
    """Return the optimizer's own states."""
    return of.optimizer["optimizer_state_dict"]


def put(of: SavedStates, place: str, value: object) -> None:
    """Replace what is at *place*, keys with dots between, in the optimizer's states or the model's."""
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    found: Any = outer(of) if path[:1] == ["optimizer"] else of.model
    for key in path[1:] if path[:1] == ["optimizer"] else path:
        found = found[key]
    found[last] = value


def shapes(**named: tuple[int, ...]) -> OrderedDict[str, torch.Size]:
    """Return a sub-group's shapes."""
    return OrderedDict((name, torch.Size(shape)) for name, shape in named.items())


def flats(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return flat masters of *sizes*."""
    return [torch.zeros(size, dtype=dtype) for size in sizes]


FLATS = "optimizer.fp32_flat_groups"
GROUPS = "optimizer.optimizer_state_dict.param_groups"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"param_shapes.1": shapes(d=(4,))}, "parameter c and 1 more: absent in the checkpoint, [4] in the engine"),
        ({"param_shapes.0.a": torch.Size([3, 3])}, "parameter a: [3, 3] in the checkpoint, [2, 3] in the engine"),
        ({"param_shapes.1.d": torch.Size([1])}, "parameter d: [1] in the checkpoint, absent in the engine"),
        (
            {"param_shapes.0": shapes(b=(3,), a=(2, 3))},
            "the parameters of sub-group 0: ['b', 'a'] in the checkpoint, ['a', 'b'] in the engine",
        ),
        ({"buffer_names": []}, "buffer run: absent in the checkpoint, [5] in the engine"),
        ({"module.run": torch.ones(6)}, "buffer run: [6] in the checkpoint, [5] in the engine"),
        ({"frozen_param_shapes.ice": torch.Size([8])}, "parameter ice: [8] in the checkpoint, [7] in the engine"),
        (
            {GROUPS: [{"params": [0, 1]}]},
            "the sub-groups of param group 0 and 1 more: 2 in the checkpoint, 1 in the engine",
        ),
        ({FLATS: flats(8, 5)}, "the elements of sub-group 0 and 1 more: 8 in the checkpoint, 9 in the engine"),
        (
            {FLATS: flats(9, 4, dtype=torch.bfloat16)},
            "the type of sub-group 0 and 1 more: bfloat16 in the checkpoint, float32 in the engine",
        ),
        (
            {"module.b": torch.zeros(0, dtype=torch.float16)},
            "the type of b: float16 in the checkpoint, bfloat16 in the engine",
        ),
    ],
)
def test_what_differs_is_told(changes: dict[str, object], words: str) -> None:
    """The error names the first difference, also one that the loader would not notice."""
    saved = states()
    for place, value in changes.items():
        put(saved, place, value)

    with pytest.raises(LayoutMismatch) as caught:
        compare(saved)

    assert str(caught.value) == words
    assert caught.value.hint


def test_values_and_missing_frozen_weights_may_differ() -> None:
    """Values may differ, and frozen weights may be missing: the engine keeps its own."""
    saved = states()
    put(saved, "frozen_param_shapes", None)
    del saved.model["module"]["ice"]
    saved.model["module"]["run"].fill_(3)
    outer(saved)["fp32_flat_groups"][0].fill_(3)
    put(saved, "optimizer.optimizer_state_dict.state", {0: {"step": 4}})

    compare(saved)


def test_schedules_are_told_of() -> None:
    """A note says which side lacks a schedule; there is none if both have one, or neither."""
    neither, both = states(), states()
    neither.model["lr_scheduler"] = None

    assert schedule_notes(both.model, both) == schedule_notes(neither.model, neither) == ()
    assert schedule_notes(both.model, neither) == (
        "the engine has no learning rate schedule: the checkpoint's is left out",
    )
    assert schedule_notes(neither.model, both) == (
        "the checkpoint has no learning rate schedule: the engine's starts over",
    )
