"""All ranks' parts become one commit."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from layerstore.errors import Conflict, LayerstoreError, LayoutMismatch
from layerstore.format.records import make_commit
from layerstore.model import (
    BlobRef,
    Commit,
    CommitRecord,
    Fork,
    Kind,
    LayerEntry,
    LayerVersion,
    Observed,
    Origin,
    Part,
    PolicyUse,
    SourceLayout,
    StoredObject,
)
from layerstore.ops.hashing import Checksums, SourceReader
from layerstore.ops.rooms import Rooms
from layerstore.ops.staging import Staging
from layerstore.storage.objects import ObjectWriter
from layerstore.zero3.checkpoint import LayerSource
from layerstore.zero3.share import Share


class GivenUp(LayerstoreError):
    """A save that will not become a commit: a rank has failed, or what it was to inherit never became visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What a commit is to be, but for what the ranks have written."""

    session: str
    save: int
    run: str
    attempt: int
    fork: Fork | None
    step: int
    save_number: int
    share: Share
    """The first rank's, which knows the names that are tied."""
    due: frozenset[str]
    policy: PolicyUse
    layout: Callable[[], SourceLayout]
    """Of the folder that it would be in, once that is complete."""
    pin: str | None = None
    """What it is to be called."""


def parts_of(rooms: Rooms, joint: Joint) -> list[Part] | None:
    """
    Return the parts of all ranks, None while some are missing.

    Raises:
        GivenUp: A rank has failed.
    """
    found = []
    for rank in range(joint.share.world_size):
        part = rooms.parts.find(joint.session, joint.save, rank)
        if part is not None and part.state is None:
            raise GivenUp(f"step {joint.step} is given up: rank {rank} could not write its share: {part.failure}")
        if part is not None:
            found.append(part)
    return found if len(found) == joint.share.world_size else None


def join(rooms: Rooms, joint: Joint, parts: Sequence[Part], *, inherited: Mapping[str, LayerEntry]) -> Commit:
    """
    Publish the commit that *parts* make; what is not due is *inherited*.

    Raises:
        GivenUp: A layer is neither due nor inherited, because the save before was given up.
        LayoutMismatch: The ranks do not agree on what they have saved.
    """
    for part in parts:
        if part.agreement != parts[0].agreement:
            raise LayoutMismatch(f"step {joint.step}: rank {part.rank} has saved another model than rank 0")
    lost = [
        of.layer
        for of in joint.share.layers
        if of.layer not in joint.due and not _stands_in(inherited.get(of.layer), of)
    ]
    if lost:
        raise GivenUp(
            f"step {joint.step} is given up: the save that had layer {lost[0]!r} never became visible",
            hint="the next save stores every layer that is missing",
        )
    with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer:
        reader = SourceReader()
        staging = Staging(writer, lambda: reader, source="a save", checksums=Checksums(), advance=lambda count: None)
        record = _record(joint, parts, dict(_versions(staging, joint, parts)), inherited)
        writer.publish()
        commit = make_commit(
            record,
            Observed(
                time_ns=time.time_ns(),
                bytes_new=writer.bytes_new + sum(part.bytes_new for part in parts),
                bytes_reused=writer.bytes_reused + sum(part.bytes_reused for part in parts),
            ),
        )
        rooms.records.publish(commit)
        gone = writer.look_again()
        if gone:
            raise Conflict(f"{len(gone)} objects were removed while they were committed (first: {gone[0].id})")
    rooms.catalog.add(commit)
    return commit


def _stands_in(entry: LayerEntry | None, layer: LayerSource) -> bool:
    """Whether *entry* can be inherited: one from before the first update has no moments to go on with."""
    return entry is not None and (layer.optimizer_step is None or entry.optimizer_step is not None)


def _versions(staging: Staging, joint: Joint, parts: Sequence[Part]) -> Iterator[tuple[str, BlobRef]]:
    of_rank = [{part.layer: part.objects for part in each.layers} for each in parts]
    for layer in joint.share.layers:
        if layer.layer in joint.due:
            version = LayerVersion(
                layer=layer.layer,
                parameters=layer.parameters,
                buffers=layer.buffers,
                world_size=joint.share.world_size,
                objects=tuple(_objects([objects[layer.layer] for objects in of_rank])),
            )
            yield layer.layer, staging.version(version)


def _objects(by_rank: Sequence[Iterable[StoredObject]]) -> Iterator[StoredObject]:
    """Yield every rank's objects of one layer; buffers once where all ranks hold the same."""
    buffers = []
    for objects in by_rank:
        for stored in objects:
            if stored.kind is Kind.BUFFERS:
                buffers.append(stored)
            else:
                yield stored
    if len({stored.id for stored in buffers}) == 1:
        yield buffers[0]
    else:
        yield from (replace(of, shard=rank, shards=len(by_rank)) for rank, of in enumerate(buffers))


def _record(
    joint: Joint, parts: Sequence[Part], versions: Mapping[str, BlobRef], inherited: Mapping[str, LayerEntry]
) -> CommitRecord:
    origin = Origin(run=joint.run, attempt=joint.attempt, step=joint.step, save_number=joint.save_number)
    return CommitRecord(
        run=joint.run,
        attempt=joint.attempt,
        fork=joint.fork,
        step=joint.step,
        save_number=joint.save_number,
        world_size=joint.share.world_size,
        layers=tuple(
            LayerEntry(layer=of.layer, version=versions[of.layer], origin=origin, optimizer_step=of.optimizer_step)
            if of.layer in joint.due
            else inherited[of.layer]
            for of in joint.share.layers
        ),
        states=tuple(part.state for part in parts if part.state is not None),
        layout=joint.layout(),
        policy=joint.policy,
        supersedes=(),
    )
