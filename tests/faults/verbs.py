"""
The verbs that every kind of fault is tried on, the stores that they begin at, and what has to be there afterwards.

A verb takes a folder made by `fresh` and a hook for the seam; called again after it failed it succeeds. Checkpoints
and facts are at ``sources`` beside the folder: what is copied, cut or mounted is only what verbs change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from layerstore import Keep
from layerstore.disk import Files, Hook, no_hook
from layerstore.errors import AlreadyExists, NotFound, Unsupported
from layerstore.format.store_json import FORMAT
from layerstore.history import resolve
from layerstore.migrations import migrate
from layerstore.storage import make_store
from layerstore.store import Store, init
from tests.compat.format1 import as_format_1
from tests.faults.harness import (
    composed,
    copied,
    fingerprint,
    flip,
    leftovers,
    masters,
    problems,
    snapshot,
    truth,
)
from tests.faults.saving import begun_after
from tests.generated import generate

Verb = Callable[[Path, Hook], object]
DELTA: Final = "delta8"
"""The precision of what is kept compactly."""
Deed = Callable[[Store, Path], object]
"""What a verb does with a store that is open, in the folder that `fresh` has made."""


def source(folder: Path, name: str) -> Path:
    """Return the checkpoint or store *name* of the scene that *folder* was made from."""
    return folder.parent / "sources" / name


def facts_of(folder: Path) -> dict[str, str]:
    """Return what the checkpoints compose to, and the commits that inherit half, by name."""
    found: dict[str, str] = json.loads(source(folder, "facts.json").read_text())
    return found


def make_scene(folder: Path) -> Path:
    """
    Make the stores that verbs begin at, with the checkpoints and facts that they need, in *folder*; return it.

    ``plain`` has ``run@2`` and the pin ``kept``. In ``rich`` that was replaced, ``run@4`` was added, and ``run@6`` is
    in the trash with the replaced one. ``rotten`` has lost its record; ``harmed`` has damage of every kind that its
    ``copy`` can heal, and a pin that nobody can. ``older`` is ``rich`` in the format before this one. In ``fine``,
    ``run@4`` is kept compactly, as differences to ``run@2``, and ``run@6`` exactly; ``worn`` has lost some of both.
    """
    for name, step, seed in (("first", 2, 0), ("second", 4, 0), ("third", 6, 0), ("other", 2, 1)):
        generate(folder / name, layers=1, hidden=8, vocab=8, step=step, seed=seed, layout="hf")
    facts = {}
    with init(folder / "plain") as store:
        store.ingest(folder / "first", run="run", pin="kept")
        facts["first"] = composed(store, "run", folder)
    with Store(copied(folder / "plain", folder / "rich")) as store:
        for name, replace in (("second", False), ("third", False), ("other", True)):
            store.ingest(folder / name, run="run", replace=replace)
            facts[name] = composed(store, "run@2" if replace else "run", folder)
        store.drop("run@6")
    for name, verb in (("half", "inherit"), ("saved", "save"), ("compact", "differ"), ("shared", "save_compactly")):
        work = folder / "work" / name
        work.mkdir(parents=True)
        _link(folder, work)
        copied(folder / "plain", work / "store")
        VERBS[verb](work, no_hook)
        with Store(work / "store") as store:
            facts[name] = composed(store, "run", folder)
            facts[f"{name} numbers"] = numbers(store, "run")
    with Store(copied(folder / "plain", folder / "rotten")) as store:
        flip(next(store.repo.layout.run("run").iterdir()))
    _make_harmed(folder)
    _make_fine(folder)
    as_format_1(copied(folder / "rich", folder / "older"))
    (folder / "facts.json").write_text(json.dumps(facts))
    return folder


def _make_harmed(folder: Path) -> None:
    """Damage an object of each kind, a record and a pin."""
    with Store(copied(folder / "plain", folder / "harmed")) as store:
        store.ingest(folder / "second", run="run")
        store.ingest(folder / "other", run="whole")
        store.pin("torn", "run@2")
        first, second = (resolve(store.repo, ref).record for ref in ("run@2", "run@4"))
        place, version = store.repo.layout, store.repo.version_of(first.layers[0])
        hurt = [place.object(ref.id) for ref in (version.objects[0], first.layers[1].version, second.states[0])]
        hurt += [place.pin("torn"), *place.run("run").glob("2.*")]
        copied(store.path, folder / "copy")
        for path in hurt:
            flip(path)


def _make_fine(folder: Path) -> None:
    """Keep a save compactly, and in a copy damage an object that it refers to, and one that is its own."""
    with Store(copied(folder / "plain", folder / "fine")) as store:
        store.delete_pin("kept")
        store.ingest(folder / "second", run="run", precision=DELTA)
        store.ingest(folder / "third", run="run")
    with Store(copied(folder / "fine", folder / "worn")) as store:
        version = store.repo.version_of(resolve(store.repo, "run@4").record.layers[0])
        for stored in (version.references[0], version.objects[-1]):
            flip(store.repo.layout.object(stored.id))


def _link(scene: Path, folder: Path) -> None:
    link = folder.parent / "sources"
    if not link.is_symlink():
        link.symlink_to(scene)


def fresh(scene: Path, folder: Path, name: str) -> Path:
    """Make *folder* with all that the verb *name* begins at; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _link(scene, folder)
    copied(scene / BEGINS_AT.get(name, "plain"), folder / "store")
    if name == "overwrite":
        shutil.copytree(scene / "other", folder / "out")
    return folder


