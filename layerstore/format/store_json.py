"""
``store.json``: the file that makes a folder a store.

It is JSON so that people can read it, with a checksum over its canonical text so that programs can trust it. The field
``format`` exists in every format, so that any layerstore, past or future, can decide whether to read on; a later format
may state in ``needs`` which layerstore reads it.
"""

import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.fields import from_plain
from layerstore.hashing import digest
from layerstore.json_text import parse_json

FORMAT = 2
HASH = "xxh3_128"
# A writer must know all flags of a store; a reader may ignore unknown ones.
KNOWN_FLAGS: frozenset[str] = frozenset()
# Room for a version number and no more, because the text is printed, and another layerstore wrote it.
_NEEDS_SIGNS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """The facts that are fixed when a store is made."""

    format: int
    store_id: str = field(metadata={"check": "id"})
    """32 random hex digits; index folders are named after it."""
    hash: str
    """The algorithm that gives objects their ids."""
    created: str
    """When the store was made, by its maker's clock; only people use this."""
    flags: tuple[str, ...] = ()

    @property
    def unknown_flags(self) -> list[str]:
        """Flags that this layerstore does not know; if there are any, it may read this store, but not write to it."""
        return sorted(set(self.flags) - KNOWN_FLAGS)

    @classmethod
    def new(cls, *, created: str) -> Self:
        """Make the identity of a new store."""
        return cls(format=FORMAT, store_id=secrets.token_hex(16), hash=HASH, created=created)

    def encode(self) -> bytes:
        """Return the text of ``store.json``."""
        fields = asdict(self) | {"flags": list(self.flags)}
        return (json.dumps(fields | {"checksum": _checksum(fields)}, indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, *, what: str) -> Self:
        """
        Decode the text of a ``store.json``; errors refer to it as *what*.

        Raises:
            Unsupported: The store has a different format.
            IntegrityError: ``store.json`` is damaged.
        """
        fields = _parse(data, what)
        # Checked before the checksum, which a newer format may compute differently.
        stated = fields.get("format")
        if isinstance(stated, int) and not isinstance(stated, bool) and stated != FORMAT:
            _check_format(fields, what)
            raise _other_format(fields, what, known=FORMAT)
        if fields.pop("checksum", None) != _checksum(fields):
            raise _damaged(what, "its checksum does not match")
        try:
            identity = from_plain(cls, fields, what="its content")
        except IntegrityError as exc:
            raise _damaged(what, exc.message) from exc
        if identity.hash != HASH:
            raise Unsupported(f"{what} names its objects by {identity.hash!r}; this layerstore knows {HASH}")
        # No change may go unnoticed, not even one of spelling, which the checksum does not cover.
        if identity.encode() != data:
            raise _damaged(what, "it is not as it was written")
        return identity


def format_of(data: bytes, *, what: str, known: int = FORMAT) -> int:
    """
    Return the format that the ``store.json`` *data* states, without checking the other fields.

    Raises:
        Unsupported: The format is newer than *known*.
        IntegrityError: No format is stated, or its number is damaged.
    """
    fields = _parse(data, what)
    stated = fields.get("format")
    if not isinstance(stated, int) or isinstance(stated, bool):
        raise _damaged(what, f"its format is {stated!r}")
    if stated != FORMAT:
        _check_format(fields, what)
    if stated > known:
        raise _other_format(fields, what, known=known)
    return stated


def stated_flags(data: bytes) -> tuple[str, ...] | None:
    """Return the flags that can still be read from a damaged ``store.json``; None if none can."""
    try:
        flags = _parse(data, "store.json").get("flags")
    except IntegrityError:
        return None
    return tuple(flag for flag in flags if isinstance(flag, str)) if isinstance(flags, list) else None


def _check_format(fields: dict[str, Any], what: str) -> None:
    """Raise IntegrityError if the checksum fits the current format: the format number itself is then damaged."""
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    if fields.get("checksum") == _checksum(rest | {"format": FORMAT}):
        raise _damaged(what, f"its format is {fields['format']}, but its checksum fits format {FORMAT}")


def _other_format(fields: dict[str, Any], what: str, *, known: int) -> Unsupported:
    stated, needs = fields["format"], fields.get("needs")
    if stated < known:
        hint = "layerstore migrate"
    elif isinstance(needs, str) and 0 < len(needs) <= _NEEDS_SIGNS_MAX:
        hint = f"it needs layerstore >= {needs}"
    else:
        hint = "use a newer layerstore"
    return Unsupported(
        f"{what} is a store of format {stated}; this layerstore reads format {known}; nothing was changed", hint=hint
    )


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        fields = parse_json(data)
    except ValueError as exc:
        raise _damaged(what, f"it is not JSON ({exc})") from exc
    if not isinstance(fields, dict):
        raise _damaged(what, "it is not a JSON object")
    return fields


def _damaged(what: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{what} is damaged: {reason}; the objects and commits are not affected",
        hint="put back a copy; only a migration changes it after init",
    )


def _checksum(fields: dict[str, Any]) -> str:
    return digest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hex()
