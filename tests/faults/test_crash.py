"""
kill -9 at every step that writes: what was saved stays, and the same command then succeeds.

A dry pass counts the calls of the seam, then the verb runs once per call in a child that kills itself there.
Every end state is looked at twice, with the index as the crash left it and without any.
LMDB's own writes do not pass the seam: strace and random kills cover those.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerstore import Keep
from layerstore.errors import AlreadyExists
from layerstore.ingest import transfer
from layerstore.storage.files import Files
from layerstore.storage.handles import Hook, no_hook
from layerstore.storage.setup import make_store
from layerstore.store import Store, init
from tests.compat.format1 import as_format_1
from tests.faults import harmed as harmed_module
from tests.faults.harmed import harmed_problems, make_harmed
from tests.faults.harness import (
    Call,
    Killer,
    Recorder,
    child,
    composed,
    copied,
    fingerprint,
    flip,
    in_child,
    problems,
    refuse_links,
    seeded,
    tiny_checkpoint,
    traced,
    truth,
    wait_for,
)
from tests.faults.older import migrate_hooked, unmigrated_problems
from tests.faults.saving import commit_live

SAMPLE = 2
"""Crash points per verb in a usual run."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A store with one commit and one pin, and what may happen to it."""

    folder: Path
    store: Path
    """Holds ``run@2`` and the pin ``kept``."""
    earlier: dict[str, str]
    """What is in it, each with the fingerprint of its composite."""
    later: dict[str, str]
    """What the verbs add: ``run@4``, ``live@4``, the replaced ``run@2``."""

    @property
    def first(self) -> Path:
        """The checkpoint of step 2."""
        return self.folder / "first"

    @property
    def second(self) -> Path:
        """The checkpoint of step 4."""
        return self.folder / "second"

    @property
    def other(self) -> Path:
        """Another checkpoint of step 2."""
        return self.folder / "other"


def _with_one_worker() -> None:
    """Let the verbs of this process make their calls in one order: the nth of a kind is then always the same one."""
    vars(transfer)["WORKERS_MAX"] = 1


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Scene:
    """Return the scene that every crash starts from; it is copied, never changed."""
    folder = fast_module_path
    first = tiny_checkpoint(folder / "first", step=2, layout="hf")
    second = tiny_checkpoint(folder / "second", step=4, layout="hf")
    other = tiny_checkpoint(folder / "other", step=2, seed=1, layout="hf")
    with init(folder / "store") as store:
        store.ingest(first, run="run", pin="kept")
        digest = composed(store, "run@2", folder)
    with init(folder / "later") as store:
        store.ingest(second, run="run")
        store.ingest(other, run="run")
        commit_live(folder / "later", second, no_hook, step=4)
        later = {ref: composed(store, ref, folder) for ref in ("run@4", "live@4")}
        later["other"] = composed(store, "run@2", folder)
    return Scene(folder, folder / "store", {"run@2": digest, "kept": digest}, later)


# -- the verbs -----------------------------------------------------------------------------------------------------


def do_init(folder: Path, scene: Scene, hook: Hook) -> None:
    """Make a store where there is none."""
    make_store(folder / "new", Files(hook))


def do_ingest(folder: Path, scene: Scene, hook: Hook) -> None:
    """Add a step."""
    with Store(folder / "store", hook=hook) as store:
        store.ingest(scene.second, run="run")


def do_commit(folder: Path, scene: Scene, hook: Hook) -> None:
    """Add a step as ranks do that save while they train."""
    commit_live(folder / "store", scene.second, hook, step=4)


def do_replace(folder: Path, scene: Scene, hook: Hook) -> None:
    """Put another commit in the place of one that is there."""
    with Store(folder / "store", hook=hook) as store:
        store.ingest(scene.other, run="run", replace=True)


def do_repeat(folder: Path, scene: Scene, hook: Hook) -> None:
    """Ingest what is there already."""
    with Store(folder / "store", hook=hook) as store:
        store.ingest(scene.folder / "first", run="run")


def do_heal(folder: Path, scene: Scene, hook: Hook) -> None:
    """Ingest what is there, and whose record is damaged; nobody has a copy of that."""
    ready = folder / "ready"
    if not ready.exists():
        with Store(folder / "store") as store:
            (record,) = (folder / "store" / "commits" / "run").iterdir()
            flip(record)
            store.reindex()
        ready.touch()
    with Store(folder / "store", hook=hook) as store:
        store.ingest(scene.first, run="run")


