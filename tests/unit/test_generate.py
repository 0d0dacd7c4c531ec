"""Promises of the made-up checkpoints: to torch and to us they look like DeepSpeed's, and they can be repeated."""

import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import layerstore
from layerstore.slices import slice_length
from tests import generated
from tests.bench.generate import LAYOUTS, generate
from tests.bench.shapes import GROUPINGS, ModelShape
from tests.bench.trees import PRECISIONS, Precision
from tests.faults.harness import snapshot

ODD = ModelShape(layers=2, hidden=17, intermediate=23, vocab=29, world_size=3)
"""Sizes that divide by nothing, so that every parameter has padding."""


def generate_odd(folder: Path, **options: Any) -> Path:
    """Write a tiny checkpoint of odd sizes into *folder*."""
    sizes = {name: getattr(ODD, name) for name in ("layers", "hidden", "intermediate", "vocab", "world_size")}
    return generate(folder, **sizes | options)


class StandIn:
    """Takes the place of DeepSpeed's classes: loading must not need DeepSpeed."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class StandInUnpickler(pickle.Unpickler):
    """Knows torch and nothing of DeepSpeed."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for what is DeepSpeed's."""
        return StandIn if module.startswith("deepspeed.") else super().find_class(module, name)


def loaded(path: Path) -> dict[str, Any]:
    """Return what torch finds in *path*."""
    module = ModuleType("stand_in")
    vars(module).update(vars(pickle), Unpickler=StandInUnpickler)
    return cast("dict[str, Any]", torch.load(path, pickle_module=module, weights_only=False))


def model_states(folder: Path, rank: int) -> dict[str, Any]:
    """Return the model states of *rank*."""
    return loaded(next(folder.glob(f"*/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")))


def optim_states(folder: Path, rank: int) -> dict[str, Any]:
    """Return the part of *rank*'s optim states that belongs to the ZeRO optimizer."""
    tree = loaded(next(folder.glob(f"*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")))
    return cast("dict[str, Any]", tree["optimizer_state_dict"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("groups", GROUPINGS)
def test_torch_reads_lengths_and_keys_as_deepspeed_saves_them(
    tmp_path: Path, groups: Any, precision: Precision
) -> None:
    """Each sub-group's flat buffers have the elements that its parameters have on one rank, padding included."""
    folder = generate_odd(tmp_path / "run", groups=groups, precision=precision, sub_group_size=200)

    for rank in range(3):
        model, optimizer = model_states(folder, rank), optim_states(folder, rank)
        lengths = [
            sum(slice_length(shape.numel(), 3) for shape in members.values()) for members in model["param_shapes"]
        ]
        state = optimizer["optimizer_state_dict"]["state"]
        assert 3 == model["dp_world_size"] == optimizer["partition_count"]
        assert lengths == [len(flat) for flat in optimizer["fp32_flat_groups"]]
        assert [(length, length, ()) for length in lengths] == [
            (len(adam["exp_avg"]), len(adam["exp_avg_sq"]), tuple(adam["step"].shape)) for adam in state.values()
        ]
        in_groups = [
            number for group in optimizer["optimizer_state_dict"]["param_groups"] for number in group["params"]
        ]
        assert list(range(len(lengths))) == in_groups
        assert 2 == model["global_steps"] == state[0]["step"]
        if groups == "layerwise" and rank == 2:
            # The first group is the embedding: 29 x 17 = 493 elements, 165 a rank, so that the last rank has two to
            # spare: junk in masters, and zeros in moments.
            assert optimizer["fp32_flat_groups"][0][-2:].isnan().all()
            assert torch.equal(torch.zeros(2), state[0]["exp_avg"][-2:])
            assert optimizer["fp32_flat_groups"][0][:-2].isfinite().all()


def test_equal_arguments_give_equal_bytes_and_other_seeds_and_steps_give_others(tmp_path: Path) -> None:
    """Whoever repeats a benchmark repeats it on the same bytes."""
    first = snapshot(generate_odd(tmp_path / "a", layout="hf"))

    assert first == snapshot(generate_odd(tmp_path / "b", layout="hf"))
    others: list[dict[str, Any]] = [{"seed": 1}, {"step": 3, "tag": "global_step2"}]
    for other in others:
        found = snapshot(generate_odd(tmp_path / "c", layout="hf", **other))
        assert first["model.safetensors"] != found["model.safetensors"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_tests_share_is_as_if_it_were_made_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    """Made once and copied from then on; two steps in one folder are still two steps."""
    (tmp_path / "made").mkdir()
    monkeypatch.setenv("PYTEST_GENERATED_CHECKPOINTS", str(tmp_path / "made"))

    def both(make: Callable[..., Path], name: str) -> list[dict[str, str]]:
        return [snapshot(make(tmp_path / name, layout=layout, seed=3, step=step)) for step in (2, 4)]

    assert both(generated.generate, "first") == both(generated.generate, "again") == both(generate, "elsewhere")
    assert len(list((tmp_path / "made").iterdir())) == 1


def test_tied_and_frozen_parameters_are_where_deepspeed_puts_them(tmp_path: Path) -> None:
    """Tied weights have one owner and an alias; frozen ones have fragments, and no optimizer state."""
    frozen = ("model.layers.0", "model.norm.weight")
    folder = generate_odd(tmp_path / "run" / "checkpoint-2", layout="hf", tied=True, frozen=frozen)

    model = model_states(folder, 0)
    trained = {name for members in model["param_shapes"] for name in members}
    assert model["shared_params"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" in model["module"]
    assert not trained & {"lm_head.weight", *model["frozen_param_shapes"]}
    assert 10 == len(model["frozen_param_shapes"]) == len(model["frozen_param_fragments"])
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(folder)
        assert (folder / "model.safetensors").read_bytes() == (
            store.compose().write(tmp_path / "out").out / "model.safetensors"
        ).read_bytes()
