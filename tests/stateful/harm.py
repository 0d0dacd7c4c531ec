"""Files of a sound store are flipped or lost; what a repair owes then follows from what needed them and from copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import flip
from tests.stateful.lab import Anatomy


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """What a repair has to make of a harm, by id."""

    healed: frozenset[str]
    """Blobs and objects that are whole again."""
    lost: frozenset[str]
    """Those that are not."""
    told: frozenset[str]
    """Those of them that the repair has to name."""
    seen: frozenset[str]
    """Those that whoever reads every byte has to name."""
    records: frozenset[str]
    """Commits of whose record there is no copy, or that name what is lost and were gone."""
    pins: frozenset[str]
    """Pins that do not come back."""
    held_back: frozenset[str]
    """Those of them of which something is left."""


class Harm:
    """What was done to the store at *path*, which consisted of *parts*."""

    def __init__(self, path: Path, parts: Anatomy) -> None:
        self._path, self.parts = path, parts
        self.objects: dict[str, bytes] = {}
        """Blobs and objects as they were."""
        self.records: dict[str, Path] = {}
        """Where the records of commits are."""
        self.pins: dict[str, bool] = {}
        """Whether a pin went without a trace: one that an earlier repair has in quarantine is missed."""
        self._unproved: set[str] = set()
        """Pins of which only that is left, and it was another one, or may have been."""
        self._removed: set[str] = set()
        self._kept: set[str] = set()
        """Commits whose record an earlier repair has kept, whole, in quarantine."""

    def do(self, which: int, place: int, *, removes: bool) -> None:
        """Harm another file: as a rule an object, now and then a record or a pin."""
        folder = ("objects", "objects", "commits", "pins")[which % 4]
        names = self.parts.objects.keys() | {name for named in self.parts.objects.values() for name in named}
        aside = {path.name for path in (self._path / "gc").glob("*/aside/*")}
        files = sorted(path for path in (self._path / folder).rglob("*") if path.is_file())
        if folder == "objects":  # what lies aside too is not lost with its place
            files = [file for file in files if file.name in names - aside]
        files = [
            file for file in files if file.name.partition(".")[2] not in self.records and file.name not in self.pins
        ]
        files = [file for file in files if file.name not in self.objects]
        if files:
            self._harm(files[which % len(files)], place, removes=removes)

    def _harm(self, file: Path, place: int, *, removes: bool) -> None:
        if file.parent.parent.name == "objects":
            self.objects[file.name] = file.read_bytes()
        elif file.parent.name == "pins":
            left = sorted(self._path.glob(f"quarantine/*/pins/{file.name}"))
            self.pins[file.name] = removes and not left
            if removes and left and not _is_flipped(left[-1].read_bytes(), file.read_bytes()):
                self._unproved.add(file.name)
        else:
            commit = file.name.partition(".")[2]
            self.records[commit] = file
            kept = self._path.glob(f"quarantine/*/commits/*/{file.name}")
            if any(each.read_bytes() == file.read_bytes() for each in kept):
                self._kept.add(commit)
        if removes:
            file.unlink()
            self._removed.add(file.name)
        else:
            flip(file, place, place % 8)

    def owed(self, *, read_data: bool, source: Path | None) -> Owed:
        """Return what a repair owes that reads every byte, or not, and may take copies from *source*."""
        copies = {name for name, data in self.objects.items() if source and _object(source, name) == data}
        lost_records = {name for name in self.records if not self._comes_back(name, copies, source)}
        lost_pins = {name for name, is_unknown in self.pins.items() if is_unknown or source is None} | self._unproved
        live = [needed for name, needed in self.parts.records.items() if name not in lost_records]
        live += [needed for name, needed in self.parts.pins.items() if name not in lost_pins]
        blobs = {blob for needed in live for blob in (*needed.versions.values(), *needed.states)}
        gone = self.objects.keys()
        readable = blobs - (gone - copies)
        reached = blobs | {name for blob in readable for name in self.parts.objects[blob]}
        # A quick look reads blobs and sizes: bytes of tensors it does not.
        found = reached & {name for name in gone if read_data or name in self.parts.objects or name in self._removed}
        healed = found & copies
        return Owed(
            healed=frozenset(healed),
            lost=frozenset(gone - healed),
            told=frozenset(found - healed),
            seen=frozenset((gone & reached) - healed),
            records=frozenset(lost_records),
            pins=frozenset(lost_pins),
            held_back=frozenset(name for name in lost_pins if not self.pins[name]),
        )

    def _comes_back(self, name: str, copies: set[str], source: Path | None) -> bool:
        """Whether the record of the commit *name* does: one that is gone only with all that it needs."""
        file = self.records[name]
        there = None if source is None else source / file.relative_to(self._path)
        if not (name in self._kept or (there is not None and there.exists())):
            return False
        if file.name not in self._removed:
            return True
        needed = self.parts.records[name]
        blobs = {*needed.versions.values(), *needed.states}
        lost_blobs = blobs & (self.objects.keys() - copies)
        inner = {each for blob in blobs - lost_blobs for each in self.parts.objects[blob]}
        return not lost_blobs and not inner & (self._removed - copies)

    def is_as_it_was(self, name: str) -> bool:
        """Whether the blob or object *name* lies at its place, with the bytes that it had."""
        return _object(self._path, name) == self.objects[name]


def _is_flipped(data: bytes, sound: bytes) -> bool:
    """Whether *data* is *sound* but for one byte, as a flip leaves it."""
    return len(data) == len(sound) and sum(one != other for one, other in zip(data, sound, strict=True)) == 1


def _object(store: Path, name: str) -> bytes | None:
    path = store / "objects" / name[:2] / name
    return path.read_bytes() if path.exists() else None
