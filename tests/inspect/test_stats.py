"""Promises of ``stats``: every figure is one that a person could add up by hand."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import NotFound
from tests.unit.checkpoints import checkpoint

FROZEN = ("model.layers.0",)


def files_of(store: Store, folder: str = "") -> list[Path]:
    """Return every file below a folder of the store."""
    return [path for path in (store.path / folder).rglob("*") if path.is_file() and not path.is_symlink()]


def object_bytes(store: Store) -> int:
    """Return the size of all objects."""
    return sum(path.stat().st_size for path in files_of(store, "objects"))


def disk_bytes(paths: list[Path]) -> int:
    """Return what *paths* take on disk."""
    return sum(path.stat().st_blocks for path in paths) * 512


def test_an_empty_store_holds_nothing(store: Store) -> None:
    """No commit, no bytes, no division by zero."""
    found = store.stats()

    assert (found.commits, found.logical_bytes, found.unique_bytes, found.saved_ratio) == (0, 0, 0, 0.0)
    assert found.physical_bytes == disk_bytes(files_of(store))


def test_one_commit_takes_what_its_files_take(store: Store, tmp_path: Path) -> None:
    """Everything is needed once: logical and unique are the sizes of all objects and the record."""
    store.ingest(checkpoint(tmp_path, layout="hf"))

    found = store.stats()

    listed = object_bytes(store) + sum(path.stat().st_size for path in files_of(store, "commits"))
    assert found.logical_bytes == found.unique_bytes == listed
    assert found.physical_bytes == disk_bytes(files_of(store))
    assert (found.unneeded.objects, found.unneeded.bytes) == (0, 0) if found.unneeded else False
    assert sum(kind.unique_bytes for kind in found.kinds.values()) == listed
    sizes = Counter[str]()
    for line in store.ls("sft"):
        sizes.update(line.bytes_by_kind)
    assert {name: found.kinds[name].unique_bytes for name in sizes} == dict(sizes)


def test_what_commits_share_is_counted_once(store: Store, tmp_path: Path) -> None:
    """A frozen layer has one version in three commits: three times logical, once unique."""
    for step in (2, 4, 6):
        store.ingest(checkpoint(tmp_path, step=step, frozen=FROZEN))

    found = store.stats()
    frozen, trained = found.layers["model.layers.0"], found.layers["model.layers.1"]

    assert list(found.layers) == [line.layer for line in store.ls("sft")]
    assert (frozen.count, trained.count) == (1, 3)
    assert frozen.logical_bytes == 3 * frozen.unique_bytes
    assert trained.logical_bytes == trained.unique_bytes
    assert found.saved_ratio == pytest.approx(1 - found.unique_bytes / found.logical_bytes)
    assert found.saved_ratio > 0
    assert found.unique_bytes == object_bytes(store) + found.kinds["record"].unique_bytes


def test_runs_that_share_have_little_of_their_own(store: Store, tmp_path: Path) -> None:
    """The same checkpoint under two names: both need all of it, neither has any object for itself."""
    source = checkpoint(tmp_path)
    store.ingest(source)
    store.ingest(source, run="twin")
    store.ingest(checkpoint(tmp_path, step=4))

    found = {run.run: run for run in store.stats().runs}
    alone = store.stats("twin")

    record = sum(path.stat().st_size for path in files_of(store, "commits/twin"))
    assert found["twin"].own_bytes == record
    assert found["twin"].unique_bytes == found["twin"].logical_bytes == alone.unique_bytes
    assert found["sft"].commits == 2
    assert found["sft"].own_bytes == found["sft"].unique_bytes - (found["twin"].unique_bytes - record)
    assert (alone.unneeded, [run.run for run in alone.runs]) == (None, ["twin"])
    assert alone.physical_bytes < store.stats().physical_bytes
    with pytest.raises(NotFound, match="no run 'nope'"):
        store.stats("nope")


def test_what_nothing_needs_is_a_figure(store: Store, tmp_path: Path) -> None:
    """After a drop the hidden commit's own objects are unneeded; a pin makes them needed again."""
    store.ingest(checkpoint(tmp_path))
    before = store.stats()
    store.ingest(checkpoint(tmp_path, step=4))
    store.drop("sft@4")

    dropped = store.stats()
    assert dropped.unneeded is not None
    assert (dropped.commits, dropped.unique_bytes) == (before.commits, before.unique_bytes)
    assert dropped.unneeded.objects > 0
    assert 0 < dropped.unneeded.bytes < dropped.physical_bytes


def test_a_pin_of_a_hidden_commit_is_counted_as_a_commit(store: Store, tmp_path: Path) -> None:
    """What only a pin keeps is needed; a pin of a visible commit adds nothing but its own record."""
    for step in (2, 4):
        store.ingest(checkpoint(tmp_path, step=step))
    whole = store.stats()
    store.pin("best", "sft@4")
    pinned = store.stats()
    store.drop("sft@4")
    kept = store.stats()

    pin_bytes = (store.path / "pins" / "best").stat().st_size
    assert (pinned.pins, pinned.unique_bytes) == (0, whole.unique_bytes + pin_bytes)
    assert (kept.pins, kept.commits) == (1, 1)
    assert kept.unneeded is not None
    assert kept.unneeded.objects == 0
    assert {name: kept.kinds[name].unique_bytes for name in ("master", "state")} == {
        name: whole.kinds[name].unique_bytes for name in ("master", "state")
    }


def test_physical_bytes_count_a_file_with_two_names_once(store: Store, tmp_path: Path) -> None:
    """A hard link takes no second place on disk."""
    store.ingest(checkpoint(tmp_path))
    before = store.stats().physical_bytes
    first = files_of(store, "objects")[0]
    os.link(first, store.path / "tmp" / "twin")

    assert before == store.stats().physical_bytes


def test_damage_is_left_out_and_named(store: Store, tmp_path: Path) -> None:
    """A damaged version blob, a lost object and a damaged pin do not keep the rest from being counted."""
    store.ingest(checkpoint(tmp_path), pin="best")
    store.ingest(checkpoint(tmp_path, step=4))
    version = store.ls("sft@2")[0].version
    blob = store.path / "objects" / version[:2] / version
    blob.chmod(0o644)
    blob.write_bytes(b"x" * blob.stat().st_size)
    (store.path / "pins" / "best").write_bytes(b"damaged")
    largest = max(files_of(store, "objects"), key=lambda path: path.stat().st_size)
    largest.unlink()

    found = store.stats()

    assert len(found.left_out) == 2
    assert any(line.startswith("pin best: ") for line in found.left_out)
    assert found.missing == 1
    assert found.commits == 2


def test_counting_writes_nothing(store: Store, tmp_path: Path) -> None:
    """No file is made, in a copy as little as in the store."""
    store.ingest(checkpoint(tmp_path))
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))
    with layerstore.open(copy) as other:
        before = sorted(path.relative_to(copy) for path in copy.rglob("*"))
        assert other.stats().unique_bytes == store.stats().unique_bytes
        assert before == sorted(path.relative_to(copy) for path in copy.rglob("*"))
