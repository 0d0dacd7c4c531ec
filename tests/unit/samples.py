"""Small valid nouns for tests: every field has a value, and a test names only those that it is about."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layerstore.compose import Composition
from layerstore.disk import Files, Hook, no_hook
from layerstore.format import make_commit
from layerstore.model import (
    BlobRef,
    Commit,
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
    Pin,
    PolicyUse,
    SourceLayout,
    StoredObject,
    StoredTensor,
)
from layerstore.states import (
    BufferContent,
    FlatContent,
    FragmentContent,
    GatheredFile,
    GatheredTensor,
    ObjectContent,
    RankState,
    SourceFile,
    TensorSource,
    TreeFile,
)
from layerstore.storage import Repository, make_store, open_repository
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Tensor, Tree

STORE_ID = "5e" * 16


def blob_ref(digit: str = "a", size_bytes: int = 10) -> BlobRef:
    """Return a reference to an object that is nowhere."""
    return BlobRef(id=ObjectId(digit * 32), size_bytes=size_bytes)


def entry(layer: str, *, run: str = "sft", attempt: int = 1, step: int = 4, save_number: int = 0) -> LayerEntry:
    """Return what a record says of a layer."""
    return LayerEntry(
        layer=layer,
        version=blob_ref("b"),
        origin=Origin(run=run, attempt=attempt, step=step, save_number=save_number),
        optimizer_step=step,
    )


def record(
    *,
    run: str = "sft",
    attempt: int = 1,
    fork: Fork | None = None,
    step: int = 4,
    save_number: int = 0,
    supersedes: Sequence[CommitId] = (),
    flags: Sequence[str] = (),
    tag: str = "global_step4",
    layers: Sequence[LayerEntry] | None = None,
) -> CommitRecord:
    """Return a whole commit record."""
    own = [
        entry(name, run=run, attempt=attempt, step=step, save_number=save_number) for name in ("model.embed", "head")
    ]
    return CommitRecord(
        run=run,
        attempt=attempt,
        lineage=() if fork is None else (fork,),
        step=step,
        save_number=save_number,
        world_size=2,
        stage=3,
        layers=tuple(own if layers is None else layers),
        states=(blob_ref("c"), blob_ref("d")),
        layout=SourceLayout(flavour="raw", tag=tag, layer_pattern=None),
        policy=PolicyUse(name="full", parameters={}, decisions={"due": ["head"]}),
        supersedes=tuple(supersedes),
        flags=tuple(flags),
    )


def observed(time_ns: int = 1_700_000_000_000_000_000) -> Observed:
    """Return what was seen beside a commit."""
    return Observed(time_ns=time_ns, bytes_new=100, bytes_reused=50)


def commit(of: CommitRecord | None = None, *, time_ns: int = 1_700_000_000_000_000_000) -> Commit:
    """Return a commit of the record *of*."""
    return make_commit(record() if of is None else of, observed(time_ns))


def composition(layers: Sequence[LayerEntry]) -> Composition:
    """Return what a commit of *layers* is composed of."""
    base = record(layers=layers)
    return Composition(base=base, commit=commit(base).id, time_ns=0, policy="latest", parameters={}, layers=base.layers)


def pin(name: str = "best", of: CommitRecord | None = None) -> Pin:
    """Return a pin of the record *of*."""
    made = commit(of)
    return Pin(name=name, record=made.record, base=made.id, observed=observed())


def version(layer: str = "model.layers.0") -> LayerVersion:
    """Return a layer version with one object of two slices."""
    name = f"{layer}.weight"
    return LayerVersion(
        layer=layer,
        parameters=(Parameter(name=name, dtype="BF16", shape=(3, 5), frozen=False, aliases=("tied.weight",)),),
        buffers=(),
        world_size=2,
        objects=(
            StoredObject(
                id=ObjectId("e" * 32),
                size_bytes=4096 + 60,
                kind=Kind.MASTER,
                shard=0,
                shards=2,
                tensors=(StoredTensor(name=name, state="", dtype="F32", elements=15, crc32=0xDEADBEEF),),
                chunks=b"12345678",
            ),
        ),
    )


def coded_version(layer: str = "model.layers.0") -> LayerVersion:
    """Return the same with differences to that object, and a moment in 8 bits."""
    exact = version(layer)
    [older] = exact.objects
    masters = tuple(replace(tensor, coding="difference8") for tensor in older.tensors)
    moments = tuple(replace(tensor, state="exp_avg", coding="companded8") for tensor in older.tensors)
    compact = (
        replace(older, id=ObjectId("d" * 32), tensors=masters, reference=older.id),
        replace(older, id=ObjectId("c" * 32), tensors=moments, kind=Kind.OPTIMIZER),
    )
    return replace(exact, objects=compact, references=(older,))


def storage(content: object, *, dtype: str = "F32", elements: int = 4, device: str = "cpu") -> Storage:
    """Return a storage with *content*."""
    return Storage(dtype=dtype, elements=elements, device=device, content=content)


def tensor(content: object, *, elements: int = 4) -> Tensor:
    """Return a one-dimensional tensor over a storage of its own."""
    return Tensor(storage=storage(content, elements=elements), offset=0, shape=Size((elements,)), stride=(1,))


def tree() -> Tree:
    """Return a tree with one node of every kind."""
    shared = storage(bytes(16))
    return {
        "none": None,
        "numbers": [True, -1, 2**70, 1.5, float("inf")],
        "text": ("é", "\ud800", b"\x00\xff"),
        "set": {1, 2, 3},
        "ordered": OrderedMap({"b": 1, "a": 2}, {"_metadata": {}}),
        "size": Size((2, 3)),
        "global": Global("torch.bfloat16"),
        "inert": Inert(name="a.b.Loss", arguments=(1,), state={"scale": 2.0}, has_state=True, items={"k": "v"}),
        "views": [
            Tensor(storage=shared, offset=0, shape=Size((4,)), stride=(1,), attributes={"ds_id": 3}),
            Tensor(storage=shared, offset=1, shape=Size((3,)), stride=(1,), requires_grad=True, is_parameter=True),
        ],
        7: tensor(FlatContent(state="exp_avg", group=0)),
    }


def state(rank: int = 0) -> RankState:
    """Return a rank's state with every kind of content."""
    contents = [
        ObjectContent(object=blob_ref("9", 5000), size_bytes=900, crc32=7),
        FlatContent(state="master", group=1),
        FragmentContent(parameter="frozen.weight"),
        BufferContent(buffer="rope.inv_freq"),
    ]
    return RankState(
        rank=rank,
        model=TreeFile(path="global_step4/model.pt", tree=tree()),
        optimizer=TreeFile(path="global_step4/optim.pt", tree=[tensor(content, elements=225) for content in contents]),
        files=(
            SourceFile(path="zero_to_fp32.py", executable=True, content=b"#!/usr/bin/env python"),
            SourceFile(path="tokenizer.json", executable=False, content=contents[0]),  # type: ignore[arg-type]  # an ObjectContent
        ),
        gathered=(
            GatheredFile(
                path="model.safetensors",
                header=b"\x02\0\0\0\0\0\0\0{}",
                tensors=(
                    GatheredTensor(
                        name="lm_head.weight",
                        dtype="BF16",
                        elements=15,
                        crc32=0,
                        source=TensorSource.PARAMETER,
                        layer_name="lm_head.weight",
                        stored=None,
                    ),
                ),
            ),
        ),
    )


def repo(path: Path, *, hook: Hook = no_hook) -> Repository:
    """Make a store at *path* and open its repository."""
    make_store(path, Files())
    return open_repository(path, Files(hook))
