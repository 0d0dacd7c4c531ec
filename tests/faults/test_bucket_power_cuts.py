"""
The power goes at a folder that serves as a bucket, while a host saves to it, pushes to it or collects in it.

As in test_power_cuts: what was reported is there, what is there is whole, and another host repeats what was under way,
one that knows nothing of the first.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.disk import Files
from layerstore.errors import NotFound
from layerstore.remote import folder as folder_room
from tests.faults.harness import composed, copied, in_child, seeded
from tests.faults.simulated_disk import Disk, Trace, TracedFiles, written
from tests.faults.test_power_cuts import AT_EACH_MOMENT, image_problems, images
from tests.faults.verbs import DEEDS, facts_of, fresh, source

ADDS = {
    "ingest": {"run@4": "second"},
    "inherit": {"run@4": "half", "half": "half"},
    "save": {"run@4": "saved"},
    "differ": {"run@4": "compact"},
    "save_compactly": {"run@4": "shared"},
    "pin": {"named": "first"},
    "push": {"run@4": "second"},
    "undrop": {"run@6": "third"},
}
REMOVES = {"unpin": "kept", "drop": "run@4", "gc": "run@2"}
BEGINS_AT = dict.fromkeys(("drop", "undrop", "gc"), "rich")


def _url(folder: Path) -> str:
    return f"file://{folder}/store"


def _call(folder: Path, name: str) -> None:
    if name == "push":
        with Store(folder.parent / "local") as store:
            store.push(_url(folder))
        return
    with Store(_url(folder)) as store:
        DEEDS[name](store, folder)


def _begin(scene: Path, folder: Path, name: str) -> None:
    """Make *folder* with the bucket that the verb *name* begins at."""
    fresh(scene, folder, "ingest")
    shutil.rmtree(folder / "store")
    _know_nothing(folder)
    if name == "push":
        with Store(copied(scene / "plain", folder.parent / "local")) as local:
            local.push(_url(folder))
            local.ingest(source(folder, "second"), run="run")
        return
    with layerstore.init(_url(folder)) as bucket:
        bucket.ingest(source(folder, "first"), run="run", pin="kept")
        if BEGINS_AT.get(name) == "rich":
            bucket.delete_pin("kept")
            bucket.ingest(source(folder, "second"), run="run")
            bucket.ingest(source(folder, "third"), run="run")
            bucket.drop("run@6")


def _know_nothing(folder: Path) -> None:
    """Be a host that has never seen the bucket."""
    os.environ["LAYERSTORE_CACHE_DIR"] = str(folder.parent / "cache")
    shutil.rmtree(folder.parent / "cache", ignore_errors=True)


def _trace(folder: Path, name: str, files: type[TracedFiles]) -> Trace:
    noted = Trace(folder)
    vars(folder_room)["Files"] = lambda: files(noted)
    try:
        _call(folder, name)
    finally:
        vars(folder_room)["Files"] = Files
    noted.finish()
    return noted


def _wrong(folder: Path, name: str, facts: dict[str, str], *, is_done: bool) -> Iterator[str]:
    """Yield what is wrong with the bucket: what has to be there is not, or has other bytes."""
    scratch = folder.parent / "scratch"
    rich = BEGINS_AT.get(name) == "rich"
    expected = {"run@2": "first"} | ({"run@4": "second"} if rich else {"kept": "first"})
    with Store(_url(folder)) as store:
        verdict = store.verify(read_data=True)
        yield from (f"{damage.kind} {damage.path}: {damage.reason}" for damage in verdict.damaged)
        known = {f"{entry.run}@{entry.step}" for entry in store.log()} | {pin.name for pin in store.pins()}
        trash = {f"{each.commit.record.run}@{each.commit.record.step}" for each in store.dropped()}
        expected |= {ref: fact for ref, fact in ADDS.get(name, {}).items() if is_done or ref in known}
        going = REMOVES.get(name, "")
        if is_done and going in known:
            yield f"{going} is there still"
        if going not in known:
            expected.pop(going, None)
        if rich and name != "gc" and "run@6" not in known | trash:
            yield "run@6, which was in the trash, is lost"
        if name == "drop" and "run@4" not in known | trash:
            yield "run@4 is lost"
        for ref, fact in expected.items():
            if ref not in known:
                yield f"{ref} is lost"
            elif composed(store, ref, scratch) != facts[fact]:
                yield f"{ref} has other bytes"


def _aftermath(folder: Path, name: str, facts: dict[str, str], *, is_done: bool) -> list[str]:
    """Return what is wrong after the power cut, and once the verb was repeated."""
    _know_nothing(folder)
    # What was removed last may be back, as on any disk.
    found = [*_wrong(folder, name, facts, is_done=is_done and name not in REMOVES)]
    _know_nothing(folder)
    with suppress(*([NotFound] if name == "unpin" else [])):
        _call(folder, name)
    return [*found, *_wrong(folder, name, facts, is_done=True)]


def _looked_at(scene: Path, folder: Path, name: str, seed: int, most: int | None) -> tuple[int, int, list[str]]:
    """Return how many operations the verb has, how many images were looked at, and what was wrong with any."""
    _begin(scene, folder, name)
    facts, chance, noted = facts_of(folder), random.Random(seed), _trace(folder, name, TracedFiles)
    last = len(noted.operations)
    moments = range(last + 1) if most is None else {last, *chance.sample(range(last), min(most, last))}
    found = list(images(noted, chance, most=AT_EACH_MOMENT, moments=moments.__contains__))
    if most is not None:
        found = found[-1:] + chance.sample(found[:-1], min(len(found), most) - 1)
    bad = []
    for image in found:
        target = folder.with_name(f"{folder.name}-image")
        look = lambda place, verb, *, is_done: _aftermath(place, verb, facts, is_done=is_done)  # noqa: E731
        wrong = image_problems(image.tree, target, name, is_done=image.is_done, look=look)
        bad += [f"at {image.moment} of {last}, lost: {', '.join(image.lost)}: {each}" for each in wrong]
    return last, len(found), bad


@pytest.mark.fault(8, 103)
@pytest.mark.parametrize("name", [*ADDS, *REMOVES])
@pytest.mark.parametrize(
    "most",
    [
        pytest.param(2, marks=pytest.mark.sample(2, by="name", always=("save",))),
        pytest.param(4, marks=[pytest.mark.full, pytest.mark.sample(5)]),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)], id="every moment"),
    ],
)
def test_a_bucket_that_is_a_folder_loses_nothing(fast_path: Path, scene: Path, name: str, most: int | None) -> None:
    """Of what a host has sent to it, no more than what it had yet to report."""
    seed = seeded(name).randrange(10**9)
    outcome = in_child(_looked_at, scene, fast_path / "cut", name, seed, most, timeout_seconds=7000.0)

    operations, count, bad = outcome.needed()
    print(f"{name}: {count} images of {operations} operations")
    assert bad == []
    assert operations > 1
    assert count > 1


class _Forgetful(TracedFiles):
    """A seam that syncs no names."""

    def sync_directory(self, directory: Path) -> None:
        """Do nothing."""


def _without_syncs(scene: Path, folder: Path) -> list[str]:
    """Return what is wrong once all is lost that an ingest without syncs of names has reported."""
    _begin(scene, folder, "ingest")
    noted = _trace(folder, "ingest", _Forgetful)
    disk = Disk(noted.before)
    for operation in noted.operations:
        disk.apply(operation)
    tree = disk.image(dict.fromkeys(disk.choices(), 0), random.Random(0)) | noted.indexes[-1]
    image = folder.with_name("image")
    written(tree, image)
    _know_nothing(image)
    return [*_wrong(image, "ingest", facts_of(folder), is_done=True)]


@pytest.mark.fault(8)
def test_names_that_are_not_synced_are_noticed(fast_path: Path, scene: Path) -> None:
    """The simulation can fail."""
    assert in_child(_without_syncs, scene, fast_path / "cut").needed() == ["run@4 is lost"]
