"""
Commit records, pins and parts: what envelopes hold.

A record's id is the xxh3_128 of its body; what was merely observed while committing stands beside the body,
so that the same content saved twice has one name. A part is what one rank leaves for the rank that commits.
"""

from collections.abc import Collection

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format.canonical import Plain, pack, pack_again, unpack, unpack_known
from layerstore.format.envelope import seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.format.hashing import digest
from layerstore.model import Commit, CommitId, CommitRecord, LayerEntry, Observed, Part, Pin

WITHOUT_MOMENTS = "without-moments"
"""Nothing of the optimizer's is left but its masters: the commit cannot be resumed from."""

# A record with another flag is for a newer layerstore.
KNOWN_FLAGS: frozenset[str] = frozenset({WITHOUT_MOMENTS})


# -- commits -------------------------------------------------------------------------------------------------------


def commit_id(record: CommitRecord) -> CommitId:
    """Return the name of *record*."""
    return CommitId(digest(pack(to_plain(record))).hex())


def make_commit(record: CommitRecord, observed: Observed) -> Commit:
    """Give *record* its name."""
    return Commit(id=commit_id(record), record=record, observed=observed)


def seal_commit(commit: Commit, *, name: str, store_id: str) -> bytes:
    """Return the bytes of *commit*'s file, which is called *name*."""
    payload = pack({"body": to_plain(commit.record), "observed": to_plain(commit.observed)})
    return seal(payload, name=name, store_id=store_id)


def unseal_commit(data: bytes, *, name: str, store_id: str) -> Commit:
    """
    Read the commit whose file is called *name*.

    Raises:
        IntegrityError: It is damaged, misplaced, or not what its name says.
        Unsupported: It needs a newer layerstore.
    """
    payload = _fields_of(unpack(unseal(data, name=name, store_id=store_id), what=name), name, "body", "observed")
    body = payload["body"]
    _check_flags(body, name)
    return Commit(
        id=CommitId(digest(pack_again(body)).hex()),
        record=from_plain(CommitRecord, body, what=name),
        observed=from_plain(Observed, payload["observed"], what=name),
    )


def unseal_entries(
    data: bytes, *, name: str, store_id: str, layers: Collection[str]
) -> tuple[tuple[Plain, Plain, CommitId], dict[str, LayerEntry]]:
    """
    Return run, step and id of the commit whose file is called *name*, and what it says of *layers*.

    Only what is asked for is built: a composite takes a few layers from each of many commits.
    Canonical form was checked when the file was first read in full; the id, which the caller compares, says that it
    is the same.
    """
    packed = unseal(data, name=name, store_id=store_id)
    payload = _fields_of(unpack_known(packed, what=name), name, "body", "observed")
    body = payload["body"]
    _check_flags(body, name)
    if not isinstance(body, dict) or not isinstance(plain := body.get("layers"), list):
        raise IntegrityError(f"{name} holds no layers", path=name)
    found = {}
    for item in plain:
        layer = item.get("layer") if isinstance(item, dict) else None
        if not isinstance(layer, str) or layer in layers:  # from_plain reports an entry without a name
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


# -- pins and parts ------------------------------------------------------------------------------------------------


def seal_pin(pin: Pin, *, name: str, store_id: str) -> bytes:
    """Return the bytes of *pin*'s file, which is called *name*."""
    return seal(pack({"pin": to_plain(pin)}), name=name, store_id=store_id)


def unseal_pin(data: bytes, *, name: str, store_id: str) -> Pin:
    """Read the pin whose file is called *name*; raises as ``unseal_commit`` does."""
    plain = _fields_of(unpack(unseal(data, name=name, store_id=store_id), what=name), name, "pin")["pin"]
    _check_flags(plain.get("record") if isinstance(plain, dict) else None, name)
    return from_plain(Pin, plain, what=name)


def part_name(session: str, save: int, rank: int) -> str:
    """Return where a part belongs, below the store."""
    return f"parts/{session}/{save}.{rank}"


def seal_part(part: Part, *, store_id: str) -> bytes:
    """Return the bytes of *part*'s file."""
    return seal(pack({"part": to_plain(part)}), name=part_name(part.session, part.save, part.rank), store_id=store_id)


def unseal_part(data: bytes, *, name: str, store_id: str) -> Part:
    """Read the part whose file is called *name*; raises IntegrityError where it is damaged or misplaced."""
    plain = _fields_of(unpack(unseal(data, name=name, store_id=store_id), what=name), name, "part")["part"]
    part = from_plain(Part, plain, what=name)
    if part_name(part.session, part.save, part.rank) != name:
        raise IntegrityError(f"{name} holds another rank's part, or another save's", path=name)
    return part


# ------------------------------------------------------------------------------------------------------------------


def _fields_of(payload: Plain, name: str, *expected: str) -> dict[str, Plain]:
    if not isinstance(payload, dict) or payload.keys() != set(expected):
        raise IntegrityError(f"{name} does not hold {' and '.join(expected)}", path=name)
    return payload


def _check_flags(body: Plain, name: str) -> None:
    """Look at the flags before any field: an unknown flag may announce fields that are unknown too."""
    flags = body.get("flags") if isinstance(body, dict) else None
    unknown = sorted({str(flag) for flag in flags} - KNOWN_FLAGS) if isinstance(flags, list) else []
    if unknown:
        raise Unsupported(
            f"{name} uses {', '.join(unknown)}, which this layerstore does not know", hint="use a newer layerstore"
        )
