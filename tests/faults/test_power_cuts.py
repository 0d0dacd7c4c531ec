"""
The power goes at any step that writes: what was saved stays, whatever the disk makes of what was not synced.

A verb runs once, with a trace of all that it does. From that come the folders that a disk may hold when the power is
back: for every moment, with all unsynced things lost, kept, or some of them (`simulated_disk`). Each is opened,
verified to the last byte, and asked for its composites; then the verb is repeated. All verbs of ``test_crash`` are
looked at, and some more: who adds a verb there has it here.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerstore import store as store_module
from layerstore.history.references import resolve
from layerstore.storage.files import Files
from layerstore.storage.handles import Hook, NewFile, no_hook
from layerstore.store import Store, init
from tests.bench.generate import Layout
from tests.faults import older, test_crash
from tests.faults.harness import composed, copied, in_child, problems, seeded
from tests.faults.saving import begun_after
from tests.faults.simulated_disk import Choice, Disk, Trace, TracedFiles, Tree, digest, samples, written
from tests.faults.test_crash import VERBS, Scene, Verb, do_ingest, do_reindex
from tests.generated import generate

IMAGES = 4
"""How many of a verb's images are looked at in a usual run."""

AT_EACH_MOMENT = 5
"""How many of each moment in an exhaustive one."""

# -- verbs that test_crash has not ---------------------------------------------------------------------------------


def do_new_run(folder: Path, scene: Scene, hook: Hook) -> None:
    """Begin another run."""
    with Store(folder / "store", hook=hook) as store:
        store.ingest(scene.second, run="new")


def do_delete_pin(folder: Path, scene: Scene, hook: Hook) -> None:
    """Take a name away."""
    with Store(folder / "store", hook=hook) as store:
        if "kept" in {pin.name for pin in store.pins()}:
            store.delete_pin("kept")


def do_selective(folder: Path, scene: Scene, hook: Hook) -> None:
    """Add a step that inherits half of its layers, and pin it."""
    with Store(folder / "store", hook=hook) as store:
        store.ingest(scene.second, run="run", policy="parity", pin="half")


def do_save(folder: Path, scene: Scene, hook: Hook) -> None:
    """Let two ranks save half of a step while they train, and join their parts; unless it is there."""
    with Store(folder / "store", hook=hook) as store:
        if resolve(store.rooms, "run").record.step < 4:
            save = begun_after(store, scene.second, half=True)
            save.write_all()
            save.finish()


SIMULATED: list[Verb] = [*VERBS, do_reindex, do_new_run, do_delete_pin, do_selective, do_save]


@dataclass(frozen=True, slots=True)
class Setting:
    """The scene, and what the verbs of this module add to it."""

    scene: Scene
    selective: str
    """The composite of ``run@4`` where it inherits half."""
    saved: str
    """The same where it was saved while training."""


@pytest.fixture(scope="module")
def setting(fast_module_path: Path) -> Setting:
    """Return the scene that a power cut starts from in a usual run; it is copied, never changed."""
    return _setting(fast_module_path / "raw", "raw")


@pytest.fixture(scope="module")
def setting_with_files(fast_module_path: Path) -> Setting:
    """Return one with gathered weights, and files that are kept as they are."""
    return _setting(fast_module_path / "hf", "hf")


def _setting(folder: Path, layout: Layout) -> Setting:
    for name, step, seed in (("first", 2, 0), ("second", 4, 0), ("other", 2, 1)):
        generate(folder / name, layers=1, hidden=8, vocab=8, step=step, seed=seed, layout=layout)
    first = folder / "first"
    with init(folder / "store") as store:
        store.ingest(first, run="run", pin="kept")
        earlier = composed(store, "run@2", folder)
    found = {}
    for name, verb in (
        ("whole", do_ingest),
        ("other", test_crash.do_replace),
        ("half", do_selective),
        ("saved", do_save),
        ("live", test_crash.do_commit),
    ):
        after = folder / f"after-{name}"
        after.mkdir()
        copied(folder / "store", after / "store")
        verb(after, Scene(folder, folder / "store", {}, {}), no_hook)
        with Store(after / "store") as store:
            found[name] = composed(store, "live" if name == "live" else "run", folder)
    scene = Scene(
        folder,
        folder / "store",
        {"run@2": earlier, "kept": earlier},
        {"run@4": found["whole"], "other": found["other"], "live@4": found["live"]},
    )
    return Setting(scene, selective=found["half"], saved=found["saved"])


