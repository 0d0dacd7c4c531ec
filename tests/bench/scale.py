"""
How long verify and gc take on a store of a million objects, and how much memory they hold.

Records, version blobs and state blobs are real and encoded by the library. Objects have their sizes and no bytes: that
is all that a quick verify and a collection look at. Each question is asked in a process of its own, so that its memory
is its own; what the page cache holds is not counted, and the folders are in it.
"""

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import layerstore
from layerstore.format import encode_state, encode_version, make_commit, ref_of
from layerstore.model import (
    BlobRef,
    CommitRecord,
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
from tests.bench.histories import RUN, layer_names

RANKS = 9
"""Objects of one layer version."""
DUE = 10
"""Layers that each save stores; with their blobs and a state that is 101 objects."""
_ELEMENTS = 16
_STARTED_NS = 1_700_000_000_000_000_000

# What a process of its own does: one question, with its time and the most memory that it held meanwhile.
_ASKED = """
import json, sys, time
import layerstore
from layerstore import Keep
from tests.bench.measure import measure
found = []
def ask():
    with layerstore.open(sys.argv[1]) as store:
        found.append(QUESTION)
timing = measure(ask)
print(json.dumps([timing.seconds, timing.cpu_seconds, timing.anonymous_bytes, found[0]]))
"""
_QUESTIONS = {
    "nothing but opening it": "time.sleep(0.1)",
    "the index made afresh": "store.reindex().commits",
    "verify, quick": "[(v := store.verify()).ok, v.records, v.objects, v.orphans]",
    "verify, quick, one object missing": "[len(store.verify().damaged[0].needed_by)]",
    "gc, plan that keeps all": "(lambda g: [len(g.removed), g.objects.count])(store.gc(dry_run=True, grace_seconds=0))",
    "gc, plan that keeps half": (
        "(lambda g: [len(g.removed), g.objects.count])(store.gc(Keep(last=HALF), dry_run=True, grace_seconds=0))"
    ),
    "gc that keeps half": "(lambda g: [len(g.removed), g.objects.count])(store.gc(Keep(last=HALF), grace_seconds=0))",
}


def build(path: Path, *, commits: int, layers: int = 80, seed: int = 0) -> None:
    """Make a store at *path* whose run has so many commits, each with ten layers of its own."""
    layerstore.init(path).close()
    repo = open_repository(path, Files())
    for prefix in range(256):
        (repo.layout.objects / f"{prefix:02x}").mkdir()
    repo.layout.run(RUN).mkdir()
    chance = random.Random(seed)
    names = layer_names(layers)
    entries: dict[str, LayerEntry] = {}
    for number in range(commits):
        step = (number + 1) * 10
        origin = Origin(run=RUN, attempt=1, step=step, save_number=number)
        due = names if not number else [names[(number * DUE + at) % len(names)] for at in range(DUE)]
        for name in due:
            version = _version(repo, name, chance)
            entries[name] = LayerEntry(layer=name, version=version, origin=origin, optimizer_step=step)
        record = CommitRecord(
            run=RUN,
            attempt=1,
            lineage=(),
            step=step,
            save_number=number,
            world_size=RANKS,
            stage=3,
            layers=tuple(entries[name] for name in names),
            states=(_state(repo, number),),
            layout=SourceLayout(flavour="hf", tag=f"global_step{step}", layer_pattern=None),
            policy=PolicyUse(name="full", parameters={}, decisions={}),
            supersedes=(),
        )
        commit = make_commit(record, Observed(time_ns=_STARTED_NS + number * 10**9, bytes_new=1, bytes_reused=0))
        repo.layout.record(RUN, step, commit.id).write_bytes(repo.records.encode(commit))
    repo.catalog.close()


def _version(repo: Repository, name: str, chance: random.Random) -> BlobRef:
    parameter = f"{name}.weight"
    objects = []
    for shard in range(RANKS):
        object_id = ObjectId(f"{chance.getrandbits(128):032x}")
        size_bytes = 4096 + 4 * _ELEMENTS
        fd = os.open(repo.layout.object(object_id), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.ftruncate(fd, size_bytes)
        os.close(fd)
        tensor = StoredTensor(name=parameter, state="", dtype="F32", elements=_ELEMENTS, crc32=0)
        objects.append(
            StoredObject(
                id=object_id,
                size_bytes=size_bytes,
                kind=Kind.MASTER,
                shard=shard,
                shards=RANKS,
                tensors=(tensor,),
                chunks=bytes(8),
            )
        )
    shape = (RANKS, _ELEMENTS)
    version = LayerVersion(
        layer=name,
        parameters=(Parameter(name=parameter, dtype="BF16", shape=shape, frozen=False, aliases=()),),
        buffers=(),
        world_size=RANKS,
        objects=tuple(objects),
    )
    return _write(repo, encode_version(version))


def _state(repo: Repository, number: int) -> BlobRef:
    state = RankState(
        rank=0,
        model=TreeFile(path="model_states.pt", tree={"global_steps": number}),
        optimizer=TreeFile(path="optim_states.pt", tree={}),
        files=(),
        gathered=(),
    )
    return _write(repo, encode_state(state))


def _write(repo: Repository, data: bytes) -> BlobRef:
    ref = ref_of(data)
    repo.layout.object(ref.id).write_bytes(data)
    return ref


def run(folder: Path, *, commits: int, shares: Sequence[int] = (4, 1)) -> None:
    """
    Make stores of two sizes, so that growth shows, and print what each question takes.

    What a process holds that opens the store and asks nothing is a row of its own: the rest is the question's.
    """
    print(f"{os.cpu_count()} processors, {platform.platform()}")
    for share in shares:
        path = folder / f"store-{share}"
        saves = commits // share
        started = time.perf_counter()
        build(path, commits=saves)
        made = sum(len(os.listdir(path / "objects" / name)) for name in os.listdir(path / "objects"))
        print(f"\n{made:,} objects, {saves:,} commits, made in {time.perf_counter() - started:.0f} s")
        print(f"{'':<40}{'seconds':>9}{'cpu':>9}{'peak MB':>9}  found")
        for question, code in _QUESTIONS.items():
            hurt = _hide_one(path) if "missing" in question else None
            seconds, cpu_seconds, peak_bytes, found = json.loads(_ask(path, code.replace("HALF", str(saves // 2))))
            print(f"{question:<40}{seconds:>9.1f}{cpu_seconds:>9.1f}{peak_bytes / 1e6:>9.0f}  {found}", flush=True)
            if hurt is not None:
                hurt.with_name("hidden").rename(hurt)


def _hide_one(path: Path) -> Path:
    """Take away an object that a version of the last commit names."""
    with layerstore.open(path) as store:
        [entry, *_] = store.repo.records.read(store.repo.records.names(RUN)[-1]).record.layers
        target = store.repo.layout.object(store.repo.version_of(entry).objects[0].id)
    target.rename(target.with_name("hidden"))
    return target


def _ask(path: Path, code: str) -> str:
    program = _ASKED.replace("QUESTION", code)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]
