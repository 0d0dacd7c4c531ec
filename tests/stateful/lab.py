"""What the machine works with: checkpoints, what is in them, and a way to die at any step that writes."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from layerstore.history.needs import objects_of_state
from layerstore.model import CommitRecord, Kind
from layerstore.store import Store, init
from layerstore.zero3 import discover, read_checkpoint
from tests.bench.shapes import ModelShape
from tests.bench.values import EXP_AVG, EXP_AVG_SQ, MASTER, words
from tests.faults.harness import fingerprint
from tests.generated import generate
from tests.stateful.model import Content, Layers

_SHAPE = ModelShape(layers=3, hidden=4, vocab=4, intermediate=12)

Bytes = dict[tuple[str, str], bytes]
"""By the name of a parameter, and what of it."""


class Died(BaseException):
    """The process ends here, with all that it would still have written."""


class Dying:
    """A hook that lets nothing more be written from one call on: what is left is what kill -9 leaves."""

    def __init__(self, call: int) -> None:
        self._left = call
        self.is_dead = False

    def __call__(self, operation: str, path: Path) -> None:
        """Die, if it is time."""
        self._left -= 1
        if self._left < 0:
            self.is_dead = True
            raise Died


@cache
def numbers(content: Content) -> dict[str, Bytes]:
    """Return the bytes of every layer of *content*, from nothing but the rule that made them."""
    found: dict[str, Bytes] = {}
    for parameter in _SHAPE.parameters():
        layer = parameter.name.split(".self_attn")[0].split(".mlp")[0]
        layer = layer.removesuffix(".weight").removesuffix(".input_layernorm").removesuffix(".post_attention_layernorm")
        for state in (MASTER, EXP_AVG, EXP_AVG_SQ):
            parts = words(
                seed=content.seed,
                step=content.step,
                name=parameter.name,
                state=state,
                start=0,
                elements=parameter.elements,
            )
            found.setdefault(layer, {})[parameter.name, state] = b"".join(map(bytes, parts))
    return found


def expected(layers: Layers, *, moments: bool = True) -> Bytes:
    """Return the bytes of a composite of *layers*."""
    return {
        key: data
        for name, layer in layers.items()
        for key, data in numbers(layer.content)[name].items()
        if moments or key[1] == MASTER
    }


def held(folder: Path) -> Bytes:
    """Return the bytes in the checkpoint *folder*, whoever cut them: each rank's slices put together."""
    found: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for layer in read_checkpoint(discover(folder)).layers:
        for source in layer.objects:
            assert source.kind in (Kind.MASTER, Kind.OPTIMIZER), source.kind
            for part in source.slices:
                with part.path.open("rb") as file:
                    file.seek(part.offset_bytes)
                    data = file.read(part.size_bytes)
                found.setdefault((part.name, part.state or MASTER), []).append((source.shard, data))
    return {key: b"".join(data for _, data in sorted(parts)) for key, parts in found.items()}


class Lab:
    """Checkpoints on disk, made when they are first asked for, and the count of what was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._machines = 0
        self._fingerprints: dict[tuple[Content, int | None], str] = {}

    def new_folder(self) -> Path:
        """Return a folder for another machine."""
        self._machines += 1
        folder = self.folder / f"machine{self._machines}"
        folder.mkdir()
        return folder

    def source(self, content: Content) -> Path:
        """Return the checkpoint *content*."""
        name = f"{content.step}-{content.seed}-{content.world_size}-{content.layout}"
        folder = self.folder / "sources" / name
        if not folder.exists():
            generate(
                folder,
                layers=_SHAPE.layers,
                hidden=_SHAPE.hidden,
                vocab=_SHAPE.vocab,
                step=content.step,
                seed=content.seed,
                world_size=content.world_size,
                layout="hf" if content.layout == "hf" else "raw",
            )
        return folder

    def fingerprint(self, content: Content, world_size: int | None) -> str:
        """Return what a store that never held anything else composes of *content*, byte for byte."""
        key = content, world_size
        if key not in self._fingerprints:
            folder = self.folder / "alone"
            with init(folder) as store:
                store.ingest(self.source(content), run="alone")
                store.compose("alone").write(self.folder / "alone-out", world_size=world_size, durable=False)
            self._fingerprints[key] = fingerprint(self.folder / "alone-out")
            shutil.rmtree(folder)
            shutil.rmtree(self.folder / "alone-out")
        return self._fingerprints[key]

    def foreign_index(self) -> Path:
        """Return the index of another store."""
        path = self.folder / "foreign"
        if not path.exists():
            with init(path) as store:
                store.ingest(self.source(Content(1, 0)), run="a")
        return path / "manifest"


@dataclass(frozen=True, slots=True)
class Needed:
    """What a record or a pin needs, by id."""

    versions: dict[str, str]
    """The version blob of each layer."""
    states: frozenset[str]
    """The blob of each rank's state."""


@dataclass(slots=True)
class Anatomy:
    """What a store that is sound consists of, as its records, pins and blobs say."""

    records: dict[str, Needed] = field(default_factory=dict)
    """By the commit's id, hidden ones too."""
    pins: dict[str, Needed] = field(default_factory=dict)
    objects: dict[str, frozenset[str]] = field(default_factory=dict)
    """The objects that each blob names."""

    @property
    def users(self) -> dict[str, set[str]]:
        """The ids of commits and names of pins that need each blob and object."""
        found: dict[str, set[str]] = {}
        for user, needed in (*self.records.items(), *self.pins.items()):
            for blob in (*needed.versions.values(), *needed.states):
                for name in (blob, *self.objects[blob]):
                    found.setdefault(name, set()).add(user)
        return found


def anatomy(store: Store) -> Anatomy:
    """Return what *store*, which is sound, consists of."""
    repo, found = store.repo, Anatomy()

    def needed(record: CommitRecord) -> Needed:
        for entry in record.layers:
            if entry.version.id not in found.objects:
                refs = [stored.ref for stored in repo.version_of(entry).objects]
                found.objects[entry.version.id] = frozenset(ref.id for ref in refs)
        for state in record.states:
            found.objects[state.id] = frozenset(ref.id for ref in objects_of_state(repo.state(state)))
        versions: dict[str, str] = {entry.layer: entry.version.id for entry in record.layers}
        return Needed(versions, frozenset(state.id for state in record.states))

    for run in repo.records.runs():
        for name in repo.records.names(run):
            record = repo.records.read(name).record
            found.records[name.id] = needed(record)
    for pin in store.pins():
        found.pins[pin.name] = needed(pin.record)
    return found
