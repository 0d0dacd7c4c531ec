"""
Stores with histories worth looking at, of runs that go back, save by parts and note what a save took.

Objects have sizes and no bytes: a report reads none.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import layerstore
from layerstore.disk import Files
from layerstore.format import encode_blob, make_commit
from layerstore.model import (
    BlobRef,
    CommitRecord,
    Fork,
    LayerEntry,
    ObjectId,
    Observed,
    Origin,
    PolicyUse,
    SourceLayout,
)
from layerstore.publish import SaveTiming, note_timing
from layerstore.states import RankState, TreeFile
from layerstore.storage import Repository, open_repository
from layerstore.tree import Tree
from tests.bench.histories import OBJECT_BYTES, layer_names, write_blob, write_version

STARTED_NS = 1_750_000_000_000_000_000
WORLD_SIZE = 2
STEP_SIZE = 50
# Different versions of a layer: more would only fill the disk.
VERSIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a made-up run is like."""

    run: str
    saves: int
    layers: int = 8
    names: Sequence[str] = ()
    """Instead of so many layers with the usual names."""
    policy: str = "full"
    """Or ``parity``, or ``drift``, with how far each layer had moved."""
    due: Sequence[Collection[str]] = ()
    """The layers that each save holds, in place of those that are made up for *policy*."""
    step_size: int = STEP_SIZE
    goes_back: Sequence[int] = ()
    """After how many saves training returns by a quarter of them."""
    is_live: bool = False
    """Whether what saves took is noted."""
    metrics: Sequence[str] = ()
    """What was measured at every save; at some, it was no number."""
    has_objects: bool = True
    """With their sizes; without, all are missing."""
    started_ns: int = STARTED_NS


def build(path: Path, *histories: History) -> None:
    """Make a store at *path* with these runs."""
    layerstore.init(path).close()
    repo = open_repository(path, Files())
    for prefix in range(256):
        (repo.layout.objects / f"{prefix:02x}").mkdir(exist_ok=True)
    for history in histories:
        _Writing(repo, history).write()
    repo.catalog.close()


