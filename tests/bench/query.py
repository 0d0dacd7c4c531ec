"""
How fast a store with a long history answers: opening it, planning composites, log and ls.

Each question is asked in turn many times, in one process that has asked it before; medians and the worst are shown.
What a new process needs is measured in new processes.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import layerstore
from layerstore import Filter, Parity
from layerstore.disk import Files
from layerstore.format import make_commit
from layerstore.policy import Policy
from layerstore.storage import open_repository
from layerstore.store import Store
from tests.bench.histories import RUN, STEP_SIZE, build, places

_ROUNDS = 200
_PROCESSES = 7
# A folder that has just been written to is listed for every question; the others are asked once it has come to rest.
_REST_SECONDS = 4.0

# What a new process does, with the time of each of its steps.
_COLD = f"""
import json, sys, time
marks = [time.perf_counter()]
import layerstore, layerstore.store
marks.append(time.perf_counter())
store = layerstore.open(sys.argv[1])
store.runs()
marks.append(time.perf_counter())
store.compose({RUN!r})
marks.append(time.perf_counter())
print(json.dumps([later - earlier for earlier, later in zip(marks, marks[1:])]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One thing that is measured."""

    name: str
    ask: Callable[[], object]
    bar_ms: float | None = None
    rounds: int = _ROUNDS
    prepare: Callable[[], object] | None = None
    """Done before each round, and not measured."""


_SLOW_FILTER = Filter(first=0, last=0, share=Fraction(1, 10), every=10)

PLANS: tuple[tuple[str, str, str | Policy], ...] = (
    ("latest", RUN, "latest"),
    ("exact", RUN, "exact"),
    ("RUN@STEP", f"{RUN}@STEP", "latest"),
    ("RUN~1", f"{RUN}~1", "latest"),
    ("parity", f"{RUN}@STEP", Parity()),
    ("filter, half at every 5th", f"{RUN}@STEP", Filter()),
    ("filter, a tenth at every 10th", f"{RUN}@STEP", _SLOW_FILTER),
)
"""Every way to choose layers: its name, a reference in which STEP is a random one, and a policy."""


def run(folder: Path, *, commits: int, layers: int) -> None:
    """Make the store and print a table of all questions."""
    path = folder / "store"
    started = time.perf_counter()
    build(path, commits=commits, layers=layers)
    built = time.perf_counter()
    with layerstore.open(path) as store:
        assert len(store.log(limit=1)) == 1
    print(f"{commits:,} commits of {layers} layers")
    print(
        f"made in {built - started:.1f} s; indexed in {time.perf_counter() - built:.1f} s; "
        f"index {(path / 'manifest/data.mdb').stat().st_size / 1e6:.1f} MB"
    )
    time.sleep(_REST_SECONDS)
    print(f"\n{'':<44}{'median':>10}{'worst':>10}  bar")
    for name, seconds, bar_ms in _cold(path):
        _print_line(name, seconds, bar_ms)
    with layerstore.open(path) as store:
        for question in _questions(store, path, commits=commits):
            _print_line(question.name, _timed(question), question.bar_ms)


def _questions(store: Store, path: Path, *, commits: int) -> list[Question]:
    chance = random.Random(0)
    # What the newest attempt's history holds: its own steps, and those below where it forked.
    newest = list(places(commits))[-1]
    steps = sorted({place.step for place in places(commits) if place.attempt == newest.attempt})
    folder = path / "commits" / RUN

    def planned(ref: str, policy: str | Policy) -> Callable[[], object]:
        return lambda: store.compose(ref.replace("STEP", str(chance.choice(steps))), policy=policy)

    names = [line.layer for line in store.ls(RUN)]

    def by_recipe(sources: int) -> Callable[[], object]:
        recipes = [
            _write_recipe(path.parent / f"{sources}-{at}.yaml", names, steps, sources, chance) for at in range(8)
        ]
        return lambda: store.compose(recipe=chance.choice(recipes))

    def just_changed() -> object:
        os.utime(folder)
        return store.compose(f"{RUN}@{chance.choice(steps)}")

    def opened() -> None:
        with layerstore.open(path) as other:
            assert other.runs() == [RUN]

    saves = _Saves(path)
    last = store.log(RUN, limit=commits // 2)[-1].commit
    return [
        Question(name="open", ask=opened, bar_ms=50),
        *(Question(name=f"plan {name}", ask=planned(ref, policy), bar_ms=10) for name, ref, policy in PLANS),
        Question(name="plan a recipe of 3 steps", ask=by_recipe(3), bar_ms=10, rounds=50),
        Question(name="plan a recipe, each layer of its own step", ask=by_recipe(len(names)), bar_ms=10, rounds=50),
        Question(name="plan RUN@STEP, folder just changed", ask=just_changed, bar_ms=10),
        Question(name="log, first 50", ask=lambda: store.log(RUN, limit=50)),
        Question(name="log, 50 from the middle", ask=lambda: store.log(RUN, limit=50, before=last)),
        Question(name="log --graph, first 50", ask=lambda: store.log_page(RUN, limit=50, graph=True), rounds=50),
        Question(name="ls", ask=lambda: store.ls(f"{RUN}@{chance.choice(steps)}"), rounds=50),
        Question(name="tell the index of a commit", ask=saves.tell, prepare=saves.publish, bar_ms=10, rounds=50),
        Question(
            name="plan latest, after another process saved",
            ask=lambda: store.compose(RUN),
            prepare=saves.publish_and_tell,
            rounds=20,
        ),
        Question(name="layerstore log, whole process", ask=lambda: _command(path, "log"), rounds=_PROCESSES),
        Question(name="layerstore ls, whole process", ask=lambda: _command(path, "ls"), rounds=_PROCESSES),
    ]


class _Saves:
    """Another process that goes on saving."""

    def __init__(self, path: Path) -> None:
        self._repo = open_repository(path, Files())
        newest = max(self._repo.records.names(RUN), key=lambda name: name.step)
        self._newest = self._repo.records.read(newest)

    def publish(self) -> None:
        """Make the next commit visible."""
        record = self._newest.record
        following = replace(record, step=record.step + STEP_SIZE, save_number=record.save_number + 1)
        self._newest = make_commit(following, self._newest.observed)
        self._repo.records.link(self._newest)

    def publish_and_tell(self) -> None:
        """Do both."""
        self.publish()
        self.tell()

    def tell(self) -> None:
        """Tell the index of it."""
        self._repo.catalog.add(self._newest)


def _write_recipe(path: Path, names: list[str], steps: list[int], sources: int, chance: random.Random) -> Path:
    """Write a recipe that takes the layers from so many steps, in turns."""
    chosen = sorted(chance.sample(steps, min(sources, len(steps))))
    lines = [f"  {name}: {chosen[at % len(chosen)]}" for at, name in enumerate(names)]
    path.write_text("\n".join([f"base: {RUN}@{chosen[-1]}", "layers:", *lines, ""]))
    return path


def _timed(question: Question) -> list[float]:
    found = []
    for _ in range(question.rounds + 1):
        if question.prepare is not None:
            question.prepare()
        started = time.perf_counter()
        question.ask()
        found.append(time.perf_counter() - started)
    return found[1:]


def _cold(path: Path) -> list[tuple[str, list[float], float | None]]:
    runs = [json.loads(_python("-c", _COLD, str(path))) for _ in range(_PROCESSES)]
    imports, opens, plans = (list(column) for column in zip(*runs, strict=True))
    both = [opened + planned for opened, planned in zip(opens, plans, strict=True)]
    return [
        ("new process: import", imports, None),
        ("new process: open", opens, 50.0),
        ("new process: open and plan latest", both, None),
    ]


def _command(path: Path, verb: str) -> None:
    _python("-m", "layerstore.cli", verb, "--store", str(path))


def _python(*words: str) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


def _print_line(name: str, seconds: list[float], bar_ms: float | None) -> None:
    median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    verdict = "" if bar_ms is None else f"under {bar_ms:g} ms: {'kept' if median < bar_ms else 'missed'}"
    print(f"{name:<44}{median:>7.2f} ms{worst:>7.2f} ms  {verdict}", flush=True)
