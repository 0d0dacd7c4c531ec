"""Joint commits: each rank writes its share as a part, and one rank joins the parts into a commit."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from layerstore.errors import Conflict, IntegrityError, LayerstoreError, LayoutMismatch, Overtaken
from layerstore.format import commit_id
from layerstore.history import NextCommit, named_by
from layerstore.model import (
    DCP,
    BlobRef,
    CodingLoss,
    Commit,
    CommitId,
    CommitRecord,
    Kind,
    LayerEntry,
    LayerVersion,
    Observed,
    PolicyUse,
    SourceLayout,
    StoredObject,
)
from layerstore.parts import LayerPart, PackedObject, Part
from layerstore.precision import PRECISIONS, Precision, compact_counts
from layerstore.publish.transaction import Transaction
from layerstore.staging import (
    Checksums,
    CompactLayers,
    KeptFile,
    Reader,
    Staging,
    can_refer,
    join_version,
    layer_part,
)
from layerstore.storage import ObjectWriter, Repository
from layerstore.units import short_id
from layerstore.zero3 import LayerSource, ObjectSource, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCommit:
    """One rank's view of a joint commit: each rank writes its share; rank 0, knowing tied weights, joins the shares."""

    session: str
    save: int
    share: Share
    due: frozenset[str]
    """The layers to store."""
    files: Callable[[], tuple[KeptFile, ...]]
    """Returns the files that are kept byte for byte with the rank's state, once they are complete."""
    mark: Callable[[ObjectSource], Hashable]
    """Identifies an object of frozen weights without reading it."""
    run: str
    place: NextCommit
    """The position at which the attempt began or was resumed; the number of this save is *save_number*."""
    step: int
    save_number: int
    policy: PolicyUse
    layout: Callable[[], SourceLayout]
    """Returns the layout of the folder, once the folder is complete."""
    is_dcp: bool = False
    """Whether ``torch.distributed.checkpoint`` made the commit."""
    precision: Precision = PRECISIONS["exact"]
    compact: frozenset[str] = frozenset()
    """The layers to keep in *precision* if an older version exists to refer to; all others are kept exactly."""
    pin: str | None = None
    """The name to pin the commit as."""


def objects_due(share: Share, due: frozenset[str]) -> list[ObjectSource]:
    """Return a rank's objects of the layers *due*, in reading order."""
    return [source for layer in share.layers if layer.layer in due for source in layer.objects]


FrozenWeights = MutableMapping[tuple[str, int], tuple[Hashable, StoredObject]]
"""By layer and shard, the mark and the object of frozen weights."""

OlderVersions = MutableMapping[str, LayerVersion]
"""By layer, the version that the next differences refer to: it has this rank's exact masters, or refers to them."""


def write_share(
    repo: Repository, joint: JointCommit, reader: Reader, *, frozen: FrozenWeights, older: OlderVersions
) -> Part:
    """
    Store a rank's share, write its part, and return the part.

    Frozen weights are read once: an object in *frozen* is reused while its mark is unchanged and the store has it.
    Compact layers refer to their versions in *older*; layers without a version in *older* are kept exactly.

    Raises:
        Overtaken: An object was removed before the part was visible.
        IntegrityError: An object that a compact layer refers to is damaged.
        Unsupported: A compact layer has numbers that cannot be coded.
    """
    share = joint.share
    due = [layer for layer in share.layers if layer.layer in joint.due]
    compact = _compact_layers(joint, due, older)
    with Transaction(repo, past_cache=True) as tx:
        # The host buffer frees each copy of a tensor after one read.
        staging = Staging(tx.objects, reader, source="the engine", checksums=Checksums(), reads_once=True)
        sharing = _Sharing(joint, staging, tx.objects, frozen, compact)
        staged = {}
        for layer in due:
            try:
                staged[layer.layer] = tuple(sharing.objects(layer))
            except (IntegrityError, Overtaken) as exc:
                if layer.layer in compact.older:
                    exc.locate(f"the reference of layer {layer.layer!r}")
                raise
        state = staging.state(share.state, joint.files())
        part = replace(
            _empty_part(joint),
            agreement=share.agreement,
            layers=tuple(layer_part(layer, objects, compact, staging) for layer, objects in staged.items()),
            state=state,
            bytes_new=tx.objects.bytes_new,
            bytes_reused=tx.objects.bytes_reused,
        )
        tx.leave(part)
    # Only once the part is visible: differences must not refer to masters that this transaction may discard.
    for layer in due:
        masters = tuple(stored for stored in staged[layer.layer] if stored.kind is Kind.MASTER and not stored.is_coded)
        if masters:
            older[layer.layer] = _version(layer, masters, world_size=share.world_size)
    return part


