"""Promises of ``diff``: equal bytes are called equal, and the numbers are those of plain arithmetic."""

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import layerstore
from layerstore import Store
from layerstore.disk import Files
from layerstore.errors import IntegrityError
from layerstore.limits import MIB
from layerstore.model import BlobRef, Kind
from layerstore.numbers.distance import Meter
from layerstore.slices import Slices
from layerstore.storage import open_repository
from tests.unit.checkpoints import checkpoint

BLOCK_0, BLOCK_1 = "model.layers.0", "model.layers.1"
Numbers = npt.NDArray[np.float64]


def masters(store: Store, ref: str, layer: str) -> Numbers:
    """Return all masters of one layer as numbers, read in the plainest way."""
    repo = open_repository(store.path, Files())
    store.pin("looked", ref)
    entry = next(entry for pin in store.pins() for entry in pin.record.layers if entry.layer == layer)
    store.delete_pin("looked")
    version = repo.version_of(entry)
    slices, found = Slices([version]), []
    for parameter in version.parameters:
        for stored, _, _ in slices.stretches(Kind.MASTER, parameter.name, begin=0, end=math.prod(parameter.shape)):
            piece = stored.piece(0)
            with repo.objects.open(piece.object) as file:
                found.append(np.frombuffer(file.read_at(piece.object_offset, piece.size_bytes), "<f4"))
    repo.catalog.close()
    return np.concatenate(found).astype(np.float64)


def distances(store: Store, a: str, b: str) -> dict[str, Any]:
    """Return every layer's distance."""
    return {layer.layer: layer.distance for layer in store.diff(a, b, stat=True).layers}


def test_a_commit_is_the_same_as_itself(store: Store, tmp_path: Path) -> None:
    """Nothing changed, and the sizes add up to the commit's."""
    store.ingest(checkpoint(tmp_path), pin="best")

    found = store.diff("sft@2", "best")

    assert {layer.status for layer in found.layers} == {"same"}
    assert {kind.status for layer in found.layers for kind in layer.kinds.values()} == {"same"}
    assert (found.same_state, found.bytes_changed, found.bytes_same) == (True, 0, store.show("sft").size_bytes)
    assert (found.a.name, found.b.name) == ("sft@2", "best")