class _Writing:
    """One run on its way into a store."""

    def __init__(self, repo: Repository, history: History) -> None:
        self._repo = repo
        self._history = history
        self._names = list(history.names) or layer_names(history.layers)
        self._versions: dict[tuple[int, int], BlobRef] = {}
        self._states = self._states_of({})

    def _states_of(self, tree: dict[Tree, Tree]) -> tuple[BlobRef, ...]:
        return tuple(self._state_of(tree, rank) for rank in range(WORLD_SIZE))

    def _state_of(self, tree: dict[Tree, Tree], rank: int) -> BlobRef:
        state = RankState(
            rank=rank,
            model=TreeFile(path="model_states.pt", tree=tree),
            optimizer=TreeFile(path="optim_states.pt", tree={}),
            files=(),
            gathered=(),
        )
        return write_blob(self._repo, encode_blob(state))

    def write(self) -> None:
        """Write every save."""
        history, size = self._history, self._history.step_size
        self._repo.layout.run(history.run).mkdir()
        attempt, step, lineage = 1, 0, tuple[Fork, ...]()
        entries: dict[str, LayerEntry] = {}
        past: dict[int, dict[str, LayerEntry]] = {}
        for number in range(history.saves):
            if number in history.goes_back:
                back = step - size * max(1, (step // size) // 4)
                lineage = (Fork(attempt=attempt, step=back), *lineage)
                attempt, step, entries = attempt + 1, back, dict(past[back])
            step += size
            origin = Origin(run=history.run, attempt=attempt, step=step, save_number=step // size - 1)
            moved = self._movements(number) if history.policy == "drift" and not history.due else {}
            due = self._due(number, moved) if entries else self._names
            for name in due:
                version = self._version(self._names.index(name), number % VERSIONS)
                entries[name] = LayerEntry(layer=name, version=version, origin=origin, optimizer_step=step)
            past[step] = dict(entries)
            if history.metrics:
                self._states = self._states_of({"metrics": self._measured(number)})
            decisions: dict[Tree, Tree] = {"due": [*due]}
            if moved:
                decisions["movements"] = dict(moved.items())
            self._save(
                number, origin, lineage, entries, PolicyUse(name=history.policy, parameters={}, decisions=decisions)
            )
            if history.is_live:
                self._note(number, origin, len(due))

    def _due(self, number: int, moved: dict[str, float]) -> list[str]:
        if self._history.due:
            return [name for name in self._names if name in self._history.due[number]]
        if self._history.policy == "parity":
            return [name for index, name in enumerate(self._names) if index % 2 == number % 2]
        if self._history.policy == "drift":
            return [name for index, name in enumerate(self._names) if moved[name] > 0.012 or number % 20 == index % 20]
        return list(self._names)

    def _measured(self, number: int) -> dict[Tree, Tree]:
        """Return less for later saves, up and down."""
        return {
            name: math.nan if number % 7 == index + 4 else 3 / (1 + number / 10) + 0.1 * math.sin(number + index)
            for index, name in enumerate(self._history.metrics)
        }

    def _movements(self, number: int) -> dict[str, float]:
        """Return more for later layers, less for later saves, up and down; one is lost to infinity."""
        count = len(self._names)
        found = {
            name: 0.05 * (0.15 + index / count) * (1 + math.sin(number / 3 + index)) / (1 + number / 25)
            for index, name in enumerate(self._names)
        }
        if number == 5:
            found[self._names[-1]] = math.inf
        return found

    def _save(
        self,
        number: int,
        origin: Origin,
        lineage: tuple[Fork, ...],
        entries: dict[str, LayerEntry],
        policy: PolicyUse,
    ) -> None:
        own = sum(entry.origin == origin for entry in entries.values())
        record = CommitRecord(
            run=origin.run,
            attempt=origin.attempt,
            lineage=lineage,
            step=origin.step,
            save_number=origin.save_number,
            world_size=WORLD_SIZE,
            stage=3,
            layers=tuple(entries[name] for name in self._names),
            states=self._states,
            layout=SourceLayout(flavour="hf", tag=f"global_step{origin.step}", layer_pattern=None),
            policy=policy,
            supersedes=(),
        )
        time_ns = self._history.started_ns + number * 1_800 * 10**9
        commit = make_commit(record, Observed(time_ns=time_ns, bytes_new=own * OBJECT_BYTES, bytes_reused=0))
        path = self._repo.layout.record(origin.run, origin.step, commit.id)
        path.write_bytes(self._repo.records.encode(commit))

    def _version(self, layer: int, number: int) -> BlobRef:
        if (layer, number) not in self._versions:
            run = int.from_bytes(hashlib.sha256(self._history.run.encode()).digest()[:4])
            ids = [ObjectId(f"{run:08x}{layer:012x}{number:012x}")]
            made = write_version(self._repo, self._names[layer], ids, with_objects=self._history.has_objects)
            self._versions[layer, number] = made
        return self._versions[layer, number]

    def _note(self, number: int, origin: Origin, due: int) -> None:
        note_timing(
            self._repo,
            "5e" * 16,
            SaveTiming(
                run=origin.run,
                attempt=origin.attempt,
                step=origin.step,
                save_number=origin.save_number,
                blocked_seconds=0.02 + 0.01 * math.sin(number) ** 2 + 0.4 * (number % 13 == 6),
                durable_seconds=1.5 + 0.1 * due + 0.3 * math.cos(number),
                visible_seconds=None if number % 17 == 9 else 1.8 + 0.1 * due + 0.3 * math.cos(number),
                copied_bytes=due * OBJECT_BYTES,
                written_bytes=due * OBJECT_BYTES,
                layers_saved=due,
                layers=len(self._names),
                queued=0,
                failure="",
            ),
        )