# -- the verbs -----------------------------------------------------------------------------------------------------


def _ingest(name: str, **options: Any) -> Deed:
    return lambda store, folder: store.ingest(source(folder, name), **{"run": "run"} | options)


def _save(**options: Any) -> Deed:
    """Let two ranks save a step while they train, and join their parts; unless it is there."""

    def save(store: Store, folder: Path) -> object:
        if resolve(store.repo, "run").record.step >= 4:
            return None
        begun = begun_after(store, source(folder, "second"), **options)
        begun.write_all()
        return begun.finish()

    return save


def _collect(keep: Keep | None, *, empty_trash: bool = False) -> Deed:
    def collect(store: Store, folder: Path) -> object:
        time.sleep(0.02)  # nothing that goes has the time of this very tick
        return store.gc(keep, grace_seconds=0, empty_trash=empty_trash)

    return collect


def _take_keyframe(store: Store, folder: Path) -> object:
    """Drop the commit that differences refer to, and all that only it needs."""
    with contextlib.suppress(NotFound):
        store.drop("run@2")
    return _collect(None, empty_trash=True)(store, folder)


def _rewrite(store: Store, folder: Path) -> object:
    """Heal what is damaged of a compact commit, and of what it refers to, from their checkpoints."""
    store.ingest(source(folder, "first"), run="run")
    return store.ingest(source(folder, "second"), run="run", precision=DELTA)


def _verify(store: Store, folder: Path) -> object:
    verdict = store.verify(read_data=True)
    assert verdict.ok, f"sound, and called damaged: {verdict.damaged}"
    return verdict


def _unless(error: type[Exception], deed: Deed) -> Deed:
    """Let *deed* do nothing where *error* says that it is done."""

    def tried(store: Store, folder: Path) -> object:
        with contextlib.suppress(error):
            return deed(store, folder)
        return None

    return tried


DEEDS: dict[str, Deed] = {
    "ingest": _ingest("second"),
    "inherit": _ingest("second", policy="parity", pin="half"),
    "begin": _ingest("second", run="new"),
    "replace": _ingest("other", replace=True),
    "heal": _ingest("first"),
    "save": _save(half=True),
    "differ": _ingest("second", precision=DELTA),
    "save_compactly": _save(precision=DELTA),
    "pin": lambda store, _: store.pin("named", "run@2"),
    "unpin": lambda store, _: store.delete_pin("kept") if store.repo.records.pin_names() else None,
    "drop": _unless(NotFound, lambda store, _: store.drop("run@4")),
    "undrop": _unless(NotFound, lambda store, _: store.undrop("run@6")),
    "gc": _collect(Keep(last=1)),
    "take_keyframe": _take_keyframe,
    "trim": _collect(Keep(drop_optimizer_older_than=1)),
    "trim_compact": _collect(Keep(drop_optimizer_older_than=1)),
    "empty": _collect(None, empty_trash=True),
    "repair": lambda store, folder: store.repair(read_data=True, sources=[source(folder, "copy")]),
    "mend": lambda store, folder: store.repair(read_data=True, sources=[source(folder, "fine")]),
    "rewrite": _rewrite,
    "reindex": lambda store, _: store.reindex(),
    "verify": _verify,
    "compose": _unless(AlreadyExists, lambda store, folder: store.compose("run@2").write(folder / "out")),
    "export": _unless(AlreadyExists, lambda store, folder: store.compose("run@2").export(folder / "exported")),
    "overwrite": lambda store, folder: store.compose("run@2").write(folder / "out", force="foreign"),
}


