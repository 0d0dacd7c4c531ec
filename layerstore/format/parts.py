"""Parts: what each rank leaves for the one that commits."""

from collections.abc import Callable
from typing import TypeVar

from layerstore.errors import IntegrityError
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.model import Part

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


def part_name(session: str, save: int, rank: int) -> str:
    """Return where a part belongs, below the store."""
    return f"parts/{session}/{save}.{rank}"


def seal_part(part: Part, *, store_id: str) -> bytes:
    """Return the bytes of *part*'s file."""
    return wrap(part, kind="part", name=part_name(part.session, part.save, part.rank), store_id=store_id)


def unseal_part(data: bytes, *, name: str, store_id: str) -> Part:
    """
    Read the part whose file is called *name*.

    Raises:
        IntegrityError: It is damaged or misplaced.
    """
    return unwrap(
        Part,
        data,
        kind="part",
        name=name,
        store_id=store_id,
        name_of=lambda part: part_name(part.session, part.save, part.rank),
        other="rank's part, or another save's",
    )
