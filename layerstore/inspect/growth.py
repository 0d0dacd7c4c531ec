"""
How a run grows in the store from save to save, both as it was saved and as it would have grown under another policy.

Sizes are those that versions and records list; records themselves are not counted.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from layerstore.dtypes import by_code
from layerstore.errors import LayerstoreError
from layerstore.history import objects_of_state
from layerstore.model import BlobRef, Commit, CommitRecord, Kind, LayerEntry
from layerstore.policy import Policy, Save, anchored, due_layers
from layerstore.states import RankState, TensorSource
from layerstore.storage import Repository

AMOUNTS = ("logical_bytes", "unique_bytes", "inherited_bytes", "derived_bytes", "written_bytes")
"""
The amounts that are counted for a commit.

In order: its size if it were stored whole; the part that no earlier commit of the run has; the part in inherited
layers; the gathered weights that are not stored because they equal the rounded masters; and the bytes that the commit's
writer put into the store, as recorded at the time.
"""

PartNumbers: TypeAlias = "array[int]"
"""The numbers that `Objects` gave to some objects, such as those of a version."""


class Objects:
    """
    Numbers objects, since a report compares sets of millions of them.

    Ids are kept as bytes, since hexadecimal ones would take twice the memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._sizes = array("Q")

    def parts(self, refs: Iterable[BlobRef]) -> PartNumbers:
        """Return the numbers of *refs*; new objects get new numbers."""
        numbers = array("I")
        for ref in refs:
            number = self._numbers.setdefault(_key(ref), len(self._sizes))
            if number == len(self._sizes):
                self._sizes.append(ref.size_bytes)
            numbers.append(number)
        return numbers

    def size_bytes(self, parts: PartNumbers) -> int:
        """Return the size of *parts*."""
        return sum(self._sizes[number] for number in parts)

    def add_new(self, seen: bytearray, parts: PartNumbers) -> int:
        """Mark *parts* in *seen*, which has a byte for each object; return the size of those that are new."""
        seen.extend(bytes(len(self._sizes) - len(seen)))
        new = 0
        for number in parts:
            if not seen[number]:
                seen[number] = True
                new += self._sizes[number]
        return new


@dataclass(frozen=True, slots=True)
class _Version:
    parts: PartNumbers = field(default_factory=lambda: array("I"))
    """Its blob and its objects."""
    size_bytes: int = 0
    layer_bytes: int = 0
    """The size without the blob, as `ls` shows it."""
    unlike: frozenset[str] = frozenset()
    """The trained parameters whose weights are stored, rather than rounded from masters."""
    shape: int = 0
    """A number for its parameters, buffers and optimizer states: `ingest` stores a layer again if any changes."""


class Growth:
    """Counts what each commit of a run adds to the earlier ones."""

    def __init__(self, repo: Repository) -> None:
        self._repo = repo
        self._objects = Objects()
        self._seen = bytearray()
        self._versions: dict[bytes, _Version] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self.versions_overlap = False
        """Whether two different versions have an object in common."""
        self.left_out: list[str] = []
        """What could not be read, and so is not counted."""

    def add(self, commit: Commit, *what_ifs: "WhatIf") -> list[int]:
        """Return the `AMOUNTS` of *commit*, given the commits that were added before; add it to *what_ifs*."""
        record = commit.record
        logical = unique = inherited = derived = 0
        stored: set[str] = set()
        for entry in record.layers:
            unique += self._add_version(entry)
            version = self._versions[_key(entry.version)]
            logical += version.size_bytes
            inherited += 0 if entry.saved_by(record) else version.size_bytes
            stored |= version.unlike
        beside = array("I")
        for ref in record.states:
            try:
                state = self._repo.state(ref)
            except LayerstoreError as exc:
                self.left_out.append(str(exc))
                continue
            parts = self._objects.parts([ref, *objects_of_state(state)])
            logical += self._objects.size_bytes(parts)
            unique += self._objects.add_new(self._seen, parts)
            derived += _derived_bytes(state, stored)
            beside += parts
        for what_if in what_ifs:
            versions = [self._versions[_key(entry.version)] for entry in record.layers]
            what_if.add(record, self._objects, versions, beside)
        return [logical, unique, inherited, derived, commit.observed.bytes_new]

    def layer_bytes(self, entry: LayerEntry) -> int:
        """Return the size of the objects of *entry*, whose commit was added before; 0 if it could not be read."""
        return self._versions[_key(entry.version)].layer_bytes

    def _add_version(self, entry: LayerEntry) -> int:
        """Read the version of *entry*, if it is new; return the size of its new objects."""
        key = _key(entry.version)
        if key in self._versions:
            return 0
        try:
            version = self._repo.version(entry.version)
        except LayerstoreError as exc:
            self.left_out.append(str(exc))
            # Counted as empty, so that the damage is reported once, not at each save that inherits the version.
            self._versions[key] = _Version()
            return 0
        trained = {parameter.name for parameter in version.parameters if not parameter.frozen}
        weights = (stored for stored in version.objects if stored.kind is Kind.WEIGHTS)
        parts = self._objects.parts([entry.version, *(stored.ref for stored in version.named)])
        size_bytes = self._objects.size_bytes(parts)
        shape = (version.parameters, version.buffers, frozenset(version.optimizer_states))
        self._versions[key] = _Version(
            parts=parts,
            size_bytes=size_bytes,
            layer_bytes=size_bytes - entry.version.size_bytes,
            unlike=frozenset(tensor.name for stored in weights for tensor in stored.tensors) & trained,
            # Numbered from 1: 0 stands for a version that could not be read.
            shape=self._shapes.setdefault(shape, len(self._shapes) + 1),
        )
        new = self._objects.add_new(self._seen, parts)
        self.versions_overlap |= new < size_bytes
        return new