def _in_store(deed: Deed) -> Verb:
    def verb(folder: Path, hook: Hook) -> object:
        with Store(folder / "store", hook=hook) as store:
            return deed(store, folder)

    return verb


VERBS: dict[str, Verb] = {
    "init": lambda folder, hook: make_store(folder / "new", Files(hook)),
    **{name: _in_store(deed) for name, deed in DEEDS.items()},
    "migrate": lambda folder, hook: migrate(folder / "store", Files(hook)),
}
WRITES = [name for name in VERBS if name not in {"verify", "export"}]
"""Those whose calls are killed, cut and refused one by one."""
BEGINS_AT = dict.fromkeys(("drop", "undrop", "gc", "trim", "empty", "reindex", "verify"), "rich") | {
    "heal": "rotten",
    "repair": "harmed",
    "migrate": "older",
    "take_keyframe": "fine",
    "trim_compact": "fine",
    "mend": "worn",
    "rewrite": "worn",
}
CLEARS_AWAY = {"gc", "trim", "empty", "unpin", "migrate", "take_keyframe", "trim_compact"}
"""Verbs that end by removing things: after a power cut, what was removed last may be back, and nothing names it."""
_ADDS = {
    "ingest": {"run@4": "second"},
    "inherit": {"run@4": "half", "half": "half"},
    "begin": {"new@4": "second"},
    "save": {"run@4": "saved"},
    "differ": {"run@4": "compact"},
    "save_compactly": {"run@4": "shared"},
    "pin": {"named": "first"},
    "undrop": {"run@6": "third"},
}
_RICH = {name for name, begin in BEGINS_AT.items() if begin in {"rich", "older"}}
_REMOVES = {"unpin": "kept", "drop": "run@4", "gc": "run@2"}
_REMOVES_BYTES = CLEARS_AWAY | {"heal", "rewrite"}
"""Verbs after which bytes may be gone that were there before; all others at most move them."""


# -- what is there afterwards --------------------------------------------------------------------------------------


def wrong(folder: Path, name: str, *, is_done: bool) -> list[str]:
    """Return what is wrong in *folder* after the verb *name* was interrupted, has failed, or *is_done*."""
    facts = facts_of(folder)
    if name == "init":
        return _wrong_in_new(folder / "new", is_done=is_done)
    if name == "repair":
        return _wrong_after_repair(folder, facts, is_done=is_done)
    if BEGINS_AT.get(name) in {"fine", "worn"}:
        return _wrong_in_fine(folder, name, facts, is_done=is_done)
    if name == "migrate":
        unfinished = _wrong_unless_migrated(folder, is_done=is_done)
        if unfinished is not None:
            return unfinished
    if name == "heal" and not is_done and _is_rotten(folder / "store"):
        return []
    found = _wrong_commits(folder, name, facts, is_done=is_done)
    if name in {"compose", "overwrite"}:
        found += _wrong_target(folder, name, facts, is_done=is_done)
    if name in {"gc", "trim", "empty"} and is_done:
        with Store(folder / "store") as opened:
            found += [f"{opened.verify().orphans} orphans"] if opened.verify().orphans else []
            found += ["the trash is not empty"] if name == "empty" and opened.dropped() else []
    return found


