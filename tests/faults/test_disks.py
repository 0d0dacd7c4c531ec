"""
Real filesystems that are full, read-only or in pieces, and stores that belong to others: each verb on each of them.

What may happen is a documented exit code or success, and then success with more room; nothing is ever lost.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore.disk import no_hook
from layerstore.errors import InvalidInput
from layerstore.storage import index_directory
from layerstore.store import Store, init
from tests.faults.disks import SMALL, fill, is_remounted, mounted
from tests.faults.harness import (
    Failure,
    attempt,
    become_nobody,
    composed,
    copied,
    descriptors,
    in_child,
    object_of,
    problems,
    seeded,
    snapshot,
)
from tests.faults.verbs import VERBS, facts_of, fresh, litter, wrong

pytestmark = pytest.mark.full

ROOMS = (0, 4096, 16_384, 65_536, 131_072, 262_144, 400_000)
"""What is free on a disk that is all but full: a commit takes a third of a megabyte."""


# -- full ----------------------------------------------------------------------------------------------------------


def _full(scene: Path, place: Path, name: str, room: int) -> list[str]:
    """Run a verb on a disk that is full; then give it room and run it again."""
    folder = fresh(scene, place / "scene", name)
    objects = snapshot(folder / "store" / "objects")
    ballast = fill(place, but_bytes=room)
    before = descriptors()
    failure = attempt(lambda: VERBS[name](folder, no_hook))
    found = [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    found += litter(folder)
    if failure is not None and (failure.exit_code != 23 or not failure.hint or name in {"gc", "empty"}):
        found.append(failure.trace)
    if name in {"gc", "empty"} and len(snapshot(folder / "store" / "objects")) >= len(objects):
        found.append("nothing was freed")
    ballast.unlink()
    found += wrong(folder, name, is_done=failure is None)
    if failure is not None:
        VERBS[name](folder, no_hook)
        found += wrong(folder, name, is_done=True)
    shutil.rmtree(folder)
    return found


def _on(kind: str, folder: Path, work: Callable[..., list[str]], *cases: tuple[object, ...]) -> None:
    with mounted(kind, folder / "disk") as place:
        for scene, *others in cases:
            outcome = in_child(work, scene, place, *others)
            assert outcome.needed() == [], (kind, *others)
            assert {notice.split(":")[0] for notice in outcome.notices} <= {"IndexNotice", "ResourceWarning"}


@pytest.mark.fault(16, 18, 20, 21)
@pytest.mark.parametrize(
    ("kind", "is_sample"),
    [
        *(pytest.param(kind, True, marks=pytest.mark.sample(1, by="kind")) for kind in ("ext4", "xfs")),
        *(
            pytest.param(
                kind, False, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)], id=f"{kind} with any room"
            )
            for kind in SMALL
        ),
    ],
)
def test_a_full_disk_is_an_error_or_success_and_no_damage(
    scene: Path, fast_path: Path, kind: str, is_sample: bool
) -> None:
    """Whatever verb runs out of space, and wherever; a collection frees even with not a byte left."""
    chance = seeded(f"room on {kind}")
    frees = {"gc", "empty"}
    cases = [(scene, name, 0 if name in frees else chance.choice(ROOMS)) for name in VERBS]
    if not is_sample:
        cases = [(scene, name, room) for name in VERBS for room in sorted({*ROOMS, *range(0, 400_000, 24_000)})]

    _on(kind, fast_path, _full, *cases)


def _index_on_a_full_disk(scene: Path, place: Path) -> list[str]:
    """The index alone is on the full disk: verbs succeed, and it catches up later."""
    folder = fresh(scene, place.parent / "scene", "gc")
    facts, scratch = facts_of(folder), place.parent / "scratch"
    earlier = {"kept": facts["first"], "run@4": facts["second"]}
    os.environ["LAYERSTORE_MANIFEST_DIR"] = str(place)
    problems(folder / "store", scratch, earlier)  # makes it
    with Store(folder / "store") as store:
        (index_directory(store.repo.layout, store_id=store.id) / "lock.mdb").unlink()
    ballast = fill(place, but_bytes=0)
    found = problems(folder / "store", scratch, earlier)
    for name in ("begin", "pin", "compose", "gc"):
        VERBS[name](folder, no_hook)
    ballast.unlink()
    with Store(folder / "store") as store:
        steps = [(entry.run, entry.step) for entry in store.log()]
        found += [] if steps == [("new", 4), ("run", 4), ("run", 2)] else [f"{steps}"]
        found += [store.repo.catalog.index_problem] if store.repo.catalog.index_problem else []
    return found + problems(folder / "store", scratch, earlier)


@pytest.mark.fault(18, 19, 100)
@pytest.mark.parametrize("kind", SMALL)
def test_a_full_disk_under_the_index_stops_nobody(scene: Path, fast_path: Path, kind: str) -> None:
    """Not even where its lock file is to be made: commits stand, questions are answered, later it catches up."""
    _on(kind, fast_path, _index_on_a_full_disk, (scene,))


def _without_inodes(scene: Path, place: Path) -> list[str]:
    folder = fresh(scene, place / "scene", "ingest")
    room = os.statvfs(place)
    assert is_remounted(place, f"nr_inodes={room.f_files - room.f_ffree}")
    failure = attempt(lambda: VERBS["ingest"](folder, no_hook))
    assert failure is not None
    assert failure.exit_code == 23, failure.trace
    assert "no inodes left" in str(failure.hint), failure.hint
    assert is_remounted(place, f"nr_inodes={room.f_files}")
    VERBS["ingest"](folder, no_hook)
    return wrong(folder, "ingest", is_done=True)


def test_a_disk_without_inodes_is_named_as_such(scene: Path, fast_path: Path) -> None:
    """The system says that no space is left, where there is plenty."""
    _on("tmpfs", fast_path, _without_inodes, (scene,))


# -- in pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.fault(29)
@pytest.mark.parametrize("name", ["tmp", "objects", "commits", "gc"])
def test_a_folder_on_another_filesystem_is_refused(scene: Path, fast_path: Path, name: str) -> None:
    """When the store is opened, before anything is linked across."""
    path = copied(scene / "plain", fast_path / "store")
    before = snapshot(path)
    with mounted("tmpfs", path / name):
        with pytest.raises(InvalidInput, match="must be on the same filesystem") as caught:
            Store(path)

        assert caught.value.hint
    assert snapshot(path) == before


# -- read-only, and other people's ---------------------------------------------------------------------------------


def _read_only(scene: Path, place: Path, how: str) -> list[str]:
    for name in VERBS:
        made = fresh(scene, place / name, name) / "store"
        if name != "migrate":  # nothing opens that one before
            problems(made, place.parent / "scratch", {})  # makes the index, and imports what nobody may not
    if how == "modes":
        open_to_all(scene, place)
        for path in [place, *place.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o555 if path.is_dir() else 0o444)
        become_nobody()
    elif not is_remounted(place, "ro"):
        return ["it cannot be made read-only"]
    before, found = snapshot(place), list[str]()
    for name, verb in VERBS.items():
        failure = attempt(lambda name=name, verb=verb: verb(place / name, no_hook))  # type: ignore[misc]
        is_as_it_should_be = failure is None if name == "verify" else failure is not None and failure.exit_code == 12
        found += [] if is_as_it_should_be else [f"{name}: {failure and failure.trace}"]
    with Store(place / "gc" / "store") as store:
        is_right = composed(store, "kept", place.parent / "scratch") == facts_of(place / "gc")["first"]
        found += [] if is_right else ["it composes to something else"]
    return found + (["something has changed"] if snapshot(place) != before else [])


def open_to_all(scene: Path, place: Path) -> None:
    """Let whoever a test becomes reach *place*, and read the scene's checkpoints."""
    for path in (scene.parent, scene, place.parent, *(path for path in scene.rglob("*") if not path.is_symlink())):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    (place.parent / "scratch").mkdir(exist_ok=True)
    (place.parent / "scratch").chmod(0o777)


