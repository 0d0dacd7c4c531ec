"""
Pointer files: what lies in a checkpoint's folder where its state is in a store.

Each is a small ``.pt`` file that torch can read, so that whoever loads it without layerstore is told what it is:
its one tensor has a name that says so, and a loader names what it did not expect.
"""

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.limits import MIB
from layerstore.storage.files import Files
from layerstore.tree import OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3.ptfile import layout_pt, read_pt

_KEY = "layerstore"
# A pointer has two kilobytes; a shard of a real model, megabytes.
_SIZE_BYTES_MAX = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Where a checkpoint's state is."""

    store: str
    store_id: str
    run: str
    attempt: int
    step: int

    @property
    def name(self) -> str:
        """Its commit, for people."""
        return f"{self.run}@{self.step}"


def pointer_bytes(pointer: Pointer, *, stem: str) -> bytes:
    """Return the bytes of a pointer file that is called *stem*."""
    words = (
        f"this file is a pointer: the state is in the layerstore {pointer.store} as {pointer.name}. Attach a saver "
        f"before loading it, or write it out with: layerstore compose {pointer.name} -o FOLDER --store {pointer.store}"
    )
    storage = Storage(dtype="F32", elements=0, device="cpu", content=b"")
    empty = Tensor(storage=storage, offset=0, shape=Size((0,)), stride=(1,))
    fields: dict[Tree, Tree] = dict(asdict(pointer).items())
    tree: dict[Tree, Tree] = {"module": OrderedMap({words: empty}), _KEY: fields}
    layout = layout_pt(tree, name=stem, alignment_bytes=64)
    data = bytearray(layout.size_bytes)
    for offset, part in layout.skeleton({}):
        data[offset : offset + len(part)] = part
    return bytes(data)


def write_pointer(files: Files, path: Path, pointer: Pointer) -> None:
    """Let *path* be a pointer; whatever was there is replaced whole."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    with files.create(partial) as file:
        file.write_at(0, pointer_bytes(pointer, stem=path.stem))
    files.rename(partial, path)


def read_pointer(path: Path) -> Pointer | None:
    """Return what *path* points at, None if it is no pointer."""
    try:
        if not path.is_file() or path.stat().st_size > _SIZE_BYTES_MAX:
            return None
        tree = read_pt(path).tree
    except (LayerstoreError, OSError):
        return None  # whatever it is, it is no file of ours: its own loader says what is wrong with it
    fields = tree.get(_KEY) if isinstance(tree, dict) else None
    if not isinstance(fields, dict):
        return None
    try:
        return Pointer(**{str(key): value for key, value in fields.items()})  # type: ignore[arg-type]  # checked below
    except TypeError as exc:
        raise InvalidInput(f"{path} is a pointer of another version of layerstore: {exc}") from exc