def _wrong_unless_migrated(folder: Path, *, is_done: bool) -> list[str] | None:
    """Return what is wrong with a store whose migration has not come to its end; None if it has."""
    store = folder / "store"
    if json.loads((store / "store.json").read_bytes())["format"] != FORMAT:
        now = snapshot(store)
        found = [
            f"{name} is gone" for name, content in truth(source(folder, "older")).items() if now.get(name) != content
        ]
        return [*found, *(["the store is not migrated"] if is_done else [])]
    try:
        Store(store).close()
    except Unsupported as error:
        return [] if "interrupted" in str(error) and not is_done else [f"it does not open: {error}"]
    return ["migrating is left behind"] if is_done and list(store.glob("migrating*")) else None


def _wrong_commits(folder: Path, name: str, facts: dict[str, str], *, is_done: bool) -> list[str]:
    """Return which commits and pins are not there, or have other bytes, of those that have to be there."""
    store, scratch = folder / "store", folder.parent / f"{folder.name}-scratch"
    found: list[str] = []
    known, trash, trimmed = _known(store)
    expected = {"run@2": "first", "kept": "first"}
    if name in _RICH:
        expected |= {"run@2": "other", "run@4": "second"}
    expected |= {ref: each for ref, each in _ADDS.get(name, {}).items() if is_done or ref in known}
    going = _REMOVES.get(name)
    if going is not None and going not in known:
        del expected[going]
    elif going is not None and is_done:
        found.append(f"{going} is there still")
    if name == "replace":
        del expected["run@2"]
        with Store(store) as opened:
            now = composed(opened, "run@2", scratch)
        allowed = ["other"] if is_done else ["other", "first"]
        found += [] if now in {facts[each] for each in allowed} else ["run@2 is neither the old commit nor the new one"]
    if name == "trim":
        found += _wrong_after_trim(store, is_done=is_done)
        if trimmed:
            del expected["run@2"]
    if name == "drop" and "run@4" not in known | trash:
        found.append("run@4 is lost")
    if name in _RICH and name != "empty" and "run@6" not in known | trash:
        found.append("run@6, which was in the trash, is lost")
    return found + problems(store, scratch, {ref: facts[each] for ref, each in expected.items()})


def _is_rotten(path: Path) -> bool:
    with Store(path) as store:
        return [damage.kind for damage in store.verify(read_data=True).damaged] == ["record"]


def _known(store: Path) -> tuple[set[str], set[str], bool]:
    """Return what can be seen, what is in the trash, and whether ``run@2`` has lost its moments."""
    with Store(store) as opened:
        log = opened.log()
        known = {f"{entry.run}@{entry.step}" for entry in log} | {pin.name for pin in opened.pins()}
        trash = {f"{each.commit.record.run}@{each.commit.record.step}" for each in opened.dropped()}
        return known, trash, any(entry.step == 2 and not entry.has_moments for entry in log)


def _wrong_in_new(path: Path, *, is_done: bool) -> list[str]:
    if not is_done and not (path / "store.json").exists():
        return []
    with Store(path) as store:
        return [] if store.verify(read_data=True).ok and store.log() == [] else ["the new store is not sound"]


def _wrong_after_trim(path: Path, *, is_done: bool) -> list[str]:
    with Store(path) as store:
        shown = [entry.has_moments for entry in store.log("run") if entry.step == 2]
        found = [] if store.compose("run@2").tensors() else ["run@2 has no weights"]
    found += [f"run@2 is there {len(shown)} times"] if len(shown) != 1 else []
    return found + (["run@2 has its moments still"] if is_done and shown == [True] else [])


def _wrong_after_repair(folder: Path, facts: dict[str, str], *, is_done: bool) -> list[str]:
    """Nothing sound is hurt at any moment, and not a byte is gone; in the end all is whole but one pin."""
    scratch, harmed = folder.parent / f"{folder.name}-scratch", source(folder, "harmed")
    there = set(truth(folder / "store").values())
    found = [f"{name} is gone" for name, content in truth(harmed).items() if content not in there]
    sound = snapshot(source(folder, "copy"))
    hurt = {name for name, content in snapshot(harmed).items() if sound.get(name) != content}
    with Store(folder / "store") as store:
        damaged = {damage.path for damage in store.verify(read_data=True).damaged}
        if composed(store, "whole@2", scratch) != facts["other"]:
            found.append("whole@2, which was sound, composes to other bytes")
        if not is_done:
            return found + [f"{path} was not damaged before" for path in damaged - hurt]
        found += [f"{path} is damaged" for path in damaged - {"pins/torn"}]
        for ref, name in (("run@2", "first"), ("kept", "first"), ("run@4", "second")):
            found += [] if composed(store, ref, scratch) == facts[name] else [f"{ref} composes to other bytes"]
    return found


