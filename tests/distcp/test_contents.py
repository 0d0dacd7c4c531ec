"""What a distributed state holds follows from names and shapes: parameters, their moments, counters, and the rest."""

from __future__ import annotations

from typing import Any

import pytest

from layerstore.distcp import Chunk, Contents, Entry
from layerstore.handover import Held
from layerstore.model import Kind

VALUE = None
"""What is not a tensor."""

Shapes = dict[str, tuple[int, ...] | None]


def contents(shapes: Shapes, *, tops: tuple[str, ...] = ("model", "optim", "optimizer", "trainer")) -> Contents:
    """Return what a state with these keys holds."""
    entries = {}
    for key, shape in shapes.items():
        top, _, rest = key.partition(".")
        path = (top, rest) if rest and top in tops else (key,)
        entries[key] = entry(key, shape, path=path)
    return Contents.of(entries)


def entry(key: str, shape: tuple[int, ...] | None, **fields: Any) -> Entry:
    """Return an entry of the metadata."""
    dtype = None if shape is None else "F32"
    return Entry(**{"key": key, "path": (key,), "dtype": dtype, "shape": shape or (), "chunks": ()} | fields)


def optimizer(prefix: str, name: str, shape: tuple[int, ...]) -> Shapes:
    """Return what AdamW has of a parameter."""
    of = f"{prefix}state.{name}"
    return {f"{of}.exp_avg": shape, f"{of}.exp_avg_sq": shape, f"{of}.step": ()}


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        ("model.", "optim."),
        ("", "optimizer."),
        ("", "optim."),
        ("model.", "optimizer."),
        ("", ""),
        ("actor.module.", "actor.opt."),
    ],
    ids=["PyTorch's examples", "torchtitan", "model at the top", "Accelerate", "all at the top", "deeper"],
)
def test_moments_are_found_under_every_name(model: str, optim: str) -> None:
    """Whatever trainers call model and optimizer, parameters have the names of the model itself."""
    shapes: Shapes = {f"{model}layers.0.weight": (4, 3), f"{model}layers.0.bias": (4,), f"{model}frozen": (2,)}
    for name in ("layers.0.weight", "layers.0.bias"):
        shapes |= optimizer(optim, name, shapes[f"{model}{name}"] or ())

    found = contents(shapes)

    assert list(found.parameters) == ["layers.0.weight", "layers.0.bias", "frozen"]
    assert [of.frozen for of in found.parameters.values()] == [False, False, True]
    assert found.tensors[f"{model}layers.0.bias"] == Held(kind=Kind.MASTER, name="layers.0.bias")
    assert found.tensors[f"{model}frozen"] == Held(kind=Kind.WEIGHTS, name="frozen")
    moment = found.tensors[f"{optim}state.layers.0.weight.exp_avg_sq"]
    assert moment == Held(kind=Kind.OPTIMIZER, name="layers.0.weight", state="exp_avg_sq")
    assert found.counters["layers.0.bias"] == f"{optim}state.layers.0.bias.step"
    assert set(found.values) == set(found.counters.values())
    assert not found.outside


def test_the_optimizer_may_come_first() -> None:
    """The order of a state decides only the order of layers."""
    shapes = optimizer("optim.", "weight", (4,)) | {"model.weight": (4,)}

    assert contents(shapes).tensors["optim.state.weight.exp_avg"].kind is Kind.OPTIMIZER


def test_states_of_other_shapes_are_no_moments() -> None:
    """Adafactor's rows and columns are kept under their keys: nothing depends on knowing them."""
    key = "optim.state.weight.exp_avg_sq_row"
    found = contents({"model.weight": (4, 3), key: (4,)})

    assert found.tensors[key] == Held(kind=Kind.WEIGHTS, name=key)
    assert found.outside == {key}


def test_an_optimizer_whose_keys_are_numbers_is_outside_of_the_model() -> None:
    """``optimizer.state_dict()`` says no names; its tensors are kept, bit for bit, as what they are called."""
    key = "optim.state.0.exp_avg"
    found = contents({"model.weight": (4,), key: (4,), "optim.state.0.step": ()})

    assert list(found.parameters) == ["weight", key]
    assert found.outside == {key}
    assert found.parameters["weight"].frozen


def test_single_numbers_and_words_are_values() -> None:
    """Unless they are surely parameters."""
    found = contents({"model.scale": (), "model.weight": (4,), "trainer.epoch": VALUE, "rate": (), "rng": (16,)})

    assert list(found.parameters) == ["scale", "weight", "rng"]
    assert set(found.values) == {"trainer.epoch", "rate"}
    assert found.outside == {"rng"}


def test_a_model_alone_is_all_of_the_state() -> None:
    """Nested or not."""
    bare, nested = contents({"a.weight": (2,)}, tops=()), contents({"model.a.weight": (2,)})

    assert list(bare.parameters) == list(nested.parameters) == ["a.weight"]
    assert not bare.outside
    assert not nested.outside


@pytest.mark.parametrize("keys", [("model.weight", "weight"), ("weight", "model.weight")])
def test_names_never_meet(keys: tuple[str, str]) -> None:
    """What would be called like a parameter of the model is called otherwise: neither takes the other's place."""
    found = contents(dict(zip(keys, ((4,), (3,)), strict=True)))

    assert len({of.name for of in found.tensors.values()}) == 2
    assert {found.parameters[of.name].shape for of in found.tensors.values()} == {(4,), (3,)}


def test_what_wraps_a_model_is_no_part_of_its_names() -> None:
    """A compiled model is the same one."""
    assert list(contents({"model._orig_mod.a.weight": (2,)}).parameters) == ["a.weight"]


def test_keys_that_share_their_bytes_are_one_parameter() -> None:
    """A folder that names tensors more than once holds them once; other names of the model are ties."""
    chunks = tuple(
        Chunk(offsets=(0,), sizes=(4,), file=f"{name}.distcp", offset_bytes=0, size_bytes=16) for name in "ab"
    )
    entries = {
        key: entry(key, (4,), path=("model", key.removeprefix("model.")), chunks=(chunk,))
        for key, chunk in (("model.embed", chunks[0]), ("model.head", chunks[0]), ("model.norm", chunks[1]))
    }

    found = Contents.of(entries)

    assert list(found.parameters) == ["embed", "norm"]
    assert found.parameters["embed"].aliases == ("head",)
    assert found.tensors["model.head"] == found.tensors["model.embed"]
    assert not found.values
