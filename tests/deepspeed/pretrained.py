"""Load folders as ``from_pretrained`` does, with whichever Transformers is imported, and say what came of it.

    python -m tests.deepspeed.pretrained FOLDER…

The last line on stdout is a JSON object: for each FOLDER the element type, the keys that loading complained of
(missing, unexpected, of another shape), and a digest of each parameter and buffer by its name in memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def main() -> None:
    """Load all that is asked for."""
    print("\n" + json.dumps({folder: described(Path(folder)) for folder in sys.argv[1:]}))


def described(folder: Path) -> dict[str, Any]:
    """Return what is to be known of the model in *folder*, in the type that its config names."""
    config = json.loads((folder / "config.json").read_text())
    made: Any = getattr(transformers, config["architectures"][0])
    model, told = made.from_pretrained(folder, torch_dtype="auto", output_loading_info=True)
    return {
        "dtype": str(model.dtype),
        "complaints": {key: sorted(map(str, keys)) for key, keys in told.items() if keys},
        "tensors": {name: digest(tensor) for name, tensor in model.state_dict().items()},
    }


def digest(tensor: torch.Tensor) -> str:
    """Return a short hash of the type, the shape and the bits of *tensor*."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