# -- what is wrong after a power cut -------------------------------------------------------------------------------


def outcome_problems(folder: Path, setting: Setting, verb: Verb, *, is_done: bool) -> list[str]:
    """Return what is wrong after *verb* was cut short, or *is_done*."""
    if verb in VERBS or verb is do_reindex:
        return test_crash.outcome_problems(folder, setting.scene, verb, is_done=is_done)
    return _own_problems(folder, setting, verb, is_done=is_done)


def _own_problems(folder: Path, setting: Setting, verb: Verb, *, is_done: bool) -> list[str]:
    composites = dict(setting.scene.earlier)
    with Store(folder / "store") as opened:
        known = {f"{entry.run}@{entry.step}" for entry in opened.log()} | {pin.name for pin in opened.pins()}
    if verb is do_delete_pin:
        if is_done and "kept" in known:
            return ["the pin is still there"]
        if "kept" not in known:
            del composites["kept"]
    if verb is do_new_run and (is_done or "new@4" in known):
        composites["new@4"] = setting.scene.later["run@4"]
    if verb in (do_selective, do_save) and (is_done or "run@4" in known):
        composites["run@4"] = setting.selective if verb is do_selective else setting.saved
    if verb is do_selective and (is_done or "half" in known):
        composites["half"] = setting.selective
    return problems(folder / "store", folder / "scratch", composites)


def aftermath(folder: Path, setting: Setting, verb: Verb, *, is_done: bool) -> list[str]:
    """Return what is wrong after a power cut, by which *verb* is done or not, and after it was repeated."""
    # What was cleared away in the end may be back: nothing names it. What was promised is looked for by itself.
    clears_away = verb in (test_crash.do_gc, test_crash.do_trim, test_crash.do_migrate)
    found = outcome_problems(folder, setting, verb, is_done=is_done and not clears_away)
    if is_done and verb is test_crash.do_gc:
        with Store(folder / "store") as opened:
            found += [f"{entry.run}@{entry.step} is back" for entry in opened.log() if entry.step == 2]
    if is_done and verb is test_crash.do_migrate:
        is_old = older.unmigrated_problems(folder / "store", folder / "old", is_done=False) is not None
        found += ["the store is of its old format again"] if is_old else []
    if verb in VERBS or verb is do_reindex:
        return found + test_crash._aftermath(folder, setting.scene, verb)
    verb(folder, setting.scene, no_hook)
    return found + outcome_problems(folder, setting, verb, is_done=True)


# -- images --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Image:
    """What a disk may hold."""

    moment: int
    """After so many operations."""
    is_done: bool
    lost: tuple[str, ...]
    tree: Tree


def trace(folder: Path, setting: Setting, verb: Verb, files: type[TracedFiles] = TracedFiles) -> Trace:
    """Run *verb* in *folder*, all of whose operations are noted."""
    test_crash._with_one_worker()
    noted = Trace(folder)
    users, plain = (store_module, test_crash, older), Files

    def seam(hook: Hook = noted) -> Files:
        return files(noted) if hook is noted else Files(hook)

    for module in users:
        vars(module)["Files"] = seam
    try:
        verb(folder, setting.scene, noted)
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


Look = Callable[..., list[str]]
"""What looks at the outcome of a verb, and perhaps repeats it."""


def image_problems(tree: Tree, folder: Path, setting: Setting, verb: Verb, *, is_done: bool, look: Look) -> list[str]:
    """Return what is wrong with the image *tree*, which *folder* is to hold."""
    shutil.rmtree(folder, ignore_errors=True)
    written(tree, folder)
    try:
        return look(folder, setting, verb, is_done=is_done)
    except Exception as error:  # noqa: BLE001  # whatever it is, it should not be
        return [repr(error)]


def _looked_at(
    folder: Path, setting: Setting, verb: Verb, seed: int, most: int | None
) -> tuple[int, int, list[tuple[str, ...]]]:
    """Return how many operations *verb* has, how many images were looked at, and what was wrong with any."""
    chance = random.Random(seed)
    noted = trace(folder, setting, verb)
    last = len(noted.operations)
    if most is None:
        chosen = images(noted, chance, most=AT_EACH_MOMENT, moments=lambda moment: True)
    else:
        wanted = {last, *chance.choices(range(last + 1), k=most)}
        chosen = images(noted, chance, most=4, moments=wanted.__contains__)
    found = list(chosen) if most is None else _some(list(chosen), most, chance)
    bad = []
    for image in found:
        target = folder.with_name(f"{folder.name}-image")
        wrong = image_problems(image.tree, target, setting, verb, is_done=image.is_done, look=aftermath)
        if wrong:
            done = "at the end" if image.is_done else f"before {noted.operations[image.moment]}"
            bad.append((done, f"lost: {', '.join(image.lost)}", *wrong))
    return last, len(found), bad


