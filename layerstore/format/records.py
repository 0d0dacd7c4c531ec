"""
Commit records and pins: the truth of the store.

A record's id is the xxh3_128 of its body; what was merely observed while committing stands beside the body,
so that the same content saved twice has one name.
"""

from collections.abc import Collection

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.canonical import Plain, pack, pack_again, unpack, unpack_known
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.format.hashing import digest
from layerstore.model import Commit, CommitId, CommitRecord, LayerEntry, Observed, Pin

WITHOUT_MOMENTS = "without-moments"
"""Nothing of the optimizer's is left but its masters: the commit cannot be resumed from."""

# Flags that this version understands; a record with another one is for a newer layerstore.
KNOWN_FLAGS: frozenset[str] = frozenset({WITHOUT_MOMENTS})


def commit_id(record: CommitRecord) -> CommitId:
    """Return the name of *record*."""
    return CommitId(digest(pack(to_plain(record))).hex())


def make_commit(record: CommitRecord, observed: Observed) -> Commit:
    """Give *record* its name."""
    return Commit(id=commit_id(record), record=record, observed=observed)


def seal_commit(commit: Commit, *, name: str, store_id: str) -> bytes:
    """Return the bytes of *commit*'s file, which is called *name*."""
    payload = pack({"body": to_plain(commit.record), "observed": to_plain(commit.observed)})
    return seal(Envelope(store_id=store_id, name=name, payload=payload))


def unseal_commit(data: bytes, *, name: str, store_id: str) -> Commit:
    """
    Read the commit whose file is called *name*.

    Raises:
        IntegrityError: It is damaged, misplaced, or not what its name says.
        Unsupported: It needs a newer layerstore.
    """
    payload = _payload(data, name, store_id, parts={"body", "observed"})
    body = payload["body"]
    _check_flags(body, name)
    return Commit(
        id=_id_of(body),
        record=from_plain(CommitRecord, body, what=name),
        observed=from_plain(Observed, payload["observed"], what=name),
    )


def unseal_entries(
    data: bytes, *, name: str, store_id: str, layers: Collection[str]
) -> tuple[tuple[Plain, Plain, CommitId], dict[str, LayerEntry]]:
    """
    Read of the commit whose file is called *name* run, step and id, and what it says of *layers*.

    Only what is asked for is built: a composite takes a few layers from each of many commits.
    That the file is in canonical form was seen when it was first read in full; the id, which the caller compares,
    says that it is the same.
    """
    packed = unseal(data, name=name, store_id=store_id).payload
    payload = unpack_known(packed, what=name)
    if not isinstance(payload, dict) or payload.keys() != {"body", "observed"}:
        raise IntegrityError(f"{name} does not hold body and observed", path=name)
    body = payload["body"]
    _check_flags(body, name)
    if not isinstance(body, dict) or not isinstance(plain := body.get("layers"), list):
        raise IntegrityError(f"{name} holds no layers", path=name)
    found = {}
    for item in plain:
        name_of = item.get("layer") if isinstance(item, dict) else None
        if not isinstance(name_of, str) or name_of in layers:  # what has no name is no entry, and is told as such
            entry = from_plain(LayerEntry, item, what=name)
            found[entry.layer] = entry
    return (body.get("run"), body.get("step"), _id_within(packed, payload["observed"], name)), found


_BEFORE_BODY, _AFTER_BODY = b"\x82\xa4body", b"\xa8observed"


def _id_within(packed: bytes, observed: Plain, name: str) -> CommitId:
    """Return the id of the body in *packed*, from its bytes as they stand: a map of two, whose first value it is."""
    tail = _AFTER_BODY + pack_again(observed)
    if not (packed.startswith(_BEFORE_BODY) and packed.endswith(tail)):
        raise IntegrityError(f"{name} is not in canonical form", path=name)
    return CommitId(digest(packed[len(_BEFORE_BODY) : -len(tail)]).hex())


def _id_of(body: Plain) -> CommitId:
    return CommitId(digest(pack_again(body)).hex())


def seal_pin(pin: Pin, *, name: str, store_id: str) -> bytes:
    """Return the bytes of *pin*'s file, which is called *name*."""
    return seal(Envelope(store_id=store_id, name=name, payload=pack({"pin": to_plain(pin)})))


def unseal_pin(data: bytes, *, name: str, store_id: str) -> Pin:
    """Read the pin whose file is called *name*; raises as ``unseal_commit`` does."""
    plain = _payload(data, name, store_id, parts={"pin"})["pin"]
    _check_flags(plain.get("record") if isinstance(plain, dict) else None, name)
    return from_plain(Pin, plain, what=name)


def _payload(data: bytes, name: str, store_id: str, *, parts: set[str]) -> dict[str, Plain]:
    payload = unpack(unseal(data, name=name, store_id=store_id).payload, what=name)
    if not isinstance(payload, dict) or payload.keys() != parts:
        raise IntegrityError(f"{name} does not hold {' and '.join(sorted(parts))}", path=name)
    return payload


def _check_flags(body: Plain, name: str) -> None:
    """Look at the flags before any field: what an unknown flag announces may be fields that are unknown too."""
    flags = body.get("flags") if isinstance(body, dict) else None
    unknown = sorted({str(flag) for flag in flags} - KNOWN_FLAGS) if isinstance(flags, list) else []
    if unknown:
        raise Unsupported(
            f"{name} uses {', '.join(unknown)}, which this layerstore does not know", hint="use a newer layerstore"
        )