def copy_share(near: Repository, repo: Repository, part: Part) -> None:
    """
    Copy *part* and everything that it references from the node's store *near* to *repo*.

    Raises:
        Overtaken: An object was removed during the copy; repeat the call.
        IntegrityError: An object in *near* is damaged.
    """
    assert part.state is not None, "it did not fail"
    with Transaction(repo, past_cache=True) as tx:
        named = (stored.ref for layer in part.layers for stored in layer.named)
        for ref in (*named, *named_by(near, part.state)):
            if not tx.objects.reuse(ref):
                tx.objects.copy(ref, near.objects)
        # The state blob comes after the objects that it references: its presence promises that they exist.
        tx.objects.put(near.objects.read(part.state), part.state)
        tx.leave(part)


def copy_commit(
    near: Repository, repo: Repository, commit: Commit, parts: Sequence[Part], *, own: set[CommitId], after: int | None
) -> None:
    """
    Make *commit* from the node's store *near* visible in *repo*, which already has all ranks' *parts* of the commit.

    *own* lists this job's commit ids. Any other commit of the same attempt after the step *after* is a conflict.

    Raises:
        InheritedLayerLost: A version that *commit* inherits is gone from *repo*.
        Overtaken: Something else is gone from *repo*; repeat the call.
        Conflict: Another job saves the same attempt.
    """
    with Transaction(repo) as tx:
        for entry in commit.record.layers:
            if entry.saved_by(commit.record):
                tx.objects.put(near.objects.read(entry.version), entry.version)
                continue
            try:
                tx.inherit(entry)
            except (IntegrityError, Overtaken) as exc:
                raise InheritedLayerLost(exc.message, hint=_STORED_AGAIN) from exc
        for state in commit.record.states:
            if not tx.objects.claim(state):
                raise Overtaken(
                    f"a rank's state of {commit.record.run}@{commit.record.step} is gone; nothing was saved",
                    hint="the next save stores every layer",
                )
        tx.trust(parts)
        _check_alone(repo, commit.record, own, after=after)
        tx.commit(commit.record, observed=commit.observed)


def _compact_layers(joint: JointCommit, due: Iterable[LayerSource], older: OlderVersions) -> CompactLayers:
    """Return the compact layers among *due* that have a version to refer to on this rank."""
    references = {}
    for layer in due:
        version = older.get(layer.layer) if layer.layer in joint.compact else None
        if version is not None and can_refer(layer, joint.precision, version):
            references[layer.layer] = version
    return CompactLayers(joint.precision, references)


def _version(layer: LayerSource, masters: tuple[StoredObject, ...], *, world_size: int) -> LayerVersion:
    return LayerVersion(
        layer=layer.layer,
        parameters=layer.parameters,
        buffers=layer.buffers,
        world_size=world_size,
        objects=masters,
        cut=layer.cut,
    )