def do_pin(folder: Path, scene: Scene, hook: Hook) -> None:
    """Give a commit a name."""
    with Store(folder / "store", hook=hook) as store:
        store.pin("named", "run@2")


def do_compose(folder: Path, scene: Scene, hook: Hook) -> None:
    """Write a checkpoint where nothing is."""
    with Store(folder / "store", hook=hook) as store:
        store.compose("run@2").write(folder / "deep" / "out")


def do_overwrite(folder: Path, scene: Scene, hook: Hook) -> None:
    """Write a checkpoint over another folder."""
    target = folder / "out"
    if not target.exists() and not list(folder.glob("out.*")):
        shutil.copytree(scene.other, target)
    with Store(folder / "store", hook=hook) as store:
        store.compose("run@2").write(target, force=True)


def do_drop(folder: Path, scene: Scene, hook: Hook) -> None:
    """Hide the only commit, unless it is hidden."""
    with Store(folder / "store", hook=hook) as store:
        if store.log():
            store.drop("run@2", last=True)


def do_gc(folder: Path, scene: Scene, hook: Hook) -> None:
    """Keep the newest of three commits, of which one hides another, which a pin keeps."""
    _collect(folder, scene, hook, Keep(last=1))


def do_trim(folder: Path, scene: Scene, hook: Hook) -> None:
    """Drop the moments of the older of two commits, which hides a third, which a pin keeps."""
    _collect(folder, scene, hook, Keep(drop_optimizer_older_than=1))


def _collect(folder: Path, scene: Scene, hook: Hook, keep: Keep) -> None:
    ready = folder / "ready"
    with Store(folder / "store") as store:
        if not ready.exists():
            store.ingest(scene.second, run="run")
            store.ingest(scene.other, run="run", replace=True)
            ready.touch()
    time.sleep(0.02)  # nothing that goes has the time of this very tick
    with Store(folder / "store", hook=hook) as store:
        store.gc(keep, grace_seconds=0)


def do_repair(folder: Path, scene: Scene, hook: Hook) -> None:
    """Put right what is wrong with everything that a store has, from a copy of it; one commit falls back."""
    store, copy = folder / "store", folder / "copy"
    if not copy.exists():
        harmed = scene.folder / "harmed"
        if not harmed.exists():  # by the dry pass, which runs alone
            make_harmed(scene.folder / "harming", store, first=scene.first, second=scene.second, other=scene.other)
            (scene.folder / "harming").rename(harmed)
        copied(harmed / "store", store)
        copied(harmed / "copy", copy)
    harmed_module.do_repair(store, copy, hook)


def do_reindex(folder: Path, scene: Scene, hook: Hook) -> None:
    """Make the index afresh."""
    with Store(folder / "store", hook=hook) as store:
        assert store.reindex().commits == 1


def do_migrate(folder: Path, scene: Scene, hook: Hook) -> None:
    """Take a store of an older format to today's."""
    old = folder / "old"
    if not old.exists():
        as_format_1(folder / "store")
        shutil.copytree(folder / "store", old)
    migrate_hooked(folder / "store", hook)


Verb = Callable[[Path, Scene, Hook], None]
VERBS: list[Verb] = [
    do_init,
    do_ingest,
    do_commit,
    do_replace,
    do_repeat,
    do_heal,
    do_pin,
    do_drop,
    do_gc,
    do_trim,
    do_repair,
    do_compose,
    do_overwrite,
    do_migrate,
]
_LIGHTLY: dict[Verb, int] = {do_repair: 2, do_commit: 2}
"""By what a usual run's sample is cut: each end state of a repair takes a dozen verifies."""


def outcome_problems(folder: Path, scene: Scene, verb: Verb, *, is_done: bool) -> list[str]:
    """Return what is wrong after *verb* was interrupted, or *is_done*."""
    store, scratch = folder / "store", folder / "scratch"
    if verb is do_init:
        return _init_problems(folder, is_done=is_done)
    if verb is do_repair:
        return harmed_problems(store, scene.folder / "harmed", scratch, is_done=is_done)
    if verb in _LOOKED_AT:
        return _LOOKED_AT[verb](folder, scene, is_done=is_done)
    composites = dict(scene.earlier)
    if verb is do_migrate and (found := unmigrated_problems(store, folder / "old", is_done=is_done)) is not None:
        return found
    with Store(store) as opened:
        known = {f"{entry.run}@{entry.step}" for entry in opened.log()} | {pin.name for pin in opened.pins()}
    if verb is do_ingest and (is_done or "run@4" in known):
        composites["run@4"] = scene.later["run@4"]
    if verb is do_commit and (is_done or "live@4" in known):
        composites["live@4"] = scene.later["live@4"]
    if verb is do_pin and (is_done or "named" in known):
        composites["named"] = scene.earlier["run@2"]
    if verb is do_replace or (verb is do_drop and (is_done or not known - {"kept"})):
        composites.pop("run@2")
    found = problems(store, scratch, composites)
    if verb is do_replace:
        with Store(store) as opened:
            now = composed(opened, "run@2", scratch)
        allowed = [scene.later["other"]] if is_done else [scene.later["other"], scene.earlier["run@2"]]
        found += [] if now in allowed else ["run@2 is neither the old commit nor the new one"]
    if verb is do_drop and is_done and "run@2" in known:
        found.append("run@2 is still shown")
    if verb in (do_compose, do_overwrite):
        found += _target_problems(folder, scene, verb, is_done=is_done)
    return found


