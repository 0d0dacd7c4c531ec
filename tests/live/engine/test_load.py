"""What is compared before a resume changes an engine: without any engine."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layerstore.errors import LayoutMismatch
from layerstore.live.engine.deepspeed import SavedStates
from layerstore.live.engine.load import check_fits, schedule_notes

Change = Callable[[SavedStates], None]


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


def renamed(of: SavedStates) -> None:
    """Call a parameter by another name."""
    of.model["param_shapes"][1] = OrderedDict(d=torch.Size([4]))


def grown(of: SavedStates) -> None:
    """Add a row to a parameter."""
    of.model["param_shapes"][0]["a"] = torch.Size([3, 3])


def added(of: SavedStates) -> None:
    """Add a parameter."""
    of.model["param_shapes"][1]["d"] = torch.Size([1])


def swapped(of: SavedStates) -> None:
    """Change the order within a sub-group."""
    of.model["param_shapes"][0].move_to_end("a")


def buffer_gone(of: SavedStates) -> None:
    """Leave a buffer out."""
    of.model["buffer_names"].clear()


def buffer_grown(of: SavedStates) -> None:
    """Make a buffer longer."""
    of.model["module"]["run"] = torch.ones(6)


def ice_grown(of: SavedStates) -> None:
    """Make a frozen parameter longer."""
    of.model["frozen_param_shapes"]["ice"] = torch.Size([8])


def single(of: SavedStates) -> None:
    """Put all into one param group."""
    outer(of)["optimizer_state_dict"]["param_groups"] = [{"params": [0, 1]}]


def more_sub_groups(of: SavedStates) -> None:
    """Cut the second group's buffer into two."""
    outer(of)["optimizer_state_dict"]["param_groups"][1]["params"].append(2)
    outer(of)["fp32_flat_groups"][1:] = [torch.zeros(2), torch.zeros(2)]


def other_sizes(of: SavedStates) -> None:
    """Cut the buffers elsewhere."""
    outer(of)["fp32_flat_groups"][:] = [torch.zeros(8), torch.zeros(5)]


def half_masters(of: SavedStates) -> None:
    """Keep masters in half precision."""
    outer(of)["fp32_flat_groups"][:] = [flat.bfloat16() for flat in outer(of)["fp32_flat_groups"]]


def half_weights(of: SavedStates) -> None:
    """Compute in another type."""
    of.model["module"]["b"] = torch.zeros(0, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, "parameter c: in the engine and not in the checkpoint"),
        (grown, "parameter a: of shape [3, 3] in the checkpoint and of [2, 3] in the engine"),
        (added, "parameter d: in the checkpoint and not in the engine"),
        (swapped, "the checkpoint's parameters are in other sub-groups than the engine's, or in another order"),
        (buffer_gone, "buffer run: in the engine and not in the checkpoint"),
        (buffer_grown, "buffer run: of shape [6] in the checkpoint and of [5] in the engine"),
        (ice_grown, "parameter ice: of shape [8] in the checkpoint and of [7] in the engine"),
        (single, "the checkpoint has 1 param groups, the engine's optimizer has 2"),
        (more_sub_groups, "the checkpoint has 3 sub-groups, the engine's optimizer 2, or of other sizes"),
        (other_sizes, "the checkpoint has 2 sub-groups, the engine's optimizer 2, or of other sizes"),
        (half_masters, "the masters in the checkpoint: bfloat16; in the engine: float32"),
        (half_weights, "b in the checkpoint: float16; in the engine: bfloat16"),
    ],
)
def test_what_differs_is_told(change: Change, words: str) -> None:
    """The first thing that the loader would stumble over, or would not even notice."""
    saved = states()
    change(saved)

    with pytest.raises(LayoutMismatch) as caught:
        compare(saved)

    assert str(caught.value) == words
    assert caught.value.hint


def without_frozen(of: SavedStates) -> None:
    """Leave frozen parameters out, as PEFT does."""
    of.model["frozen_param_shapes"] = None
    del of.model["module"]["ice"]


def other_numbers(of: SavedStates) -> None:
    """Hold other values everywhere."""
    of.model["module"]["run"].fill_(3)
    outer(of)["fp32_flat_groups"][0].fill_(3)
    outer(of)["optimizer_state_dict"]["state"][0] = {"step": 4}


@pytest.mark.parametrize("change", [without_frozen, other_numbers])
def test_what_may_differ_may_differ(change: Change) -> None:
    """An engine keeps its own frozen weights where the checkpoint has none."""
    saved = states()
    change(saved)

    compare(saved)


def test_schedules_are_told_of() -> None:
    """Both ways; nothing is said where both have one, or neither."""
    neither, both = states(), states()
    neither.model["lr_scheduler"] = None

    assert schedule_notes(both.model, both) == schedule_notes(neither.model, neither) == ()
    assert schedule_notes(both.model, neither) == (
        "the engine has no learning rate schedule: the checkpoint's is left out",
    )
    assert schedule_notes(neither.model, both) == (
        "the checkpoint has no learning rate schedule: the engine's begins anew",
    )
