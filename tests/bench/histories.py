"""
Make stores with long histories: records and blobs through the library's own encoders, and no payload.

Nothing can be composed from them, but everything can be asked. `build` makes four attempts of full saves, whose objects
are nowhere; `build_objects` makes one attempt of saves of ten layers, whose objects have their sizes and no bytes.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import layerstore
from layerstore.format import encode_state, encode_version, make_commit, ref_of
from layerstore.model import (
    BlobRef,
    Commit,
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
    RankState,
    SourceLayout,
    StoredObject,
    StoredTensor,
    TreeFile,
)
from layerstore.storage import Files, Repository, open_repository

RUN = "long"
STEP_SIZE = 10
# Each layer's content repeats after so many saves: 800,000 different blobs would only fill the disk.
VERSIONS = 20
RANKS = 8
DUE = 10
"""Layers that each save of `build_objects` stores."""
_ELEMENTS = 64
OBJECT_BYTES = 4096 + 4 * _ELEMENTS
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
    repo = _opened(path)
    names = layer_names(layers)
    versions = {name: [write_version(repo, name, _ids(number)) for number in range(VERSIONS)] for name in names}
    states = tuple(BlobRef(id=ObjectId(f"{rank:032x}"), size_bytes=1) for rank in range(RANKS))
    for number, place in enumerate(places(commits)):
        chosen = {name: versions[name][place.save_number % VERSIONS] for name in names}
        record = _record(place, [_entry(place, name, version) for name, version in chosen.items()], states)
        if chance.random() < 0.02:
            hidden = _write_record(repo, replace(record, world_size=4), number)
            record = replace(record, supersedes=(hidden.id,))
        _write_record(repo, record, number)
    repo.catalog.close()


def build_objects(path: Path, *, commits: int, layers: int = 80, seed: int = 0) -> None:
    """Make a store at *path* whose run has so many commits, each with ten layers and 101 objects of its own."""
    chance = random.Random(seed)
    repo = _opened(path)
    names = layer_names(layers)
    entries: dict[str, LayerEntry] = {}
    for number in range(commits):
        place = Place(1, None, (number + 1) * STEP_SIZE, number)
        for name in names if not number else [names[(number * DUE + at) % len(names)] for at in range(DUE)]:
            ids = [ObjectId(f"{chance.getrandbits(128):032x}") for _ in range(RANKS + 1)]
            entries[name] = _entry(place, name, write_version(repo, name, ids, with_objects=True))
        state = RankState(
            rank=0,
            model=TreeFile(path="model_states.pt", tree={"global_steps": number}),
            optimizer=TreeFile(path="optim_states.pt", tree={}),
            files=(),
            gathered=(),
        )
        states = (write_blob(repo, encode_state(state)),)
        _write_record(repo, _record(place, [entries[name] for name in names], states), number)
    repo.catalog.close()


def _opened(path: Path) -> Repository:
    layerstore.init(path).close()
    repo = open_repository(path, Files())
    for prefix in range(256):
        (repo.layout.objects / f"{prefix:02x}").mkdir(exist_ok=True)
    repo.layout.run(RUN).mkdir()
    return repo


def _entry(place: Place, name: str, version: BlobRef) -> LayerEntry:
    origin = Origin(run=RUN, attempt=place.attempt, step=place.step, save_number=place.save_number)
    return LayerEntry(layer=name, version=version, origin=origin, optimizer_step=place.step)


def _record(place: Place, entries: list[LayerEntry], states: tuple[BlobRef, ...]) -> CommitRecord:
    return CommitRecord(
        run=RUN,
        attempt=place.attempt,
        lineage=() if place.fork is None else (place.fork,),
        step=place.step,
        save_number=place.save_number,
        world_size=RANKS,
        stage=3,
        layers=tuple(entries),
        states=states,
        layout=SourceLayout(flavour="hf", tag=f"global_step{place.step}", layer_pattern=None),
        policy=PolicyUse(name="full", parameters={}, decisions={}),
        supersedes=(),
    )


def _ids(number: int) -> list[ObjectId]:
    return [ObjectId(f"{number:031x}{shard}") for shard in range(RANKS)]


def write_version(repo: Repository, name: str, ids: list[ObjectId], *, with_objects: bool = False) -> BlobRef:
    """Write the version blob of a layer with one parameter, whose objects are nowhere or have no bytes."""
    parameter, size_bytes = f"{name}.weight", OBJECT_BYTES
    tensor = StoredTensor(name=parameter, state="", dtype="F32", elements=_ELEMENTS, crc32=int(ids[0][:8], 16))
    objects = tuple(
        StoredObject(
            id=object_id,
            size_bytes=size_bytes,
            kind=Kind.MASTER,
            shard=shard,
            shards=len(ids),
            tensors=(tensor,),
            chunks=bytes(8),
        )
        for shard, object_id in enumerate(ids)
    )
    for each in objects if with_objects else ():
        fd = os.open(repo.layout.object(each.id), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.ftruncate(fd, size_bytes)
        os.close(fd)
    shape = (len(ids), _ELEMENTS)
    version = LayerVersion(
        layer=name,
        parameters=(Parameter(name=parameter, dtype="BF16", shape=shape, frozen=False, aliases=()),),
        buffers=(),
        world_size=len(ids),
        objects=objects,
    )
    return write_blob(repo, encode_version(version))


def write_blob(repo: Repository, data: bytes) -> BlobRef:
    """Write a blob."""
    ref = ref_of(data)
    repo.layout.object(ref.id).write_bytes(data)
    return ref


def _write_record(repo: Repository, record: CommitRecord, number: int) -> Commit:
    commit = make_commit(record, Observed(time_ns=_STARTED_NS + number * 10**9, bytes_new=1, bytes_reused=0))
    repo.layout.record(record.run, record.step, commit.id).write_bytes(repo.records.encode(commit))
    return commit
