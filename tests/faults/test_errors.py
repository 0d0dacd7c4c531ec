"""
The disk refuses, at any step: a documented exit code, no litter, nothing lost, and the same command then succeeds.

At the seam every step fails once, with what the system could answer there, and also from there on for good.
Real limits, full filesystems, read-only stores and strace check that the seam tells the truth.
"""

from __future__ import annotations

import errno as errnos
import os
import resource
import shutil
import subprocess
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerstore.errors import NotFound, StorageIO
from layerstore.storage.setup import make_store
from layerstore.storage.files import Files
from layerstore.storage.handles import Hook, no_hook
from layerstore.store import Store, init
from tests.faults.harness import (
    Call,
    Failure,
    Recorder,
    Refuser,
    attempt,
    become_nobody,
    composed,
    copied,
    descriptors,
    flip,
    in_child,
    leftovers,
    problems,
    seeded,
    snapshot,
    tiny_checkpoint,
    tmpfs,
    traced,
    truth,
)

SAMPLE = 4
EXIT_CODES = {
    errnos.ENOSPC: 23,
    errnos.EDQUOT: 23,
    errnos.EIO: 1,
    errnos.EMFILE: 1,
    errnos.EACCES: 12,
    errnos.EROFS: 12,
}

# What the system can answer to each operation, other than success.
ANSWERS = {
    "mkdir": (errnos.ENOSPC, errnos.EROFS),
    "create": (errnos.ENOSPC, errnos.EMFILE, errnos.EACCES),
    "write": (errnos.ENOSPC, errnos.EIO),
    "copy": (errnos.ENOSPC, errnos.EIO),
    "truncate": (errnos.ENOSPC, errnos.EIO),
    "fsync": (errnos.EIO, errnos.ENOSPC),
    "link": (errnos.ENOSPC, errnos.EDQUOT),
    "rename": (errnos.ENOSPC, errnos.EIO),
    "touch": (errnos.EIO, errnos.EROFS),
}

Verb = Callable[[Path, Hook], object]


def do_init(folder: Path, hook: Hook) -> object:
    """Make a store."""
    return make_store(folder / "new", Files(hook))


def do_ingest(folder: Path, hook: Hook) -> object:
    """Add a step."""
    with Store(folder / "store", hook=hook) as store:
        return store.ingest(folder / "second", run="run")


def do_pin(folder: Path, hook: Hook) -> object:
    """Name a commit."""
    with Store(folder / "store", hook=hook) as store:
        return store.pin("named", "run@2")


def do_drop(folder: Path, hook: Hook) -> object:
    """Hide a commit; what is hidden already is confirmed first."""
    with Store(folder / "store", hook=hook) as store:
        try:
            return store.drop("run@2", last=True)
        except NotFound:
            return None


def do_compose(folder: Path, hook: Hook) -> object:
    """Write a checkpoint."""
    with Store(folder / "store", hook=hook) as store:
        return store.compose("run@2").write(folder / "out")


def do_overwrite(folder: Path, hook: Hook) -> object:
    """Write a checkpoint in the place of another one."""
    if not (folder / "out").exists():
        shutil.copytree(folder / "older", folder / "out")
    with Store(folder / "store", hook=hook) as store:
        return store.compose("run@2").write(folder / "out", force=True)


def do_repair(folder: Path, hook: Hook) -> object:
    """Put a damaged object and a damaged record right."""
    copy = folder / "copy"
    if not copy.exists():
        copied(folder / "store", copy)
        with Store(folder / "store") as store:
            [name] = store.rooms.records.names("run")
            record = store.rooms.records.read(name).record
            harmed = [store.rooms.layout.object(record.layers[0].version.id)]
            harmed += [store.rooms.layout.record(name.run, name.step, name.id)]
        for path in harmed:
            flip(path)
        (folder / "store" / "commits" / "run" / "notes.txt").write_text("?")
    with Store(folder / "store", hook=hook) as store:
        return store.repair(sources=[copy])


VERBS: list[Verb] = [do_init, do_ingest, do_pin, do_drop, do_repair, do_compose, do_overwrite]


