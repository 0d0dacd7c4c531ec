"""A composite of a compact save is what its codes mean, in every format and for every number of ranks."""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import layerstore
from layerstore import Composite, Store
from layerstore.model import Kind
from layerstore.tree import Storage
from tests.precision.twins import Twins, decoded, path_of, twins, versions
from tests.unit.checkpoints import checkpoint, digests, tensors_of
from tests.zero3.ptfiles import change_tree, held
from tests.zero3.test_read import with_bytes

# Sizes divide by nothing, so blocks of 128 lie across every cut.
SHAPES: dict[str, dict[str, Any]] = {
    "gathered": {"layout": "hf"},
    "three ranks": {"layout": "hf", "world_size": 3, "groups": "layerwise"},
    "many sub-groups": {"sub_group_size": 300},
    "tied": {"tied": True, "layout": "hf"},
    "frozen": {"frozen": ("model.layers.0", "model.norm"), "layout": "hf"},
    "fp16": {"precision": "fp16", "layout": "hf"},
    "fp32": {"precision": "fp32"},
    "stage 1": {"stage": 1, "tied": True},
    "stage 2": {"stage": 2, "layout": "hf", "frozen": ("model.layers.0",)},
    "accelerate": {"layout": "accelerate"},
}
PRECISIONS = ("moments8", "delta8", "delta4")
CASES = list(product(SHAPES, PRECISIONS))

Written = Callable[[Composite, Path], Path]


def _shards(world_size: int) -> Written:
    return lambda composite, out: composite.write(out, world_size=world_size, durable=False).out


FORMATS: dict[str, Written] = {
    "shards": lambda composite, out: composite.write(out, durable=False).out,
    "1 rank": _shards(1),
    "3 ranks": _shards(3),
    "4 ranks": _shards(4),
    "zero3": lambda composite, out: composite.write(out, as_zero3=True, world_size=3, durable=False).out,
    "hf": lambda composite, out: composite.export(out, durable=False).out,
    "hf fp32": lambda composite, out: composite.export(out, dtype="fp32", max_shard_size="9KiB", durable=False).out,
    "dcp": lambda composite, out: composite.export(out, format="dcp", durable=False).out,
    "universal": lambda composite, out: composite.export(out, format="universal", durable=False).out,
    "delta": lambda composite, out: (
        composite.export(out, format="delta", since="sft@2", dtype="bf16", durable=False).out
    ),
    "sparse": lambda composite, out: (
        composite.export(out, format="delta", since="sft@4", dtype="bf16", encoding="sparse", durable=False).out
    ),
}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """Return a store of an exact save and two compact ones, and its twin."""
    shape, precision = request.param
    folder = tmp_path_factory.mktemp("twins")
    with layerstore.init(folder / "compact") as store:
        for step in (2, 4, 6):
            source = checkpoint(folder / "in", step=step, **{"hidden": 18, "vocab": 37} | SHAPES[shape])
            store.ingest(source, run="sft", precision=precision)
        made = twins(folder, store, 2, 4, 6)
        yield made
        made.exact.close()


@pytest.mark.sample(1, by="pair")
@pytest.mark.timeout(600)
def test_every_format_has_what_the_codes_mean(pair: Twins, tmp_path: Path) -> None:
    """Byte for byte what a store writes that holds the decoded numbers exactly."""
    for name, write in FORMATS.items():
        found, wanted = (
            write(store.compose("sft@6"), tmp_path / side / name)
            for side, store in (("compact", pair.compact), ("exact", pair.exact))
        )
        assert digests(found) == digests(wanted), name


