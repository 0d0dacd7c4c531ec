"""
The nouns of the store: values without behaviour, and without access to the disk.

Their fields are the fields of the records and blobs on disk (docs/reference/format.md), so adding or renaming a field
here changes the format.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from typing import ClassVar, NewType, Protocol, Self, runtime_checkable

from layerstore.dtypes import by_code
from layerstore.tree import Tree
from layerstore.units import short_id, utc

StrPath = str | os.PathLike[str]
"""A path as users give it."""

# Marks a field that holds a tree: it is kept in the encoding of format/treecodec.py.
AS_TREE = {"tree": True}

# AS_NAME marks a text that becomes a file's name, AS_PATH a text that becomes a path below a checkpoint. Readers check
# both kinds of text.
AS_NAME = {"check": "name"}
AS_PATH = {"check": "path"}

# Marks a field that is left out if it has its default, so that blobs written before the field existed keep their ids.
OMITTED = {"omitted": True}

ObjectId = NewType("ObjectId", str)
"""xxh3_128 of an object's bytes, as 32 lower-case hex digits."""

CommitId = NewType("CommitId", str)
"""xxh3_128 of a record's body, also as 32 lower-case hex digits."""


class Kind(StrEnum):
    """The part of a layer that an object holds."""

    WEIGHTS = "weights"
    """Weights that cannot be derived from the master: frozen ones, and any that differ from its rounding."""
    MASTER = "master"
    OPTIMIZER = "optimizer"
    """Every optimizer state that is cut into slices like the parameters."""
    BUFFERS = "buffers"


def key_of(name: str, state: str) -> str:
    """Return the name that a slice of *name* has in its object; *state* is its optimizer state, or empty."""
    return f"{state}/{name}" if state else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A rank's share of a tensor, in a source or in an object."""

    name: str
    """The parameter or buffer."""
    state: str
    """The optimizer state, such as ``exp_avg``; empty for a slice of any other kind."""
    dtype: str
    """Code of the element type, after decoding."""
    elements: int
    """Its length, padding excluded; never zero."""

    @property
    def key(self) -> str:
        """Its name inside a safetensors file."""
        return key_of(self.name, self.state)

    @property
    def size_bytes(self) -> int:
        """Its size, after decoding."""
        return self.elements * by_code(self.dtype).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor(Slice):
    """One slice inside an object."""

    crc32: int
    """Checksum of the slice's bytes after decoding; a zip entry's checksum is combined from such checksums."""
    coding: str = field(default="", metadata=OMITTED)
    """How the slice is coded in fewer bytes (`layerstore.coding`); empty if its bytes are kept as they are."""
    box: tuple[int, ...] = field(default=(), metadata=OMITTED)
    """If the slice is a box rather than a contiguous stretch: its first index in each dimension, then its extents."""


