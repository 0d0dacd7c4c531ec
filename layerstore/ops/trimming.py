"""A commit without its moments: weights and masters stay for ever, what only a resume needs goes."""

from dataclasses import dataclass, replace

from layerstore.errors import LayoutMismatch
from layerstore.format.blobs import encode_version, ref_of
from layerstore.format.records import WITHOUT_MOMENTS, make_commit
from layerstore.model import BlobRef, Commit, CommitRecord, Kind, LayerEntry
from layerstore.ops.claims import claim, publish
from layerstore.ops.needs import Needs
from layerstore.ops.rooms import Rooms
from layerstore.storage.objects import ObjectWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """The commit that takes the place of one with moments."""

    commit: Commit
    versions: dict[BlobRef, bytes]
    """Version blobs that it names, with their bytes."""
    objects: tuple[BlobRef, ...]
    """What these name."""


def plan_trim(rooms: Rooms, commit: Commit) -> Trim | None:
    """Return what takes the place of *commit*; None where it has no moments."""
    record = commit.record
    entries: list[LayerEntry] = []
    versions: dict[BlobRef, bytes] = {}
    objects: list[BlobRef] = []
    for entry in record.layers:
        version = rooms.version_of(entry)
        kept = tuple(stored for stored in version.objects if stored.kind is not Kind.OPTIMIZER)
        data = encode_version(replace(version, objects=kept))
        versions[ref_of(data)] = data
        objects += [stored.ref for stored in kept]
        entries.append(replace(entry, version=ref_of(data), optimizer_step=None))
    if [entry.version for entry in entries] == [entry.version for entry in record.layers]:
        return None
    trimmed = replace(
        record, layers=tuple(entries), supersedes=(commit.id,), flags=tuple(sorted({*record.flags, WITHOUT_MOMENTS}))
    )
    # Saved when the other was: rules about age go on as before.
    observed = replace(commit.observed, bytes_new=0, bytes_reused=0)
    return Trim(commit=make_commit(trimmed, observed), versions=versions, objects=tuple(objects))


def add_needs(needs: Needs, trim: Trim) -> None:
    """Note what *trim* will need once it is there."""
    needs.add(trim.versions)
    needs.add(trim.objects)
    for state in trim.commit.record.states:
        needs.add_state(state)


def execute_trim(rooms: Rooms, trim: Trim) -> None:
    """Publish the commit without moments, which hides the other."""
    with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer:
        for ref, data in trim.versions.items():
            writer.put(data, ref)
        claim(rooms, writer, (), trim.commit.record.states)
        writer.publish()
        publish(rooms, writer, trim.commit)


def check_has_moments(record: CommitRecord, *, called: str) -> None:
    """
    Make sure that *record* can be resumed from.

    Raises:
        LayoutMismatch: A collection has dropped its moments.
    """
    if WITHOUT_MOMENTS in record.flags:
        raise LayoutMismatch(
            f"{called} has no optimizer moments any more: a collection has dropped them",
            hint=f"its weights are there: layerstore compose {called} --format hf; or choose a newer step",
        )