def _empty_part(joint: JointCommit) -> Part:
    return Part(
        session=joint.session,
        save=joint.save,
        rank=joint.share.rank,
        agreement="",
        layers=(),
        state=None,
        bytes_new=0,
        bytes_reused=0,
        failure="",
    )


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Stages one rank's share."""

    joint: JointCommit
    staging: Staging
    writer: ObjectWriter
    frozen: FrozenWeights
    compact: CompactLayers

    def objects(self, layer: LayerSource) -> Iterator[StoredObject]:
        """Stage this rank's objects of *layer*."""
        for source in layer.objects:
            if source.kind is not Kind.WEIGHTS:
                yield self.staging.planned(source, self.compact.plan(layer.layer, source))
                continue
            mark = self.joint.mark(source)
            known, stored = self.frozen.get((layer.layer, source.shard), (None, None))
            if stored is None or known != mark or not self.writer.reuse(stored.ref):
                stored = self.staging.object(source)
                self.frozen[layer.layer, source.shard] = mark, stored
            yield stored


def fail_share(repo: Repository, joint: JointCommit, why: str) -> None:
    """Write a part that reports this rank's failure, unless the rank's share exists: it may already be joined."""
    # An abandoned draft would keep its objects until the session has been idle for a day.
    repo.parts.withdraw(joint.session, joint.save, joint.share.rank)
    repo.parts.publish(replace(_empty_part(joint), failure=why or "it failed"))


_STORED_AGAIN = "the next save stores every layer that is missing"
_ONE_MODEL = "build the same model on every rank"


class GivenUp(LayerstoreError):
    """A save will not become a commit: a rank failed, or an earlier save that it inherits from never became visible."""


class InheritedLayerLost(GivenUp):
    """An inherited layer was collected: resuming from an old step does not protect that step's layers."""


def parts_of(repo: Repository, joint: JointCommit, known: dict[int, Part]) -> list[Part] | None:
    """
    Return the parts of all ranks; None while some are missing. Parts in *known*, by rank, are not read again.

    Raises:
        GivenUp: A rank has failed.
    """
    # List the folder: an NFS client that looks up a name too early reports it as missing for up to a minute.
    listed = repo.parts.ranks(joint.session, joint.save)
    for rank in sorted(listed.intersection(range(joint.share.world_size)) - known.keys()):
        part = repo.parts.find(joint.session, joint.save, rank)
        # A part without state means that the rank failed; the part holds the reason instead of a share.
        if part is not None and part.state is None:
            raise GivenUp(f"rank {rank} could not write its share: {part.failure}")
        if part is not None:
            known[rank] = part
    return [known[rank] for rank in sorted(known)] if len(known) == joint.share.world_size else None


def join(
    repo: Repository,
    joint: JointCommit,
    parts: Sequence[Part],
    *,
    inherited: Mapping[str, LayerEntry],
    own: set[CommitId],
) -> Commit:
    """
    Join *parts* into a commit and publish it; layers that are not due are *inherited*.

    *own* lists the ids of all commits that this job has tried to publish; this commit's id is added.

    Raises:
        Conflict: Another job saves the same attempt to the same bucket.
        InheritedLayerLost: A layer to be inherited was collected.
        GivenUp: A part or a needed object is gone; or a layer is neither due nor inherited, because the save that
            stored it was given up.
        LayoutMismatch: The ranks have saved different models.
    """
    for part in parts:
        if part.agreement != parts[0].agreement:
            raise LayoutMismatch(f"rank {part.rank} has saved a different model than rank 0", hint=_ONE_MODEL)
    lost = [
        layer.layer
        for layer in joint.share.layers
        if layer.layer not in joint.due and not _can_inherit(inherited.get(layer.layer), layer)
    ]
    if lost:
        raise GivenUp(
            f"layer {lost[0]!r} has no version to inherit: the save that stored it failed, or gc removed it",
            hint=_STORED_AGAIN,
        )
    losses = joined_losses(layer for part in parts for layer in part.layers)
    with Transaction(repo) as tx:
        record = replace(joint.place, save_number=joint.save_number, inherited=inherited).record(
            run=joint.run,
            step=joint.step,
            layers=joint.share.layers,
            due=joint.due,
            versions=dict(_versions(tx.objects, joint, parts)),
            states=tuple(part.state for part in parts if part.state is not None),
            world_size=joint.share.world_size,
            stage=joint.share.stage,
            layout=joint.layout(),
            policy=joint.policy,
            precision=joint.precision.name,
            compact=compact_counts(inherited, {loss.layer for loss in losses}),
            flags=(DCP,) if joint.is_dcp else (),
        )
        try:
            for entry in record.layers:
                if entry.layer not in joint.due:
                    tx.inherit(entry)
        except (IntegrityError, Overtaken) as exc:
            raise InheritedLayerLost(exc.message, hint=_STORED_AGAIN) from exc
        observed = Observed(
            time_ns=time.time_ns(),
            bytes_new=tx.objects.bytes_new + sum(part.bytes_new for part in parts),
            bytes_reused=tx.objects.bytes_reused + sum(part.bytes_reused for part in parts),
            losses=losses,
        )
        try:
            # Until the record is linked, only the parts make collections keep what the ranks wrote. So the parts must
            # exist before the version blobs are linked, and must still exist once the record is, as `commit` checks.
            tx.trust(parts)
            _check_alone(repo, record, own, after=joint.place.after)
            return tx.commit(record, observed=observed).commit
        except Overtaken as exc:
            raise GivenUp(exc.message, hint=_STORED_AGAIN) from exc