def _some(found: list[Image], most: int, chance: random.Random) -> list[Image]:
    """Return *most* of *found*, one of them from when the verb was done."""
    done = [image for image in found if image.is_done][:1]
    others = [image for image in found if image not in done]
    return done + chance.sample(others, min(len(others), most - len(done)))


def _fresh(folder: Path, setting: Setting, name: str) -> Path:
    (folder / name).mkdir()
    copied(setting.scene.store, folder / name / "store")
    return folder / name


# -- the promises --------------------------------------------------------------------------------------------------


@pytest.mark.fault(8, 9, 103)
@pytest.mark.parametrize("verb", SIMULATED, ids=lambda verb: verb.__name__[3:])
@pytest.mark.sample(4, always=("init", "ingest", "gc"))
def test_a_power_cut_loses_nothing(fast_path: Path, setting: Setting, verb: Verb) -> None:
    """A sample of what may be lost: what was reported is there, what is there is whole, and the verb repeats."""
    seed = seeded(verb.__name__).randrange(10**9)
    outcome = in_child(_looked_at, _fresh(fast_path, setting, "cut"), setting, verb, seed, IMAGES)

    operations, count, bad = outcome.needed()
    print(f"{verb.__name__}: {count} images of {operations} operations")
    assert bad == []
    assert count


@pytest.mark.fault(8, 9, 103)
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("verb", SIMULATED, ids=lambda verb: verb.__name__[3:])
def test_a_power_cut_at_any_moment_loses_nothing(fast_path: Path, setting_with_files: Setting, verb: Verb) -> None:
    """The same for every moment, and with every kind of object."""
    seed = seeded(verb.__name__).randrange(10**9)
    folder = _fresh(fast_path, setting_with_files, "cut")
    outcome = in_child(_looked_at, folder, setting_with_files, verb, seed, None, timeout_seconds=7000.0)

    operations, count, bad = outcome.needed()
    print(f"{verb.__name__}: {count} images of {operations} operations")
    assert bad == []


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


def _blamed(folder: Path, setting: Setting, verb: Verb, forgets: str) -> list[str]:
    """Return the things that alone make an image bad where they are lost, once *verb* has reported success."""
    forgetful = type("Forgetful", (_Forgetful,), {"forgets": forgets})
    noted = trace(folder, setting, verb, forgetful)
    disk = Disk(noted.before)
    for operation in noted.operations:
        disk.apply(operation)
    blamed = []
    # Nothing ever reads a name in tmp/: each of them would only cost time.
    for choice in (choice for choice in disk.choices() if choice.node.label != "store/tmp"):
        tree = disk.image({choice: 0}, random.Random(0)) | noted.indexes[-1]
        if image_problems(tree, folder, setting, verb, is_done=True, look=outcome_problems):
            blamed.append(str(choice))
    return blamed


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    ("verb", "forgets", "named"),
    [
        (do_ingest, "an object", "the bytes of store/objects/"),
        (do_ingest, "a record", "the bytes of store/commits/run/4."),
        (do_ingest, "the folder of an object", "the name store/objects/"),
        (do_ingest, "the folder of objects", "the name store/objects/"),
        (do_ingest, "the folder of a run", "the name store/commits/run/4."),
        (do_new_run, "the folder of runs", "the name store/commits/new"),
        (test_crash.do_pin, "the folder of pins", "the name store/pins/named"),
    ],
)
@pytest.mark.sample(3)
def test_a_sync_that_is_left_out_is_named(
    fast_path: Path, setting: Setting, verb: Verb, forgets: str, named: str
) -> None:
    """The simulation can fail: without any one of the syncs of a commit it shows what the power cut took."""
    blamed = in_child(_blamed, _fresh(fast_path, setting, "cut"), setting, verb, forgets).needed()

    assert blamed
    assert all(name.startswith(named) for name in blamed), blamed
