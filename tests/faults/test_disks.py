"""
Real filesystems that are full, read-only or in pieces: ext4, XFS and tmpfs, each verb on each of them.

What may happen is a documented exit code or success, and then success with more room; nothing is ever lost.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore.errors import InvalidInput
from layerstore.storage import manifest_directory, no_hook
from layerstore.store import Store, init
from tests.faults.disks import KINDS, disk, fill, remounted
from tests.faults.harness import (
    Failure,
    attempt,
    become_nobody,
    composed,
    copied,
    descriptors,
    in_child,
    leftovers,
    problems,
    seeded,
    snapshot,
    tmpfs,
)
from tests.faults.verbs import VERBS, do_gc, facts_of, fresh, make_scene, wrong

pytestmark = pytest.mark.full

ROOMS = (0, 4096, 16_384, 65_536, 131_072, 262_144, 400_000)
"""What is free on a disk that is all but full: a commit takes a third of a megabyte."""


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Path:
    """Return the scene that verbs begin at; it is copied, never changed."""
    return make_scene(fast_module_path / "scene", layout="hf")


# -- full ----------------------------------------------------------------------------------------------------------


def _full(scene: Path, mounted: Path, name: str, room: int) -> list[str]:
    """Run a verb on a disk that is full; then give it room and run it again."""
    folder = fresh(scene, mounted / "scene", name)
    objects = snapshot(folder / "store" / "objects")
    ballast = fill(mounted, but_bytes=room)
    before = descriptors()
    failure = attempt(lambda: VERBS[name](folder, no_hook))
    found = [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    found += _complaints(folder, name, failure, objects)
    ballast.unlink()
    found += wrong(folder, name, is_done=failure is None)
    again = attempt(lambda: VERBS[name](folder, no_hook)) if failure is not None else None
    found += [f"with room again: {again.trace}"] if again is not None else []
    found += wrong(folder, name, is_done=again is None)
    shutil.rmtree(folder)
    return found


def _complaints(folder: Path, name: str, failure: Failure | None, objects: dict[str, str]) -> list[str]:
    litter = [*leftovers(folder / "store"), *(path.name for path in folder.glob("*.partial-*"))]
    found = [f"left behind: {litter}"] if litter else []
    if failure is not None:
        found += [failure.trace] if failure.exit_code != 23 else []
        found += ["no hint"] if not failure.hint else []
    if name in {"gc", "empty"}:
        found += [] if failure is None else [f"it does not free: {failure.trace}"]
        found += [] if len(snapshot(folder / "store" / "objects")) < len(objects) else ["nothing was freed"]
    return found


def _on(kind: str, folder: Path, work: Callable[..., list[str]], *cases: tuple[object, ...]) -> None:
    with disk(kind, folder) as mounted:
        if mounted is None:
            pytest.skip(f"no {kind} can be made and mounted here")
        for case in cases:
            source, *others = case
            outcome = in_child(work, source, mounted, *others)
            assert outcome.needed() == [], (kind, *others)
            assert {notice.split(":")[0] for notice in outcome.notices} <= {"IndexNotice", "ResourceWarning"}


@pytest.mark.fault(16, 18, 20, 21)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.sample(1)
def test_a_full_disk_is_an_error_or_success_and_no_damage(scene: Path, fast_path: Path, kind: str) -> None:
    """Whatever verb runs out of space, and wherever; a collection frees even with not a byte left."""
    chance = seeded(f"repo on {kind}")
    frees = {"gc", "empty"}
    cases = [(scene, name, 0 if name in frees else chance.choice(ROOMS)) for name in VERBS]

    _on(kind, fast_path, _full, *cases)


@pytest.mark.fault(16, 18, 20, 21)
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VERBS)
def test_a_disk_that_is_full_anywhere_is_an_error_or_success_and_no_damage(
    scene: Path, fast_path: Path, kind: str, name: str
) -> None:
    """The same with any room that is left."""
    repo = sorted({*ROOMS, *range(0, 400_000, 24_000)})

    _on(kind, fast_path, _full, *((scene, name, room) for room in repo))
    print(f"{name} on {kind}: {len(repo)} sizes of room")


def _index_on_a_full_disk(scene: Path, mounted: Path) -> list[str]:
    """The index alone is on the full disk: verbs succeed, and it catches up later."""
    folder = fresh(scene, mounted.parent / "scene", "gc")
    facts, scratch = facts_of(folder), mounted.parent / "scratch"
    earlier = {"kept": facts["first"], "run@4": facts["second"]}
    os.environ["LAYERSTORE_MANIFEST_DIR"] = str(mounted)
    problems(folder / "store", scratch, earlier)  # makes it
    with Store(folder / "store") as store:
        (manifest_directory(store.repo.layout, store_id=store.id) / "lock.mdb").unlink()
    ballast = fill(mounted, but_bytes=0)
    found = problems(folder / "store", scratch, earlier)
    for name in ("begin", "pin", "compose", "gc"):
        failure = attempt(lambda name=name: VERBS[name](folder, no_hook))  # type: ignore[misc]  # bound at once
        found += [f"{name}: {failure.trace}"] if failure is not None else []
    ballast.unlink()
    with Store(folder / "store") as store:
        steps = [(entry.run, entry.step) for entry in store.log()]
        found += [] if steps == [("new", 4), ("run", 4), ("run", 2)] else [f"{steps}"]
        found += [store.repo.catalog.index_problem] if store.repo.catalog.index_problem else []
    return found + problems(folder / "store", scratch, earlier)


@pytest.mark.fault(18, 19, 100)
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_under_the_index_stops_nobody(scene: Path, fast_path: Path, kind: str) -> None:
    """Not even where its lock file is to be made: commits stand, questions are answered, later it catches up."""
    _on(kind, fast_path, _index_on_a_full_disk, (scene,))


# -- read-only -----------------------------------------------------------------------------------------------------


def _read_only(scene: Path, mounted: Path) -> list[str]:
    for name in VERBS:
        made = fresh(scene, mounted / name, name) / "store"
        if name != "migrate":  # nothing opens that one before
            problems(made, mounted.parent / "scratch", {})  # makes the index
    if not remounted(mounted, "ro"):
        return ["it cannot be made read-only"]
    before, found = snapshot(mounted), list[str]()
    for name, verb in VERBS.items():
        failure = attempt(lambda name=name, verb=verb: verb(mounted / name, no_hook))  # type: ignore[misc]
        is_as_it_should_be = failure is None if name == "verify" else failure is not None and failure.exit_code == 12
        found += [] if is_as_it_should_be else [f"{name}: {failure and failure.trace}"]
    with Store(mounted / "gc" / "store") as store:
        is_right = composed(store, "kept", mounted.parent / "scratch") == facts_of(mounted / "gc")["first"]
        found += [] if is_right else ["it composes to something else"]
    return found + (["something has changed"] if snapshot(mounted) != before else [])


@pytest.mark.fault(27)
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_disk_can_be_read(scene: Path, fast_path: Path, kind: str) -> None:
    """Everything that writes exits with 12, questions and composites work, and not a byte changes."""
    _on(kind, fast_path, _read_only, (scene,))


# -- in pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.fault(29)
@pytest.mark.parametrize("name", ["tmp", "objects", "commits", "gc"])
def test_a_folder_on_another_filesystem_is_refused(scene: Path, fast_path: Path, name: str) -> None:
    """When the store is opened, before anything is linked across."""
    path = copied(scene / "plain", fast_path / "store")
    before = snapshot(path)
    with tmpfs(path / name, 1 << 20) as is_mounted:
        if not is_mounted:
            pytest.skip("mounting is not allowed here")
        with pytest.raises(InvalidInput, match="must be on the same filesystem") as caught:
            Store(path)

        assert caught.value.hint
    assert snapshot(path) == before


# -- modes and owners ----------------------------------------------------------------------------------------------

_GROUP = 4242


def _made_with(scene: Path, folder: Path, umask: int) -> list[str]:
    """Use a store under *umask*; return the files whose modes are not what it leaves."""
    os.umask(umask)
    folder.mkdir()
    with init(folder / "store") as store:
        store.ingest(scene / "first", run="run", pin="kept")
        store.ingest(scene / "second", run="run")
        store.ingest(scene / "third", run="run")
        store.drop("run@6")
        store.compose("run@4").write(folder / "out")
    do_gc(folder, no_hook)
    found = []
    for path in [*(folder / "store").rglob("*"), *(folder / "out").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        full = 0o777 if path.is_dir() else 0o777 if mode & 0o100 else 0o666
        found += [f"{path.relative_to(folder)} {mode:o}"] if mode != full & ~umask else []
    return found


@pytest.mark.fault(33)
@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022, 0o002, 0o000])
def test_modes_are_what_the_umask_leaves(scene: Path, fast_path: Path, umask: int) -> None:
    """Of every file and folder, of the store and of composites: whoever shares a store decides it there."""
    assert in_child(_made_with, scene, fast_path / "made", umask).needed() == []


def _as_somebody(folder: Path, groups: list[int]) -> dict[str, Failure | None]:
    """Do everything as a user who owns nothing here, but may be of the store's group."""
    problems(copied(folder / "gc" / "store", folder / "warm"), folder / "scratch", {})  # imports as root
    os.umask(0o002)
    if groups:
        os.setgroups(groups)
        os.setgid(groups[0])
        os.setuid(65534)
    else:
        become_nobody()
    return {name: attempt(lambda name=name: VERBS[name](folder / name, no_hook)) for name in VERBS}  # type: ignore[misc]


