"""
``store.json``: what makes a folder a store.

JSON so that a person can read it, with a checksum over its canonical text so that a program can trust it.
The field ``format`` never moves: every version of layerstore, past or future, can tell whether it may read on.
"""

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.hashing import digest

FORMAT = 1
HASH = "xxh3_128"
# A writer must know all flags of a store; a reader may go on if it does not.
KNOWN_FLAGS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """What is fixed when a store is made."""

    format: int
    store_id: str
    """32 random hex digits."""
    hash: str
    """The algorithm that names objects."""
    created: str
    """When, by the maker's clock; for people."""
    flags: tuple[str, ...] = ()

    @property
    def unknown_flags(self) -> list[str]:
        """Flags that this layerstore does not know: it may read this store, not write to it."""
        return sorted(set(self.flags) - KNOWN_FLAGS)


def new_identity(*, created: str) -> StoreIdentity:
    """Make the identity of a new store."""
    return StoreIdentity(format=FORMAT, store_id=secrets.token_hex(16), hash=HASH, created=created)


def encode_identity(identity: StoreIdentity) -> bytes:
    """Return the text of *identity*."""
    fields = asdict(identity) | {"flags": list(identity.flags)}
    return (json.dumps(fields | {"checksum": _checksum(fields)}, indent=2, sort_keys=True) + "\n").encode()


def decode_identity(data: bytes, *, what: str) -> StoreIdentity:
    """
    Read the text of a ``store.json``, called *what* in errors.

    Raises:
        Unsupported: It is of another format.
        IntegrityError: It is damaged.
    """
    fields = _parse(data, what)
    found = fields.get("format")
    # Before the checksum: a newer format may compute it differently, and must still be recognised.
    if isinstance(found, int) and not isinstance(found, bool) and found != FORMAT:
        raise Unsupported(
            f"{what} is a store of format {found}; this layerstore reads format {FORMAT}; nothing was changed",
            hint="use a newer layerstore" if found > FORMAT else "layerstore migrate",
        )
    if fields.pop("checksum", None) != _checksum(fields):
        raise _damaged(what, "its checksum does not match")
    try:
        identity = StoreIdentity(**fields | {"flags": tuple(fields["flags"])})
    except (TypeError, KeyError) as exc:
        raise _damaged(what, str(exc)) from exc
    if identity.hash != HASH:
        raise Unsupported(f"{what} names its objects by {identity.hash!r}; this layerstore knows {HASH}")
    # Spelled differently, it is not what was written: no byte of it may change unseen.
    if encode_identity(identity) != data:
        raise _damaged(what, "it is not as it was written")
    return identity


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _damaged(what, f"it is not JSON ({exc})") from exc
    if not isinstance(fields, dict):
        raise _damaged(what, "it is not a JSON object")
    return fields


def _damaged(what: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{what} is damaged: {reason}; the objects and commits beside it are not affected",
        hint="put back a copy of this file; it never changes after init",
    )


def _checksum(fields: dict[str, Any]) -> str:
    return digest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hex()
