"""Run DeepSpeed's own ``zero_to_fp32`` over checkpoints and print what it makes of them.

    DS_ACCELERATOR=cpu python -m tests.deepspeed.consolidate SAVE_DIR:TAG ...

A program of its own, so that pytest never imports deepspeed. The last line on stdout is a JSON object:
for each argument the digest of every tensor, or the error that DeepSpeed raised.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.deepspeed.compare import raw_bytes


def main() -> None:
    """Consolidate every checkpoint named on the command line."""
    print("\n" + json.dumps({argument: digests(*argument.rsplit(":", 1)) for argument in sys.argv[1:]}))


def digests(save_dir: str, tag: str) -> dict[str, str]:
    """Return a digest for each full parameter of one checkpoint."""
    try:
        state = get_fp32_state_dict_from_zero_checkpoint(save_dir, tag)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # DeepSpeed saves settings that its converter cannot read. The composite must fail alike.
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: describe(tensor) for name, tensor in state.items()}


def describe(tensor: torch.Tensor) -> str:
    """Return dtype, shape and digest of *tensor* as one line."""
    digest = hashlib.sha256(raw_bytes(tensor).tobytes()).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"


if __name__ == "__main__":
    main()
