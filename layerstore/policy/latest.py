"""``latest``: the commit's own layers, each as new as the commit has it."""

from layerstore.model import CommitRecord, LayerEntry


def latest(record: CommitRecord) -> tuple[LayerEntry, ...]:
    """Return every layer as *record* has it: saved there, or inherited."""
    return record.layers
