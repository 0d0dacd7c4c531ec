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
from layerstore.disk import Files
from layerstore.format import encode_blob, make_commit, ref_of
from layerstore.model import BlobRef, Commit, CommitRecord, Fork, LayerEntry, ObjectId
from layerstore.states import RankState, TreeFile
from layerstore.storage import Repository, open_repository
from tests.unit import samples

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
    repo = open_empty(path)
    names = layer_names(layers)
    versions = {name: [write_version(repo, name, shard_ids(number)) for number in range(VERSIONS)] for name in names}
    states = tuple(BlobRef(id=ObjectId(f"{rank:032x}"), size_bytes=1) for rank in range(RANKS))
    for number, place in enumerate(places(commits)):
        chosen = {name: versions[name][place.save_number % VERSIONS] for name in names}
        record = record_of(place, [entry_of(place, name, version) for name, version in chosen.items()], states)
        if chance.random() < 0.02:
            hidden = _write_record(repo, replace(record, world_size=4, states=states[:4]), number)
            record = replace(record, supersedes=(hidden.id,))
        _write_record(repo, record, number)
    repo.catalog.close()


def build_objects(path: Path, *, commits: int, layers: int = 80, seed: int = 0) -> None:
    """Make a store at *path* whose run has so many commits, each with ten layers and 101 objects of its own."""
    chance = random.Random(seed)
    repo = open_empty(path)
    names = layer_names(layers)
    entries: dict[str, LayerEntry] = {}
    for number in range(commits):
        place = Place(1, None, (number + 1) * STEP_SIZE, number)
        for name in names if not number else [names[(number * DUE + at) % len(names)] for at in range(DUE)]:
            ids = [ObjectId(f"{chance.getrandbits(128):032x}") for _ in range(RANKS + 1)]
            entries[name] = entry_of(place, name, write_version(repo, name, ids, with_objects=True))
        state = RankState(
            rank=0,
            model=TreeFile(path="model_states.pt", tree={"global_steps": number}),
            optimizer=TreeFile(path="optim_states.pt", tree={}),
            files=(),
            gathered=(),
        )
        states = (write_blob(repo, encode_blob(state)),)
        _write_record(repo, record_of(place, [entries[name] for name in names], states), number)
    repo.catalog.close()


def open_empty(path: Path) -> Repository:
    """Make a store at *path* with all its folders, and open it."""
    layerstore.init(path).close()
    repo = open_repository(path, Files())
    for prefix in range(256):
        (repo.layout.objects / f"{prefix:02x}").mkdir(exist_ok=True)
    repo.layout.run(RUN).mkdir()
    return repo


def entry_of(place: Place, name: str, version: BlobRef) -> LayerEntry:
    """Return the entry of the layer *name* that was saved at *place*."""
    made = samples.entry(name, run=RUN, attempt=place.attempt, step=place.step, save_number=place.save_number)
    return replace(made, version=version)


def record_of(place: Place, entries: list[LayerEntry], states: tuple[BlobRef, ...]) -> CommitRecord:
    """Return the record of a save at *place*."""
    made = samples.record(
        run=RUN,
        attempt=place.attempt,
        fork=place.fork,
        step=place.step,
        save_number=place.save_number,
        tag=f"global_step{place.step}",
        layers=entries,
    )
    return replace(made, world_size=len(states), states=states)


def shard_ids(number: int) -> list[ObjectId]:
    """Return the ids of objects, one for each rank."""
    return [ObjectId(f"{number:031x}{shard}") for shard in range(RANKS)]


def write_version(repo: Repository, name: str, ids: list[ObjectId], *, with_objects: bool = False) -> BlobRef:
    """Write the version blob of a layer with one parameter, whose objects are nowhere or have no bytes."""
    made = samples.version(name)
    [model] = made.objects
    crc32 = int(ids[0][:8], 16)
    tensors = tuple(replace(tensor, elements=_ELEMENTS, crc32=crc32) for tensor in model.tensors)
    objects = tuple(
        replace(model, id=object_id, size_bytes=OBJECT_BYTES, shard=shard, shards=len(ids), tensors=tensors)
        for shard, object_id in enumerate(ids)
    )
    for each in objects if with_objects else ():
        fd = os.open(repo.layout.object(each.id), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.ftruncate(fd, OBJECT_BYTES)
        os.close(fd)
    parameters = (replace(made.parameters[0], shape=(len(ids), _ELEMENTS), aliases=()),)
    return write_blob(repo, encode_blob(replace(made, parameters=parameters, world_size=len(ids), objects=objects)))


def write_blob(repo: Repository, data: bytes) -> BlobRef:
    """Write a blob."""
    ref = ref_of(data)
    repo.layout.object(ref.id).write_bytes(data)
    return ref


def _write_record(repo: Repository, record: CommitRecord, number: int) -> Commit:
    commit = make_commit(record, samples.observed(_STARTED_NS + number * 10**9))
    repo.layout.record(record.run, record.step, commit.id).write_bytes(repo.records.encode(commit))
    return commit
