"""
How a run grows: what each of its commits takes, and what of that was there already.

Every version and state blob is read once; bytes are listed sizes, as `stats` counts them, without records.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from layerstore.dtypes import by_code
from layerstore.errors import LayerstoreError
from layerstore.history.needs import objects_of_state
from layerstore.model import BlobRef, Commit, Kind, LayerEntry, RankState, TensorSource
from layerstore.storage.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Bytes of one commit, or of several together."""

    logical_bytes: int = 0
    """If it were stored whole: every layer, and all that is not one."""
    unique_bytes: int = 0
    """Of these, what no commit before it in its run has named."""
    inherited_bytes: int = 0
    """Of these, layers that it did not save itself."""
    derived_bytes: int = 0
    """Beside these: gathered weights that follow from what is stored, and are in no commit."""
    written_bytes: int = 0
    """What its writer put into the store, by its own account."""

    def __add__(self, other: "Amounts") -> "Amounts":
        """Return both together."""
        return Amounts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


class Growth:
    """Counts the commits of one run, in the order in which they are given."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        # Ids are kept as bytes: of a million objects that is a tenth of a gigabyte.
        self._seen: set[bytes] = set()
        self._versions: dict[bytes, int] = {}
        """Sizes, with all that each needs."""
        self._stored_weights: dict[bytes, frozenset[str]] = {}
        """Of the versions that have any: trained parameters whose weights are not their masters, rounded."""
        self.left_out: list[str] = []
        """What could not be read, so that it is in no figure."""

    def add(self, commit: Commit) -> Amounts:
        """Return what *commit* takes."""
        record = commit.record
        logical = unique = inherited = 0
        stored: set[str] = set()
        for entry in record.layers:
            new = self._add_version(entry)
            size_bytes = self._versions[_key(entry.version)]
            logical += size_bytes
            unique += new
            inherited += 0 if entry.saved_by(record) else size_bytes
            stored |= self._stored_weights.get(_key(entry.version), frozenset())
        derived = 0
        for ref in record.states:
            state = self._state(ref)
            parts = [ref] if state is None else [ref, *objects_of_state(state)]
            if state is not None:
                logical += sum(part.size_bytes for part in parts)
                unique += self._new_bytes(parts)
                derived += _derived_bytes(state, stored)
        return Amounts(
            logical_bytes=logical,
            unique_bytes=unique,
            inherited_bytes=inherited,
            derived_bytes=derived,
            written_bytes=commit.observed.bytes_new,
        )

    def _add_version(self, entry: LayerEntry) -> int:
        """Note the version of *entry*; return what of it is new."""
        key = _key(entry.version)
        if key in self._versions:
            return 0
        try:
            version = self._rooms.version_of(entry)
        except LayerstoreError as exc:
            self.left_out.append(str(exc))
            self._versions[key] = 0
            return 0
        parts = [entry.version, *(stored.ref for stored in version.objects)]
        self._versions[key] = sum(part.size_bytes for part in parts)
        trained = {parameter.name for parameter in version.parameters if not parameter.frozen}
        weights = (stored for stored in version.objects if stored.kind is Kind.WEIGHTS)
        if unlike := frozenset(tensor.name for of in weights for tensor in of.tensors) & trained:
            self._stored_weights[key] = unlike
        return self._new_bytes(parts)

    def _state(self, ref: BlobRef) -> RankState | None:
        try:
            return self._rooms.state(ref)
        except LayerstoreError as exc:
            problem = str(exc)
            if problem not in self.left_out:
                self.left_out.append(problem)
            return None

    def _new_bytes(self, refs: Iterable[BlobRef]) -> int:
        new = 0
        for ref in refs:
            key = _key(ref)
            if key not in self._seen:
                self._seen.add(key)
                new += ref.size_bytes
        return new


def _key(ref: BlobRef) -> bytes:
    return bytes.fromhex(ref.id)


def _derived_bytes(state: RankState, stored: set[str]) -> int:
    """Return the bytes of the gathered weights of *state* that are no objects; of the parameters *stored* they are."""
    return sum(
        tensor.elements * by_code(tensor.dtype).bytes
        for file in state.gathered
        for tensor in file.tensors
        if tensor.source is not TensorSource.STORED and tensor.layer_name not in stored
    )
