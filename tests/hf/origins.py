"""
Follow tensors without elements through what Transformers does to weights, and hold them against real ones.

    python -m tests.hf.origins

The last line on stdout is a JSON object: by name, whether both have the same elements in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from layerstore.hf.saved_names import Origins

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CHANGES: dict[str, Change] = {
    "itself": lambda a, b: a,
    "chunk": lambda a, b: torch.chunk(a, 2, dim=1)[1].contiguous(),
    "unstacked": lambda a, b: torch.chunk(a, 2, dim=0)[1].squeeze(0),
    "unstacked chunk": lambda a, b: torch.chunk(torch.chunk(a, 2, dim=1)[1].contiguous(), 2, dim=0)[1].squeeze(0),
    "turned": lambda a, b: torch.transpose(a, 1, 2).contiguous(),
    "interleaved": lambda a, b: a.reshape(2, 2, 2, 3).transpose(1, 2).reshape(a.shape).contiguous(),
    "joined": lambda a, b: torch.cat([a, b], dim=0),
    "joined inside": lambda a, b: torch.cat([a, b], dim=1),
    "joined at the end": lambda a, b: torch.cat([b, a], dim=-1),
    "stacked": lambda a, b: torch.stack([a, b], dim=1),
    "joined, then cut": lambda a, b: torch.cat([a, b], dim=1)[:, 3:6].contiguous(),
    "flat": lambda a, b: a.transpose(0, 2).flatten(),
}


def main() -> None:
    """Try all changes."""
    real = {"a": torch.arange(24).reshape(2, 4, 3), "b": torch.arange(24, 48).reshape(2, 4, 3)}
    flat = {name: tensor.flatten() for name, tensor in real.items()}
    same = {}
    for name, change in CHANGES.items():
        expected = change(real["a"], real["b"])
        unreal = {of: torch.empty(tensor.shape, device="meta") for of, tensor in real.items()}
        with Origins(unreal) as origins:
            made = change(unreal["a"], unreal["b"])
            runs = origins.runs(made)
        found = torch.cat([flat[of][start : start + count] for of, start, count in runs])
        same[name] = made.shape == expected.shape and torch.equal(found, expected.flatten())
    print("\n" + json.dumps(same))


if __name__ == "__main__":
    main()
