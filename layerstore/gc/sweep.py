"""
Sweep: move unneeded objects aside, check again, and unlink them.

Readers and writers need not wait (docs/internals/durability.md); `tests/gc/model.py` models the protocol.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from layerstore.errors import IntegrityError, StorageIO
from layerstore.gc.mark import Marks, is_blob
from layerstore.history import named_by
from layerstore.model import BlobRef, ObjectId
from layerstore.progress import Progress
from layerstore.storage import ObjectWriter, Repository


@dataclass(frozen=True, slots=True)
class Gone:
    """A number of objects or files, and their bytes."""

    _JSON: ClassVar = "count bytes=size_bytes"

    count: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Gone") -> "Gone":
        return Gone(self.count + other.count, self.size_bytes + other.size_bytes)


def take_aside(repo: Repository, marks: Marks, progress: Progress) -> StorageIO | None:
    """Move old unneeded objects aside; on a full disk return the error, so that the caller can make room."""
    try:
        for unneeded in marks.unmarked_old():
            repo.aside.take(unneeded.ref.id)
            progress.advance(unneeded.ref.size_bytes)
    except StorageIO as exc:
        if exc.kind != "no_space":
            raise
        return exc
    return None


def settle(repo: Repository, marks: Marks, listed: Iterable[ObjectId]) -> tuple[Gone, Gone]:
    """
    Put back the needed objects of *listed*, and unlink the others; return what was removed, and what waits.

    All of *listed* must have been aside before *marks* last looked. Blobs go first; each object is checked again
    right before it is unlinked.

    This also settles what a killed collection left aside. On a network filesystem another node's listing may be stale,
    so objects moved aside within the grace period stay aside until the next collection.
    """
    back: list[BlobRef] = []
    old: list[BlobRef] = []
    for unneeded in marks.aside(listed):
        if unneeded.is_young:
            marks.protect_named(unneeded.ref)
            back.append(unneeded.ref)
        else:
            old.append(unneeded.ref)
    # Only now are the objects of all young blobs known: a blob may be listed after the objects that it refers to.
    _put_back(repo, [*back, *(ref for ref in old if ref.id in marks.needs)])
    old = [ref for ref in old if ref.id not in marks.needs]
    blobs = {ref.id: ref for ref in old if is_blob(repo, ref)}
    sums = {True: Gone(), False: Gone()}
    # Blobs go first: a blob that a writer puts back in the meantime must not outlive its objects.
    for ref in blobs.values():
        unneeded_blob = marks.look_at(ref.id, repo.layout.aside / ref.id)
        if unneeded_blob is not None and unneeded_blob.is_young:
            _put_back(repo, [ref])
        elif unneeded_blob is not None:
            sums[_remove(repo, marks, unneeded_blob.path)] += Gone(1, ref.size_bytes)
        if repo.files.exists(repo.layout.object(ref.id)):
            # A writer has put the blob back, and a blob in objects/ promises that everything it refers to exists.
            marks.protect_named(ref)
            _put_back(repo, _named_by(repo, ref) or ())
    # Check each object once more: it may have been touched since.
    for unneeded in marks.aside(ref.id for ref in old if ref.id not in blobs):
        if not unneeded.is_young:
            sums[_remove(repo, marks, unneeded.path)] += Gone(1, unneeded.ref.size_bytes)
    # One sync for all objects: if the power fails before it and some reappear, the next collection removes them again.
    repo.aside.sync()
    return sums[True], sums[False]


def _remove(repo: Repository, marks: Marks, path: Path) -> bool:
    """Unlink the object aside at *path*, unless it must wait for the next collection; return whether it is gone."""
    if repo.aside.is_on_network and repo.aside.moved_ns(path) >= marks.old_before_ns:
        return False
    repo.files.unlink(path)
    return True


def _put_back(repo: Repository, objects: Iterable[BlobRef]) -> None:
    """
    Put *objects* back, each blob after the objects that it refers to: a blob in ``objects/`` promises that they exist.

    Touches all of them, so that no other collection moves them aside again.
    """
    blobs = []
    for ref in objects:
        named = _named_by(repo, ref)
        if named is None:
            _put_back_one(repo, ref)
        else:
            blobs.append((ref, named))
    for ref, named in blobs:
        # If one of its objects is gone, a blob stays aside.
        if all(_put_back_one(repo, named_ref) for named_ref in named):
            _put_back_one(repo, ref)


def _put_back_one(repo: Repository, ref: BlobRef) -> bool:
    aside = repo.layout.aside / ref.id
    is_aside = repo.files.exists(aside)
    at_home = repo.files.size(repo.layout.object(ref.id))
    if is_aside and at_home is not None:
        ref = replace(ref, size_bytes=at_home)  # an ingest has rewritten the object; the file aside may be damaged
    is_home = ObjectWriter(repo.layout, repo.files, repo.objects).put_back(ref)
    if is_home and is_aside:
        # Last: at any moment, a reader must find the object at one of the two paths.
        repo.files.unlink(aside)
    return is_home


def _named_by(repo: Repository, ref: BlobRef) -> list[BlobRef] | None:
    """Return the objects that the blob *ref* refers to; None if *ref* is not a blob, or is damaged."""
    try:
        return named_by(repo, ref) if is_blob(repo, ref) else None
    except IntegrityError:
        return None  # damaged: it promises nothing
