"""
From format 1 to format 2: a record holds its attempt's whole lineage, and dropped commits are in ``trash/``.

In format 1, a record hid a commit by listing it in ``supersedes``; a record without layers could be made just for that.
Format 2 has no records without layers, and hidden commits are in ``trash/commits/``. A record's id is the hash of its
body, so all ids change, including those in ``supersedes`` and in a pin's ``base``. Objects stay the same, byte for
byte.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TypeAlias, cast

from layerstore.errors import IntegrityError, Unsupported
from layerstore.format import Plain, pack, unpack
from layerstore.hashing import digest
from layerstore.migrations.step import Older, Step

Body: TypeAlias = dict[str, Plain]

_MAGIC = b"\x89LSR\r\n\x1a\n"
_HEAD = struct.Struct(">8sH16sH")
_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 16
_OLD, _NEW = 1, 2
"""The numbers of the formats, which are also the schemas of their envelopes."""

_RECORD = re.compile(r"(?:0|[1-9][0-9]{0,18})\.([0-9a-f]{32})")
_FIELDS = frozenset(
    "run attempt fork step save_number world_size layers states layout policy supersedes flags".split()  # noqa: SIM905
)
_FLAGS = frozenset({"without-moments"})

_WAY_ON = "with layerstore 0.1: repair heals it or moves it away, drop or pin --delete removes it"


# -- store.json ----------------------------------------------------------------------------------------------------


def identity_text(fields: Mapping[str, object]) -> bytes:
    """Return the text of a ``store.json``, whose form is the same in both formats."""
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return (json.dumps({**fields, "checksum": digest(plain).hex()}, indent=2, sort_keys=True) + "\n").encode()


def identity_fields(data: bytes, *, number: int) -> dict[str, object]:
    """Return the fields of the ``store.json`` *data* of format *number*, without its checksum."""
    fields = cast("dict[str, object]", json.loads(data))
    fields.pop("checksum", None)
    if fields.get("format") != number or identity_text(fields) != data:
        raise IntegrityError(
            "store.json is damaged: its checksum does not match; nothing was changed", hint="put back a copy of it"
        )
    if fields["flags"]:
        raise Unsupported(f"store.json has the flags {fields['flags']}, which format {number} does not have")
    return fields


def _identity(data: bytes) -> bytes:
    return identity_text(identity_fields(data, number=_OLD) | {"format": _NEW})


# -- envelopes -----------------------------------------------------------------------------------------------------


def seal(payload: Plain, *, name: str, store_id: str, schema: int = _NEW) -> bytes:
    """Return the envelope of *payload*, whose maps are sorted, for the file *name*."""
    packed = pack(payload)
    head = _HEAD.pack(_MAGIC, schema, bytes.fromhex(store_id), len(name.encode()))
    body = head + name.encode() + _LENGTH.pack(len(packed)) + packed
    return body + digest(body)


def unseal(data: bytes, *, name: str, store_id: str, schema: int = _OLD) -> Body:
    """Return the payload of the envelope *data*, found under *name*."""
    body, checksum = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest(body) != checksum or len(body) < _HEAD.size:
        raise _damaged(name, "its checksum does not match its bytes")
    magic, found_schema, found_id, name_bytes = _HEAD.unpack_from(body)
    if (magic, found_id.hex()) != (_MAGIC, store_id) or body[_HEAD.size : _HEAD.size + name_bytes] != name.encode():
        raise _damaged(name, "it does not belong here")
    if found_schema != schema:
        raise Unsupported(f"{name} has record schema {found_schema}; format {_OLD} has {schema}; nothing was changed")
    return cast("Body", unpack(body[_HEAD.size + name_bytes + _LENGTH.size :], what=name))


def id_of(body: Body) -> str:
    """Return the id of a record's *body*, whose maps are sorted, in either format."""
    return digest(pack(body)).hex()


def _damaged(name: str, reason: str) -> IntegrityError:
    return IntegrityError(f"{name} is damaged: {reason}; nothing was changed", hint=_WAY_ON, path=name)


# -- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """The fields of a format 1 record that stay in memory while the other records of its run are read."""

    attempt: int
    step: int
    fork: Body | None
    supersedes: tuple[str, ...]
    has_layers: bool
    """Whether the record is a commit; otherwise it only hides commits, or stands for one that gc removed."""


