"""
The power goes at any step that writes: what was saved stays, whatever the disk makes of what was not synced.

A verb runs once, with a trace of all that it does. From that come the folders that a disk may hold when the power is
back: for every moment, with all unsynced things lost, kept, or some of them (`simulated_disk`). Each is opened,
verified to the last byte, and asked for its composites; then the verb is repeated.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerstore import store as store_module
from layerstore.disk import Files, Hook, NewFile
from tests.faults import verbs
from tests.faults.harness import in_child, seeded
from tests.faults.simulated_disk import Choice, Disk, Trace, TracedFiles, Tree, digest, samples, written
from tests.faults.test_crash import with_one_worker
from tests.faults.verbs import CLEARS_AWAY, VERBS, WRITES, fresh, wrong

AT_EACH_MOMENT = 5
"""How many images of each moment are looked at in an exhaustive run."""


def aftermath(folder: Path, name: str, *, is_done: bool) -> list[str]:
    """Return what is wrong after a power cut, by which the verb *name* is done or not, and after it was repeated."""
    return verbs.aftermath(folder, name, is_done=is_done and name not in CLEARS_AWAY)


# -- images --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Image:
    """What a disk may hold."""

    moment: int
    """After so many operations."""
    is_done: bool
    lost: tuple[str, ...]
    tree: Tree


def trace(folder: Path, name: str, files: type[TracedFiles] = TracedFiles) -> Trace:
    """Run the verb *name* in *folder*, all of whose operations are noted."""
    with_one_worker()
    noted = Trace(folder)
    users, plain = (store_module, verbs), Files

    def seam(hook: Hook = noted) -> Files:
        return files(noted) if hook is noted else Files(hook)

    for module in users:
        vars(module)["Files"] = seam
    try:
        VERBS[name](folder, noted)
    finally:
        for module in users:
            vars(module)["Files"] = plain
    noted.finish()
    return noted


def images(noted: Trace, chance: random.Random, *, most: int, moments: Callable[[int], bool]) -> Iterator[Image]:
    """Yield what the disk may hold at each of *moments*, each once."""
    disk = Disk(noted.before)
    seen = set()
    last = len(noted.operations)
    for moment in range(last + 1):
        for picks in samples(disk.choices(), chance, most=most) if moments(moment) else ():
            index = chance.choice([noted.indexes[moment], {}])
            tree = disk.image(picks, chance) | index
            if (digest(tree), moment == last) not in seen:
                seen.add((digest(tree), moment == last))
                yield Image(moment, moment == last, tuple(map(str, _lost(picks))), tree)
        if moment < last:
            disk.apply(noted.operations[moment])


def _lost(picks: dict[Choice, int]) -> list[Choice]:
    return [choice for choice, way in picks.items() if way != choice.kept]


def image_problems(tree: Tree, folder: Path, name: str, *, is_done: bool, look: Callable[..., list[str]]) -> list[str]:
    """Return what is wrong with the image *tree*, which *folder* is to hold."""
    shutil.rmtree(folder, ignore_errors=True)
    written(tree, folder)
    try:
        return look(folder, name, is_done=is_done)
    except Exception as error:  # noqa: BLE001  # whatever it is, it should not be
        return [repr(error)]


def _looked_at(folder: Path, name: str, seed: int, most: int | None) -> tuple[int, int, list[tuple[str, ...]]]:
    """Return how many operations the verb has, how many images were looked at, and what was wrong with any."""
    chance = random.Random(seed)
    noted = trace(folder, name)
    last = len(noted.operations)
    moments = range(last + 1) if most is None else {last, *chance.choices(range(last + 1), k=most)}
    found = list(images(noted, chance, most=AT_EACH_MOMENT, moments=moments.__contains__))
    if most is not None:  # one of them from when the verb was done
        done, others = found[-1:], found[:-1]
        found = done + chance.sample(others, min(len(others), most - 1))
    bad = []
    for image in found:
        target = folder.with_name(f"{folder.name}-image")
        wrong = image_problems(image.tree, target, name, is_done=image.is_done, look=aftermath)
        if wrong:
            done_by = "at the end" if image.is_done else f"before {noted.operations[image.moment]}"
            bad.append((done_by, f"lost: {', '.join(image.lost)}", *wrong))
    return last, len(found), bad


# -- the promises --------------------------------------------------------------------------------------------------


@pytest.mark.fault(8, 9, 103)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "most",
    [
        pytest.param(2, marks=pytest.mark.sample(2, by="name", always=("ingest", "gc"))),
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)], id="every moment"),
    ],
)
def test_a_power_cut_loses_nothing(fast_path: Path, scene: Path, name: str, most: int | None) -> None:
    """A sample of what may be lost: what was reported is there, what is there is whole, and the verb repeats."""
    seed = seeded(name).randrange(10**9)
    outcome = in_child(_looked_at, fresh(scene, fast_path / "cut", name), name, seed, most, timeout_seconds=7000.0)

    operations, count, bad = outcome.needed()
    print(f"{name}: {count} images of {operations} operations")
    assert bad == []
    assert count


# -- that it can fail ----------------------------------------------------------------------------------------------


class _Forgetful(TracedFiles):
    """A seam that leaves out one kind of sync."""

    forgets: str

    def sync_directory(self, directory: Path) -> None:
        """Sync, unless this is what it forgets."""
        if not _is_called(self.forgets, self.trace.root, directory):
            super().sync_directory(directory)

    def create(self, path: Path, *, sync_ahead: bool = False) -> NewFile:
        """Create a file that may never be synced."""
        file = super().create(path, sync_ahead=sync_ahead)
        # Objects are drafts, which the disk begins to write ahead; records are not.
        if self.forgets == ("an object" if sync_ahead else "a record"):
            file.sync = lambda: None  # type: ignore[method-assign]  # this one forgets it
        return file


def _is_called(what: str, root: Path, directory: Path) -> bool:
    place = directory.relative_to(root).as_posix()
    return {
        "the folder of an object": place.startswith("store/objects/"),
        "the folder of objects": place == "store/objects",
        "the folder of a run": place.startswith("store/commits/"),
        "the folder of runs": place == "store/commits",
        "the folder of pins": place == "store/pins",
    }.get(what, False)


def _blamed(folder: Path, name: str, forgets: str) -> list[str]:
    """Return the things that alone make an image bad where they are lost, once the verb has reported success."""
    forgetful = type("Forgetful", (_Forgetful,), {"forgets": forgets})
    noted = trace(folder, name, forgetful)
    disk = Disk(noted.before)
    for operation in noted.operations:
        disk.apply(operation)
    blamed = []
    # Nothing ever reads a name in tmp/: each of them would only cost time.
    for choice in (choice for choice in disk.choices() if choice.node.label != "store/tmp"):
        tree = disk.image({choice: 0}, random.Random(0)) | noted.indexes[-1]
        if image_problems(tree, folder, name, is_done=True, look=wrong):
            blamed.append(str(choice))
    return blamed


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    ("name", "forgets", "named"),
    [
        ("ingest", "an object", "the bytes of store/objects/"),
        ("ingest", "a record", "the bytes of store/commits/run/4."),
        ("ingest", "the folder of an object", "the name store/objects/"),
        ("ingest", "the folder of objects", "the name store/objects/"),
        ("ingest", "the folder of a run", "the name store/commits/run/4."),
        ("begin", "the folder of runs", "the name store/commits/new"),
        ("pin", "the folder of pins", "the name store/pins/named"),
    ],
)
@pytest.mark.sample(2)
def test_a_sync_that_is_left_out_is_named(fast_path: Path, scene: Path, name: str, forgets: str, named: str) -> None:
    """The simulation can fail: without any one of the syncs of a commit it shows what the power cut took."""
    blamed = in_child(_blamed, fresh(scene, fast_path / "cut", name), name, forgets).needed()

    assert blamed
    assert all(each.startswith(named) for each in blamed), blamed
