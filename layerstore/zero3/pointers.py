"""
Pointer files: what lies in a checkpoint's folder where its state is in a store.

Each is a small ``.pt`` file that cannot be loaded: whoever tries without layerstore, with ``torch.load`` or through
an engine, gets an error whose text says what the file is and how to write the checkpoint out.
"""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.limits import MIB
from layerstore.tree import Inert, Tree
from layerstore.zero3.ptfile import layout_pt, read_pt

_KEY = "layerstore"
_WORDS = "this file cannot be loaded"
# A pointer has two kilobytes, and a few hundred bytes more for each layer of a mixture; a shard of a real model,
# megabytes.
_SIZE_BYTES_MAX = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Where a checkpoint's state is."""

    store: str
    store_id: str
    name: str
    """The reference that means it, for people; of a pin its name."""
    run: str
    attempt: int
    step: int
    is_pin: bool = False
    policy: str = "latest"
    layers: Tree = None
    """The entry of every layer where they are not the commit's own, else None."""

    @property
    def command(self) -> str:
        """What writes the checkpoint out."""
        policy = f" --policy {self.policy}" if self.layers is not None else ""
        return f"layerstore compose {self.name}{policy} -o FOLDER --store {self.store}"


def pointer_bytes(pointer: Pointer, *, stem: str) -> bytes:
    """Return the bytes of a pointer file that is called *stem*."""
    words = (
        f"{stem}.pt is a pointer: the state is in the layerstore {pointer.store} as {pointer.name}. "
        f"Attach a saver before loading it, or write it out with: {pointer.command}"
    )
    # No device has such a name. That is the one error which torch raises in these words with weights_only and without.
    tree: dict[Tree, Tree] = {
        _KEY: dict(asdict(pointer).items()),
        _WORDS: Inert(name="torch.device", arguments=(words,)),
    }
    layout = layout_pt(tree, name=stem, alignment_bytes=64)
    data = bytearray(layout.size_bytes)
    for offset, part in layout.skeleton({}):
        data[offset : offset + len(part)] = part
    return bytes(data)


def read_pointer(path: Path) -> Pointer | None:
    """Return what *path* points at, None if it is no pointer."""
    try:
        if not path.is_file() or path.stat().st_size > _SIZE_BYTES_MAX:
            return None
        tree = read_pt(path).tree
    except (LayerstoreError, OSError):
        return None  # whatever it is, it is no file of ours: its own loader says what is wrong with it
    fields = tree.get(_KEY) if isinstance(tree, dict) and _WORDS in tree else None
    if not isinstance(fields, dict):
        return None
    try:
        pointer = Pointer(**{str(key): value for key, value in fields.items()})  # type: ignore[arg-type]  # looked at next
        for field in dataclasses.fields(Pointer):
            value = getattr(pointer, field.name)
            if isinstance(field.type, type) and type(value) is not field.type:  # a tree may be anything
                raise TypeError(f"its {field.name} is a {type(value).__name__}")
    except TypeError as exc:
        raise InvalidInput(
            f"{path} is a pointer of another version of layerstore: {exc}",
            hint="use the version that wrote it, or make it again",
        ) from exc
    return pointer


def refuse_pointer(path: Path) -> None:
    """Raise InvalidInput if *path*, which is asked for as a shard, is a pointer."""
    pointer = read_pointer(path)
    if pointer is not None:
        raise InvalidInput(
            f"{path.parent} holds pointers, no shards: the state is in the store {pointer.store} as {pointer.name}",
            hint=f"it need not be ingested; shards of it: {pointer.command}",
        )
