"""Promises of the reader: padding is in no slice, and lengths are never guessed. Compose tests compare the rest."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest

import layerstore
from layerstore.errors import LayoutMismatch
from layerstore.slices import slice_length, valid_elements
from layerstore.tree import Size, Storage, Tensor
from layerstore.zero3 import discover, read_checkpoint
from layerstore.zero3.pt import read_pt
from tests.unit.checkpoints import checkpoint
from tests.zero3.ptfiles import change_tree, held


def change_masters(folder: Path, change: Callable[[Tensor, list[int], int, int], Tensor], *, world_size: int) -> None:
    """Let *change* alter every master, given the elements of its parameters, the rank and the number of ranks."""
    for rank in range(world_size):
        [model] = folder.rglob(f"*rank_{rank}_*model_states.pt")
        [optimizer] = folder.rglob(f"*rank_{rank}_*optim_states.pt")
        groups = cast(Any, read_pt(model).tree)["param_shapes"]
        sizes = [[prod(shape) for shape in group.values()] for group in groups]

        def changed(tree: Any, sizes: list[list[int]] = sizes, rank: int = rank) -> None:
            flats = tree["optimizer_state_dict"]["fp32_flat_groups"]
            flats[:] = [change(flat, own, rank, world_size) for flat, own in zip(flats, sizes, strict=True)]

        change_tree(optimizer, changed)


def with_bytes(flat: Tensor, data: bytes) -> Tensor:
    """Return *flat* with other bytes."""
    elements = len(data) // 4
    storage = Storage(dtype="F32", elements=elements, device="cpu", content=data)
    return replace(flat, storage=storage, shape=Size((elements,)))


def junk_padding(flat: Tensor, sizes: list[int], rank: int, world_size: int) -> Tensor:
    """Fill what is not a parameter's own with NaNs."""
    data, start = bytearray(held(flat.storage)), 0
    for size in sizes:
        length, valid = slice_length(size, world_size), valid_elements(size, world_size, rank)
        data[4 * (start + valid) : 4 * (start + length)] = b"\xff" * 4 * (length - valid)
        start += length
    return with_bytes(flat, bytes(data))


@pytest.mark.fault(67)
def test_padding_content_makes_no_difference(tmp_path: Path) -> None:
    """Padding is junk by nature: it is in no slice, so no layer has another version."""
    folder = checkpoint(tmp_path, hidden=18, vocab=37, world_size=4)
    before = {path.name: path.read_bytes() for path in folder.rglob("*optim_states.pt")}
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(folder, run="before")
        change_masters(folder, junk_padding, world_size=4)
        store.ingest(folder, run="after")

        assert before != {path.name: path.read_bytes() for path in folder.rglob("*optim_states.pt")}
        versions = [[(line.layer, line.version) for line in store.ls(run)] for run in ("before", "after")]
        assert versions[0] == versions[1]


@pytest.mark.fault(67)
@pytest.mark.parametrize("change", [lambda data: data[4:], lambda data: data + bytes(4)], ids=["shorter", "longer"])
def test_a_buffer_of_another_length_is_a_mismatch(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """Lengths are never guessed: a flat buffer that its parameters do not fill exactly is refused."""
    folder = checkpoint(tmp_path)
    change_masters(folder, lambda flat, *_: with_bytes(flat, change(held(flat.storage))), world_size=2)

    with pytest.raises(LayoutMismatch, match="its parameters need"):
        read_checkpoint(discover(folder))
