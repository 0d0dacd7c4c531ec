"""
Each rank's own share of the versions, read once for all ranks.

A version describes the slices of all ranks, but each rank needs only its own slices. So one rank reads, checks and
splits each version, and sends every rank its share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar, cast

from layerstore.compose import Composition
from layerstore.errors import LayerstoreError, StorageIO
from layerstore.format import Plain, decode_version, encode_blob, pack, ref_of, unpack
from layerstore.live.ranks.exchange import Exchange
from layerstore.model import BlobRef, LayerEntry, LayerVersion, ObjectId, OwnVersion, StoredObject
from layerstore.storage import Repository

OwnVersions = Mapping[BlobRef, OwnVersion]
"""The descriptions of this rank's slices in some versions."""

Layer = TypeVar("Layer")


def own_versions(exchange: Exchange, repo: Repository, layers: Sequence[Sequence[LayerEntry]]) -> OwnVersions:
    """
    Return the descriptions of this rank's slices in the versions of *layers*. Collective.

    A layer is left out if one of its versions is damaged, or was cut for a different number of ranks: each rank then
    reads the layer itself, and reports any error itself.
    """
    rank, ranks = exchange.rank, exchange.size
    with exchange.raise_on_all():
        messages = [pack(message) for message in _messages(repo, share_of(layers, rank, ranks), ranks)]
    found: dict[BlobRef, OwnVersion] = {}
    with exchange.raise_on_all():
        for message in exchange.deal(messages):
            for name, size_bytes, data in cast("list[tuple[ObjectId, int, bytes]]", unpack(message, what="a message")):
                found[BlobRef(id=name, size_bytes=size_bytes)] = _own(data)
    return found


def versions_to_load(composition: Composition) -> list[tuple[LayerEntry, ...]]:
    """Return, by layer, the versions that a load of *composition* reads: the chosen one, and the base's to compare."""
    own = {entry.layer: entry for entry in composition.base.layers}
    return [tuple(dict.fromkeys((entry, own[entry.layer]))) for entry in composition.layers]


def share_of(layers: Sequence[Layer], rank: int, ranks: int) -> Sequence[Layer]:
    """Return the *layers* that *rank* reads for all *ranks*: equal shares, which spread few layers over all hosts."""
    return layers[rank * len(layers) // ranks : (rank + 1) * len(layers) // ranks]


def _messages(repo: Repository, layers: Sequence[Sequence[LayerEntry]], ranks: int) -> list[list[Plain]]:
    """Return, for each rank, its share of each version of *layers*, with the reference to the version."""
    messages: list[list[Plain]] = [[] for _ in range(ranks)]
    for layer in layers:
        try:
            versions = {entry.version: repo.version(entry.version) for entry in layer}
        except StorageIO:
            break  # the store does not answer: for each further version, all ranks might wait as long again
        except LayerstoreError:
            continue
        # Send all versions of a layer or none: a rank compares the versions that it gets.
        if all(_is_cut_for(version, ranks) for version in versions.values()):
            for ref, version in versions.items():
                for message, data in zip(messages, _taken_apart(version, ranks), strict=True):
                    message.append([ref.id, ref.size_bytes, data])
    return messages


def _is_cut_for(version: LayerVersion, ranks: int) -> bool:
    """Whether *version* is cut evenly for this number of *ranks*, as ZeRO-3 cuts it."""
    return version.cut == "even" and all(stored.shards in {1, ranks} for stored in version.objects)


def _taken_apart(version: LayerVersion, ranks: int) -> Iterator[bytes]:
    """Yield, for each rank, the encoding of *version* reduced to what the rank needs."""
    objects: list[list[StoredObject]] = [[] for _ in range(ranks)]
    for stored in version.objects:
        for rank in range(ranks) if stored.shards == 1 else (stored.shard,):
            objects[rank].append(stored)
    references: dict[str, StoredObject] = {stored.id: stored for stored in version.references}
    for of_rank in objects:
        referred = dict.fromkeys(stored.reference for stored in of_rank if stored.reference)
        older = tuple(references[name] for name in referred)
        yield encode_blob(replace(version, objects=tuple(of_rank), references=older))


def _own(data: bytes) -> OwnVersion:
    version = decode_version(data, ref=ref_of(data))
    return OwnVersion(**{field.name: getattr(version, field.name) for field in fields(version)})