def _check_alone(repo: Repository, record: CommitRecord, own: set[CommitId], *, after: int | None) -> None:
    """
    Add *record* to *own*; raise Conflict if another job has saved the same attempt since the step *after*.

    On a disk, a lock prevents such saves. Hosts that save to a bucket do not see each other's locks.
    """
    own.add(commit_id(record))  # first: the record may exist even if the server's answer is lost
    if repo.remote is None:
        return
    repo.records.refresh(run=record.run)
    view = repo.catalog.find(record.run)
    for row in [] if view is None else view.of_attempt(record.attempt):
        # A commit up to the step *after* may be an older one that was restored.
        if row.id not in own and (after is None or row.step > after):
            raise Conflict(
                f"another job is also saving attempt {record.attempt} of run {record.run!r}, "
                f"and has saved step {row.step} (commit {short_id(row.id)})",
                hint="end one of the two jobs, and restart the other",
            )


def _can_inherit(entry: LayerEntry | None, layer: LayerSource) -> bool:
    """Whether *layer* can inherit *entry*."""
    # A version from before the first update has no moments; a later commit must not inherit such a version.
    return entry is not None and (layer.optimizer_step is None or entry.optimizer_step is not None)


def joined_losses(parts: Iterable[LayerPart]) -> tuple[CodingLoss, ...]:
    """Return the coding errors of all ranks, added up by layer and state."""
    losses: dict[tuple[str, str], CodingLoss] = {}
    for loss in (loss for part in parts for loss in part.losses):
        others = losses.get((loss.layer, loss.state))
        losses[loss.layer, loss.state] = loss if others is None else others + loss
    return tuple(losses.values())


def _versions(writer: ObjectWriter, joint: JointCommit, parts: Sequence[Part]) -> Iterator[tuple[str, BlobRef]]:
    shares_by_rank = [{share.layer: share for share in part.layers} for part in parts]
    for layer in joint.share.layers:
        if layer.layer in joint.due:
            shares = [by_layer[layer.layer] for by_layer in shares_by_rank]
            ref = join_version(
                writer,
                layer,
                _objects([share.objects for share in shares]),
                [older for share in shares for older in share.references],
                world_size=joint.share.world_size,
            )
            yield layer.layer, ref


def _objects(by_rank: Sequence[Iterable[PackedObject]]) -> Iterator[PackedObject]:
    """Yield every rank's objects of one layer; buffers that are the same on all ranks are yielded once."""
    buffers = []
    for objects in by_rank:
        for packed in objects:
            if packed.kind is Kind.BUFFERS:
                buffers.append(packed)
            else:
                yield packed
    if len({packed.id for packed in buffers}) == 1:
        yield buffers[0]
    else:
        yield from (replace(packed, shard=rank, shards=len(by_rank)) for rank, packed in enumerate(buffers))
