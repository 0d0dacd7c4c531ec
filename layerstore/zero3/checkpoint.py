"""
What a ZeRO-3 checkpoint holds, as plain values: layers with the places of their slices, and each rank's state.

``read.py`` makes these from DeepSpeed's files; ``ops`` moves the bytes they point at.
"""

from dataclasses import dataclass
from pathlib import Path

from layerstore.dtypes import by_code
from layerstore.model import Buffer, Kind, Parameter, RankState
from layerstore.tree import Located
from layerstore.zero3.discover import FoundCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSource:
    """Where one slice of a layer lies in the source."""

    name: str
    """The parameter or buffer."""
    state: str
    """Which optimizer state; empty for the other kinds."""
    dtype: str
    elements: int
    """Padding excluded; never zero."""
    path: Path
    offset_bytes: int

    @property
    def key(self) -> str:
        """Its name inside an object."""
        return f"{self.state}/{self.name}" if self.state else self.name

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.elements * by_code(self.dtype).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSource:
    """The slices of one object to be."""

    kind: Kind
    shard: int
    shards: int
    slices: tuple[SliceSource, ...]
    """In the canonical order of an object's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """One layer of the checkpoint."""

    layer: str
    parameters: tuple[Parameter, ...]
    """By name."""
    buffers: tuple[Buffer, ...]
    """By name."""
    objects: tuple[ObjectSource, ...]
    """By kind, then by shard."""
    optimizer_step: int | None
    """How many updates the optimizer has made to it; None where it does not count, or counts differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredSource:
    """One tensor of a gathered weights file: whole, in half precision or full."""

    file: Path
    name: str
    dtype: str
    elements: int
    offset_bytes: int
    supplier: str
    """The parameter or buffer that has the same bytes or should have; empty if none has its name."""

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.elements * by_code(self.dtype).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredFileSource:
    """A safetensors file of gathered weights."""

    path: Path
    header: bytes
    """Length field and JSON, verbatim."""
    tensors: tuple[GatheredSource, ...]
    """In file order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCheck:
    """A record of a ``.pt`` file whose bytes must have the checksum that the file states for them."""

    key: str
    located: Located


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All of a checkpoint."""

    found: FoundCheckpoint
    step: int
    world_size: int
    layers: tuple[LayerSource, ...]
    """In the model's order."""
    states: tuple[RankState, ...]
    """By rank; files and gathered weights still left out, small storages still ``Located``."""
    gathered: tuple[GatheredFileSource, ...]
    files: tuple[Path, ...]
    """Files that are kept byte for byte."""
    checks: tuple[StorageCheck, ...]
    """Every storage of every ``.pt`` file."""
    notes: tuple[str, ...]
    """What was left out or looks odd, for the user."""

    @property
    def size_bytes(self) -> int:
        """The size of all its files."""
        return sum(stamp.size_bytes for stamp in self.found.stamps)
