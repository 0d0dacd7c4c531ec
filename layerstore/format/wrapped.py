"""One value in an envelope of its own: what parts, plans of collections and logs of repairs are on disk."""

from collections.abc import Callable
from typing import TypeVar

from layerstore.errors import IntegrityError
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain

Value = TypeVar("Value")


def wrap(value: object, *, kind: str, name: str, store_id: str) -> bytes:
    """Return the bytes of the file *name*, which holds *value*, a *kind*."""
    return seal(Envelope(store_id=store_id, name=name, payload=pack({kind: to_plain(value)})))


def unwrap(
    cls: type[Value],
    data: bytes,
    *,
    kind: str,
    name: str,
    store_id: str,
    name_of: Callable[[Value], str],
    other: str,
) -> Value:
    """
    Read the *kind* that the file *name* holds.

    *name_of* says where the value itself belongs, and *other* in words what another one of them is.

    Raises:
        IntegrityError: It is damaged, misplaced, or something else.
    """
    plain = unpack(unseal(data, name=name, store_id=store_id).payload, what=name)
    if not isinstance(plain, dict) or plain.keys() != {kind}:
        raise IntegrityError(f"{name} holds no {kind}", path=name)
    value = from_plain(cls, plain[kind], what=name)
    if name_of(value) != name:
        raise IntegrityError(f"{name} holds another {other}", path=name)
    return value
