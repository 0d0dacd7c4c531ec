"""Small checkpoints, and the bytes of folders and stores to compare."""

import hashlib
import json
from pathlib import Path
from typing import Any

from layerstore import Store
from tests.generated import generate

SMALL: dict[str, Any] = {"layers": 2, "hidden": 16, "vocab": 16}


class Checkpoints:
    """Small checkpoints, each another one unless it is asked for again."""

    def __init__(self, folder: Path, **shape: Any) -> None:
        self.folder = folder
        self._shape = {"layers": 2, "hidden": 8, "vocab": 8} | shape

    def __call__(self, step: int, *, seed: int | None = None, **options: Any) -> Path:
        """Return the checkpoint of *step*."""
        seed = step if seed is None else seed
        name = "-".join(map(str, (step, seed, *options.values())))
        return generate(self.folder / name, step=step, seed=seed, **self._shape | options)

    def into(self, store: Store, *steps: int, run: str = "r", **options: Any) -> None:
        """Ingest the checkpoints of *steps* into *store*."""
        for step in steps:
            store.ingest(self(step), run=run, **options)


def checkpoint(folder: Path, **options: Any) -> Path:
    """Write a small checkpoint of run ``sft`` below *folder*."""
    step = options.get("step", 2)
    return generate(folder / "sft" / f"checkpoint-{step}", **SMALL | options)


def digests(folder: Path, *, leave_out: str = "") -> dict[str, str]:
    """Return the hash of every file below *folder*."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        # What a composite is made of lies beside its shards, and is not part of the checkpoint.
        if path.is_file() and path.name != "layerstore.json" and not (leave_out and path.name.endswith(leave_out))
    }


def snapshot(store: Store) -> dict[str, str]:
    """Return the hash of every file of the store that is truth."""
    return {
        name: digest
        for name, digest in digests(store.path).items()
        if name.split("/")[0] in {"objects", "commits", "pins", "store.json", "tmp"}
    }


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and where its payload begins."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def change_gathered(folder: Path, name: str, *, offset: int = 0) -> None:
    """Change one byte of the gathered tensor *name*."""
    path = folder / "model.safetensors"
    header, payload = header_of(path)
    position = payload + header[name]["data_offsets"][0] + offset
    data = bytearray(path.read_bytes())
    data[position] ^= 0x01
    path.write_bytes(data)


def tensors_of(path: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor in a safetensors file."""
    data = path.read_bytes()
    header, payload = header_of(path)
    header.pop("__metadata__", None)
    return {name: data[slice(*(payload + at for at in entry["data_offsets"]))] for name, entry in header.items()}