class _Run:
    """The records of one run, read once to find how they are related, then again to rewrite them."""

    def __init__(self, older: Older, run: str, store_id: str) -> None:
        self._older = older
        self._run = run
        self._store_id = store_id
        self._rows: dict[str, _Row] = {}
        for name in older.names(f"commits/{run}"):
            if match := _RECORD.fullmatch(name):
                self._rows[match[1]] = _row_of(self._read(name)["body"])
        in_order = sorted(self._rows.items(), key=lambda item: (item[1].attempt, item[1].step, item[0]), reverse=True)
        self._forks = {row.attempt: row.fork for _, row in in_order}  # reversed: an attempt's first record decides
        self._hidden = {old for row in self._rows.values() for old in row.supersedes}
        self.ids: dict[str, str] = {}
        """The new id of each commit, by its old id."""
        # Superseded commits first, because the commits that supersede them refer to their new ids.
        mentions = {old: [other for other in row.supersedes if other in self._rows] for old, row in self._rows.items()}
        for old in TopologicalSorter(mentions).static_order():
            if self._rows[old].has_layers:
                self.ids[old] = id_of(self._rewritten(old)["body"])

    def _read(self, file_name: str) -> dict[str, Body]:
        """Return the payload of the record *file_name*; its run, step and id must be those of its path."""
        path = f"commits/{self._run}/{file_name}"
        payload = unseal(self._older.read(path), name=path, store_id=self._store_id)
        body = _checked(payload.get("body"), path)
        if (body["run"], f"{cast('int', body['step'])}.{id_of(body)}") != (self._run, file_name):
            raise _damaged(path, "it does not hold the commit that its name says")
        return cast("dict[str, Body]", payload)

    def _rewritten(self, old: str) -> dict[str, Body]:
        payload = self._read(f"{self._rows[old].step}.{old}")
        return {**payload, "body": self.converted(payload["body"])}

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the new records; hidden ones go to the trash."""
        # A commit that was dropped and saved again differed only in ``supersedes``, so both may have one id now: keep
        # the visible one.
        hidden_first = sorted(self.ids, key=lambda old: old not in self._hidden)
        for new, old in {self.ids[old]: old for old in hidden_first}.items():
            name = f"commits/{self._run}/{self._rows[old].step}.{new}"
            data = seal(cast("Plain", self._rewritten(old)), name=name, store_id=self._store_id)
            yield f"trash/{name}" if old in self._hidden else name, data

    def converted(self, body: Body) -> Body:
        """Return *body*, from a record of this run or from a pin, converted to format 2."""
        row = _row_of(body)
        changed: Body = {
            "lineage": self._lineage(row),
            "stage": 3,
            "supersedes": cast("Plain", sorted({self.ids[old] for old in row.supersedes if old in self.ids})),
            "notes": [],
        }
        return {name: value for name, value in sorted((body | changed).items()) if name != "fork"}

    def _lineage(self, row: _Row) -> Plain:
        """Return where the attempt forked, where its parent attempt forked, and so on."""
        forks: list[Plain] = []
        attempt, fork = row.attempt, row.fork
        # Follow a fork only to an earlier attempt, as readers of format 1 did.
        while fork is not None and cast("int", fork["attempt"]) < attempt:
            forks.append(fork)
            attempt = cast("int", fork["attempt"])
            fork = self._forks.get(attempt)
        return forks


def _checked(body: Plain, name: str) -> Body:
    """Return *body* if it has a record's fields and known flags; its checksum was right, so their types are, too."""
    if not isinstance(body, dict) or not body.keys() >= _FIELDS:
        raise _damaged(name, "its fields are not those of a record")
    unknown = sorted({str(flag) for flag in cast("list[Plain]", body["flags"])} - _FLAGS)
    if unknown:
        raise Unsupported(f"{name} uses {', '.join(unknown)}, which format {_OLD} does not have; nothing was changed")
    return body


def _row_of(body: Body) -> _Row:
    return _Row(
        attempt=cast("int", body["attempt"]),
        step=cast("int", body["step"]),
        fork=cast("Body | None", body["fork"]),
        supersedes=tuple(str(old) for old in cast("list[Plain]", body["supersedes"])),
        has_layers=bool(body["layers"]),
    )


# -- the whole store -----------------------------------------------------------------------------------------------


def _convert(older: Older) -> Iterator[tuple[str, bytes]]:
    if "commits" not in older.folders(""):
        raise _damaged("commits", "it is missing although this is a store")
    _check_settled(older)
    store_id = str(identity_fields(older.read("store.json"), number=_OLD)["store_id"])
    runs = {run: _Run(older, run, store_id) for run in older.folders("commits")}
    for run in runs.values():
        yield from run.files()
    for name in older.names("pins"):
        if not name.startswith("."):  # otherwise, a network filesystem's own file
            yield _pin(older, f"pins/{name}", runs, store_id)


def _pin(older: Older, name: str, runs: Mapping[str, _Run], store_id: str) -> tuple[str, bytes]:
    pin = unseal(older.read(name), name=name, store_id=store_id).get("pin")
    if not isinstance(pin, dict):
        raise _damaged(name, "it holds no pin")
    body = _checked(pin.get("record"), name)
    # A pin may outlive its run.
    run = runs.get(str(body["run"])) or _Run(older, str(body["run"]), store_id)
    new, base = run.converted(body), str(pin.get("base"))
    if base == id_of(body):
        run.ids.setdefault(base, id_of(new))  # the commit is gone, but the pin contains its record
    changed = pin | {"base": run.ids.get(base, base), "record": new}
    return name, seal({"pin": changed}, name=name, store_id=store_id)


def _check_settled(older: Older) -> None:
    """Refuse a store where layerstore 0.1 left records or pins in quarantine, or objects in ``aside/``."""
    lost = [
        f"{folder}/{name}"
        for repair in older.folders("quarantine")
        for folder in ("pins", *(f"commits/{run}" for run in older.folders(f"quarantine/{repair}/commits")))
        for name in older.names(f"quarantine/{repair}/{folder}")
        if name not in older.names(folder)
    ]
    if lost:
        raise IntegrityError(
            f"{', '.join(sorted(set(lost)))} are in quarantine: neither healed nor given up; nothing was changed",
            hint="with layerstore 0.1: repair --from COPY heals them, drop REF --quarantined or pin --delete NAME "
            "gives them up; what was replaced since may be removed from quarantine/",
        )
    if any(older.names(f"gc/{collection}/aside") for collection in older.folders("gc")):
        raise IntegrityError(
            "a collection was interrupted, and objects lie in gc/*/aside/; nothing was changed",
            hint="with layerstore 0.1: gc finishes it",
        )


STEP = Step(
    source=_OLD,
    target=_NEW,
    summary="records hold their attempt's whole lineage, and dropped commits lie in trash/",
    makes=("commits", "gc", "parts", "pins", "trash"),
    leaves=("quarantine",),
    removes=("locks/gc.reserve", "manifest", "manifest.dropped-*"),
    identity=_identity,
    convert=_convert,
)
