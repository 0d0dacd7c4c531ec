"""
What large models take on many GPUs: files, bytes, calls, requests, memory and dollars, without any tensor.

Records, version blobs, parts and states are real, and encoded by the library; one version blob stands for all layers
of its shape. Policies decide save by save. Calls and requests are counted by `COUNTED`, which a test holds against what
a small real save makes. Seconds are of one processor, measured; everything else is the same at every run.
"""

import contextlib
import random
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from unittest.mock import patch

import layerstore
from layerstore import Drift, Filter, Latest, Parity
from layerstore.format import (
    decode_version,
    encode_blob,
    make_commit,
    named_in_version,
    pack,
    pack_object,
    ref_of,
    seal_part,
    unseal_part,
)
from layerstore.framing import canonical_order, frame
from layerstore.history import Needs
from layerstore.inspect import Model, Prices, Training, estimate_saves
from layerstore.inspect.estimate import cycle_of, due_sets
from layerstore.inspect.model_shapes import model_of_shapes
from layerstore.limits import REMOTE_REQUESTS_MAX, VERIFY_CHUNK_BYTES
from layerstore.live.ranks import own_versions, versions_to_load
from layerstore.live.ranks.own_versions import share_of
from layerstore.model import BlobRef, Kind, LayerVersion, ObjectId, Parameter, StoredObject, StoredTensor
from layerstore.parts import LayerPart, Part
from layerstore.policy import Policy
from layerstore.slices import Slices, valid_elements
from layerstore.storage import ObjectStore, Repository
from tests.bench.generate import generate
from tests.bench.histories import RUN, build, write_blob
from tests.bench.totals import FileTotals, kept_on_disk, saves_kept, trained_files
from tests.ranks.exchanges import InTurn
from tests.unit import samples

STEP_SECONDS, EVERY, STEPS = 10.0, 60, 30 * 8640
"""A save every ten minutes, for 30 days."""
KEEP_LAST, KEEP_EVERY = 3, 8640
"""The newest three, and one of each day."""
PRICES = Prices(gb_month=0.023, gpu_hour=2.50)
MOVEMENT = 0.004
"""Of every layer from save to save: the figure of the guide."""
CALL_SECONDS, REQUEST_SECONDS = 0.001, 0.05
"""What a call of a network filesystem and a request to a bucket take, assumed."""

POLICIES: Mapping[str, Policy] = {
    "full": Latest(),
    "parity": Parity(),
    "filter": Filter(),
    "drift": Drift(),
}

COUNTED: Mapping[str, Mapping[str, int]] = {
    # On the rank that writes it.
    "object": {"create": 1, "fsync": 1, "utime": 3, "link": 1, "unlink": 1},
    "blob": {"create": 1, "fsync": 1, "utime": 3, "link": 1, "unlink": 1},
    # For each of the 256 folders that new objects of a writer fall into, once for all of them, and for its part.
    "folder": {"lstat": 1, "open": 1, "fsync": 1},
    "folders": {"open": 1, "fsync": 1},
    "part": {"create": 1, "fsync": 2, "link": 1, "rename": 1, "unlink": 1, "lstat": 1, "open": 1},
    # On rank 0: for each version that is inherited, each part, and once.
    "claim": {"utime": 2, "lstat": 2},
    "joined part": {"open": 1, "unlink": 1},
    "record": {
        "create": 1,
        "fsync": 3,
        "link": 1,
        "unlink": 1,
        "lstat": 7,
        "open": 5,
        "listdir": 3,
        "mkdir": 1,
        "rmdir": 1,
    },
    # Of a collection that removes commits: each of the 256 folders; each version, state and record that stays; each
    # object of tensors, version or state, and record that goes. An object of tensors that stays is not looked at.
    "listed": {"lstat": 4, "listdir": 4},
    "read": {"open": 1},
    "kept record": {"lstat": 1, "open": 2},
    "collected": {"lstat": 5, "open": 2, "rename": 1, "unlink": 1},
    "collected blob": {"lstat": 6, "open": 3, "rename": 1, "unlink": 1},
    "collected record": {"lstat": 1, "open": 2, "unlink": 1},
}
"""Calls about names that saves while training and collections make; `tests.bench.counted` records them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save of many ranks."""

    ranks: int
    objects: int
    """Of all ranks."""
    versions: int
    """Layers that are due."""
    inherited: int
    """Layers that are not."""

    def of_a_rank(self, *, objects: int | None = None, folders: float | None = None) -> Counter[str]:
        """Return the calls of a rank that writes *objects*, an even share of them, into so many folders."""
        own = self.objects // self.ranks if objects is None else objects
        return _calls(object=own, blob=1, folder=_folders(own + 1) if folders is None else folders, folders=1, part=1)

    def of_the_first(self, *, folders: float | None = None) -> Counter[str]:
        """Return the calls of rank 0 that joins the parts, besides those of its own share."""
        return _calls(
            blob=self.versions,
            folder=_folders(self.versions) if folders is None else folders,
            folders=1,
            claim=self.inherited,
            **{"joined part": self.ranks},
            record=1,
        )

    def collected(self, *, kept: int) -> Counter[str]:
        """Return the calls of a collection that removes it, where *kept* saves stay and share nothing."""
        return _calls(
            listed=256,
            read=kept * (self.versions + self.inherited + self.ranks),
            collected=self.objects,
            **{"kept record": kept, "collected blob": self.versions + self.ranks, "collected record": 1},
        )

    @property
    def calls(self) -> int:
        """Return the calls of all ranks together."""
        return self.ranks * self.of_a_rank().total() + self.of_the_first().total()


