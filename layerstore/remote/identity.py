"""
Which store a bucket belongs to, and which of its records are complete.

A bucket becomes a remote of a store when the first push writes that store's ``store.json`` to the bucket. A record in a
bucket promises that the bucket has everything the record references. But a bucket may lose objects (to a lifecycle
rule, say), so the objects themselves are looked up before local bytes are removed or a commit is reported as pushed.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from layerstore.errors import AlreadyExists, Conflict, IntegrityError, NotFound
from layerstore.format import StoreIdentity
from layerstore.history import PushedNotice, named_by
from layerstore.layers import typed
from layerstore.layout import IDENTITY
from layerstore.limits import OWN_JSON_BYTES_MAX, RECORD_BYTES_MAX, REMOTE_GRACE_SECONDS, REMOTE_REQUESTS_MAX
from layerstore.model import BlobRef, CommitId, CommitRecord, ObjectId
from layerstore.remote.bucket import COLLECTIONS_AT_WORK, COLLECTIONS_ENDED, LISTED_AT_ONCE, OBJECT_FOLDERS, Bucket
from layerstore.remote.folder import Listed
from layerstore.storage import RecordName, Repository, name_in
from layerstore.threads import Threads


def claim(bucket: Bucket, identity: StoreIdentity) -> bool:
    """
    Make *bucket* a remote of the store *identity* if it is not one yet; return whether this call did so.

    Raises:
        Conflict: The bucket belongs to another store.
        IntegrityError: The bucket holds commits or objects, but no ``store.json``.
    """
    actual, made = identity_of(bucket), False
    if actual is None:
        made = True
        for folder in ("commits", "objects"):
            if bucket.listed(folder):
                raise IntegrityError(
                    f"{bucket.url} holds {folder}, but its store.json is missing; nothing was sent",
                    hint=f"layerstore repair --remote {typed(bucket.url)} puts it back if the bucket is this "
                    "store's; otherwise, name another prefix",
                )
        # Read back: two stores may push to an empty prefix at once, and some servers accept both writes.
        bucket.create(IDENTITY, identity.encode())
        actual = identity_of(bucket) or identity
    check_own(bucket, actual, expected=identity)
    if made:
        bucket.on_made(bucket.url)
    return made


def make_there(bucket: Bucket) -> None:
    """
    Make *bucket* a new store, with an identity of its own.

    Raises:
        AlreadyExists: The bucket holds a store.
        IntegrityError: The bucket holds commits or objects, but no store.
    """
    if identity_of(bucket) is not None:
        raise AlreadyExists(
            f"{bucket.url} is a store already; nothing was changed", hint=f"layerstore log --store {typed(bucket.url)}"
        )
    claim(bucket, StoreIdentity.new(created=time.strftime("%Y-%m-%dT%H:%M:%S%z")))


def identity_of(bucket: Bucket) -> StoreIdentity | None:
    """Return the identity of the store in *bucket*, None if the bucket holds no store."""
    try:
        data = bucket.read(IDENTITY, size_bytes_max=OWN_JSON_BYTES_MAX)
        return None if data is None else StoreIdentity.decode(data, what=f"{bucket.url}/{IDENTITY}")
    except IntegrityError as exc:
        if "path" not in exc.facts:  # an error with a path is about a link, and has its own hint
            exc.hint = f"layerstore repair --remote {typed(bucket.url)}, in a store with all commits, puts it back"
        raise


def records_in(bucket: Bucket) -> dict[RecordName, int]:
    """Return the sizes of the records in *bucket*, by run and step."""
    paths = ((entry.name.split("/"), entry.size_bytes) for entry in bucket.listed("commits"))
    sizes = {name: size for path, size in paths if len(path) == 3 and (name := name_in(path[1], path[2])) is not None}
    return dict(sorted(sizes.items()))


def pushed_records(repo: Repository, bucket: Bucket) -> set[RecordName]:
    """Return the records of *repo* that its remote *bucket* has in full size."""
    return {name for name, size_bytes in records_in(bucket).items() if _size_here(repo, name) == size_bytes}


class Inventory:
    """
    Which objects a bucket has, among those that records of *repo* reference.

    Objects are looked up one by one or all listed, whichever takes fewer requests; with *lists*, all are listed now.
    """

    def __init__(self, repo: Repository, bucket: Bucket, *, lists: bool) -> None:
        self._repo = repo
        self._bucket = bucket
        self._entries: dict[str, Listed | None] = {}
        """By name; None for objects not found, or assumed missing. A listing has no entries for missing objects."""
        self._looked_up = 0
        self.is_listed = False
        self.nothing_is_lost = False
        """Whether the bucket is known to have everything that the local store has; then blobs need not be read."""
        self._blobs: dict[ObjectId, bool] = {}
        """For each blob that was looked up, whether the bucket has the blob and everything that the blob references."""
        if lists:
            self._list()

    def _list(self) -> None:
        self._entries = {entry.name: entry for entry in self._bucket.objects()}
        self.is_listed = True

    def look_for(self, refs: Sequence[BlobRef]) -> None:
        """Find out which of *refs* the bucket has; refs already known are not looked up again."""
        names = [name for name in self._names(refs) if name not in self._entries]
        if self.is_listed or not names:
            return
        self._looked_up += len(names)
        # The first comparison is cheap; the second counts all objects of this store, and is true only if the first is.
        if self._looked_up > len(OBJECT_FOLDERS) and self._looked_up > self._requests_of_listing:
            self._list()
            return
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="look") as pool:
            self._entries.update(zip(names, pool.map(self._bucket.look, names), strict=True))

    def look_for_new(self, refs: Sequence[BlobRef]) -> None:
        """
        Look for *refs*, which a push is about to send in this order; if the first few are missing, assume that all are.

        All pushes send in the same order, so a killed push would have sent some of those first few. If the assumption
        is wrong, objects are merely sent again.
        """
        new = [ref for ref, name in zip(refs, self._names(refs), strict=True) if name not in self._entries]
        first, others = new[:REMOTE_REQUESTS_MAX], new[REMOTE_REQUESTS_MAX:]
        self.look_for(first)
        if any(map(self.find, first)):
            self.look_for(others)
        else:
            self._entries.update(dict.fromkeys(self._names(others)))

    @cached_property
    def _requests_of_listing(self) -> int:
        """The fewest requests that a listing takes, if the bucket has as many objects as this store."""
        return max(len(OBJECT_FOLDERS), sum(1 for _ in self._repo.objects.ids()) // LISTED_AT_ONCE)

    def _names(self, refs: Iterable[BlobRef]) -> list[str]:
        return [self._repo.layout.object_name(ref.id) for ref in refs]

    def find(self, ref: BlobRef) -> Listed | None:
        """Return the entry of *ref*; None unless the bucket has *ref* in full size."""
        name = self._repo.layout.object_name(ref.id)
        if not self.is_listed and name not in self._entries:
            self.look_for([ref])
        entry = self._entries.get(name)
        return entry if entry is not None and entry.size_bytes == ref.size_bytes else None

    def has_all_of(self, record: CommitRecord) -> bool:
        """
        Whether the bucket has everything that *record* references, in full size.

        Raises:
            IntegrityError: A blob is damaged in the local store, so the objects that it references are unknown.
        """
        self.look_for(record.blobs)
        return all(map(self._has_all_of_blob, record.blobs))

    def has_all_here(self, *, besides: Container[object]) -> bool:
        """Whether the bucket has every object of the local store, except *besides*, in full size."""
        if self._repo.files.exists(self._repo.layout.partial):
            return False  # a partial clone does not know all objects
        sizes = ((name, self._repo.files.size(self._repo.layout.object(name))) for name in self._repo.objects.ids())
        return all(
            name in besides or self.find(BlobRef(id=name, size_bytes=size)) is not None
            for name, size in sizes
            if size is not None
        )

    def _has_all_of_blob(self, blob: BlobRef) -> bool:
        if blob.id not in self._blobs:
            self._blobs[blob.id] = self.find(blob) is not None and (self.nothing_is_lost or self._has_named_by(blob))
        return self._blobs[blob.id]

    def _has_named_by(self, blob: BlobRef) -> bool:
        named = named_by(self._repo, blob)
        self.look_for(named)
        return None not in map(self.find, named)


class SecondCopies:
    """
    The commits of *repo* that its remote *bucket* has with everything that they reference, in full size.

    Objects are looked up only when a caller asks for a commit whose record is in the bucket. A commit that another
    commit in the bucket supersedes (one without moments, say) does not count: the bucket's next collection removes it.
    """

    def __init__(self, repo: Repository, bucket: Bucket) -> None:
        self._repo = repo
        self._bucket = bucket
        there = {name: (size_bytes, _size_here(repo, name)) for name, size_bytes in records_in(bucket).items()}
        self._records = {name.id: name for name, (size_bytes, here) in there.items() if size_bytes == here}
        self._unknown = defaultdict[tuple[str, int], list[RecordName]](list)
        """By run and step, the records in the bucket that this store does not have."""
        for name, (_, here) in there.items():
            if here is None:
                self._unknown[name.run, name.step].append(name)
        self._wholeness: dict[CommitId, bool] = {}
        self._has_warned = False

    @cached_property
    def _inventory(self) -> Inventory:
        return Inventory(self._repo, self._bucket, lists=False)

    def __contains__(self, commit: object) -> bool:
        name = self._records.get(CommitId(str(commit)))
        if name is None:
            return False
        if name.id not in self._wholeness:
            self._wholeness[name.id] = self._is_whole(name)
        return self._wholeness[name.id]

    def _is_whole(self, name: RecordName) -> bool:
        if any(name.id in supersedes for supersedes in self._supersedes(name)):
            return False
        with suppress(IntegrityError, NotFound):  # damaged in this store, so the objects that it needs are unknown
            if self._inventory.has_all_of(self._repo.records.read(name).record):
                return True
        if not self._has_warned:  # warn once: a lifecycle rule may remove thousands of objects
            self._has_warned = True
            warnings.warn(
                f"{self._bucket.url} has the record of {name.run}@{name.step}, but not all that it names: such commits "
                "count as not pushed; layerstore push sends the rest",
                PushedNotice,
                stacklevel=2,
            )
        return False

    def _supersedes(self, name: RecordName) -> Iterator[Collection[CommitId]]:
        """Yield the commits superseded by each record that only the bucket has, at the run and step of *name*."""
        layout, records = self._repo.layout, self._repo.records
        for other in self._unknown.get((name.run, name.step), ()):
            with suppress(IntegrityError):  # damaged, so it replaces nothing
                path = layout.name(layout.record(other.run, other.step, other.id))
                data = self._bucket.read(path, size_bytes_max=RECORD_BYTES_MAX)
                if data is not None:
                    yield records.decode(data, other).record.supersedes


# Servers report times in whole seconds, so the order of events less than two seconds apart is unknown.
_CLOCK_NS = 2 * 10**9


def collected_since(bucket: Bucket, listed_ns: int) -> bool:
    """Whether a collection may have run in *bucket* since *listed_ns*, by the server's clock."""
    # A collection stops by itself after half a grace, so an older mark was left by a killed collection.
    old_before_ns = listed_ns - int(REMOTE_GRACE_SECONDS / 2 * 1e9)
    # In this order: a collection that ends between the two listings appears in the second.
    at_work, ended = map(bucket.listed, (COLLECTIONS_AT_WORK, COLLECTIONS_ENDED))
    return any(mark.modified_ns >= old_before_ns for mark in at_work) or any(
        mark.modified_ns >= listed_ns - _CLOCK_NS for mark in ended
    )


def kept_there(repo: Repository, bucket: Bucket) -> Container[object]:
    """
    Return the commits of *repo* that may be removed locally, since its remote *bucket* has everything they reference.

    Raises:
        Conflict: *bucket* belongs to another store.
    """
    actual = identity_of(bucket)
    if actual is None:
        return ()  # without store.json nobody can open or clone the bucket
    check_own(bucket, actual, expected=repo.identity, outcome="nothing was removed")
    return SecondCopies(repo, bucket)


def _size_here(repo: Repository, name: RecordName) -> int | None:
    return repo.files.size(repo.layout.record(name.run, name.step, name.id))


def check_own(
    bucket: Bucket, actual: StoreIdentity, *, expected: StoreIdentity, outcome: str = "nothing was sent"
) -> None:
    """Raise Conflict unless *actual*, the store in *bucket*, is *expected*."""
    if actual.store_id != expected.store_id:
        raise Conflict(
            f"{bucket.url} is a remote of another store ({actual.store_id}); {outcome}",
            hint="name another prefix",
        )
