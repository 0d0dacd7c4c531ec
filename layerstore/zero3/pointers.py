"""
Pointer files: small files that replace shards, or FSDP's files, while the state itself is in a store.

Without layerstore, loading a pointer (with ``torch.load``, an engine or ``torch.distributed.checkpoint``) fails with an
error that explains what the file is and how to write the checkpoint out.
"""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.filenames import DCP_METADATA
from layerstore.limits import MIB
from layerstore.source import read_source_file
from layerstore.tree import Inert, Tree
from layerstore.zero3.pt import OF_DCP_METADATA, layout_pt, read_pickle, read_pt, write_pickle

_KEY = "layerstore"
_WORDS = "this file cannot be loaded"
# A pointer takes two kilobytes, plus a few hundred bytes per layer of a mixture. Real shards take megabytes.
_SIZE_BYTES_MAX = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The store and the composite that hold a checkpoint's state."""

    store: str
    store_id: str
    name: str
    """The composite's reference, or the name of its pin."""
    run: str
    attempt: int
    step: int
    is_pin: bool = False
    policy: str = "latest"
    layers: Tree = None
    """The entry of every layer; None if all layers are the commit's own."""

    @property
    def command(self) -> str:
        """The command that writes the checkpoint out."""
        policy = f" --policy {self.policy}" if self.layers is not None else ""
        return f"layerstore compose {self.name}{policy} -o FOLDER --store {self.store}"


def pointer_bytes(pointer: Pointer, path: Path) -> bytes:
    """Return the bytes of the pointer file *path*: for DCP's metadata file, a bare pickle, as DCP expects."""
    is_metadata = path.name == DCP_METADATA
    name = path.parent.name if is_metadata else path.name
    words = (
        f"{name} is a pointer: the state is in the layerstore {pointer.store} as {pointer.name}. "
        f"Attach a saver before loading it, or write it out with: {pointer.command}"
    )
    # No device has this name, so loading fails, with the name in its message. No other error of torch has the same
    # message with and without weights_only.
    tree: dict[Tree, Tree] = {
        _KEY: dict(asdict(pointer).items()),
        _WORDS: Inert(name="torch.device", arguments=(words,)),
    }
    if is_metadata:
        return write_pickle(tree, protocol=OF_DCP_METADATA.protocol)[0]
    layout = layout_pt(tree, name=path.stem, alignment_bytes=64)
    data = bytearray(layout.size_bytes)
    for offset, part in layout.skeleton({}):
        data[offset : offset + len(part)] = part
    return bytes(data)


def read_pointer(path: Path) -> Pointer | None:
    """Return the pointer in *path*, None if it is not a pointer file."""
    try:
        if not path.is_file() or path.stat().st_size > _SIZE_BYTES_MAX:
            return None
        payload = read_source_file(path, size_bytes_max=_SIZE_BYTES_MAX)
        if _KEY.encode() not in payload:
            return None  # a shard: not parsed here, since the shard reader parses it anyway
        if path.name == DCP_METADATA:
            tree, _ = read_pickle(payload, path=path, records={}, form=OF_DCP_METADATA)
        else:
            tree = read_pt(path).tree
    except (LayerstoreError, OSError):
        return None  # not a pointer; the shard reader will report what is wrong with it
    fields = tree.get(_KEY) if isinstance(tree, dict) and _WORDS in tree else None
    if not isinstance(fields, dict):
        return None
    try:
        pointer = Pointer(**{str(key): value for key, value in fields.items()})  # type: ignore[arg-type]  # checked next
        for field in dataclasses.fields(Pointer):
            value = getattr(pointer, field.name)
            if isinstance(field.type, type) and type(value) is not field.type:  # Tree allows any type
                raise TypeError(f"its {field.name} is a {type(value).__name__}")
    except TypeError as exc:
        raise InvalidInput(
            f"{path} is a pointer of another version of layerstore: {exc}",
            hint="use the version that wrote it, or write the pointer again",
        ) from exc
    return pointer


def refuse_pointer(path: Path) -> None:
    """Raise InvalidInput if *path* is a pointer instead of a shard."""
    pointer = read_pointer(path)
    if pointer is not None:
        raise InvalidInput(
            f"{path.parent} holds pointers instead of shards: the state is in the store "
            f"{pointer.store} as {pointer.name}",
            hint=f"the checkpoint is in the store already; to write its shards: {pointer.command}",
        )
