"""A rank's share of a save. The rank leaves it in the store; the committing rank joins the parts of all ranks."""

from dataclasses import dataclass, field

from layerstore.model import OMITTED, BlobRef, CodingLoss, Kind, ObjectId


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedObject:
    """
    A `StoredObject` whose tensors are encoded as they will be in a version blob.

    The committing rank writes a million tensors of other ranks to version blobs, and decodes none of them.
    """

    id: ObjectId
    size_bytes: int
    kind: Kind
    shard: int
    shards: int
    tensors: bytes
    chunks: bytes
    reference: str = field(default="", metadata=OMITTED)

    @property
    def ref(self) -> "BlobRef":
        """Its name and size alone."""
        return BlobRef(id=self.id, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """One rank's objects of one layer."""

    layer: str
    objects: tuple[PackedObject, ...]
    references: tuple[PackedObject, ...] = field(default=(), metadata=OMITTED)
    """The objects that the differences in *objects* refer to."""
    losses: tuple[CodingLoss, ...] = field(default=(), metadata=OMITTED)
    """What was lost by coding *objects*."""

    @property
    def named(self) -> tuple[PackedObject, ...]:
        """Every object that is needed to read the part."""
        return (*self.objects, *self.references)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    One rank's contribution to an incomplete commit, all of it durable in the store.

    If the part has no state, the rank has failed: *failure* is the reason, and the commit is given up.
    """

    session: str
    """The session of the ranks that save together: 32 hex digits."""
    save: int
    """Counted from 0 in the session."""
    rank: int
    agreement: str
    """A hash of everything that all ranks of one save share."""
    layers: tuple[LayerPart, ...]
    """The layers that were due."""
    state: BlobRef | None
    bytes_new: int
    bytes_reused: int
    failure: str
