"""
Every verb that writes, and verify, on a store with a history: what disks, limits and the kernel's errors are tried on.

Each takes the folder of the scene and a hook for the seam, can be called again after it failed, and then succeeds.
Most are at ``store``; repair and migrate have stores of their own, which need them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from layerstore import Keep
from layerstore.errors import AlreadyExists, NotFound
from layerstore.storage.handles import Hook
from layerstore.store import Store, init
from tests.compat.format1 import as_format_1
from tests.faults import harmed
from tests.faults.harness import composed, copied, problems, tiny_checkpoint
from tests.faults.older import migrate_hooked, unmigrated_problems
from tests.faults.saving import commit_live

Verb = Callable[[Path, Hook], object]


def make_scene(folder: Path) -> dict[str, str]:
    """
    Make a store with three steps, of which one is hidden, and a pin; return what has to stay, and its bytes.

    Beside it are ``older``, its twin of format 0, and ``harmed``, a store that needs a repair.
    """
    for step in (2, 4, 6, 8):
        tiny_checkpoint(folder / f"step{step}", step=step, layout="hf")
    tiny_checkpoint(folder / "other2", step=2, seed=1, layout="hf")
    tiny_checkpoint(folder / "other4", step=4, seed=1, layout="hf")
    with init(folder / "store") as store:
        for step in (2, 4, 6):
            store.ingest(folder / f"step{step}", run="run")
        store.pin("kept", "run@4")
        store.drop("run@2")
        earlier = {ref: composed(store, ref, folder) for ref in ("run@6", "kept")}
    as_format_1(copied(folder / "store", folder / "older"))
    with init(folder / "first") as store:
        store.ingest(folder / "step2", run="run", pin="kept")
    harmed.make_harmed(
        folder / "harmed",
        folder / "first",
        first=folder / "step2",
        second=folder / "step4",
        other=folder / "other2",
    )
    return earlier


def do_ingest(folder: Path, hook: Hook) -> object:
    """Add a step."""
    with Store(folder / "store", hook=hook) as store:
        return store.ingest(folder / "step8", run="run")


def do_replace(folder: Path, hook: Hook) -> object:
    """Put another commit in the place of one that a pin keeps."""
    with Store(folder / "store", hook=hook) as store:
        return store.ingest(folder / "other4", run="run", replace=True)


def do_commit(folder: Path, hook: Hook) -> object:
    """Add a step as ranks do that save while they train."""
    return commit_live(folder / "store", folder / "step8", hook, step=8)


def do_pin(folder: Path, hook: Hook) -> object:
    """Name a commit."""
    with Store(folder / "store", hook=hook) as store:
        return store.pin("named", "run@6")


def do_drop(folder: Path, hook: Hook) -> object:
    """Hide a commit; what is hidden already is confirmed first."""
    with Store(folder / "store", hook=hook) as store:
        try:
            return store.drop("run@4")
        except NotFound:
            return None


def do_compose(folder: Path, hook: Hook) -> object:
    """Write a checkpoint."""
    with Store(folder / "store", hook=hook) as store:
        return _written(lambda: store.compose("run@6").write(folder / "out"))


def do_export(folder: Path, hook: Hook) -> object:
    """Write a folder for Transformers."""
    with Store(folder / "store", hook=hook) as store:
        return _written(lambda: store.compose("run@6").export(folder / "exported"))


def _written(write: Callable[[], object]) -> object:
    try:
        return write()
    except AlreadyExists:
        return None  # it failed behind the last rename


def do_overwrite(folder: Path, hook: Hook) -> object:
    """Write a checkpoint in the place of another one."""
    with Store(folder / "store", hook=hook) as store:
        return store.compose("run@6").write(folder / "over", force=True)


def do_gc(folder: Path, hook: Hook) -> object:
    """Keep the newest commit and what is pinned; the hidden one goes."""
    time.sleep(0.02)  # nothing that goes has the time of this very tick
    with Store(folder / "store", hook=hook) as store:
        return store.gc(Keep(last=1), grace_seconds=0)


def do_reindex(folder: Path, hook: Hook) -> object:
    """Make the index afresh."""
    with Store(folder / "store", hook=hook) as store:
        return store.reindex()


def do_verify(folder: Path, hook: Hook) -> object:
    """Read every byte; all is as it was written."""
    with Store(folder / "store", hook=hook) as store:
        verdict = store.verify(read_data=True)
        assert verdict.ok, f"sound, and called damaged: {verdict.damaged}"
        return verdict


def do_repair(folder: Path, hook: Hook) -> object:
    """Put right what is wrong with everything that a store has; one commit falls back."""
    return harmed.do_repair(folder / "repaired" / "store", folder / "repaired" / "copy", hook)


def do_migrate(folder: Path, hook: Hook) -> object:
    """Take a store of an older format to today's."""
    return migrate_hooked(folder / "migrated", hook)


VERBS: dict[str, Verb] = {
    verb.__name__[3:]: verb
    for verb in (
        do_ingest,
        do_replace,
        do_commit,
        do_pin,
        do_drop,
        do_compose,
        do_export,
        do_overwrite,
        do_gc,
        do_reindex,
        do_verify,
        do_repair,
        do_migrate,
    )
}


def scene_on(source: Path, folder: Path, *names: str) -> Path:
    """Copy the scene *source* to *folder*, with what the verbs *names* work on; checkpoints are linked to."""
    folder.mkdir(parents=True, exist_ok=True)
    copied(source / "store", folder / "store")
    for path in source.iterdir():
        if path.name not in {"store", "first", "scratch"}:
            (folder / path.name).symlink_to(path)
    if "overwrite" in names:
        shutil.copytree(source / "other2", folder / "over")
    if "repair" in names:
        copied(source / "harmed", folder / "repaired")
    if "migrate" in names:
        copied(source / "older", folder / "migrated")
    return folder


def store_of(folder: Path, name: str) -> Path:
    """Return the store that the verb *name* is at."""
    return {"repair": folder / "repaired" / "store", "migrate": folder / "migrated"}.get(name, folder / "store")


def wrong(folder: Path, name: str, earlier: dict[str, str], *, scratch: Path, is_done: bool) -> list[str]:
    """
    Return what is wrong with the store that the verb *name* was at, which it has done, or has failed at.

    What has to be there is *earlier*, with the bytes that it composes to; a repair's store has facts of its own.
    """
    store = store_of(folder, name)
    if name == "repair":
        return harmed.harmed_problems(store, folder / "harmed", scratch, is_done=is_done)
    found = unmigrated_problems(store, folder / "older", is_done=is_done) if name == "migrate" else None
    return problems(store, scratch, earlier) if found is None else found