def _gc_problems(folder: Path, scene: Scene, *, is_done: bool) -> list[str]:
    store, scratch = folder / "store", folder / "scratch"
    with Store(store) as opened:
        known = {f"{entry.run}@{entry.step}" for entry in opened.log()}
    composites = {"kept": scene.earlier["kept"], "run@4": scene.later["run@4"]}
    if "run@2" in known:  # never the one that it had replaced
        composites["run@2"] = scene.later["other"]
    found = problems(store, scratch, composites)
    with Store(store) as opened:
        orphans = opened.verify().orphans
    return found + (
        [f"{orphans} orphans, run@2 {'run@2' in known}"] if is_done and (orphans or "run@2" in known) else []
    )


def _trim_problems(folder: Path, scene: Scene, *, is_done: bool) -> list[str]:
    store, scratch = folder / "store", folder / "scratch"
    composites = {"kept": scene.earlier["kept"], "run@4": scene.later["run@4"]}
    with Store(store) as opened:
        shown = [entry.has_moments for entry in opened.log("run") if entry.step == 2]
        weights = opened.compose("run@2", policy="latest").tensors()
    if shown == [True]:
        composites["run@2"] = scene.later["other"]
    found = problems(store, scratch, composites)
    found += [f"run@2 is there {len(shown)} times"] if len(shown) != 1 else []
    found += ["run@2 has moments still"] if is_done and shown == [True] else []
    return found + ([] if weights else ["run@2 has no weights"])


def _healed_problems(folder: Path, scene: Scene, *, is_done: bool) -> list[str]:
    store, scratch = folder / "store", folder / "scratch"
    with Store(store) as opened:
        damaged = [damage.kind for damage in opened.verify(read_data=True).damaged]
        (entry,) = opened.log()
    if damaged and not is_done:
        return [] if (damaged, entry.run, entry.step) == (["record"], "run", 2) else [f"{damaged} are damaged: {entry}"]
    return problems(store, scratch, scene.earlier)


_LOOKED_AT: dict[Verb, Callable[..., list[str]]] = {
    do_gc: _gc_problems,
    do_trim: _trim_problems,
    do_heal: _healed_problems,
}
"""What is looked at in a way of its own."""


def _init_problems(folder: Path, *, is_done: bool) -> list[str]:
    if not is_done and not (folder / "new" / "store.json").exists():
        return []
    with Store(folder / "new") as store:
        return [] if store.verify(read_data=True).ok and store.log() == [] else ["the new store is not sound"]


def _target_problems(folder: Path, scene: Scene, verb: Verb, *, is_done: bool) -> list[str]:
    target = folder / "deep" / "out" if verb is do_compose else folder / "out"
    allowed = [scene.earlier["run@2"]]
    if verb is do_overwrite and not is_done:
        allowed.append(fingerprint(scene.other))
    if not target.exists():
        # Between the two renames of a replacement there is no target, but both folders are whole.
        aside = [fingerprint(path) for path in folder.glob("out.*")]
        is_lost = verb is do_overwrite and fingerprint(scene.other) not in aside
        return ["the target is gone"] if is_done or is_lost else []
    return [] if fingerprint(target) in allowed else ["the target is torn"]


# -- at the seam ---------------------------------------------------------------------------------------------------


def _crash(folder: Path, scene: Scene, verb: Verb, call: Call) -> None:
    _with_one_worker()
    verb(folder, scene, Killer(call))