@pytest.mark.fault(27)
@pytest.mark.parametrize("kind", SMALL)
def test_a_read_only_disk_can_be_read(scene: Path, fast_path: Path, kind: str) -> None:
    """Everything that writes exits with 12, questions and composites work, and not a byte changes."""
    _on(kind, fast_path, _read_only, (scene, "mount"))


@pytest.mark.fault(27)
def test_a_store_without_write_permission_can_be_read(scene: Path, fast_path: Path) -> None:
    """The same where modes forbid it."""
    (fast_path / "place").mkdir()

    assert in_child(_read_only, scene, fast_path / "place", "modes").needed() == []


def _verified_by_nobody(scene: Path, place: Path) -> Failure | None:
    made = copied(scene / "plain", place / "store")
    with Store(made) as store:
        [run] = store.runs()
        hidden = object_of(store, run, "model.layers.0")
        store.verify(read_data=True)  # imports what nobody may not
    open_to_all(scene, place)
    for path in [place, *place.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    hidden.chmod(0)
    become_nobody()
    return attempt(lambda: Store(made).verify(read_data=True))


@pytest.mark.fault(27)
def test_what_may_not_be_read_is_no_damage(scene: Path, fast_path: Path) -> None:
    """Nobody should give up a sound commit for a file mode."""
    (fast_path / "place").mkdir()
    failure = in_child(_verified_by_nobody, scene, fast_path / "place").needed()

    assert failure is not None
    assert failure.exit_code == 12


def _looked_for_by_nobody(place: Path) -> Failure | None:
    inside = place / "store"
    with init(inside):
        pass
    inside.chmod(0)
    place.chmod(0o755)
    place.parent.chmod(0o755)
    become_nobody()
    return attempt(lambda: Store(place))


@pytest.mark.fault(27)
def test_what_may_not_be_looked_at_is_no_hint(fast_path: Path) -> None:
    """There is no store here, whoever has closed a folder beside."""
    failure = in_child(_looked_for_by_nobody, fast_path / "place").needed()

    assert failure is not None
    assert (failure.exit_code, failure.hint) == (
        10,
        "layerstore init makes one in a new or empty folder, or name yours",
    )


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
    VERBS["gc"](folder, no_hook)
    found = []
    for path in [*(folder / "store").rglob("*"), *(folder / "out").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        full = 0o777 if path.is_dir() or mode & 0o100 else 0o666
        found += [f"{path.relative_to(folder)} {mode:o}"] if mode != full & ~umask else []
    return found


@pytest.mark.fault(33)
@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_modes_are_what_the_umask_leaves(scene: Path, fast_path: Path, umask: int) -> None:
    """Of every file and folder, of the store and of composites: whoever shares a store decides it there."""
    assert in_child(_made_with, scene, fast_path / "made", umask).needed() == []


_GROUP = 4242


def _as_somebody(folder: Path, groups: list[int]) -> dict[str, Failure | None]:
    """Do everything as a user who owns nothing here, but may be of the store's group."""
    problems(copied(folder / "gc" / "store", folder / "warm"), folder / "scratch", {})  # imports as root
    os.umask(0o002)
    become_nobody(*groups)
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
    open_to_all(scene, fast_path / "gc")

    failures = in_child(_as_somebody, fast_path, [_GROUP] if is_member else []).needed()

    if is_member:
        assert {name: failure.trace for name, failure in failures.items() if failure is not None} == {}
        return
    for name, failure in failures.items():
        assert failure is not None, name
        assert failure.exit_code == 12, failure.trace
        if name not in {"init", "save", "save_compactly"}:  # there is no store yet; a checkpoint is looked at first
            assert "belongs to user 0 and group 4242, with mode 2770; you are user 65534" in (failure.hint or ""), name
