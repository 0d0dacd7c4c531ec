"""Compact saves beside exact ones with the same numbers: what codings mean is said here once more, by hand."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import layerstore
from layerstore import Store
from layerstore.coding import CODINGS
from layerstore.history import resolve
from layerstore.model import CommitRecord, LayerVersion, StoredObject
from tests.unit.checkpoints import tensors_of
from tests.zero3.ptfiles import change_tree

STATES = ("exp_avg", "exp_avg_sq")


def record(store: Store, ref: str) -> CommitRecord:
    """Return the record of *ref*."""
    return resolve(store.repo, ref).record


def versions(store: Store, ref: str) -> dict[str, LayerVersion]:
    """Return the version of each layer of *ref*."""
    return {entry.layer: store.repo.version_of(entry) for entry in record(store, ref).layers}


def counts(store: Store, ref: str) -> dict[str, int]:
    """Return how many versions in a row, the last of them in *ref*, are compact."""
    return {entry.layer: entry.compact for entry in record(store, ref).layers}


def path_of(store: Store, stored: StoredObject) -> Path:
    """Return the file of *stored*."""
    return store.repo.layout.object(stored.id)


def decoded(store: Store, stored: StoredObject) -> dict[str, bytes]:
    """Return the tensors of *stored*, decoded from its own file and, for differences, that of what it refers to."""
    own = tensors_of(path_of(store, stored))
    referred = tensors_of(store.repo.layout.object(stored.reference)) if stored.reference else {}  # type: ignore[arg-type]  # a name
    found = {}
    for tensor in stored.tensors:
        if not tensor.coding:
            found[tensor.key] = own[tensor.key]
            continue
        coding, key = CODINGS[tensor.coding], f"{tensor.key}:{tensor.coding}"
        parts = [own[key + part.suffix] for part in coding.parts(tensor.elements)]
        numbers = memoryview(bytearray(4 * tensor.elements))
        coding.decode(parts, memoryview(referred[tensor.key]) if coding.needs_reference else None, numbers)
        found[tensor.key] = bytes(numbers)
    return found


@dataclass(frozen=True, slots=True)
class Twins:
    """A store of compact saves, and one that holds exactly what they decode to."""

    compact: Store
    exact: Store


def twins(folder: Path, compact: Store, *steps: int, run: str = "sft") -> Twins:
    """Return *compact* beside a store into which its composites of *steps* are ingested as they are."""
    exact = layerstore.init(folder / "exact")
    for step in steps:
        out = compact.compose(f"{run}@{step}").write(folder / "written" / str(step)).out
        exact.ingest(out, run=run)
    return Twins(compact, exact)


def spoiled(folder: Path, number: float = math.nan, *, where: str = "fp32_flat_groups") -> Path:
    """Write *number* over the first master, or the first of a moment's numbers, in the checkpoint *folder*."""

    def change(tree: Any) -> None:
        optimizer = tree["optimizer_state_dict"]
        flat = (
            optimizer["fp32_flat_groups"][0]
            if where == "fp32_flat_groups"
            else optimizer["optimizer_state_dict"]["state"][0][where]
        )
        located = flat.storage.content
        with located.path.open("rb") as file:
            file.seek(located.offset_bytes)
            data = file.read(located.size_bytes)
        flat.storage.content = np.float32(number).tobytes() + data[4:]

    change_tree(next(folder.rglob("*rank_0_*optim_states.pt")), change)
    return folder