@pytest.mark.sample(1, by="pair")
def test_every_file_is_whole_and_the_numbers_are_those_decoded_by_hand(pair: Twins, tmp_path: Path) -> None:
    """Zip checksums are those of the decoded bytes, torch loads them, and each slice is what its codings say."""
    out = pair.compact.compose("sft@4").write(tmp_path / "out", durable=False).out
    for path in out.rglob("*_states.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        torch.load(path, map_location="cpu", weights_only=False)
    found = versions(pair.compact, "sft@4")
    assert any(stored.is_coded for version in found.values() for stored in version.objects)
    for layer, twin in versions(pair.exact, "sft@4").items():
        assert twin.is_exact
        for mine, theirs in zip(found[layer].objects, twin.objects, strict=True):
            assert (mine.kind, mine.shard, mine.shards) == (theirs.kind, theirs.shard, theirs.shards)
            assert decoded(pair.compact, mine) == tensors_of(path_of(pair.exact, theirs))
            assert [tensor.crc32 for tensor in mine.tensors] == [tensor.crc32 for tensor in theirs.tensors]


@pytest.mark.sample(1, by="pair")
def test_gathered_weights_follow_the_decoded_masters(pair: Twins) -> None:
    """A composed folder agrees with itself: stored elsewhere, no weights are kept beside its masters."""
    for version in versions(pair.exact, "sft@6").values():
        trained = {parameter.name for parameter in version.parameters if not parameter.frozen}
        beside = {tensor.name for stored in version.objects if stored.kind is Kind.WEIGHTS for tensor in stored.tensors}
        assert beside.isdisjoint(trained)


@pytest.mark.sample(1, by="pair")
def test_in_memory_and_averaged_it_is_the_same(pair: Twins, tmp_path: Path) -> None:
    """Arrays, state dicts and means are made of decoded numbers, whatever is exact among the saves."""
    mine, theirs = (store.compose("sft@4") for store in (pair.compact, pair.exact))
    for kind, state in (("master", None), ("optimizer", "exp_avg"), ("optimizer", "exp_avg_sq")):
        found, wanted = (each.tensors(kind, state=state) for each in (mine, theirs))  # type: ignore[arg-type]  # of a loop
        assert found.keys() == wanted.keys()
        for name in found:
            for part, other in zip(found.parts(name), wanted.parts(name), strict=True):
                assert not part.flags.writeable
                assert np.array_equal(part.view("u1"), other.view("u1")), name
    found_weights, wanted_weights = mine.state_dict(), theirs.state_dict()
    assert found_weights.keys() == wanted_weights.keys()
    assert all(torch.equal(found_weights[name], wanted_weights[name]) for name in wanted_weights)
    means = [store.average("last:3") for store in (pair.compact, pair.exact)]
    for name in ("shards", "3 ranks", "hf", "delta"):
        a, b = (FORMATS[name](mean, tmp_path / name / str(number)) for number, mean in enumerate(means))
        assert digests(a) == digests(b), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_adams_in_fp32_stays_as_it_is(store: Store, tmp_path: Path, precision: Any) -> None:
    """Frozen weights, integer states, those of no known name and masters in 16 bits are kept to the last bit."""
    for step in (2, 4):
        source = checkpoint(tmp_path / "in", step=step, frozen=("model.layers.0",), layout="hf")
        for path in source.rglob("*optim_states.pt"):
            change_tree(path, _with_odd_states)
        store.ingest(source, run="compact", precision=precision)
        store.ingest(source, run="exact")
    found, wanted = versions(store, "compact@4"), versions(store, "exact@4")
    assert found["model.layers.0"] == wanted["model.layers.0"]
    kept = set()
    for layer in found:
        for mine, theirs in zip(found[layer].objects, wanted[layer].objects, strict=True):
            exact = tensors_of(path_of(store, theirs))
            for tensor in mine.tensors:
                if not tensor.coding:
                    assert decoded(store, mine)[tensor.key] == exact[tensor.key]
                    kept.add((mine.kind, tensor.state, tensor.dtype))
    assert {(Kind.OPTIMIZER, "seen", "I32"), (Kind.OPTIMIZER, "ramp", "F32")} <= kept
    assert {tensor.state for of in found["model.layers.1"].objects for tensor in of.tensors if tensor.coding} >= {
        "exp_avg",
        "exp_avg_sq",
    }


def _with_odd_states(tree: Any) -> None:
    for state in tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        flat = state["exp_avg"]
        data = held(flat.storage)
        state["ramp"] = with_bytes(flat, data)
        state["seen"] = replace(
            flat, storage=Storage(dtype="I32", elements=flat.storage.elements, device="cpu", content=data)
        )
