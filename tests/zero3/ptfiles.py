"""Write and compare ``.pt`` files in tests: what the store does with a layout, in a few lines."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

from isal import isal_zlib

from layerstore.limits import PAGE_BYTES
from layerstore.tree import Inert, Located, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3.pt import layout_pt, read_pt


def held(storage: Storage) -> bytes:
    """Return the bytes of *storage*, wherever it keeps them."""
    if isinstance(storage.content, Located):
        with storage.content.path.open("rb") as file:
            file.seek(storage.content.offset_bytes)
            return file.read(storage.content.size_bytes)
    assert isinstance(storage.content, bytes)
    return storage.content


def write_pt(
    path: Path,
    tree: Tree,
    *,
    payload: Callable[[Storage], bytes] = held,
    alignment_bytes: int = PAGE_BYTES,
) -> Path:
    """Write *tree* to *path*, payloads first, and check that nothing is left out or written twice."""
    layout = layout_pt(tree, name=path.stem, alignment_bytes=alignment_bytes)
    payloads = {storage: payload(storage) for storage, _ in layout.storages}
    pieces = [(offset, payloads[storage]) for storage, offset in layout.storages if payloads[storage]]
    pieces += layout.skeleton({storage: isal_zlib.crc32(raw) for storage, raw in payloads.items()})
    position = 0
    with path.open("wb") as file:
        for offset, raw in sorted(pieces):
            assert position == offset
            position += file.write(raw)
    assert layout.size_bytes == position
    return path


def change_tree(path: Path, change: Callable[[dict[Tree, Tree]], object]) -> None:
    """Let *change* alter the tree of a ``.pt`` file."""
    tree = cast("dict[Tree, Tree]", read_pt(path).tree)
    change(tree)
    aside = path.parent / "aside" / path.name
    aside.parent.mkdir()
    write_pt(aside, tree)
    aside.replace(path)
    aside.parent.rmdir()


def fingerprint(tree: Tree) -> object:
    """Return a plain value that is equal for equal trees: types, order, float bits and sharing included."""
    return _fingerprint(tree, {})


def _fingerprint(node: Tree, storages: dict[Storage, int]) -> object:
    def inner(part: Tree) -> object:
        return _fingerprint(part, storages)

    def entries(mapping: dict[Tree, Tree] | None) -> object:
        return None if mapping is None else [(inner(key), inner(value)) for key, value in mapping.items()]

    value: object = node
    match node:
        case float():
            value = struct.pack(">d", node)
        case OrderedMap():
            value = (entries(node), entries(node.attributes))
        case dict():
            value = entries(node)
        case Size() | tuple() | list():
            value = [inner(part) for part in node]
        case set():
            value = sorted(repr(inner(part)) for part in node)
        case Inert():
            made = (node.name, node.made_by_new, inner(node.arguments))
            value = (made, node.has_state, inner(node.state), inner(node.appended), entries(node.items))
        case Tensor():
            number = storages.setdefault(node.storage, len(storages))
            storage = (number, node.storage.dtype, node.storage.elements, node.storage.device)
            view = (node.offset, inner(node.shape), inner(node.stride), node.requires_grad, node.is_parameter)
            value = (storage, view, entries(node.attributes), held(node.storage))
    return (type(node).__name__, value)
