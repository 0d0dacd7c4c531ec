"""``exact``: every layer from this very step, or nothing."""

from layerstore.errors import LayoutMismatch
from layerstore.model import CommitRecord, LayerEntry


def exact(record: CommitRecord) -> tuple[LayerEntry, ...]:
    """
    Return every layer of *record*.

    Raises:
        LayoutMismatch: Some layers were not saved at this step; the message names one.
    """
    older = [entry for entry in record.layers if entry.origin.step != record.step or entry.origin.run != record.run]
    if older:
        first = older[0]
        raise LayoutMismatch(
            f"{len(older)} of {len(record.layers)} layers were not saved at {record.run}@{record.step}: "
            f"{first.layer} is from {first.origin.run}@{first.origin.step}",
            hint="--policy latest takes each layer's newest version",
        )
    return record.layers
