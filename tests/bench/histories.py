"""
Make stores with long histories: records and version blobs through the library's own encoders, and no payload.

Nothing can be composed from them, but everything can be asked.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import layerstore
from layerstore.format import encode_version, make_commit, ref_of, seal_commit
from layerstore.layout import Layout
from layerstore.model import (
    BlobRef,
    CommitId,
    CommitRecord,
    Fork,
    Kind,
    LayerEntry,
    LayerVersion,
    ObjectId,
    Observed,
    Origin,
    Parameter,
    PolicyUse,
    SourceLayout,
    StoredObject,
    StoredTensor,
)
from layerstore.storage import Files, open_repository

RUN = "long"
STEP_SIZE = 10
# Each layer's content repeats after so many saves: 800,000 different blobs would only fill the disk.
VERSIONS = 20
_ELEMENTS = 64
_STARTED_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a commit stands in a history."""

    attempt: int
    fork: Fork | None
    step: int
    save_number: int


def layer_names(count: int) -> list[str]:
    """Return the names of *count* layers, two of them auxiliary on the output side and one on the input side."""
    blocks = [f"model.layers.{index}" for index in range(count - 3)]
    return ["model.embed_tokens", *blocks, "model.norm", "lm_head"]


def places(commits: int) -> Iterator[Place]:
    """Yield *commits* places in four attempts: training went back by a twentieth three times, once twice over."""
    quarter = commits // 4
    fork: Fork | None = None
    step = 0
    for attempt in range(1, 5):
        count = quarter if attempt < 4 else commits - 3 * quarter
        for number in range(count):
            step += STEP_SIZE
            yield Place(attempt, fork, step, number)
        back = max(1, count // 5) * STEP_SIZE
        if attempt == 3:  # from before where the third itself had begun
            back += count * STEP_SIZE
        step = max(STEP_SIZE, step - back)
        fork = Fork(attempt=attempt, step=step)


def build(path: Path, *, commits: int, layers: int, seed: int = 0) -> None:
    """Make a store at *path* whose run ``long`` has so many visible commits, and one in fifty replaced."""
    chance = random.Random(seed)
    layerstore.init(path).close()
    repo = open_repository(path, Files())
    names = layer_names(layers)
    versions = {name: [_version(repo.layout, name, number) for number in range(VERSIONS)] for name in names}
    repo.layout.run(RUN).mkdir()
    for number, place in enumerate(places(commits)):
        origin = Origin(run=RUN, attempt=place.attempt, step=place.step, save_number=place.save_number)
        record = CommitRecord(
            run=RUN,
            attempt=place.attempt,
            lineage=() if place.fork is None else (place.fork,),
            step=place.step,
            save_number=place.save_number,
            world_size=8,
            stage=3,
            layers=tuple(
                LayerEntry(
                    layer=name,
                    version=versions[name][place.save_number % VERSIONS],
                    origin=origin,
                    optimizer_step=place.step,
                )
                for name in names
            ),
            states=tuple(BlobRef(id=ObjectId(f"{rank:032x}"), size_bytes=1) for rank in range(8)),
            layout=SourceLayout(flavour="hf", tag=f"global_step{place.step}", layer_pattern=None),
            policy=PolicyUse(name="full", parameters={}, decisions={}),
            supersedes=(),
        )
        if chance.random() < 0.02:
            hidden = _write(repo.layout, repo.identity.store_id, replace(record, world_size=4), number)
            record = replace(record, supersedes=(hidden,))
        _write(repo.layout, repo.identity.store_id, record, number)
    repo.catalog.close()


def _version(layout: Layout, name: str, number: int) -> BlobRef:
    """Write the version blob of a layer with one parameter, whose objects are nowhere."""
    parameter = f"{name}.weight"
    objects = tuple(
        StoredObject(
            id=ObjectId(f"{number:031x}{shard}"),
            size_bytes=4096 + 4 * _ELEMENTS,
            kind=Kind.MASTER,
            shard=shard,
            shards=8,
            tensors=(StoredTensor(name=parameter, state="", dtype="F32", elements=_ELEMENTS, crc32=number),),
            chunks=bytes(8),
        )
        for shard in range(8)
    )
    data = encode_version(
        LayerVersion(
            layer=name,
            parameters=(Parameter(name=parameter, dtype="BF16", shape=(8, _ELEMENTS), frozen=False, aliases=()),),
            buffers=(),
            world_size=8,
            objects=objects,
        )
    )
    ref = ref_of(data)
    path = layout.object(ref.id)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return ref


def _write(layout: Layout, store_id: str, record: CommitRecord, number: int) -> CommitId:
    observed = Observed(time_ns=_STARTED_NS + number * 10**9, bytes_new=1, bytes_reused=0)
    commit = make_commit(record, observed)
    path = layout.record(record.run, record.step, commit.id)
    path.write_bytes(seal_commit(commit, name=layout.name(path), store_id=store_id))
    return commit.id