def test_only_what_was_trained_has_changed(store: Store, tmp_path: Path) -> None:
    """A frozen layer is the same, the others differ in every kind that they have."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, frozen=(BLOCK_0,), step=step))

    found = {layer.layer: layer for layer in store.diff("sft@2", "sft@4").layers}

    assert [name for name, layer in found.items() if layer.status == "same"] == [BLOCK_0]
    assert found[BLOCK_0].kinds.keys() == {"weights"}
    assert {name: kind.status for name, kind in found[BLOCK_1].kinds.items()} == {
        "master": "changed",
        "optimizer": "changed",
    }
    assert found[BLOCK_1].bytes_changed == found[BLOCK_1].bytes_b == found[BLOCK_1].bytes_a > 0


def test_layers_that_only_one_has_are_named_as_such(store: Store, tmp_path: Path) -> None:
    """Runs of models of different depth can be compared; a layer without a partner is not a change."""
    store.ingest(checkpoint(tmp_path / "a"), run="shallow")
    store.ingest(checkpoint(tmp_path / "b", layers=3), run="deep")

    found = store.diff("shallow", "deep", stat=True)
    back = store.diff("deep", "shallow")

    only = next(layer for layer in found.layers if layer.layer == "model.layers.2")
    assert (only.status, only.bytes_a, only.distance, found.count("only in b")) == ("only in b", 0, None, 1)
    assert found.bytes_only_b == back.bytes_only_a == only.bytes_b > 0
    assert next(layer.status for layer in back.layers if layer.layer == "model.layers.2") == "only in a"


@pytest.mark.parametrize("world_sizes", [(2, 2), (2, 3), (1, 4), (20, 3)])
def test_distances_are_those_of_plain_arithmetic(store: Store, tmp_path: Path, world_sizes: tuple[int, int]) -> None:
    """Whatever each was cut for, relative distance and cosine are what numpy says of the whole layers."""
    for step, world_size in zip((2, 4), world_sizes, strict=True):
        store.ingest(checkpoint(tmp_path, step=step, world_size=world_size, hidden=18, vocab=37))

    measured = distances(store, "sft@2", "sft@4")

    assert len(measured) == 5
    for layer, distance in measured.items():
        a, b = masters(store, "sft@2", layer), masters(store, "sft@4", layer)
        assert distance.elements == a.size
        assert distance.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12)
        assert distance.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
        assert (distance.nonfinite_a, distance.nonfinite_b, distance.left_out) == (0, 0, ())


def test_equal_masters_cut_for_other_ranks_have_no_distance(store: Store, tmp_path: Path) -> None:
    """Ids tell nothing of a re-sliced layer; the numbers do."""
    store.ingest(checkpoint(tmp_path / "a", world_size=2), run="two")
    store.ingest(checkpoint(tmp_path / "b", world_size=3), run="three")

    found = store.diff("two", "three", stat=True)

    assert {layer.kinds["master"].status for layer in found.layers} == {"re-sliced"}
    assert {layer.distance.relative_l2 for layer in found.layers if layer.distance} == {0.0}
    assert all(math.isclose(layer.distance.cosine, 1.0) for layer in found.layers if layer.distance)


def test_what_is_the_same_is_not_read(store: Store, tmp_path: Path) -> None:
    """Equal ids are enough: a distance of 0 with no bytes read, and so no word on NaNs."""
    store.ingest(checkpoint(tmp_path))

    distance = distances(store, "sft", "sft")[BLOCK_0]

    assert (distance.relative_l2, distance.cosine, distance.nonfinite_a, distance.nonfinite_b) == (0.0, 1.0, None, None)
    assert distance.elements == masters(store, "sft", BLOCK_0).size


@pytest.mark.full
@pytest.mark.parametrize("world_sizes", [(1, 1), (2, 3)])
def test_memory_does_not_grow_with_the_layer(store: Store, tmp_path: Path, world_sizes: tuple[int, int]) -> None:
    """Two masters of 50 MB are compared within what a few chunks take."""
    for step, world_size in zip((2, 4), world_sizes, strict=True):
        store.ingest(checkpoint(tmp_path, step=step, world_size=world_size, layers=1, hidden=1024))
    distances(store, "sft@2", "sft@2")
    size_bytes = store.diff("sft@2", "sft@4").layers[1].kinds["master"].bytes_a

    tracemalloc.start()
    distances(store, "sft@2", "sft@4")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert size_bytes > 48 * MIB
    assert peak_bytes < 24 * MIB


def test_a_damaged_object_is_an_error_wherever_its_numbers_are_read(store: Store, tmp_path: Path) -> None:
    """One flipped bit in a master, of a commit or of its layer; nothing else reads it."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step))
    path = master_object(store, "sft@4", BLOCK_1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.chmod(0o644)
    path.write_bytes(data)

    assert store.diff("sft@2", "sft@4").count("changed") == 5
    with pytest.raises(IntegrityError, match="is damaged"):
        store.diff("sft@2", "sft@4", stat=True)
    with pytest.raises(IntegrityError, match="is damaged"):
        store.diff_layer("sft@2", "sft@4", BLOCK_1)
    assert store.diff_layer("sft@2", "sft@4", BLOCK_0).totals["master"].status == "changed"


def master_object(store: Store, ref: str, layer: str) -> Path:
    """Return the file of the first shard of a layer's masters."""
    version = next(line.version for line in store.ls(ref) if line.layer == layer)
    path = store.path / "objects" / version[:2] / version
    repo = open_repository(store.path, Files())
    stored = repo.version(BlobRef(id=layerstore.model.ObjectId(version), size_bytes=path.stat().st_size)).objects
    repo.catalog.close()
    first = next(found for found in stored if found.kind is Kind.MASTER)
    return store.path / "objects" / first.id[:2] / first.id


# -- the arithmetic ------------------------------------------------------------------------------------------------


def meter_of(a: Numbers, b: Numbers, *, chunk: int = 7) -> Any:
    """Return the distance of two arrays that arrive in chunks, as masters do."""
    meter = Meter()
    for start in range(0, a.size, chunk):
        parts = (side[start : start + chunk].astype("<f4") for side in (a, b))
        left, right = (memoryview(bytearray(part.tobytes())) for part in parts)
        meter.add(left, right, dtype_a="F32", dtype_b="F32")
    return meter.distance()


@pytest.mark.parametrize(
    ("a", "b", "relative", "cosine", "nonfinite"),
    [
        ([3, 4], [3, 4], 0.0, 1.0, (0, 0)),
        ([3, 4], [-3, -4], 2.0, -1.0, (0, 0)),
        ([1, 0], [0, 1], math.sqrt(2), 0.0, (0, 0)),
        ([0, 0], [3, 4], math.inf, math.nan, (0, 0)),
        ([0, 0], [0, 0], 0.0, math.nan, (0, 0)),
        ([3, 4], [0, 0], 1.0, math.nan, (0, 0)),
        ([3, math.nan], [3, 4], math.nan, math.nan, (1, 0)),
        ([3, 4], [math.inf, -math.inf], math.inf, math.nan, (0, 2)),
        ([1e30, 1e38], [1e30, 1e38], 0.0, 1.0, (0, 0)),
        ([1e-40, 1e-45], [1e-40, 1e-45], 0.0, 1.0, (0, 0)),
    ],
)
def test_edges_of_the_arithmetic(
    a: list[float], b: list[float], relative: float, cosine: float, nonfinite: tuple[int, int]
) -> None:
    """Zeros, huge, tiny and non-finite numbers are answered honestly, without a warning."""
    found = meter_of(np.array(a, np.float64), np.array(b, np.float64), chunk=1)

    assert found.relative_l2 == pytest.approx(relative, nan_ok=True)
    assert found.cosine == pytest.approx(cosine, nan_ok=True)
    assert (found.nonfinite_a, found.nonfinite_b) == nonfinite


def test_sums_do_not_drown_in_float32() -> None:
    """A million small steps away from large values are not lost."""
    chance = np.random.default_rng(0)
    a = chance.normal(size=1_000_000).astype("<f4").astype(np.float64)
    b = (a * (1 + 1e-6)).astype("<f4").astype(np.float64)

    found = meter_of(a, b, chunk=65_536)

    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-9)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64", "I8"])
def test_other_types_are_numbers_too(dtype: str) -> None:
    """Frozen weights have no masters: their own type is measured, against any other."""
    data = {
        "BF16": np.array([0x4040, 0x4080], "<u2"),
        "F16": np.array([3, 4], "<f2"),
        "F64": np.array([3, 4], "<f8"),
        "I8": np.array([3, 4], "<i1"),
    }[dtype]
    meter = Meter()

    meter.add(
        memoryview(bytearray(data.tobytes())),
        memoryview(bytearray(np.array([3, 4], "<f4").tobytes())),
        dtype_a=dtype,
        dtype_b="F32",
    )

    assert (meter.distance().relative_l2, meter.distance().cosine, meter.distance().elements) == (0.0, 1.0, 2)