@pytest.mark.fault(30, 33)
@pytest.mark.parametrize("is_member", [True, False])
def test_a_store_of_a_group_is_for_its_members(scene: Path, fast_path: Path, is_member: bool) -> None:
    """They do everything, with objects that others own; who is none is told what keeps them out."""
    if os.getuid():
        pytest.skip("only root can be somebody else")
    for name in VERBS:
        fresh(scene, fast_path / name, name)
    for path in [fast_path, *fast_path.rglob("*")]:
        if not path.is_symlink():
            os.chown(path, 0, _GROUP)
            path.chmod(0o2770 if path.is_dir() else 0o660)
    fast_path.chmod(0o777)
    for path in [scene.parent, scene, *(path for path in scene.rglob("*") if not path.is_symlink())]:
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))

    failures = in_child(_as_somebody, fast_path, [_GROUP] if is_member else []).needed()

    if is_member:
        assert {name: failure.trace for name, failure in failures.items() if failure is not None} == {}
        return
    for name, failure in failures.items():
        assert failure is not None, name
        assert failure.exit_code == 12, failure.trace
        if name not in {"init", "save"}:  # there is no store yet; a checkpoint is looked at first
            assert "is user 0's, of group 4242, with mode 2770; you are user 65534" in (failure.hint or ""), name
