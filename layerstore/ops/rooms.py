"""What a verb works with: the open rooms of one store."""

import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from layerstore.errors import IntegrityError, InvalidInput, Unsupported
from layerstore.format.blobs import decode_state, decode_version
from layerstore.format.identity import StoreIdentity
from layerstore.limits import LOCK_DEADLINE_SECONDS
from layerstore.model import BlobRef, LayerEntry, LayerVersion, RankState
from layerstore.storage.catalog import Catalog
from layerstore.storage.commits import RecordStore
from layerstore.storage.files import Files
from layerstore.storage.garbage import Garbage
from layerstore.storage.layout import Layout
from layerstore.storage.locks import lock
from layerstore.storage.objects import ObjectStore
from layerstore.storage.parts import PartStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """The storage of one store."""

    identity: StoreIdentity
    layout: Layout
    files: Files
    objects: ObjectStore
    records: RecordStore
    parts: PartStore
    garbage: Garbage
    catalog: Catalog

    def version(self, ref: BlobRef) -> LayerVersion:
        """Read a layer version, checked."""
        return decode_version(self.objects.read(ref), ref=ref)

    def version_of(self, entry: LayerEntry) -> LayerVersion:
        """Read the version that *entry* names, and make sure that it is of the entry's layer."""
        version = self.version(entry.version)
        if version.layer != entry.layer:
            raise IntegrityError(
                f"version {entry.version.id} is of layer {version.layer!r}, a commit has it as {entry.layer!r}"
            )
        return version

    def whole_version_of(self, entry: LayerEntry) -> LayerVersion | None:
        """Read the version that *entry* names; None where the store has lost it, or an object of it."""
        try:
            version = self.version_of(entry)
            return version if all(self.objects.find(stored.ref) for stored in version.objects) else None
        except IntegrityError:
            return None

    def state(self, ref: BlobRef) -> RankState:
        """Read a rank's state, checked."""
        return decode_state(self.objects.read(ref), ref=ref)

    def lock_run(self, run: str) -> AbstractContextManager[None]:
        """Hold the courtesy lock of *run*."""
        return lock(
            self.layout.locks / f"run-{run}.lock",
            what=f"run {run!r}",
            deadline_seconds=_deadline_seconds(),
        )

    def lock_gc(self) -> AbstractContextManager[None]:
        """Hold the lock that keeps two collections apart."""
        return lock(self.layout.locks / "gc.lock", what="the collection", deadline_seconds=_deadline_seconds())

    def lock_index(self) -> AbstractContextManager[None]:
        """Hold the courtesy lock of the index."""
        return lock(self.layout.locks / "index.lock", what="the index", deadline_seconds=_deadline_seconds())

    def prepare_writing(self) -> None:
        """
        Make the folders that a copy of the store may have lost because they were empty.

        Raises:
            Unsupported: The store uses something that this layerstore might destroy unknowingly.
        """
        if self.identity.unknown_flags:
            raise Unsupported(
                f"the store uses {', '.join(self.identity.unknown_flags)}, which this layerstore does not know; "
                "it can be read, not written",
                hint="use a newer layerstore",
            )
        for folder in self.layout.folders:
            if folder != self.layout.commits and not self.files.exists(folder):
                self.files.make_directory(folder)


def _deadline_seconds() -> float:
    text = os.environ.get("LAYERSTORE_LOCK_TIMEOUT")
    if text is None:
        return LOCK_DEADLINE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidInput(f"LAYERSTORE_LOCK_TIMEOUT is {text!r}, which is no number of seconds", hint="try 60")
    return seconds
