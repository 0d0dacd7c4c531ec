"""Load exports with Transformers and print what comes of it.

    python -m tests.deepspeed.pretrained FOLDER ...

A program of its own, so that pytest never imports transformers. The last line on stdout is a JSON object:
for each folder the element type, what loading complained about, and a digest of the logits of fixed tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.deepspeed.compare import raw_bytes
from tests.deepspeed.models import VOCABULARY


def main() -> None:
    """Describe every folder named on the command line."""
    print("\n" + json.dumps({folder: describe(folder) for folder in sys.argv[1:]}))


def describe(folder: str) -> dict[str, Any]:
    """Return what loading *folder* gave."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, info = loaded
    tokens = torch.arange(24).reshape(2, 12) % VOCABULARY
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    return {
        "dtype": str(model.dtype),
        "complaints": {kind: sorted(map(str, found)) for kind, found in info.items() if found},
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "logits": hashlib.sha256(raw_bytes(logits).tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    main()
