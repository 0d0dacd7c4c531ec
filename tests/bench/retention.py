"""
What retention takes of a processor after each commit of a run that is being saved: whether anything is to go.

Records and states are real, with a trainer's log that grows as the run does. The rules go through the library's own
question (`layerstore.gc.has_work`), once as a saver asks it, which goes on with what it knows, and once with every
record read anew, as a collection reads them.
"""

import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from layerstore import Keep
from layerstore.disk import Files
from layerstore.filenames import TRAINER_STATE
from layerstore.format import encode_blob, make_commit
from layerstore.gc import Facts, GcRequest, execute_gc, has_work
from layerstore.model import LayerEntry
from layerstore.progress import Silent
from layerstore.states import RankState, SourceFile, TreeFile
from layerstore.storage import Repository, open_repository
from tests.bench.histories import (
    RUN,
    STEP_SIZE,
    Place,
    entry_of,
    layer_names,
    open_empty,
    record_of,
    shard_ids,
    write_blob,
    write_version,
)
from tests.unit import samples

_ROUNDS = 9
_RULES = {
    "last, every": Keep(last=3, every=STEP_SIZE),
    "within": Keep(last=3, within="10000d"),
    "best": Keep(last=3, every=STEP_SIZE, best="eval_loss:2"),
}


class _Saver:
    """A job that goes on saving."""

    def __init__(self, path: Path, layers: int, *, logs: bool = True) -> None:
        open_empty(path).close()
        self.repo: Repository = open_repository(path, Files())
        self._names = layer_names(layers)
        self._versions = {name: write_version(self.repo, name, shard_ids(0)) for name in self._names}
        self._logs = logs
        self._log: list[dict[str, float]] = []
        self.commits = 0

    def write_objects(self) -> None:
        """Write what the versions name, in its sizes: a collection looks whether it is there."""
        for version in self._versions.values():
            for stored in self.repo.version(version).objects:
                path = self.repo.layout.object(stored.id)
                path.parent.mkdir(exist_ok=True)
                path.touch()
                os.truncate(path, stored.size_bytes)

    def save(self) -> None:
        """Publish the next commit and tell the index, as a saver does."""
        self.commits += 1
        place = Place(1, None, self.commits * STEP_SIZE, self.commits)
        if self._logs:
            self._log.append({"step": place.step, "loss": 1 / self.commits, "eval_loss": 2 / self.commits})
        log = SourceFile(path=TRAINER_STATE, executable=False, content=json.dumps({"log_history": self._log}).encode())
        tree = TreeFile(path="model_states.pt", tree={"global_steps": place.step})
        state = RankState(rank=0, model=tree, optimizer=replace(tree, path="optim.pt"), files=(log,), gathered=())
        entries: list[LayerEntry] = [entry_of(place, name, version) for name, version in self._versions.items()]
        record = record_of(place, entries, (write_blob(self.repo, encode_blob(state)),))
        commit = make_commit(record, samples.observed(time.time_ns()))
        self.repo.records.link(commit)
        self.repo.catalog.add(commit)


def run(folder: Path, *, commits: int, layers: int) -> None:
    """Print what each rule takes after a commit, at a quarter of the commits and at all, so that growth shows."""
    saver = _Saver(folder / "store", layers)
    print(f"processor milliseconds after a commit of {layers} layers: as a saver asks; with every record read anew\n")
    print(f"{'':<16}" + "".join(f"{count:>20,}" for count in (commits // 4, commits)))
    facts = {rule: Facts(saver.repo, keep) for rule, keep in _RULES.items()}
    found: dict[str, list[str]] = {rule: [] for rule in _RULES}
    for count in (commits // 4, commits):
        while saver.commits < count - _ROUNDS:
            saver.save()
        for rule in _RULES:
            has_work(facts[rule], RUN)  # what it has not asked about yet is read once
        times: dict[str, list[float]] = {rule: [] for rule in _RULES}
        for _ in range(_ROUNDS):
            saver.save()
            for rule in _RULES:
                times[rule].append(_milliseconds(facts[rule]))
        for rule, keep in _RULES.items():
            anew = statistics.median(_milliseconds(Facts(saver.repo, keep), reads_all=True) for _ in range(3))
            found[rule].append(f"{statistics.median(times[rule]):>12.1f}{anew:>8.0f}")
    for rule, cells in found.items():
        print(f"{rule:<16}" + "".join(cells), flush=True)
    saver.repo.close()


def run_collected(folder: Path, *, commits: int, layers: int) -> None:
    """Print what the newest three take after each commit, all others being collected, as ever more were made."""
    saver = _Saver(folder / "collected", layers, logs=False)
    saver.write_objects()
    keep = Keep(last=3)
    facts = Facts(saver.repo, keep)
    print(f"\nwall milliseconds after a commit of {layers} layers, with {keep}: to ask, and to collect\n")
    print(f"{'commits made':>16}{'asking':>12}{'collecting':>12}")
    asking, collecting = list[float](), list[float]()
    for count in range(1, commits + 1):
        saver.save()
        begun = time.perf_counter()
        is_due = has_work(facts, RUN)
        asked = time.perf_counter()
        if is_due:
            # Without a grace, or all that was made within it would still be there, and be looked at.
            execute_gc(saver.repo, GcRequest(keep=keep, grace_seconds=0.0), progress=Silent())
        asking.append(asked - begun)
        collecting.append(time.perf_counter() - asked)
        if not count % max(commits // 10, 1):
            medians = "".join(f"{statistics.median(each) * 1e3:>12.2f}" for each in (asking, collecting))
            print(f"{count:>16,}{medians}", flush=True)
            asking.clear()
            collecting.clear()
    saver.repo.close()


def _milliseconds(facts: Facts, *, reads_all: bool = False) -> float:
    begun = time.process_time()
    if reads_all:
        view = facts.repo.catalog.view(RUN)
        for row in view.visible:
            facts.of(row, view)
    has_work(facts, RUN)
    return (time.process_time() - begun) * 1e3