_coding_of = attrgetter("coding")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One safetensors file: one layer, one kind, one shard."""

    id: ObjectId
    size_bytes: int
    """Size of the whole file."""
    kind: Kind
    shard: int
    shards: int
    """The number of slices that each parameter was split into; 1 means unsharded."""
    tensors: tuple[StoredTensor, ...]
    """In file order."""
    chunks: bytes
    """xxh3_64, 8 bytes big-endian each, of every 16 MiB of the file."""
    reference: str = field(default="", metadata=OMITTED)
    """The id of the object that this object's differences are relative to; empty if it holds no differences."""

    @property
    def ref(self) -> "BlobRef":
        """Its name and size alone."""
        return BlobRef(id=self.id, size_bytes=self.size_bytes)

    @property
    def is_coded(self) -> bool:
        """Whether any of its tensors needs decoding."""
        return any(map(_coding_of, self.tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A layer's description of one of its parameters."""

    name: str
    dtype: str
    """Element type of the weights during training."""
    shape: tuple[int, ...]
    frozen: bool
    aliases: tuple[str, ...]
    """Other names of the same memory (tied weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A layer's description of one of its persistent buffers."""

    name: str
    dtype: str
    shape: tuple[int, ...]


STAGES = frozenset({1, 2, 3})
"""The ZeRO stages; a save without a stage is kept as stage 3."""

DCP = "dcp"
"""The flag of a record whose save ``torch.distributed.checkpoint`` made: its states are not DeepSpeed's trees."""

CUTS = frozenset({"boxes", "even", "partition"})
"""The values of `LayerVersion.cut` that readers know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVersion:
    """A whole layer at one step; equal bytes make equal versions, whatever step or run they come from."""

    layer: str
    parameters: tuple[Parameter, ...]
    """By name."""
    buffers: tuple[Buffer, ...]
    """By name."""
    world_size: int
    """The number of ranks that the slices come from."""
    objects: tuple[StoredObject, ...]
    """By kind, then by shard."""
    cut: str = field(default="even", metadata=OMITTED)
    """
    How parameters were split into slices: ``even`` is ZeRO-3's ``flat[r*k:(r+1)*k]``, k = ceil(n/world); ``partition``
    is how stages 1 and 2 and FSDP split: the slices of a parameter follow each other, and some ranks have none;
    ``boxes`` is how tensor parallelism splits: some slices are boxes.
    """
    references: tuple[StoredObject, ...] = field(default=(), metadata=OMITTED)
    """Objects of older versions that this version's differences refer to, by shard; kept as long as the version."""

    @property
    def named(self) -> tuple[StoredObject, ...]:
        """Every object that is needed to read the version."""
        return (*self.objects, *self.references)

    @property
    def is_exact(self) -> bool:
        """Whether every bit of the version is as it was saved."""
        return not any(stored.is_coded for stored in self.objects)

    @property
    def optimizer_states(self) -> set[tuple[str, str]]:
        """The optimizer's states for the layer, as pairs of parameter and state name."""
        return {
            (tensor.name, tensor.state)
            for stored in self.objects
            if stored.kind is Kind.OPTIMIZER
            for tensor in stored.tensors
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVersion(LayerVersion):
    """A version with only one rank's objects and those that all ranks share; never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """The name of an object and the size it must have."""

    id: ObjectId
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The save that wrote a layer version."""

    run: str = field(metadata=AS_NAME)
    attempt: int
    step: int
    save_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """The version that one layer has in one commit."""

    layer: str
    version: BlobRef
    origin: Origin
    """The commit itself if it saved the version, otherwise the save that the version was inherited from."""
    optimizer_step: int | None
    """The optimizer's update count for the layer at its origin; None if there is no count, or several that differ."""
    compact: int = field(default=0, metadata=OMITTED)
    """How many consecutive versions, up to and including this one, are not exact; 0 if this one is exact."""

    def saved_by(self, commit: "Saving") -> bool:
        """Whether *commit* itself saved the version rather than inheriting it."""
        origin = self.origin
        return (origin.run, origin.attempt, origin.step) == (commit.run, commit.attempt, commit.step)


@runtime_checkable
class Saving(Protocol):
    """The identity of a save: its run, attempt and step, as in records, rows and origins."""

    @property
    def run(self) -> str:
        """The run that it belongs to."""

    @property
    def attempt(self) -> int:
        """The attempt of that run."""

    @property
    def step(self) -> int:
        """The trainer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where an attempt forked from an earlier one."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayout:
    """The checkpoint's layout on disk, so that it can be reproduced."""

    flavour: str
    """``raw``, ``hf``, ``accelerate`` or ``lightning``; ``dcp`` if DeepSpeed did not write it."""
    tag: str = field(metadata=AS_PATH)
    """DeepSpeed's folder inside the checkpoint."""
    layer_pattern: str | None
    """The user's own rule for naming layers, if one was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUse:
    """The policy that chose the layers of a save, with its parameters and the facts that it used."""

    name: str
    parameters: dict[Tree, Tree] = field(metadata=AS_TREE)
    decisions: dict[Tree, Tree] = field(metadata=AS_TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """
    One step of a run, complete by itself.

    Equal content has equal bytes: nothing here depends on when or where it was written.
    docs/reference/format.md, section 5.2, describes the fields.
    """

    run: str = field(metadata=AS_NAME)
    attempt: int
    """Counted from 1."""
    lineage: tuple[Fork, ...]
    """Where the attempt forked from an earlier one, where that one forked, and so on; empty if it did not fork."""
    step: int
    save_number: int
    """
    One more than the number of the preceding commit in its history, plus the saves that a saver skipped or gave up in
    between.

    Counted from 0, and never recomputed.
    """
    world_size: int
    stage: int
    """The ZeRO stage: 1, 2 or 3."""
    layers: tuple[LayerEntry, ...]
    """Every layer of the model, in the model's order."""
    states: tuple[BlobRef, ...]
    """
    One state blob per rank: everything that is not a layer.

    A DCP save has either one blob for all ranks, or one blob for each rank.
    """
    layout: SourceLayout
    policy: PolicyUse
    supersedes: tuple[CommitId, ...]
    """Commits of the same run that this one replaces."""
    precision: str = field(default="exact", metadata=OMITTED)
    """The precision requested for the saved layers, some of which may be exact anyway; ``exact`` if all layers are."""
    flags: tuple[str, ...] = ()
    """Features that a reader must know; see the format page."""
    notes: tuple[str, ...] = ()
    """Features that a reader may ignore."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """The versions of its layers and the states of its ranks."""
        return (*(entry.version for entry in self.layers), *self.states)

    @property
    def is_dcp(self) -> bool:
        """Whether ``torch.distributed.checkpoint`` made the save, rather than DeepSpeed."""
        return DCP in self.flags

    @property
    def is_exact(self) -> bool:
        """Whether every layer is kept bit for bit."""
        return not any(entry.compact for entry in self.layers)

    @property
    def kept_precision(self) -> str:
        """``exact`` if all layers are, ``mixed`` if only inherited ones are compact, else the save's own precision."""
        if self.is_exact:
            return "exact"
        return "mixed" if self.precision == "exact" else self.precision

    @property
    def fork(self) -> Fork | None:
        """Where the attempt forked from an earlier one; None if it began from nothing."""
        return self.lineage[0] if self.lineage else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingLoss:
    """What coding lost of a layer's masters, or of one of its optimizer states; the sums run over all slices."""

    layer: str
    state: str
    """Empty for the masters."""
    greatest: float
    """The greatest error."""
    squares: float
    """The sum of the squares of all errors."""
    greatest_value: float
    """The greatest number that was coded: for differences, a movement since the reference; otherwise a value."""
    value_squares: float

    def __add__(self, other: Self) -> Self:
        """Return the combined loss, with the layer and state of this one."""
        return replace(
            self,
            greatest=max(self.greatest, other.greatest),
            squares=self.squares + other.squares,
            greatest_value=max(self.greatest_value, other.greatest_value),
            value_squares=self.value_squares + other.value_squares,
        )

    @property
    def relative(self) -> float:
        """The root mean square of the errors, divided by that of the coded numbers; 0 if the latter is 0."""
        return float((self.squares / self.value_squares) ** 0.5) if self.value_squares else 0.0

    @property
    def relative_greatest(self) -> float:
        """The greatest error, divided by the greatest number that was coded; 0 if the latter is 0."""
        return self.greatest / self.greatest_value if self.greatest_value else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations made while committing: stored with the record, but never part of its identity."""

    time_ns: int
    """When it was committed, by the writer's clock, in nanoseconds since 1970."""
    bytes_new: int
    """Bytes that were not in the store before."""
    bytes_reused: int
    """Bytes that were in the store before."""
    losses: tuple[CodingLoss, ...] = field(default=(), metadata=OMITTED)
    """What coding lost of the commit's compact layers."""

    @property
    def time(self) -> datetime:
        """When it was committed, in UTC."""
        return utc(self.time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A record in the store, with its id and what was observed at the commit."""

    _JSON: ClassVar = "run step attempt=record.attempt commit=id"

    id: CommitId
    record: CommitRecord
    observed: Observed

    def __repr__(self) -> str:
        return f"<Commit {short_id(self.id)} {_in_short(self.record, self.observed)}>"

    @property
    def run(self) -> str:
        """Its run."""
        return self.record.run

    @property
    def step(self) -> int:
        """Its step."""
        return self.record.step

    @property
    def time(self) -> datetime:
        """When it was committed, in UTC."""
        return self.observed.time


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A user's name for a commit or a composite, fully resolved."""

    _JSON: ClassVar = (
        "pin=name run=record.run step=record.step commit=base time=observed.time_ns layers=#record.layers "
        "attempt=record.attempt policy=record.policy.name precision=record.kept_precision"
    )

    name: str = field(metadata=AS_NAME)
    record: CommitRecord
    """Every layer's version and everything else, so that the pin outlives the commits that it was made from."""
    base: CommitId
    """The commit that supplies everything that is not a layer."""
    observed: Observed
    """The time is the base's; the byte counts are 0."""

    def __repr__(self) -> str:
        return f"<Pin {self.name}: {_in_short(self.record, self.observed)}>"

    @property
    def run(self) -> str:
        """The base's run."""
        return self.record.run

    @property
    def step(self) -> int:
        """The base's step."""
        return self.record.step

    @property
    def time(self) -> datetime:
        """When the base was committed, in UTC."""
        return self.observed.time


def _in_short(record: CommitRecord, observed: Observed) -> str:
    layers = f"{len(record.layers)} layers, policy {record.policy.name}"
    return f"{record.run}@{record.step}, {layers}, world size {record.world_size}, {observed.time:%Y-%m-%d %H:%M} UTC"