def make_scene(folder: Path) -> dict[str, str]:
    """Make a store with ``run@2`` and a second checkpoint; return what composes to what."""
    tiny_checkpoint(folder / "first", step=2, layout="hf")
    tiny_checkpoint(folder / "second", step=4, layout="hf")
    tiny_checkpoint(folder / "older", step=2, seed=1, layout="hf")
    with init(folder / "store") as store:
        store.ingest(folder / "first", run="run")
        return {"run@2": composed(store, "run@2", folder)}


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a folder to copy, and what its store composes to."""
    return fast_module_path, make_scene(fast_module_path)


# -- at the seam ---------------------------------------------------------------------------------------------------


def _dry_pass(folder: Path, verb: Verb) -> list[Call]:
    recorder = Recorder()
    verb(folder, recorder)
    return recorder.calls


def refused(folder: Path, verb: Verb, call: Call, number: int, lasting: bool, earlier: dict[str, str]) -> list[str]:
    """Run *verb* while *call* fails with *number*; return all that is not as it should be."""
    hook = Refuser(call, number, lasting=lasting)
    if verb is do_drop:
        earlier = {}  # the only commit: hidden or not, the store is sound
    if verb is do_overwrite:
        shutil.copytree(folder / "older", folder / "out")
    target = snapshot(folder / "out")
    before = descriptors()
    failure = attempt(lambda: verb(folder, hook))
    found = _complaints(folder, hook, failure, number, lasting=lasting)
    found += [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    if failure is not None and snapshot(folder / "out") != target:
        # Where no rename works any more, nothing can be moved back; what was there is whole beside its place.
        aside = [snapshot(path) for path in folder.glob("out.replaced-*")]
        found += [] if lasting and (not target or target in aside) else ["the target has changed"]
    if verb is not do_repair:  # which finds it damaged: it has to put that right, not to leave it
        found += problems(folder / "store", folder / "scratch", earlier)
    again = attempt(lambda: verb(folder, no_hook))
    if again is not None and not (again.kind == "AlreadyExists" and (verb is do_init or lasting)):
        found.append(f"the verb does not succeed again: {again.trace}")
    return found + problems(folder / "store", folder / "scratch", earlier)


def _complaints(folder: Path, hook: Refuser, failure: Failure | None, number: int, *, lasting: bool) -> list[str]:
    found: list[str] = []
    if failure is None and all(path.name == "gc.reserve" for path in hook.failed):
        return found  # a collection that finds none on a full disk asks for some space
    if failure is None:
        # Only what is done to be helpful may fail unseen.
        found.append(f"success was reported although {hook.failed} failed")
    elif failure.kind != "StorageIO" or failure.exit_code != EXIT_CODES[number]:
        found.append(f"it failed otherwise: {failure.trace}")
    beside = folder.glob("out.partial-*" if lasting else "out.*")
    litter = [*leftovers(folder / "store"), *leftovers(folder / "new"), *(path.name for path in beside)]
    found += [f"left behind: {litter}"] if litter else []
    synced = [path for call, path in hook.paths if call.operation == "fsync" and path.is_file()]
    found += ["a failed fsync was tried again"] if any(synced.count(path) > 1 for path in hook.failed) else []
    return found


def _refuse_everywhere(scene: tuple[Path, dict[str, str]], fast_path: Path, verb: Verb, points: list[Call]) -> None:
    source, earlier = scene

    def refuse(case: tuple[Call, int, bool]) -> None:
        call, number, lasting = case
        folder = copied(source, fast_path / f"{call}-{number}-{lasting}")
        outcome = in_child(refused, folder, verb, call, number, lasting, earlier)
        assert outcome.needed() == [], f"{call} fails with {errnos.errorcode[number]}{' for good' * lasting}"
        shutil.rmtree(folder)

    cases = [(call, number, False) for call in points for number in ANSWERS.get(call.operation, ())]
    cases += [(call, errnos.ENOSPC, True) for call in points[::4] if call.operation in ANSWERS]
    print(f"{verb.__name__}: {len(cases)} refusals at {len(points)} calls")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refuse, cases))


@pytest.mark.fault(16, 17, 23, 28)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__[3:])
@pytest.mark.sample(2, always=("ingest",))
def test_an_error_at_any_step_is_reported_and_harmless(
    scene: tuple[Path, dict[str, str]], fast_path: Path, verb: Verb
) -> None:
    """One call of the sample fails: the code says why, nothing is left behind, and a repeat succeeds."""
    calls = sorted(in_child(_dry_pass, copied(scene[0], fast_path / "dry"), verb).needed())
    firsts = [call for call in calls if call.ordinal == 1]
    others = [call for call in calls if call.ordinal > 1]

    chance = seeded(verb.__name__)
    chosen = [call for each in (firsts, others) for call in chance.sample(each, min(len(each), SAMPLE // 2))]
    _refuse_everywhere(scene, fast_path, verb, sorted(chosen))


@pytest.mark.fault(16, 17, 23, 28)
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__[3:])
def test_an_error_at_every_step_is_reported_and_harmless(
    scene: tuple[Path, dict[str, str]], fast_path: Path, verb: Verb
) -> None:
    """The same for every single call."""
    calls = sorted(in_child(_dry_pass, copied(scene[0], fast_path / "dry"), verb).needed())

    _refuse_everywhere(scene, fast_path, verb, calls)


# -- real limits ---------------------------------------------------------------------------------------------------


def _limited(folder: Path, verb: Verb, limit: int, value: int) -> Failure | None:
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value, hard))
    failure = attempt(lambda: verb(folder, no_hook))
    resource.setrlimit(limit, (hard, hard))
    return failure


def _too_few_descriptors(folder: Path, verb: Verb, more: int, earlier: dict[str, str]) -> list[str]:
    before = descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the index may be out of reach, and says so
        failure = _limited(folder, verb, resource.RLIMIT_NOFILE, before + more)
    found = [] if failure is None or failure.exit_code == 1 else [failure.trace]
    found += ["another error than EMFILE"] if failure and failure.errno != errnos.EMFILE else []
    found += [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    found += [f"left behind: {leftovers(folder / 'store')}"] if leftovers(folder / "store") else []
    verb(folder, no_hook) if failure is not None else None
    return found + problems(folder / "store", folder / "scratch", earlier)


@pytest.mark.fault(25)
@pytest.mark.parametrize("more", [0, 1, 2, 3, 4, 6, 9, 14])
@pytest.mark.parametrize("verb", [do_ingest, do_compose, do_pin], ids=lambda verb: verb.__name__[3:])
@pytest.mark.sample(8)
def test_too_few_descriptors_are_an_error_and_no_damage(
    scene: tuple[Path, dict[str, str]], fast_path: Path, verb: Verb, more: int
) -> None:
    """EMFILE is told as what it is, and every descriptor that was opened is closed."""
    folder = copied(scene[0], fast_path / "limited")

    assert in_child(_too_few_descriptors, folder, verb, more, scene[1]).needed() == []


def _files_too_large(folder: Path, verb: Verb, size_bytes: int, earlier: dict[str, str]) -> list[str]:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")  # the index may not grow, and says so
        failure = _limited(folder, verb, resource.RLIMIT_FSIZE, size_bytes)
    found = [] if failure is None or failure.exit_code == 23 else [failure.trace]
    found += [f"left behind: {leftovers(folder / 'store')}"] if leftovers(folder / "store") else []
    verb(folder, no_hook) if failure is not None else None
    return found + problems(folder / "store", folder / "scratch", earlier)


@pytest.mark.fault(28)
@pytest.mark.parametrize("size_bytes", [0, 100, 5000, 9000, 20_000])
@pytest.mark.parametrize("verb", [do_ingest, do_compose, do_pin], ids=lambda verb: verb.__name__[3:])
@pytest.mark.sample(5)
def test_a_limit_on_file_sizes_is_an_error_and_no_damage(
    scene: tuple[Path, dict[str, str]], fast_path: Path, verb: Verb, size_bytes: int
) -> None:
    """EFBIG counts as a full disk; Python ignores the signal that comes with it."""
    folder = copied(scene[0], fast_path / "limited")

    assert in_child(_files_too_large, folder, verb, size_bytes, scene[1]).needed() == []


def _full_store(folder: Path, small: Path, earlier: dict[str, str], free_bytes: int) -> list[str]:
    """Let the store run out of space, then give it some."""
    shutil.copytree(folder / "store", small / "store")
    (small / "second").symlink_to(folder / "second")
    room = os.statvfs(small)
    with (small / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, max(1, room.f_bavail * room.f_frsize - free_bytes))
    failure = attempt(lambda: do_ingest(small, no_hook))
    found = [] if failure is None or failure.exit_code == 23 else [failure.trace]
    found += ["the message has no numbers"] if failure and "are free" not in failure.message else []
    found += [f"left behind: {leftovers(small / 'store')}"] if leftovers(small / "store") else []
    found += problems(small / "store", folder / "scratch", earlier)
    (small / "ballast").unlink()
    do_ingest(small, no_hook)
    return found + problems(small / "store", folder / "scratch", earlier)


@pytest.mark.fault(16, 18)
@pytest.mark.parametrize("free_bytes", [0, 4096, 16_384, 65_536, 131_072, 180_224, 196_608, 212_992, 229_376, 262_144])
@pytest.mark.sample(4)
def test_a_full_disk_under_the_store_is_an_error_and_no_damage(
    scene: tuple[Path, dict[str, str]], fast_path: Path, free_bytes: int
) -> None:
    """Wherever space runs out: exit code 23 with the numbers, or success; and success once there is space."""
    folder = copied(scene[0], fast_path / "disk")

    with tmpfs(fast_path / "small", 4 * 2**20) as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small tmpfs is not allowed here")
        outcome = in_child(_full_store, folder, fast_path / "small", scene[1], free_bytes)

    assert outcome.needed() == []
    assert {notice.split(":")[0] for notice in outcome.notices} <= {"IndexNotice", "ResourceWarning"}


def _full_target(folder: Path, small: Path, earlier: dict[str, str]) -> list[str]:
    before = snapshot(folder / "store" / "objects")
    with Store(folder / "store") as store:
        failure = attempt(lambda: store.compose("run@2").write(small / "out"))
    assert failure is not None
    found = [] if failure.exit_code == 23 else [failure.trace]
    found += [f"left behind: {os.listdir(small)}"] if os.listdir(small) else []
    found += ["the store has changed"] if snapshot(folder / "store" / "objects") != before else []
    return found + problems(folder / "store", folder / "scratch", earlier)


@pytest.mark.fault(21)
@pytest.mark.known_fault("llmtailor 10")
@pytest.mark.parametrize("size_bytes", [4096, 32_768, 65_536])
def test_a_full_disk_under_the_target_leaves_nothing_there(
    scene: tuple[Path, dict[str, str]], fast_path: Path, size_bytes: int
) -> None:
    """A composite that does not fit leaves no part of itself, and the store as it was."""
    folder = copied(scene[0], fast_path / "disk")

    with tmpfs(fast_path / "small", size_bytes) as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small tmpfs is not allowed here")
        outcome = in_child(_full_target, folder, fast_path / "small", scene[1])

    assert outcome.needed() == []


# -- read-only -----------------------------------------------------------------------------------------------------


def _as_nobody(folder: Path, earlier: dict[str, str]) -> list[str]:
    # Once as root: nobody may not be allowed to import what is still missing.
    assert problems(copied(folder / "store", folder / "warm"), folder / "scratch", earlier) == []
    become_nobody()
    return _read_only(folder, folder / "scratch", earlier)


def _read_only(folder: Path, scratch: Path, earlier: dict[str, str]) -> list[str]:
    before = snapshot(folder / "store")
    found = problems(folder / "store", scratch, earlier)
    with Store(folder / "store") as store:
        found += [] if store.show("run@2").step == 2 and store.ls("run@2") else ["show or ls says something else"]
        for name, verb in _WRITES.items():
            failure = attempt(lambda verb=verb: verb(store, folder))  # type: ignore[misc]  # bound at once
            if failure is None or failure.exit_code != 12:
                found.append(f"{name}: {failure and failure.trace}")
    return found + (["the store has changed"] if snapshot(folder / "store") != before else [])


_WRITES: dict[str, Callable[[Store, Path], object]] = {
    "ingest": lambda store, folder: store.ingest(folder / "second", run="run"),
    "another run": lambda store, folder: store.ingest(folder / "second", run="new"),
    "pin": lambda store, folder: store.pin("named", "run@2"),
    "reindex": lambda store, folder: store.reindex(),
}


def _open_to_all(folder: Path) -> None:
    for path in [folder, *folder.parents][:-1]:
        if path.stat().st_uid == os.getuid() and path != Path("/dev/shm"):
            path.chmod(0o755)
    (folder / "scratch").mkdir(exist_ok=True)
    (folder / "scratch").chmod(0o777)


@pytest.mark.fault(27)
@pytest.mark.parametrize("has_index", [True, False])
def test_a_store_without_write_permission_can_be_read(
    scene: tuple[Path, dict[str, str]], fast_path: Path, has_index: bool
) -> None:
    """Questions and composites work, everything that writes exits with 12, and nothing changes."""
    folder = copied(scene[0], fast_path / "locked")
    if not has_index:
        shutil.rmtree(folder / "store" / "manifest")
    _open_to_all(folder)
    for path in [folder / "store", *(folder / "store").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    outcome = in_child(_as_nobody, folder, scene[1])

    assert outcome.needed() == []
    assert {notice.split(":")[0] for notice in outcome.notices} <= {"IndexNotice"}


@pytest.mark.fault(27)
@pytest.mark.parametrize("has_index", [True, False])
def test_a_store_on_a_read_only_mount_can_be_read(
    scene: tuple[Path, dict[str, str]], fast_path: Path, has_index: bool
) -> None:
    """The same on a filesystem that refuses even root."""
    with tmpfs(fast_path / "mount", 4 * 2**20) as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small tmpfs is not allowed here")
        copied(scene[0], fast_path / "mount" / "scene")
        if not has_index:
            shutil.rmtree(fast_path / "mount" / "scene" / "store" / "manifest")
        done = subprocess.run(["mount", "-o", "remount,ro", str(fast_path / "mount")], check=False)
        if done.returncode:
            pytest.skip("remounting read-only is not allowed here")
        outcome = in_child(_read_only, fast_path / "mount" / "scene", fast_path / "scratch", scene[1])

    assert outcome.needed() == []


# -- below the seam ------------------------------------------------------------------------------------------------

_DRIVER = """
import sys
from pathlib import Path
from layerstore.errors import LayerstoreError
from layerstore.storage.handles import no_hook
from tests.faults import test_errors
try:
    getattr(test_errors, sys.argv[1])(Path(sys.argv[2]), no_hook)
