"""Promises of a composite's arrays: the very bytes, verified, and nothing copied that lies together."""

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import layerstore
from layerstore import Store
from layerstore.errors import IntegrityError, InvalidInput, NotFound
from layerstore.model import BlobRef, Kind
from layerstore.storage import ObjectStore
from tests.compose.test_hf import objects_of
from tests.deepspeed.compare import full_tensors, raw_bytes, whole_weights
from tests.faults.harness import flip
from tests.unit.checkpoints import change_gathered, checkpoint

NORM = "model.norm.weight"

Array = npt.NDArray[Any]


def address(array: Array) -> int:
    """Return where the memory of *array* begins."""
    return int(array.__array_interface__["data"][0])


def mapped_files() -> dict[range, str]:
    """Return the files that are mapped into this process, by their addresses."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            found[range(start, end)] = fields[5]
    return found


def file_behind(array: Array) -> str | None:
    """Return the file whose pages the memory of *array* is."""
    return next((path for addresses, path in mapped_files().items() if address(array) in addresses), None)


def same_bytes(expected: torch.Tensor, actual: Array) -> bool:
    """Whether both hold the same bytes."""
    return bool(np.array_equal(raw_bytes(expected), np.frombuffer(np.ascontiguousarray(actual).tobytes(), np.uint8)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_arrays_are_the_flat_buffers_cut_by_hand(store: Store, tmp_path: Path, world_size: int) -> None:
    """Masters and every state of the optimizer, whole and in shape, from however many ranks."""
    source = checkpoint(tmp_path, world_size=world_size, hidden=6, vocab=7)
    store.ingest(source)
    expected, whole = full_tensors(source / "global_step2"), whole_weights(source / "global_step2")
    composite = store.compose("sft")

    arrays = {
        "master": composite.tensors(),
        "exp_avg": composite.tensors("optimizer", state="exp_avg"),
        "exp_avg_sq": composite.tensors("optimizer", state="exp_avg_sq"),
    }
    states = composite.tensors("optimizer")
    assert set(states) == {f"{state}/{name}" for state in ("exp_avg", "exp_avg_sq") for name in expected}
    assert np.array_equal(states[f"exp_avg/{NORM}"], arrays["exp_avg"][NORM])

    for kind, tensors in arrays.items():
        assert tensors.keys() == expected.keys()
        for name, array in tensors.items():
            assert array.shape == tuple(whole[name].shape) == tensors.shape(name)
            assert array.dtype == np.float32
            assert same_bytes(expected[name][kind], array)
            assert np.array_equal(np.concatenate(tensors.parts(name)), array.reshape(-1))


def test_half_precision_comes_as_bits_and_says_so(store: Store, tmp_path: Path) -> None:
    """numpy has no bfloat16; torch can take the bits for what they are. Derived weights are not among the stored."""
    source = checkpoint(tmp_path, layout="hf", frozen=("model.layers.0",), world_size=3)
    change_gathered(source, NORM)
    store.ingest(source)
    weights = store.compose("sft").tensors("weights")
    expected = whole_weights(source / "global_step2")

    frozen = {name for name in expected if name.startswith("model.layers.0.")}
    assert set(weights) == {*frozen, NORM}
    for name in frozen:
        assert weights.dtype(name) == "BF16"
        assert weights[name].dtype == np.uint16
        tensor = torch.from_numpy(weights[name].copy()).view(torch.bfloat16)
        assert torch.equal(tensor, expected[name])


# -- nothing is copied ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_slices_of_several_ranks_are_copied(store: Store, tmp_path: Path, world_size: int) -> None:
    """What lies together is the mapped file's memory, at every look the same; copied or mapped, nobody can write."""
    store.ingest(checkpoint(tmp_path, world_size=world_size))
    tensors = store.compose("sft").tensors()
    files = {str(path) for path in objects_of(store, "sft", Kind.MASTER)}

    for name in tensors:
        array, parts = tensors[name], tensors.parts(name)
        assert len({file_behind(part) for part in parts} & files) == world_size
        assert tensors.is_mapped(name) == (file_behind(array) in files) == (world_size == 1)
        assert world_size > 1 or address(array) == address(tensors[name]) == address(parts[0])
        for each in (array, *parts):
            with pytest.raises(ValueError, match="read-only"):
                each[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                each.setflags(write=True)


# -- what is read, and when ----------------------------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return the objects that were mapped, and whether each was verified, as it happens."""
    seen: list[tuple[str, bool]] = []
    original = ObjectStore.map

    def spied(self: ObjectStore, ref: BlobRef, *, verify: bool) -> Any:
        seen.append((ref.id, verify))
        return original(self, ref, verify=verify)

    monkeypatch.setattr(ObjectStore, "map", spied)
    return seen


def test_only_the_object_that_is_asked_for_is_read_and_verified_once(
    store: Store, tmp_path: Path, verified: list[tuple[str, bool]]
) -> None:
    """Looking at names, types and shapes reads nothing; with all other objects gone, one tensor still comes."""
    store.ingest(checkpoint(tmp_path, world_size=1))
    tensors = store.compose("sft").tensors()
    assert [(tensors.dtype(name), tensors.is_mapped(name), name in tensors) for name in tensors]
    assert "nobody" not in tensors
    assert verified == []
    kept = Path(str(file_behind(tensors[NORM])))
    for path in objects_of(store, "sft", *Kind):
        if path != kept:
            path.unlink()

    assert tensors[NORM].shape == (16,)
    assert tensors[NORM].shape == (16,)

    assert [(kept.name, True)] == [item for item in verified if item[1]]
    with pytest.raises(IntegrityError, match="is missing"):
        tensors["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_object_is_refused_whichever_of_its_tensors_is_asked_for(
    store: Store, tmp_path: Path, world_size: int
) -> None:
    """Also where the damage is in another tensor of it; unverified, it is not looked for."""
    store.ingest(checkpoint(tmp_path, world_size=world_size))
    names = [name for name in store.compose("sft").tensors() if name.startswith("model.layers.1.")]
    tensors = store.compose("sft").tensors()
    damaged = Path(str(file_behind(tensors.parts(names[0])[0])))
    flip(damaged)
    tensors = store.compose("sft").tensors()

    for name in names:
        with pytest.raises(IntegrityError, match=f"object {damaged.name} is damaged"):
            tensors[name]
    assert tensors[NORM].size
    assert store.compose("sft").tensors(verify=False)[names[0]].size


def test_an_object_cut_short_is_refused_even_unverified(store: Store, tmp_path: Path) -> None:
    """A mapping beyond a file's end would kill the process."""
    store.ingest(checkpoint(tmp_path))
    damaged = objects_of(store, "sft", Kind.MASTER)[0]
    os.truncate(damaged, damaged.stat().st_size - 1)

    with pytest.raises(IntegrityError, match=f"object {damaged.name} is damaged"):
        list(store.compose("sft").tensors(verify=False).values())


# -- how long arrays live ------------------------------------------------------------------------------------------


def test_arrays_outlive_the_store_and_its_files(tmp_path: Path) -> None:
    """A closed store still answers, and removed files keep their pages for whoever has them mapped."""
    with layerstore.init(tmp_path / "store") as store:
        source = checkpoint(tmp_path, world_size=1)
        store.ingest(source)
        tensors = store.compose("sft").tensors()
        early = tensors[NORM]
    expected = full_tensors(source / "global_step2")
    late = tensors["lm_head.weight"]
    shutil.rmtree(tmp_path / "store")
    del tensors
    gc.collect()

    assert same_bytes(expected[NORM]["master"], early)
    assert same_bytes(expected["lm_head.weight"]["master"], late)


@pytest.mark.full
def test_descriptors_are_given_back_with_the_last_array(store: Store, tmp_path: Path) -> None:
    """A look at every tensor of many slices costs none for long."""
    store.ingest(checkpoint(tmp_path, world_size=20))
    tensors = store.compose("sft").tensors()
    before = len(os.listdir("/proc/self/fd"))

    for name in tensors:
        assert tensors[name].size
    gc.collect()

    assert before == len(os.listdir("/proc/self/fd"))


def test_threads_may_share_them(store: Store, tmp_path: Path, verified: list[tuple[str, bool]]) -> None:
    """Each object is verified by one of them only."""
    store.ingest(checkpoint(tmp_path, world_size=2))
    tensors = store.compose("sft").tensors()
    totals: list[float] = []
    threads = [
        threading.Thread(target=lambda: totals.append(sum(float(array.sum()) for array in tensors.values())))
        for _ in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(totals) == 4
    assert len(set(totals)) == 1
    assert sorted(object_id for object_id, was in verified if was) == sorted(
        path.name for path in objects_of(store, "sft", Kind.MASTER)
    )


# -- composites, buffers, wrong questions --------------------------------------------------------------------------


def test_wrong_kinds_and_states_are_refused(store: Store, tmp_path: Path) -> None:
    """The error names what there is."""
    store.ingest(checkpoint(tmp_path))
    composite = store.compose("sft")

    with pytest.raises(InvalidInput, match="'moments' is not a kind"):
        composite.tensors("moments")  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(InvalidInput, match="master has no states"):
        composite.tensors("master", state="exp_avg")
    with pytest.raises(NotFound, match="no state 'exp_avgs'") as caught:
        composite.tensors("optimizer", state="exp_avgs")
    assert caught.value.hint == "did you mean exp_avg or exp_avg_sq? there is exp_avg, exp_avg_sq"
    assert not composite.tensors("buffers")
    with pytest.raises(KeyError):
        composite.tensors()["nobody"]
