"""What records and version blobs say of compact saves: who does not know it refuses, and lies are found out."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import IntegrityError, LayerstoreError, Unsupported
from layerstore.format import decode_version, encode_blob, ref_of
from layerstore.model import LayerVersion
from tests.faults.crafted import ask_all, craft
from tests.precision.twins import record, versions
from tests.unit import samples
from tests.unit.checkpoints import Checkpoints

Change = Callable[[Any], object]


def decoded_again(version: LayerVersion) -> LayerVersion:
    """Return *version* after it was written and read."""
    data = encode_blob(version)
    return decode_version(data, ref=ref_of(data))


def test_exact_saves_say_nothing_of_precision(store: Store, saved: Checkpoints) -> None:
    """Asked for or not: their records and blobs are those of a store that knows none."""
    store.ingest(saved(2), run="r")
    one = store.ingest(saved(4), run="r")
    with layerstore.init(store.path.parent / "other") as other:
        other.ingest(saved(2), run="r", precision="exact", exact_every=None)
        assert other.ingest(saved(4), run="r", precision="exact", exact_every=3).commit == one.commit
    assert record(store, "r@4").flags == ()
    for version in versions(store, "r@4").values():
        data = encode_blob(version)
        assert not any(word in data for word in (b"coding", b"reference", b"compact"))


def test_a_reader_that_does_not_know_compact_saves_refuses_them_by_name(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And reads the exact ones beside them."""
    for step in (2, 4):
        store.ingest(saved(step), run="r", precision="delta8")
    monkeypatch.setattr("layerstore.format.records.KNOWN_FLAGS", frozenset({"without-moments"}))
    shutil.rmtree(store.path / "manifest", ignore_errors=True)
    with layerstore.open(store.path) as older:
        with pytest.raises(Unsupported, match="compact"):
            older.compose("r@4").write(tmp_path / "4")
        older.compose("r@2").write(tmp_path / "2", durable=False)


def test_a_version_with_coded_slices_survives_the_way_to_disk() -> None:
    """To the last field."""
    version = samples.coded_version()
    assert decoded_again(version) == version
    assert [stored.id for stored in version.named] == ["d" * 32, "c" * 32, "e" * 32]


def _of(place: int, **changes: Any) -> Change:
    return lambda plain: plain["objects"][place].update(changes)


def _slices(place: int, **changes: Any) -> Change:
    return lambda plain: [tensor.update(changes) for tensor in plain["objects"][place]["tensors"]]


def _of_reference(change: Change) -> Change:
    return lambda plain: change(plain["references"][0])


def _swap_references(plain: Any) -> None:
    """Let masters refer to moments of the same size."""
    other = next(stored for stored in plain["objects"] if stored["kind"] == "optimizer")
    plain["references"][0].update(id=other["id"], size_bytes=other["size_bytes"], tensors=other["tensors"])
    for stored in plain["objects"]:
        if "reference" in stored:
            stored["reference"] = other["id"]


LIES: dict[str, tuple[Change, str]] = {
    "unknown coding": (_slices(0, coding="entropy3"), "'entropy3', which this layerstore does not know"),
    "reference not named": (lambda plain: plain.pop("references"), "which its version does not name"),
    "reference elsewhere": (_of(0, reference="ab" * 16), "which its version does not name"),
    "reference is a path": (_of(0, reference="../../etc"), "which its version does not name"),
    "no reference": (lambda plain: plain["objects"][0].pop("reference"), "refers to nothing"),
    "needless reference": (_slices(0, coding="companded8"), "contradicting its slices' coding"),
    "another type": (_slices(0, dtype="BF16"), "that are not fp32"),
    "longer slices": (_slices(0, elements=10**9), "coded or different slices"),
    "a longer reference": (
        _of_reference(lambda older: [tensor.update(elements=7) for tensor in older["tensors"]]),
        "coded or different slices",
    ),
    "a coded reference": (
        _of_reference(lambda older: [tensor.update(coding="companded8") for tensor in older["tensors"]]),
        "coded or different slices",
    ),
    "a reference of another size": (
        _of_reference(lambda older: older.update(size_bytes=older["size_bytes"] + 1)),
        "size|bytes",
    ),
    "a reference to moments": (_swap_references, "coded or different slices"),
    "a spare reference": (lambda plain: plain["references"].append(plain["objects"][-1]), "none of its objects"),
    "a default spelled out": (_of(0, reference=""), "spells out a default"),
}


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with one compact save, whose keyframe is gone but for what it refers to."""
    folder = tmp_path_factory.mktemp("compact")
    saved = Checkpoints(folder, layers=1)
    with layerstore.init(folder / "store") as store:
        store.ingest(saved(2), run="run")
        store.ingest(saved(4), run="run", precision="delta8")
        store.drop("run@2")
        store.gc(Keep(last=1), grace_seconds=0, empty_trash=True)
    return folder / "store"


@pytest.mark.sample(4)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_references_is_refused_in_words(compact: Path, tmp_path: Path, lie: str) -> None:
    """Whatever is asked of the store: no crash, no path that leads out, nothing decoded wrongly."""
    change, said = LIES[lie]
    store = shutil.copytree(compact, tmp_path / "store")
    craft(store, "version", lambda plain: change(plain) and None)
    with layerstore.open(store) as opened, pytest.raises((IntegrityError, Unsupported), match=said):
        opened.compose("run@4").write(tmp_path / "written", durable=False)
    with layerstore.open(store) as opened:
        assert not _is_sound(opened)
    assert "write" in ask_all(store, "run@4", tmp_path / "out") or "compose" in ask_all(store, "run@4", tmp_path / "o2")
    assert sorted(each.name for each in tmp_path.iterdir()) in (["out", "store"], ["o2", "out", "store"])


def _is_sound(store: Store) -> bool:
    try:
        return store.verify(read_data=True).ok
    except LayerstoreError:
        return False
