"""
A store in which something of every kind is damaged, a copy that can heal nearly all of it, and what a repair owes.

What is to be expected is worked out while all is sound, and kept beside the two stores.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from layerstore.storage.handles import Hook
from layerstore.storage.layout import Layout
from layerstore.store import Store
from tests.faults.harness import composed, copied, flip, snapshot, truth

_FACTS = "facts.json"


def make_harmed(folder: Path, sound: Path, *, first: Path, second: Path, other: Path) -> None:
    """
    Make a ``store`` and its ``copy`` in *folder*.

    They come from the store *sound*, which has the checkpoint *first* as ``run@2`` and as the pin ``kept``;
    *other* is another one of that step, *second* one of step 4.
    """
    folder.mkdir(parents=True)
    store = copied(sound, folder / "store")
    with Store(store) as opened:
        opened.ingest(other, run="whole")
        opened.ingest(second, run="run")
        opened.ingest(first, run="lost")
        opened.pin("torn", "run@2")
        opened.pin("unread", "run@2")
        facts: dict[str, Any] = {ref: composed(opened, ref, folder) for ref in ("whole@2", "run@2", "kept", "run@4")}
    _harm(store, folder / "copy")
    facts["damaged"] = sorted(_damaged(store, folder / "copy"))
    facts["contents"] = truth(store)
    (folder / _FACTS).write_text(json.dumps(facts))


def _harm(store: Path, copy: Path) -> None:
    """Damage an object of each kind, a record and a pin with a copy and without, and what nobody can heal."""
    with Store(store) as opened:
        record, later = (opened.rooms.records.read(name).record for name in opened.rooms.records.names("run"))
        version = opened.rooms.version_of(record.layers[0])
    place = Layout(store)
    lost = place.object(later.layers[1].version.id)
    shutil.copytree(store, copy, symlinks=True)
    # The state of a later step: without files that are kept, two checkpoints of one step have the same.
    for blob in (version.objects[0].id, record.layers[0].version.id, later.states[0].id):
        flip(place.object(blob))
    for pin in (place.pin("torn"), place.pin("unread"), copy / place.name(place.pin("unread"))):
        flip(pin)
    flip(lost)
    flip(copy / lost.relative_to(store))
    for path in (*place.run("run").glob("2.*"), *place.run("lost").iterdir()):
        flip(path)
    for path in (copy / "commits" / "lost").iterdir():
        flip(path)
    (place.run("run") / "notes.txt").write_text("?")


def _damaged(store: Path, copy: Path) -> set[str]:
    """Return what is damaged in *store*: what verify finds, and what a repair may find behind that."""
    there = snapshot(copy)
    with Store(copied(store, copy.with_name("looked at"))) as opened:
        found = {damage.path for damage in opened.verify(read_data=True).damaged}
    shutil.rmtree(copy.with_name("looked at"))
    changed = {name for name, content in snapshot(store).items() if there.get(name) != content}
    return found | changed


def do_repair(store: Path, copy: Path, hook: Hook) -> object:
    """Put right what is wrong, from the copy; one commit falls back."""
    with Store(store, hook=hook) as opened:
        return opened.repair(read_data=True, sources=[copy], fall_back=True)


def harmed_problems(store: Path, harmed: Path, scratch: Path, *, is_done: bool) -> list[str]:
    """
    Return what is wrong with *store*, which was the one in *harmed*, after a repair that *is_done*, or may be.

    Nothing sound is hurt at any moment, and not a byte is gone; in the end all is healed, or in quarantine.
    """
    facts = json.loads((harmed / _FACTS).read_text())
    there = set(truth(store).values())
    found = [f"{name} is gone" for name, content in facts["contents"].items() if content not in there]
    with Store(store) as opened:
        damaged = [damage.path for damage in opened.verify(read_data=True).damaged]
        lost = {record.name.run for record in opened.rooms.quarantine.records()}
        if composed(opened, "whole@2", scratch) != facts["whole@2"]:
            return [*found, "whole@2, which was sound, composes to other bytes"]
        if not is_done:
            return found + [f"{path} was not damaged before" for path in damaged if path not in facts["damaged"]]
        again = opened.repair(read_data=True, fall_back=True)
        found += [f"{path} is damaged still" for path in damaged]
        found += ["there is something to repair still"] if again.has_done else []
        found += [] if again.held_back == ("lost@2", "unread") and "lost" in lost else [f"held back: {again.held_back}"]
        composites = {name: composed(opened, name, scratch) for name in ("run@2", "kept", "torn", "run@4")}
    facts["torn"] = facts["run@2"]
    found += [
        f"{name} composes to other bytes" for name in ("run@2", "kept", "torn") if composites[name] != facts[name]
    ]
    return found + (["run@4 did not fall back"] if composites["run@4"] == facts["run@4"] else [])
