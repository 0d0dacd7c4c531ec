"""
The transaction: records, parts and pins become visible only here.

    with Transaction(repo) as tx:
        tx.objects.put(data, ref)     # staged and synced in tmp/, or found in the store and touched
        tx.inherit(entry)             # a version that an earlier commit references
        tx.commit(record)             # link the objects, sync, link the record, check everything that it references

No lock is taken against collections. A writer touches its objects, links its record, and then checks the objects; a
collection moves objects aside, and then checks for new records. Whichever comes first, one of them sees the other
(docs/internals/durability.md). A transaction that finds an object missing undoes its own record and raises an error
with the hint "try again"; it never repairs another record.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from layerstore.errors import IntegrityError, LayerstoreError, Overtaken
from layerstore.format import make_commit
from layerstore.history import named_by
from layerstore.model import BlobRef, Commit, CommitRecord, LayerEntry, Observed, Pin
from layerstore.parts import Part
from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The result of `Transaction.commit`."""

    commit: Commit
    is_new: bool
    """False if the same record already existed."""


class Transaction:
    """
    One record, part or pin on its way into the store, with everything that it references.

    As a context manager it removes objects that were staged but never linked. *past_cache* and *reads_reused* are as
    in `ObjectWriter`.
    """

    def __init__(self, repo: Repository, *, past_cache: bool = False, reads_reused: bool = False) -> None:
        self._repo = repo
        self.objects = repo.writer(past_cache=past_cache, reads_reused=reads_reused)
        """Stages new objects."""
        self._parts: Sequence[Part] = ()

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *_: object) -> None:
        self.objects.discard()

    def inherit(self, entry: LayerEntry) -> None:
        """
        Reference the version of *entry*, which an earlier commit already references.

        Raises:
            Overtaken: The version or one of its objects is gone.
            IntegrityError: The version or one of its objects is damaged.
        """
        try:
            # If the blob is at its own path, touching it is enough: collections keep what a young blob references.
            is_there = self.objects.claim(entry.version) or self._reuse(entry.version)
        except IntegrityError as exc:
            raise IntegrityError(
                f"the version of {entry.layer!r} of {entry.origin.run}@{entry.origin.step} cannot be inherited: {exc}; "
                "nothing was saved",
                hint="layerstore repair --from COPY, or ingesting the checkpoint of that step again, heals it",
            ) from exc
        if not is_there:
            raise Overtaken(
                f"the version of {entry.layer!r} that was to be inherited is gone; nothing was saved",
                hint="try again",
            )

    def keep(self, record: CommitRecord) -> None:
        """Reference all versions and states of *record*, which the store already has; raises as `inherit` does."""
        for entry in record.layers:
            self.inherit(entry)
        for state in record.states:
            if not (self.objects.claim(state) or self._reuse(state)):
                raise Overtaken(
                    f"a rank's state of {record.run}@{record.step} is gone; nothing was saved",
                    hint="try again",
                )

    def trust(self, parts: Sequence[Part]) -> None:
        """
        Rely on everything that *parts* (of one save) reference, without checking that it exists.

        Each rank has checked its objects before writing its part, and collections keep what a part references.

        Raises:
            Overtaken: A part is gone.
        """
        self._parts = parts
        self._check_parts()

    def _check_parts(self) -> None:
        if self._parts:
            # One listing for all ranks: looking up each part would take a call per rank, perhaps a thousand.
            listed = self._repo.parts.ranks(self._parts[0].session, self._parts[0].save)
            gone = sorted({part.rank for part in self._parts} - listed)
            if gone:
                raise Overtaken(
                    f"gc removed the share of rank {gone[0]}: the save was idle for too long",
                    hint="save again",
                )

    def _reuse(self, blob: BlobRef) -> bool:
        """
        Reuse *blob*, which is not at its own path, and what it references: a collection may be removing all of them.

        Return whether all of them exist; raise IntegrityError if one is damaged.
        """
        if self._repo.objects.find(blob) is None:
            return False
        # The blob comes last: once it is back at its path, its objects must exist.
        return all(map(self.objects.reuse, named_by(self._repo, blob))) and self.objects.reuse(blob)

    def commit(self, record: CommitRecord, *, observed: Observed | None = None) -> Published:
        """
        Make *record* visible and durable; move what it supersedes to the trash.

        Once this returns, a power cut cannot lose the commit. If it raises, all earlier commits are unchanged.

        Raises:
            Overtaken: An object is gone: a collection won the race because this process slept for longer than the
                grace, or somebody deleted files. The record was unlinked again, unless it already existed.
            Unsupported: The store was migrated since it was opened.
        """
        repo = self._repo
        # The objects first: a crash after this leaves objects without a record, never a record without its objects.
        self.objects.publish()
        commit = make_commit(record, observed or self.observed())
        identity = repo.records.link(commit)
        try:
            # After the link: a collection that marked before the link has not seen what the record references.
            self._check_all_there(f"{record.run}@{record.step}")
        except LayerstoreError:
            if identity is not None:  # None: the same record already existed, and others may rely on it
                repo.records.withdraw(commit, identity)
                repo.catalog.forget([repo.records.name_of(commit)])
            raise
        # The index after the record: if this process dies in between, opening the store adds the record to the index.
        repo.catalog.add(commit)
        # Last: superseded records may go only once nothing can undo this one.
        retire(repo, commit)
        return Published(commit=commit, is_new=identity is not None)

    def leave(self, part: Part) -> None:
        """
        Write *part* for the rank that commits, and make everything that it references durable.

        Raises as `commit` does, or StorageIO if a collection has removed the draft.
        """
        self.objects.publish()
        # Written as a draft first, so that collections keep its objects before this rank checks them. The rename to a
        # part then shows the committing rank that the objects still existed once collections had begun to keep them.
        self._repo.parts.draft(part)
        try:
            self._check_all_there(f"the share of rank {part.rank}")
            self._repo.parts.confirm(part)
        except LayerstoreError:
            # Only a draft is withdrawn: a part may already have been joined.
            self._repo.parts.withdraw(part.session, part.save, part.rank)
            raise

    def pin(self, pin: Pin) -> None:
        """Make *pin* visible; raises as `commit` does, and AlreadyExists if a pin of that name exists."""
        self.keep(pin.record)
        self.objects.publish()
        self._repo.records.link_pin(pin)
        try:
            self._check_all_there(f"pin {pin.name!r}")
        except LayerstoreError:
            # The pin is ours: had the name been taken, `link_pin` would have raised.
            self._repo.records.delete_pin(pin.name)
            raise

    def observed(self) -> Observed:
        """Return the time, and the bytes staged and reused so far."""
        return Observed(
            time_ns=time.time_ns(), bytes_new=self.objects.bytes_new, bytes_reused=self.objects.bytes_reused
        )

    def _check_all_there(self, name: str) -> None:
        """Check that everything referenced still exists; link back what a collection has moved aside."""
        self._check_parts()
        lost = self.objects.look_again()
        # Inherited blobs were only touched; if one was moved aside, its objects may have been moved, too.
        lost += [blob for blob in self.objects.claimed_elsewhere() if not self._reuse(blob)]
        if lost:
            raise Overtaken(
                f"objects of {name} were removed while it was written ({len(lost)}, first: {lost[0].id})",
                hint="try again: what is missing is then written again",
            )


def retire(repo: Repository, commit: Commit) -> None:
    """Move the records that *commit* supersedes to the trash."""
    # A crash in between is harmless: *commit* hides those that were not moved yet.
    for name in repo.records.names(commit.record.run) if commit.record.supersedes else ():
        if name.id in commit.record.supersedes and repo.trash.take_record(name):
            repo.catalog.forget([name])


def republish(repo: Repository, commit: Commit) -> Published:
    """Make *commit* visible again, unchanged; raises Overtaken if anything that it references is gone."""
    with Transaction(repo) as tx:
        tx.keep(commit.record)
        return tx.commit(commit.record, observed=commit.observed)
