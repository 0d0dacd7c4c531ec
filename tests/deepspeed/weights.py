"""A checkpoint's weights put together by hand from its flat buffers: what exports are held against."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.deepspeed.compare import full_tensors, rank_trees, valid_count


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the master of each trained parameter in *folder*, and the weights of each frozen one, in shape."""
    ranks = len(list(folder.glob("*model_states.pt")))
    trees = [rank_trees(folder, rank)["model_states"] for rank in range(ranks)]
    shapes = {name: shape for group in trees[0]["param_shapes"] for name, shape in group.items()}
    found = {name: kinds["master"].reshape(shapes[name]) for name, kinds in full_tensors(folder).items()}
    for name, shape in (trees[0]["frozen_param_shapes"] or {}).items():
        slices = [
            tree["frozen_param_fragments"][name].detach()[: valid_count(shape, ranks, rank)]
            for rank, tree in enumerate(trees)
        ]
        found[name] = torch.cat(slices).reshape(shape)
    return found


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* as integers of its width: equal exactly when all bits are."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(widths[tensor.element_size()])


def differing(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of all tensors that are not the same: missing, of another type or shape, or other bits."""
    return [
        name
        for name in sorted(expected.keys() | actual.keys())
        if name not in expected
        or name not in actual
        or expected[name].dtype != actual[name].dtype
        or expected[name].shape != actual[name].shape
        or not torch.equal(as_bits(expected[name]), as_bits(actual[name]))
    ]
