"""What a verb works with: the open repository of one store."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from layerstore.errors import IntegrityError
from layerstore.format import StoreIdentity, decode_state, decode_version
from layerstore.layout import Layout
from layerstore.limits import LEASE_RENEWED_SECONDS, LEASE_SECONDS
from layerstore.model import BlobRef, LayerEntry, LayerVersion, RankState
from layerstore.storage.aside import Aside
from layerstore.storage.catalog import Catalog
from layerstore.storage.commits import RecordStore
from layerstore.storage.files import Files
from layerstore.storage.identity import check_still_writable
from layerstore.storage.locks import Hold, deadline_seconds, lock
from layerstore.storage.objects import ObjectStore
from layerstore.storage.parts import PartStore
from layerstore.storage.trash import Trash


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """The storage of one store."""

    identity: StoreIdentity
    layout: Layout
    files: Files
    objects: ObjectStore
    records: RecordStore
    parts: PartStore
    aside: Aside
    trash: Trash
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

    def lock_run(self, run: str) -> AbstractContextManager[Hold]:
        """Hold the courtesy lock of *run*."""
        return lock(
            self.layout.locks / f"run-{run}.lock",
            what=f"run {run!r}",
            deadline_seconds=deadline_seconds(),
        )

    def lock_attempt(self, run: str, attempt: int, *, at_once: bool = False) -> AbstractContextManager[Hold]:
        """
        Hold *attempt* of *run*, which no other job then saves; who finds it held goes elsewhere at once.

        On a network filesystem only once it is clear that the holder lives, unless that must be *at_once*: a job that
        died has to be followed there.
        """
        is_patient = self.aside.is_on_network and not at_once
        return lock(
            self.layout.attempt_lock(run, attempt),
            what=f"attempt {attempt} of run {run!r}",
            # A moment in any case: a collection that looks who saves what holds it for no longer.
            deadline_seconds=0 if at_once else LEASE_SECONDS + LEASE_RENEWED_SECONDS if is_patient else 1,
        )

    def lock_gc(self) -> AbstractContextManager[Hold]:
        """Hold the lock that keeps two collections apart."""
        return lock(self.layout.gc_lock, what="the collection", deadline_seconds=deadline_seconds())

    def lock_index(self) -> AbstractContextManager[Hold]:
        """Hold the courtesy lock of the index."""
        return lock(self.layout.locks / "index.lock", what="the index", deadline_seconds=deadline_seconds())

    def prepare_writing(self) -> None:
        """
        Make the folders that a copy of the store may have lost because they were empty.

        Raises:
            Unsupported: The store uses something that this layerstore might destroy unknowingly, or was migrated
                since it was opened.
        """
        check_still_writable(self.layout, self.files, store_id=self.identity.store_id)
        for folder in self.layout.folders:
            if folder != self.layout.commits and not self.files.exists(folder):
                self.files.make_directory(folder)