class _HeldVersion(NamedTuple):
    """A version of a layer that a policy would have stored."""

    since: int
    """The step that stored it."""
    is_counted: bool
    """Whether it has an update that the optimizer counted."""
    shape: int


@dataclass(slots=True)
class _Past:
    """The saves in an attempt's history, as far as a policy needs to know them."""

    steps: list[int] = field(default_factory=list)
    """The step of each save so far."""
    held: dict[str, list[_HeldVersion]] = field(default_factory=dict)
    """By layer, the versions that the policy would store; of successive ones that differ only in step, the first."""

    def up_to(self, step: int) -> "_Past":
        """Return the past as it was after *step*."""
        return _Past(
            steps=[saved_step for saved_step in self.steps if saved_step <= step],
            held={name: [past for past in held if past.since <= step] for name, held in self.held.items()},
        )

    def can_inherit(self, layer: str, kind: tuple[bool, int]) -> bool:
        """Whether `ingest` would let a save inherit *layer*; *kind* is its *is_counted* and *shape* at that save."""
        if not self.held.get(layer):
            return False
        held, (is_counted, shape) = self.held[layer][-1], kind
        return held.shape == shape and (held.is_counted or not is_counted)

    def hold(self, layer: str, kind: tuple[bool, int], *, since: int) -> None:
        """Note that a version of *layer* is stored at step *since*."""
        held = self.held.setdefault(layer, [])
        if not held or (held[-1].is_counted, held[-1].shape) != kind:
            held.append(_HeldVersion(since, *kind))


class WhatIf:
    """
    Counts what a run would have stored if *policy* had chosen the layers of each of its saves, from the first.

    This is exact for the layers that a save wrote, since their versions are known. If a layer would have been due at a
    save that did not write it, its version is unknown: it is counted as new, with the size of the inherited version.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = anchored(policy, 0)
        self._seen = bytearray()
        self._pasts: dict[int, _Past] = {}
        self.own_bytes: list[int] = []
        """What each save would have added."""
        self.estimated_bytes: list[int] = []
        """The part of *own_bytes* that is estimated."""

    def add(self, record: CommitRecord, objects: Objects, versions: Iterable[_Version], beside: PartNumbers) -> None:
        """Count *record*: its layers' *versions*, and the parts *beside* its layers, all numbered by *objects*."""
        past = self._past_of(record)
        names = tuple(entry.layer for entry in record.layers)
        due = due_layers(self._policy, Save(number=len(past.steps), layers=names, ages={}))
        own, estimated = objects.add_new(self._seen, beside), 0
        for entry, version in zip(record.layers, versions, strict=True):
            is_counted = entry.optimizer_step is not None
            kind = (is_counted, version.shape)
            if entry.layer not in due and past.can_inherit(entry.layer, kind):
                continue
            past.hold(entry.layer, kind, since=record.step)
            new = objects.add_new(self._seen, version.parts)
            # The save inherited an older version; what it would have stored is unknown, but all of it would be new.
            if is_counted and not entry.saved_by(record):
                new = version.size_bytes
                estimated += new
            own += new
        past.steps.append(record.step)
        self.own_bytes.append(own)
        self.estimated_bytes.append(estimated)

    def _past_of(self, record: CommitRecord) -> _Past:
        if record.attempt not in self._pasts:
            fork = record.fork
            parent = None if fork is None else self._pasts.get(fork.attempt)
            self._pasts[record.attempt] = _Past() if fork is None or parent is None else parent.up_to(fork.step)
        return self._pasts[record.attempt]


def _key(ref: BlobRef) -> bytes:
    return bytes.fromhex(ref.id)


def _derived_bytes(state: RankState, stored: set[str]) -> int:
    """Return the bytes of gathered weights in *state* that are not stored, given the parameters that are *stored*."""
    return sum(
        tensor.elements * by_code(tensor.dtype).bytes
        for file in state.gathered
        for tensor in file.tensors
        if tensor.source is not TensorSource.STORED and tensor.layer_name not in stored
    )