def _wrong_in_fine(folder: Path, name: str, facts: dict[str, str], *, is_done: bool) -> list[str]:
    """Whatever becomes of the commit that it refers to, a compact one decodes to the same numbers."""
    path, scratch = folder / "store", folder.parent / f"{folder.name}-scratch"
    known, trash, _ = _known(path)
    expected = {"run@4": "compact", "run@6": "third"}
    if name == "take_keyframe" and (is_done or "run@2" not in known | trash):
        found = ["run@2 is there still"] if "run@2" in known | trash else []
    else:
        expected |= {"run@2": "first"} if "run@2" in known else {}
        found = [] if name == "take_keyframe" or "run@2" in known else ["run@2 is lost"]
    with Store(path) as store:
        now = store.verify(read_data=True)
        if name in CLEARS_AWAY and is_done and now.orphans:
            found.append(f"{now.orphans} orphans")
        if name in {"mend", "rewrite"} and not is_done:
            sound = snapshot(source(folder, "fine"))
            hurt = {each for each, content in snapshot(source(folder, "worn")).items() if sound.get(each) != content}
            found += [f"{damage.path} was not damaged before" for damage in now.damaged if damage.path not in hurt]
            return found + ([] if composed(store, "run@6", scratch) == facts["third"] else ["run@6 has other bytes"])
        if name == "trim_compact":
            shown = {f"{entry.run}@{entry.step}" for entry in store.log() if not entry.has_moments}
            found += ["run@4 has its moments still"] if is_done and "run@4" not in shown else []
            found += [] if numbers(store, "run@4") == facts["compact numbers"] else ["run@4 has other weights"]
            expected = {ref: each for ref, each in expected.items() if ref not in shown}
    return found + problems(path, scratch, {ref: facts[each] for ref, each in expected.items()})


def numbers(store: Store, ref: str) -> str:
    """Return the digest of the masters of *ref*, which need no moments."""
    return hashlib.sha256(repr(sorted(masters(store, ref).items())).encode()).hexdigest()


def _wrong_target(folder: Path, name: str, facts: dict[str, str], *, is_done: bool) -> list[str]:
    older = fingerprint(source(folder, "other"))
    if not (folder / "out").exists():
        # Between the two renames of a replacement there is no target, but both folders are whole.
        is_lost = name == "overwrite" and older not in [fingerprint(path) for path in folder.glob("out.*")]
        return ["the target is gone"] if is_done or is_lost else []
    allowed = [facts["first"], *([older] if name == "overwrite" and not is_done else [])]
    return [] if fingerprint(folder / "out") in allowed else ["the target is torn"]


def repeated(folder: Path, name: str) -> list[str]:
    """Return what is wrong once the verb *name*, which was interrupted, was called again."""
    if name == "init":
        with contextlib.suppress(AlreadyExists):  # killed after its last step, before it could say so
            VERBS[name](folder, no_hook)
        return wrong(folder, name, is_done=True)
    before = truth(folder / "store")
    VERBS[name](folder, no_hook)
    now = set(truth(folder / "store").values())
    lost: Iterable[str] = () if name in _REMOVES_BYTES else before
    found = [f"{path} is gone" for path in lost if before[path] not in now and not path.startswith(("tmp/", "parts/"))]
    return found + wrong(folder, name, is_done=True)


def aftermath(folder: Path, name: str, *, is_done: bool = False) -> list[str]:
    """Return what is wrong in *folder* now, and once the verb *name* was repeated."""
    return wrong(folder, name, is_done=is_done) + repeated(folder, name)


def litter(folder: Path, *patterns: str) -> list[str]:
    """Return what a verb that ended by itself has left behind in ``tmp/``, or beside its target."""
    beside = [path.name for pattern in patterns or ("*.partial-*",) for path in folder.glob(pattern)]
    found = [*leftovers(folder / "store"), *leftovers(folder / "new"), *beside]
    return [f"left behind: {found}"] if found else []