except LayerstoreError as error:
    print(type(error).__name__, getattr(error, "errno", None))
    sys.exit(error.exit_code)
"""


@pytest.mark.fault(17, 18, 23)
@pytest.mark.parametrize("number", [errnos.EIO, errnos.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    ("call", "counts"), [("fsync", (1, 2, 3)), ("fdatasync", (1,)), ("pwrite64", (1, 2)), ("linkat", (1,))]
)
@pytest.mark.usefixtures("strace")
@pytest.mark.sample(3)
def test_the_systems_own_errors_are_reported_and_harmless(
    scene: tuple[Path, dict[str, str]], fast_path: Path, call: str, counts: tuple[int, ...], number: int
) -> None:
    """What the kernel answers to a sync, write or link comes out with its own number, and once."""
    for count in counts:
        folder = copied(scene[0], fast_path / "traced")
        options = ["-e", f"inject={call}:error={errnos.errorcode[number]}:when={count}"]

        done = traced(options, _DRIVER, "do_ingest", folder)
        looked = in_child(problems, folder / "store", folder / "scratch", scene[1])

        # fdatasync is LMDB's: the commit stands, and a rebuilt index follows it.
        assert done.returncode == (0 if call == "fdatasync" else EXIT_CODES[number]), (count, done.stderr)
        assert leftovers(folder / "store") == []
        assert looked.needed() == []
        assert in_child(_ingested_twice, folder).needed() == []


def _ingested_twice(folder: Path) -> list[str]:
    do_ingest(folder, no_hook)
    before = truth(folder / "store")
    do_ingest(folder, no_hook)
    return [] if truth(folder / "store") == before else ["a second ingest wrote something"]


def test_a_refusal_keeps_its_number_and_path() -> None:
    """What a program needs to act on is in the error."""
    error = StorageIO("cannot write x", errno=errnos.ENOSPC, filename="x")

    assert (error.exit_code, error.kind, error.errno, error.filename) == (23, "no_space", errnos.ENOSPC, "x")
