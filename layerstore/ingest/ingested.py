"""What an ingest did."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from layerstore.model import CommitId
from layerstore.units import short_id, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What an ingest did."""

    _JSON: ClassVar = (
        "run step attempt commit is_new record_healed layers=#layers layers_saved=#layers_saved "
        "layers_compact=#layers_compact precision objects_new objects_reused bytes_new bytes_reused objects_healed "
        "reused_read bytes_derived seconds"
    )

    run: str
    step: int
    attempt: int
    commit: CommitId
    is_new: bool
    """False if this content was saved before; in that case, only what the store had lost was written."""
    record_healed: bool
    """Whether the commit's record was damaged and was written again."""
    layers: tuple[str, ...]
    layers_saved: tuple[str, ...]
    """The layers that were due; all others are inherited."""
    layers_compact: tuple[str, ...]
    """The layers of `layers_saved` that are not kept bit for bit."""
    precision: str
    """The precision that was asked for; some layers may be exact nevertheless."""
    objects_new: int
    objects_reused: int
    bytes_new: int
    bytes_reused: int
    objects_healed: int
    """New objects that replace damaged objects of the store."""
    reused_read: bool
    """Whether reused objects were read and compared."""
    bytes_derived: int
    """Gathered weights that were not stored because they follow from the masters."""
    seconds: float
    source: Path
    """The folder of the tag that was read."""
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        head = f"<Ingested {self.run}@{self.step} {short_id(self.commit)}"
        if not self.is_new:
            return f"{head}: was in the store before>"
        written = f"{size(self.bytes_new)} new, {size(self.bytes_reused)} reused"
        compact = f", {len(self.layers_compact)} in {self.precision}" if self.layers_compact else ""
        return (
            f"{head}: {len(self.layers_saved)} of {len(self.layers)} layers{compact}, {written}, {self.seconds:.1f} s>"
        )
