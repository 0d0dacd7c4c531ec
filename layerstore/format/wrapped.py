"""One value in an envelope of its own: what parts and plans of collections are on disk."""

from typing import TypeVar

from layerstore.errors import IntegrityError
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain

Value = TypeVar("Value")


def wrap(value: object, *, kind: str, name: str, store_id: str) -> bytes:
    """Return the bytes of the file *name*, which holds *value*, a *kind*."""
    return seal(Envelope(store_id=store_id, name=name, payload=pack({kind: to_plain(value)})))


def unwrap(cls: type[Value], data: bytes, *, kind: str, name: str, store_id: str) -> Value:
    """
    Read the *kind* that the file *name* holds.

    Raises:
        IntegrityError: It is damaged, misplaced, or something else.
    """
    plain = unpack(unseal(data, name=name, store_id=store_id).payload, what=name)
    if not isinstance(plain, dict) or plain.keys() != {kind}:
        raise IntegrityError(f"{name} holds no {kind}", path=name)
    return from_plain(cls, plain[kind], what=name)
