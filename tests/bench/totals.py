"""What the saves of a training come to, besides their bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import starmap
from math import ceil
from typing import Self

from layerstore.inspect import Model, Training
from layerstore.inspect.cost import SaveGroup, stored
from layerstore.inspect.estimate import _groups, kept_exactly, trained_objects
from layerstore.limits import GC_GRACE_SECONDS, REMOTE_PART_BYTES
from layerstore.precision import Keyframes


@dataclass(frozen=True, slots=True)
class FileTotals:
    """Files that are saved together."""

    count: int = 0
    size_bytes: int = 0
    puts: int = 0
    """Requests that upload them."""

    @classmethod
    def alike(cls, count: int, size_bytes: int) -> Self:
        """Return *count* files of *size_bytes* each; those larger than a part are uploaded in parts."""
        parts = ceil(size_bytes / REMOTE_PART_BYTES)
        return cls(count, count * size_bytes, count * (parts + 2 if parts > 1 else 1))

    def __add__(self, other: "FileTotals") -> "FileTotals":
        return FileTotals(self.count + other.count, self.size_bytes + other.size_bytes, self.puts + other.puts)


def trained_files(model: Model, training: Training) -> dict[str, FileTotals]:
    """Return each layer's objects on all ranks."""
    return {
        layer: sum(starmap(FileTotals.alike, objects), FileTotals())
        for layer, objects in trained_objects(model, training)
    }


def saves_kept(training: Training) -> int:
    """Return how many saves are kept when the run ends."""
    return stored([SaveGroup(size_bytes=1, due=(0,))], training, lingers_seconds=0.0).end_bytes


def kept_on_disk(files: Mapping[str, FileTotals], due: Iterable[frozenset[str]], training: Training) -> tuple[int, int]:
    """Return the bytes and files that are on a disk when the run ends, records and states of ranks among the files."""
    kept = kept_exactly(due, Keyframes())
    amounts = (
        {(layer, True): of.size_bytes for layer, of in files.items()},
        # With the version blob that names them.
        {(layer, True): of.count + 1 for layer, of in files.items()},
    )
    size_bytes, objects = (
        stored([*_groups(amount, kept)], training, lingers_seconds=GC_GRACE_SECONDS).end_bytes for amount in amounts
    )
    return size_bytes, objects + (training.world_size + 1) * saves_kept(training)
