"""
The version of a layer, which lists its objects: made by one process, or joined from what many ranks have packed.

A rank packs the descriptions of its own slices, so that the rank that commits only has to concatenate a million of
them.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from layerstore.coding import Error
from layerstore.format import encode_blob, pack_object, ref_of
from layerstore.model import BlobRef, CodingLoss, Kind, LayerVersion, StoredObject
from layerstore.parts import LayerPart, PackedObject
from layerstore.staging.encode import CompactLayers
from layerstore.staging.stage import Staging
from layerstore.storage import ObjectWriter
from layerstore.zero3 import LayerSource

_KINDS = tuple(Kind)


def stage_version(
    writer: ObjectWriter,
    layer: LayerSource,
    objects: Iterable[StoredObject],
    *,
    world_size: int,
    references: Iterable[StoredObject] = (),
) -> BlobRef:
    """
    Stage the version of *layer* that consists of *objects*, after putting them into canonical order.

    *references* are objects of older versions that *objects* may refer to.
    """
    return join_version(writer, layer, map(pack_object, objects), map(pack_object, references), world_size=world_size)


def join_version(
    writer: ObjectWriter,
    layer: LayerSource,
    objects: Iterable[PackedObject],
    references: Iterable[PackedObject],
    *,
    world_size: int,
) -> BlobRef:
    """Do as `stage_version` does, with objects that several ranks have packed."""
    # The same order, no matter which process staged them: a version's id is the hash of its blob.
    objects = sorted(objects, key=lambda packed: (_KINDS.index(packed.kind), packed.shards, packed.shard))
    referred = {packed.reference for packed in objects}
    version = LayerVersion(
        layer=layer.layer,
        parameters=layer.parameters,
        buffers=layer.buffers,
        world_size=world_size,
        objects=(),
        cut=layer.cut,
    )
    # Only those referred to: the store keeps whatever a version references for as long as it keeps the version.
    older = sorted((packed for packed in references if packed.id in referred), key=attrgetter("shard"))
    data = encode_blob(version, objects, older)
    ref = ref_of(data)
    writer.put(data, ref)
    return ref


def layer_part(layer: str, objects: Iterable[StoredObject], compact: CompactLayers, staging: Staging) -> LayerPart:
    """Return one rank's part of *layer*, made of the *objects* that it has staged."""
    objects = tuple(objects)
    referred = {stored.reference for stored in objects}
    return LayerPart(
        layer=layer,
        objects=tuple(map(pack_object, objects)),
        references=tuple(pack_object(older) for older in compact.references(layer) if older.id in referred),
        losses=tuple(coding_losses(layer, objects, staging)),
    )


def coding_losses(layer: str, objects: Iterable[StoredObject], staging: "Staging") -> Iterator[CodingLoss]:
    """Yield the coding errors of the compact *objects* of *layer*, for each optimizer state and for masters."""
    errors: dict[str, Error] = {}
    for stored in objects:
        for state, lost in staging.losses.get(stored.id, {}).items():
            errors[state] = errors.get(state, Error()) + lost
    for state, lost in sorted(errors.items()):
        yield CodingLoss(
            layer=layer,
            state=state,
            greatest=lost.greatest,
            squares=lost.squares,
            greatest_value=lost.greatest_value,
            value_squares=lost.value_squares,
        )