def _aftermath(folder: Path, scene: Scene, verb: Verb) -> list[str]:
    """Return what is wrong after a crash, and after the verb was repeated."""
    found = outcome_problems(folder, scene, verb, is_done=False)
    before = None if verb is do_init else truth(folder / "store")
    try:
        verb(folder, scene, Recorder())
    except AlreadyExists as error:
        # Killed after its last step but before it could say so: what it made is there, and is looked at below.
        found += [] if verb in (do_init, do_compose) else [f"the verb does not succeed again: {error!r}"]
    if before is not None:
        now = truth(folder / "store")
        gone = [name for name in before if name not in now and not name.startswith("tmp/")]
        lost = [] if verb in (do_gc, do_trim, do_migrate) else gone  # which have their own way to say what may go
        if verb is do_commit:
            lost = [name for name in lost if not name.startswith("parts/")]  # they have become a commit
        if verb is do_repair:  # moved, and never removed
            kept = {content for name, content in now.items() if name.startswith("quarantine/")}
            lost = [name for name in lost if before[name] not in kept]
        found += [f"{name} is gone" for name in lost]
    return found + outcome_problems(folder, scene, verb, is_done=True)


def _aftermaths(folder: Path, scene: Scene, verb: Verb) -> list[str]:
    """Look at the crash's end state as it is, and at a copy that has lost its index."""
    twin = folder.with_name(f"{folder.name}-without-index")
    shutil.copytree(folder, twin, symlinks=True)
    shutil.rmtree(twin / "store" / "manifest", ignore_errors=True)
    shutil.rmtree(twin / "new" / "manifest", ignore_errors=True)
    found = _aftermath(folder, scene, verb)
    return found + [f"without the index: {problem}" for problem in _aftermath(twin, scene, verb)]


def _dry_pass(folder: Path, scene: Scene, verb: Verb) -> list[Call]:
    _with_one_worker()
    recorder = Recorder()
    verb(folder, scene, recorder)
    return recorder.calls


def _fresh(fast_path: Path, scene: Scene, name: str) -> Path:
    folder = fast_path / name
    folder.mkdir()
    copied(scene.store, folder / "store")
    return folder


def crash_points(calls: list[Call], chance: random.Random) -> list[Call]:
    """Return a sample: half of first and last calls of an operation, half of others."""
    last = {call.operation: call for call in sorted(calls)}
    ends = {call for call in calls if call.ordinal == 1} | set(last.values())
    return sorted(_some(ends, chance) | _some(set(calls) - ends, chance))