def _calls(**counts: float) -> Counter[str]:
    found: Counter[str] = Counter()
    for what, count in counts.items():
        found.update({call: round(count * each) for call, each in COUNTED[what].items()})
    return found


def _folders(objects: int) -> float:
    """Return into how many of 256 folders so many objects fall."""
    return 256 * (1 - (255 / 256) ** objects)


@dataclass(frozen=True)
class Case:
    """A model of the Llama 3.1 family, and the GPUs that train it."""

    name: str
    ranks: int
    layers: int
    hidden: int
    intermediate: int
    bytes_per_second: float
    """What all ranks write together, assumed."""

    @cached_property
    def model(self) -> Model:
        """The real shapes: 8 heads for keys and values, 128 wide, and 128,256 tokens."""
        block = {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (1024, self.hidden),
            "self_attn.v_proj": (1024, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        vocabulary = (128_256, self.hidden)
        shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", vocabulary)]
        for number in range(self.layers):
            shapes += [(f"model.layers.{number}.{name}.weight", shape) for name, shape in block.items()]
        return model_of_shapes(
            self.name, [*shapes, ("model.norm.weight", (self.hidden,)), ("lm_head.weight", vocabulary)]
        )

    @cached_property
    def training(self) -> Training:
        """How it is trained and saved."""
        return Training(
            world_size=self.ranks,
            steps=STEPS,
            every=EVERY,
            step_seconds=STEP_SECONDS,
            bytes_per_second=self.bytes_per_second,
            copy_bytes_per_second=10e9,
            disk_bytes=10**15,
            movement=MOVEMENT,
            keep_last=KEEP_LAST,
            keep_every=KEEP_EVERY,
            prices=PRICES,
        )

    @cached_property
    def files(self) -> dict[str, FileTotals]:
        """The objects of each layer."""
        return trained_files(self.model, self.training)

    @cached_property
    def title(self) -> str:
        """What the case is called."""
        return f"{self.name}, {self.ranks:,} GPUs"

    def due(self, policy: Policy) -> list[frozenset[str]]:
        """Return the layers that *policy* stores, in a cycle."""
        sizes = {layer: files.size_bytes for layer, files in self.files.items()}
        movement = MOVEMENT if getattr(policy, "measures", False) else None
        found = due_sets(policy, tuple(sizes), movement=movement, sizes=sizes)
        return found[: cycle_of(found)]

    def largest(self, policy: Policy) -> Save:
        """Return the save that stores most."""
        return max((self._save(due) for due in self.due(policy)), key=lambda save: save.objects)

    def average_files(self, policy: Policy) -> float:
        """Return how many files a save adds."""
        saves = [self._save(due) for due in self.due(policy)]
        return sum(save.objects + save.versions + save.ranks + 1 for save in saves) / len(saves)

    def _save(self, due: frozenset[str]) -> Save:
        return Save(
            ranks=self.ranks,
            objects=sum(self.files[layer].count for layer in due),
            versions=len(due),
            inherited=len(self.files) - len(due),
        )

    def kept(self, policy: Policy) -> tuple[int, int]:
        """Return the bytes and files that are on a disk when the month ends."""
        return kept_on_disk(self.files, self.due(policy), self.training)


CASES = (
    Case("8B", 8, 32, 4096, 14336, 2e9),
    Case("70B", 256, 80, 8192, 28672, 40e9),
    Case("405B", 4096, 126, 16384, 53248, 400e9),
)


# -- tables --------------------------------------------------------------------------------------------------------


def run() -> None:
    """Print the tables of docs/internals/scale.md."""
    for table in (a_month, a_save, metadata, resumed, packed, seconds, resume_seconds, index):
        for line in table():
            print(line, flush=True)
        print()


def a_month() -> Iterator[str]:
    """Yield what a month stores and costs."""
    yield from _head(
        "", "a save", "files a save", "kept on a disk", "files there", "in a bucket",
        "storage", "GPUs held up", "in all",
    )  # fmt: skip
    for case in CASES:
        found = estimate_saves(case.model, case.training, POLICIES)["lines"]
        for line in found[1:]:
            policy = line["policy"] and POLICIES[line["policy"]]
            if policy:
                files = case.average_files(policy)
                held, names = case.kept(policy)
            else:
                files = 2 * case.ranks + 2
                held, names = line["held_bytes"], files * saves_kept(case.training)
            cost = line["cost"]
            yield _row(
                f"{case.title}: {line['policy'] or 'DeepSpeed'}",
                _size(line["average_bytes"]),
                _count(files),
                _size(held),
                _count(names),
                _size(line["held_bytes"]),
                *(f"${cost[what]:,.0f}" for what in ("storage", "held_up", "total")),
            )


def a_save() -> Iterator[str]:
    """Yield the calls and requests of the largest save after the first."""
    yield from _head(
        "", "objects", "calls of a rank", "to join all", "of rank 0", "its time at 1 ms", "of all ranks",
        "a collection", "its time at 1 ms", "PUTs", f"their time, {REMOTE_REQUESTS_MAX} at 50 ms",
    )  # fmt: skip
    for case in CASES:
        for name in ("full", "filter"):
            save = case.largest(POLICIES[name])
            each, first = save.of_a_rank(), save.of_the_first()
            due = max(case.due(POLICIES[name]), key=lambda due: sum(case.files[layer].count for layer in due))
            puts = sum(case.files[layer].puts for layer in due) + save.versions + save.ranks + 1
            collecting = save.collected(kept=saves_kept(case.training)).total()
            yield _row(
                f"{case.title}: {name}",
                _count(save.objects),
                _count(each.total()),
                _count(first.total()),
                _count(each.total() + first.total()),
                _time((each.total() + first.total()) * CALL_SECONDS),
                _count(save.calls),
                _count(collecting),
                _time(collecting * CALL_SECONDS),
                _count(puts),
                _time(puts / REMOTE_REQUESTS_MAX * REQUEST_SECONDS),
            )


def metadata() -> Iterator[str]:
    """Yield the sizes of what is not a tensor."""
    yield from _head(
        "", "an object of a block", "version blob of a block", "all of a full save", "a rank's part", "all parts",
        "a rank's state", "all states", "a record", "beside tensors",
    )  # fmt: skip
    for case in CASES:
        made = _Made(case)
        beside = made.blob_bytes + case.ranks * made.state_bytes + len(made.record)
        yield _row(
            case.title,
            " and ".join(_size(each.size_bytes) for each in made.block.objects[:: case.ranks]),
            _size(len(made.encoded)),
            _size(made.blob_bytes),
            _size(len(made.part)),
            _size(len(made.part) * case.ranks),
            _size(made.state_bytes),
            _size(made.state_bytes * case.ranks),
            _size(len(made.record)),
            f"{beside / sum(each.size_bytes for each in case.files.values()):.3%}",
        )


def resumed() -> Iterator[str]:
    """Yield what ranks read of version blobs, and what they are told, if as many resume as have saved."""
    yield from _head(
        "", "all version blobs", "read by every rank", "read once", "a rank at most", "on average", "a rank is told",
    )  # fmt: skip
    for case in CASES:
        made = _Made(case)
        reads, told_bytes = _read_and_told(made)
        yield _row(
            case.title,
            _size(made.blob_bytes),
            _size(made.blob_bytes * case.ranks),
            _size(sum(reads)),
            _size(max(reads)),
            _size(sum(reads) / case.ranks),
            _size(told_bytes),
        )


def packed() -> Iterator[str]:
    """Yield what a full save would take if each rank wrote one file."""
    yield from _head("", "files", "in packs", "calls of rank 0", "in packs", "PUTs", "in packs")
    for case in CASES:
        save = case.largest(POLICIES["full"])
        pack = replace(save, objects=save.ranks)
        size_bytes = sum(each.size_bytes for each in case.files.values())
        pack_puts = FileTotals.alike(case.ranks, size_bytes // case.ranks).puts
        beside = save.versions + save.ranks + 1
        yield _row(
            case.title,
            _count(save.objects + beside),
            _count(pack.objects + beside),
            _count(save.of_a_rank().total() + save.of_the_first().total()),
            _count(pack.of_a_rank().total() + pack.of_the_first().total()),
            _count(sum(each.puts for each in case.files.values()) + beside),
            _count(pack_puts + beside),
        )


def seconds() -> Iterator[str]:
    """Yield what rank 0 and a collection take of a processor."""
    yield from _head(
        "", "reading all parts", "their memory", "encoding all versions", "visible after",
        "a collection's mark", "its memory",
    )  # fmt: skip
    for case in CASES:
        made = _Made(case)
        save = case.largest(POLICIES["full"])
        names = save.objects
        kept = saves_kept(case.training)
        read_part = partial(unseal_part, made.part, name=made.part_name, store_id=samples.STORE_ID)
        reading_seconds = _cpu(read_part) * case.ranks
        packed = list(map(pack_object, made.block.objects))
        of_block = _cpu(partial(encode_blob, replace(made.block, objects=()), packed))
        encoding_seconds = of_block / len(packed) * names

        with _repository() as repo:
            of_one = _cpu(partial(_mark, Needs(repo), made.encoded)) / len(made.block.objects)
        yield _row(
            case.title,
            _time(reading_seconds),
            _size(_held_bytes(read_part) * case.ranks),
            _time(encoding_seconds),
            _time(reading_seconds + encoding_seconds + save.of_the_first().total() * CALL_SECONDS),
            _time(of_one * names * kept),
            _size(_bytes_of_a_need() * names * kept),
        )


def resume_seconds() -> Iterator[str]:
    """Yield what versions take of a rank's processor and memory at a resume."""
    yield from _head("", "reading all", "memory", "reading a block for all ranks", "being told", "memory")
    for case in CASES:
        made, exchange, layers = _Made(case), InTurn(case.ranks), len(case.files)
        blocks, ref = made.blob_bytes / len(made.encoded), ref_of(made.encoded)
        composition = samples.composition([replace(samples.entry("model.layers.0"), version=ref)])
        whole = partial(_sliced, partial(_read_whole, made.encoded))
        with _repository() as repo:
            write_blob(repo, made.encoded)
            share = partial(own_versions, exchange, repo, versions_to_load(composition))
            exchange.rank = case.ranks - 1
            share()
            reading_seconds = _cpu(share)
            # Another rank, which reads nothing, hears from all ranks: of as many blocks as there are layers.
            [full], empty = exchange.sent.values(), [pack([])] * case.ranks
            exchange.sent = {rank: full if rank < layers else empty for rank in range(max(case.ranks, layers))}
            exchange.rank, exchange.hears = 0, True
            own = list(share().values())
            told_seconds = _cpu(share) + _cpu(partial(Slices, own * layers))
            told_bytes = _held_bytes(partial(_sliced, share)) * layers
        yield _row(
            case.title,
            _time(min(_cpu(whole) for _ in range(3)) * blocks),
            _size(_held_bytes(whole) * blocks),
            _time(reading_seconds),
            _time(told_seconds),
            _size(told_bytes),
        )


def index() -> Iterator[str]:
    """Yield what the index of a month takes, of which nothing was collected; how many ranks there are is not in it."""
    yield from _head("", "the index, a month", "made afresh", "first plan", "a plan")
    for case in CASES:
        yield _row(case.title, *_index(len(case.files)))


# -- what is real --------------------------------------------------------------------------------------------------


class _Made:
    """The real records and blobs of a case."""

    def __init__(self, case: Case) -> None:
        chance = random.Random(case.ranks)
        versions = {}
        for layer, elements in case.model.layers.items():
            shape = tuple(elements.values())
            if shape not in versions:
                versions[shape] = _version(layer, elements, case.ranks, chance)
        self.case, self.versions = case, versions
        self.block = versions[tuple(case.model.layers["model.layers.0"].values())]
        self.encoded = encode_blob(self.block)
        sizes = {shape: len(encode_blob(version)) for shape, version in versions.items()}
        self.blob_bytes = sum(sizes[tuple(elements.values())] for elements in case.model.layers.values())
        self.state_bytes = _state_bytes(case.layers)
        part = Part(
            session="0" * 32,
            save=1000,
            rank=case.ranks - 1,
            agreement="0" * 32,
            layers=tuple(
                LayerPart(
                    layer=layer,
                    objects=tuple(map(pack_object, _objects_of(elements, case.ranks, chance, ranks=range(1)))),
                )
                for layer, elements in case.model.layers.items()
            ),
            state=BlobRef(id=_id(chance), size_bytes=self.state_bytes),
            bytes_new=sum(each.size_bytes for each in case.files.values()) // case.ranks,
            bytes_reused=0,
            failure="",
        )
        self.part_name = f"parts/{part.session}/{part.save}.{part.rank}"
        self.part = seal_part(part, store_id=samples.STORE_ID)
        states = tuple(BlobRef(id=_id(chance), size_bytes=self.state_bytes) for _ in range(case.ranks))
        entries = [
            replace(
                samples.entry(layer, step=STEPS), version=BlobRef(id=_id(chance), size_bytes=sizes[tuple(of.values())])
            )
            for layer, of in case.model.layers.items()
        ]
        record = replace(samples.record(step=STEPS, layers=entries), world_size=case.ranks, states=states)
        with _repository() as repo:
            self.record = repo.records.encode(make_commit(record, samples.observed(0)))


def _version(layer: str, elements: Mapping[str, int], ranks: int, chance: random.Random) -> LayerVersion:
    return LayerVersion(
        layer=layer,
        parameters=tuple(
            Parameter(name=name, dtype="BF16", shape=(count,), frozen=False, aliases=())
            for name, count in sorted(elements.items())
        ),
        buffers=(),
        world_size=ranks,
        objects=tuple(_objects_of(elements, ranks, chance, ranks=range(ranks))),
    )


def _objects_of(
    elements: Mapping[str, int], world_size: int, chance: random.Random, *, ranks: Sequence[int]
) -> Iterator[StoredObject]:
    """Yield the objects of *ranks*, as a version has them: masters first."""
    for kind, states in ((Kind.MASTER, ("",)), (Kind.OPTIMIZER, ("exp_avg", "exp_avg_sq"))):
        for rank in ranks:
            tensors = canonical_order(
                StoredTensor(name=name, state=state, dtype="F32", elements=valid, crc32=chance.getrandbits(32))
                for name, count in elements.items()
                for state in states
                if (valid := valid_elements(count, world_size, rank))
            )
            if tensors:
                size_bytes = frame(tensors).size_bytes
                chunks = chance.randbytes(8 * -(-size_bytes // VERIFY_CHUNK_BYTES))
                yield StoredObject(
                    id=_id(chance),
                    size_bytes=size_bytes,
                    kind=kind,
                    shard=rank,
                    shards=world_size,
                    tensors=tuple(tensors),
                    chunks=chunks,
                )


def _id(chance: random.Random) -> ObjectId:
    return ObjectId(f"{chance.getrandbits(128):032x}")


def _state_bytes(layers: int) -> int:
    """Return the state of a rank of a real checkpoint of so many layers, which are tiny: of all but the first."""
    with tempfile.TemporaryDirectory() as folder:
        source = generate(Path(folder) / "run", layers=layers, hidden=8, vocab=16, layout="accelerate")
        with layerstore.init(f"{folder}/store") as store:
            store.ingest(source, run="r")
            [name] = store.repo.records.names("r")
            return store.repo.records.read(name).record.states[1].size_bytes


def _read_whole(encoded: bytes) -> dict[BlobRef, LayerVersion]:
    ref = ref_of(encoded)
    return {ref: decode_version(encoded, ref=ref)}


def _sliced(read: Callable[[], Mapping[BlobRef, LayerVersion]]) -> tuple[Mapping[BlobRef, LayerVersion], Slices]:
    """Return what a rank holds of versions."""
    versions = read()
    return versions, Slices(versions.values())


def _read_and_told(made: _Made) -> tuple[list[int], int]:
    """Return how many bytes of version blobs each rank reads at a resume, and how many are then sent to the last."""
    ranks = made.case.ranks
    exchange, reads, told_bytes = InTurn(ranks), [0] * ranks, 0
    alike: dict[tuple[BlobRef, ...], tuple[int, int]] = {}
    with _repository() as repo:
        refs = {shape: write_blob(repo, encode_blob(version)) for shape, version in made.versions.items()}
        layers = [refs[tuple(elements.values())] for elements in made.case.model.layers.values()]
        composition = samples.composition(
            [
                replace(samples.entry(name), version=ref)
                for name, ref in zip(made.case.model.layers, layers, strict=True)
            ]
        )
        for rank in range(ranks):
            share = tuple(share_of(layers, rank, ranks))
            if share and share not in alike:
                exchange.rank = rank
                with patch.object(ObjectStore, "read", autospec=True, side_effect=ObjectStore.read) as read:
                    own_versions(exchange, repo, versions_to_load(composition))
                read_bytes = sum(call.args[1].size_bytes for call in read.call_args_list)
                alike[share] = read_bytes, len(exchange.sent.pop(rank)[-1])
            reads[rank], sent_bytes = alike.get(share, (0, 1))
            told_bytes += sent_bytes
    return reads, told_bytes


def _mark(needs: Needs, encoded: bytes) -> None:
    """Do what a collection does with a version blob that it has read."""
    needs.add(named_in_version(encoded, ref=ref_of(encoded)))


def _cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@contextlib.contextmanager
def _repository() -> Iterator[Repository]:
    """Yield an empty store, with folders for objects."""
    with tempfile.TemporaryDirectory() as folder, layerstore.init(f"{folder}/store") as store:
        for number in range(256):
            (store.path / "objects" / f"{number:02x}").mkdir()
        yield store.repo


def _bytes_of_a_need() -> float:
    """Return what a collection holds of each object."""
    chance, count = random.Random(0), 200_000
    refs = [BlobRef(id=_id(chance), size_bytes=1) for _ in range(count)]
    with _repository() as repo:
        needs = Needs(repo)
        return _held_bytes(partial(needs.add, refs)) / count


def _held_bytes(work: Callable[[], object]) -> int:
    """Return how much more memory is held after *work*, what it returns included."""
    tracemalloc.start()
    found = work()
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del found
    return held_bytes


def _index(layers: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        build(path, commits=STEPS // EVERY, layers=layers)
        with layerstore.open(path) as store:
            afresh_seconds = _cpu(store.reindex)
        size_bytes = (path / "manifest/data.mdb").stat().st_size
        opened = layerstore.open(path)
        first = _cpu(lambda: opened.compose(RUN))
        again = statistics.median(_cpu(lambda: opened.compose(RUN)) for _ in range(20))
        opened.close()
    yield from (_size(size_bytes), _time(afresh_seconds), _time(first), _time(again))


# -- words ---------------------------------------------------------------------------------------------------------


def _head(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|---|{'---:|' * (len(names) - 1)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _count(number: float) -> str:
    """
    Return *number* with what can be read of it.

    >>> _count(12.4), _count(42_500), _count(1_060_000)
    ('12', '42,500', '1.06 million')
    """
    return f"{number:,.0f}" if number < 10**6 else f"{number / 1e6:,.3g} million"


def _size(size_bytes: float) -> str:
    unit, length = next(each for each in _UNITS if size_bytes >= each[1] or each[1] == 1)
    return f"{size_bytes / length:,.3g} {unit}" if size_bytes < 1000 * length else f"{size_bytes / length:,.0f} {unit}"


def _time(seconds: float) -> str:
    unit, length = next(each for each in _TIMES if seconds >= each[1] or each is _TIMES[-1])
    return f"{seconds / length:,.3g} {unit}"


_UNITS = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
_TIMES = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