def _some(calls: set[Call], chance: random.Random) -> set[Call]:
    return set(chance.sample(sorted(calls), min(len(calls), SAMPLE // 2)))


def _as_it_is(work: Callable[..., object], *arguments: object) -> object:
    return work(*arguments)


def _crash_everywhere(
    fast_path: Path, scene: Scene, verb: Verb, points: list[Call], *, around: Callable[..., object] = _as_it_is
) -> None:
    def crash(call: Call) -> None:
        folder = _fresh(fast_path, scene, str(call))

        died = in_child(around, _crash, folder, scene, verb, call)
        looked = in_child(around, _aftermaths, folder, scene, verb)

        assert died.exit_code == -signal.SIGKILL, f"{call}: {died}"
        assert looked.needed() == [], str(call)
        shutil.rmtree(folder)
        shutil.rmtree(folder.with_name(f"{folder.name}-without-index"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(crash, points))


@pytest.mark.fault(1, 2, 3, 4, 7, 11, 12, 13, 14, 44)
@pytest.mark.known_fault("llmtailor 10")
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__[3:])
def test_a_kill_at_any_step_loses_nothing(fast_path: Path, scene: Scene, verb: Verb) -> None:
    """After a kill at a step of the sample, everything earlier is whole and the verb succeeds."""
    calls = in_child(_dry_pass, _fresh(fast_path, scene, "dry"), scene, verb).needed()
    chance = seeded(verb.__name__)
    points = crash_points(calls, chance)
    points = chance.sample(points, len(points) // _LIGHTLY.get(verb, 1))
    print(f"{verb.__name__}: {len(points)} of {len(calls)} crash points")

    _crash_everywhere(fast_path, scene, verb, points)


@pytest.mark.fault(1, 2, 3, 4, 7, 11, 12, 13, 14, 44)
@pytest.mark.known_fault("llmtailor 10")
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__[3:])
def test_a_kill_at_every_step_loses_nothing(fast_path: Path, scene: Scene, verb: Verb) -> None:
    """The same for every single step."""
    calls = in_child(_dry_pass, _fresh(fast_path, scene, "dry"), scene, verb).needed()
    print(f"{verb.__name__}: {len(calls)} crash points")

    _crash_everywhere(fast_path, scene, verb, calls)


# -- without hard links --------------------------------------------------------------------------------------------

_MOVERS = [do_ingest, do_replace, do_gc, do_repair, do_migrate]
"""The verbs that give a file another name while something still counts on the one that it has."""


def _without_links(work: Callable[..., object], *arguments: object) -> object:
    vars(os)["link"] = refuse_links
    return work(*arguments)


def _crash_without_links(fast_path: Path, scene: Scene, verb: Verb, share: int | None) -> None:
    dry = in_child(_without_links, _dry_pass, _fresh(fast_path, scene, "dry"), scene, verb)
    points = dry.needed() if share is None else seeded(f"{verb.__name__} without links").sample(dry.needed(), share)
    print(f"{verb.__name__} without hard links: {len(points)} of {len(dry.needed())} crash points")

    _crash_everywhere(fast_path, scene, verb, points, around=_without_links)


@pytest.mark.fault(4, 11, 12, 14, 30)
@pytest.mark.parametrize("verb", _MOVERS, ids=lambda verb: verb.__name__[3:])
@pytest.mark.sample(2)
def test_a_kill_without_hard_links_loses_nothing(fast_path: Path, scene: Scene, verb: Verb) -> None:
    """Where a file has one name only, what is moved is at one of its two places, and both are looked at."""
    _crash_without_links(fast_path, scene, verb, 3)


@pytest.mark.fault(4, 11, 12, 14, 30)
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", _MOVERS, ids=lambda verb: verb.__name__[3:])
def test_a_kill_without_hard_links_loses_nothing_anywhere(fast_path: Path, scene: Scene, verb: Verb) -> None:
    """The same for every single step."""
    _crash_without_links(fast_path, scene, verb, None)


# -- below the seam ------------------------------------------------------------------------------------------------

_DRIVER = """
import sys
from pathlib import Path
from tests.faults import test_crash
from tests.faults.harness import Recorder
folder, scene = Path(sys.argv[2]), Path(sys.argv[3])
getattr(test_crash, sys.argv[1])(folder, test_crash.Scene(scene, scene / "store", {}, {}), Recorder())
"""


# What LMDB does to its files, and what the catalog does to their folder; strace counts each call for itself.
_INDEX_CALLS = ("writev", "pwrite64", "fdatasync", "rename")


@pytest.mark.fault(5, 6, 99)
@pytest.mark.parametrize("verb", [do_ingest, do_reindex], ids=lambda verb: verb.__name__[3:])
@pytest.mark.parametrize("call", _INDEX_CALLS)
@pytest.mark.usefixtures("strace")
@pytest.mark.sample(1, always=("rename-ingest",))
def test_a_kill_inside_the_index_loses_nothing(fast_path: Path, scene: Scene, verb: Verb, call: str) -> None:
    """LMDB's writes and syncs, and the swap of its folder, are survived like our own."""
    count, is_over = 0, False
    while not is_over:
        count += 1
        folder = _fresh(fast_path, scene, f"index-{count}")
        manifest = folder / "store" / "manifest"
        watched = [option for path in (manifest, *manifest.iterdir()) for option in ("-P", str(path))]

        options = [*watched, "-e", f"inject={call}:signal=KILL:when={count}"]
        died = traced(options, _DRIVER, verb.__name__, folder, scene.folder)
        is_over = died.returncode == 0
        looked = in_child(_aftermaths, folder, scene, verb)

        assert is_over or died.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), died.stderr
        assert looked.needed() == [], count
    print(f"{verb.__name__}: {count - 1} kills at {call}")
    assert count > 1 or call == "rename"


def _ingest_for_ever(folder: Path, scene: Scene) -> None:
    with Store(folder / "store") as store:
        (folder / "started").touch()
        while True:
            for source in (scene.second, scene.other, scene.folder / "first"):
                store.ingest(source, run="busy", replace=True)


@pytest.mark.fault(5)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_a_kill_at_a_random_time_loses_nothing(fast_path: Path, scene: Scene, kills: int) -> None:
    """A process that ingests without end is killed at any moment, again and again on the same store."""
    chance = seeded("random times")
    folder = _fresh(fast_path, scene, "random")
    for number in range(kills):
        with child(_ingest_for_ever, folder, scene) as busy:
            wait_for(folder / "started")
            time.sleep(chance.random() * 0.3)
            busy.kill()
        (folder / "started").unlink()

        looked = in_child(problems, folder / "store", folder, scene.earlier)

        assert looked.needed() == [], number
        assert looked.notices == (), "LMDB survives a kill by itself"
    assert in_child(_aftermaths, folder, scene, do_ingest).needed() == []
