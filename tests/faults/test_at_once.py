"""
Several at once: processes, threads and forks share a store and never mix what they write.

Four processes are killed at any moment and begun again: each writes down what it was told is saved, and all of that is
there in the end, nobody waits for ever, and nothing looks damaged to anybody meanwhile. Pairs of verbs meet at every
step.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from layerstore import Keep
from layerstore.errors import Conflict, IntegrityError, Internal, Locked, NotFound
from layerstore.history import resolve
from layerstore.ingest import transfer
from layerstore.storage import IndexNotice, Repository
from layerstore.store import Store, init
from tests.faults.harness import (
    Call,
    Failure,
    Recorder,
    attempt,
    begun,
    child,
    composed,
    copied,
    flip,
    in_child,
    leftovers,
    problems,
    seeded,
    wait_for,
)
from tests.faults.saving import begun_after
from tests.generated import generate

STEPS = (1, 2, 3, 4, 5, 6)
HURT = "hurt"
"""The run of what is harmed and repaired."""
PROCESSES = 4
ROUNDS = 3
"""How often ingests meet in a usual run."""
QUIET_SECONDS_MAX = 90.0
"""After so long without a word a process hangs."""
GRACE_SECONDS = 3.0
"""Of the collections meanwhile: longer than anybody takes from touching a thing to naming it."""


@dataclass(frozen=True, slots=True)
class Arena:
    """Checkpoints by step, and what each composes to."""

    folder: Path
    digests: dict[str, str]
    hurt_object: str
    """An object that only the checkpoint *hurt* has, which is there to be harmed; ``alone`` has a sound copy."""

    def source(self, step: int | str) -> Path:
        """Return the checkpoint of *step*; ``hurt`` is another one of step 1."""
        return self.folder / f"source{step}"

    def digest(self, step: int | str) -> str:
        """Return what that composes to; ``3 compact`` is step 3, kept as differences to step 1."""
        return self.digests[str(step)]


@pytest.fixture(scope="module")
def arena(fast_module_path: Path) -> Arena:
    """Return where all happens."""
    digests = {}
    with init(fast_module_path / "alone") as store:
        for name, step, seed in [*((str(step), step, step) for step in STEPS), (HURT, 1, 99)]:
            source = generate(fast_module_path / f"source{name}", layers=2, hidden=8, vocab=8, step=step, seed=seed)
            store.ingest(source, run=HURT if name == HURT else "alone")
            digests[name] = composed(store, f"{HURT if name == HURT else 'alone'}@{step}", fast_module_path)
        for step in STEPS[1:]:
            _save_compactly(store, fast_module_path / f"source{step}", f"compact{step}", "alone@1")
            digests[f"{step} compact"] = composed(store, f"compact{step}@{step}", fast_module_path)
        version = store.repo.version_of(resolve(store.repo, f"{HURT}@1").record.layers[0])
    return Arena(fast_module_path, digests, version.objects[0].id)


def _save_compactly(store: Store, source: Path, run: str, keyframe: str) -> None:
    """Save *source* in a *run* of its own, as differences to *keyframe*, which may have gone before it is read."""
    done = store.ingest(source, run=run, resumed_from=keyframe, precision="delta8", exact_every=None)
    if done.is_new and not done.layers_compact:
        store.drop(run)
        raise NotFound(f"{keyframe} went meanwhile")


# -- four processes ------------------------------------------------------------------------------------------------


class _Worker:
    """One process's life: it does this and that until it is killed."""

    def __init__(self, path: Path, arena: Arena, life: int, seed: int) -> None:
        self._path, self._arena, self._life = path, arena, life
        self._chance = random.Random(seed)
        self._fd = os.open(path.parent / f"journal{life}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._step = self._saves = 0

    def say(self, *words: object) -> None:
        """Write something down; one line is written whole."""
        os.write(self._fd, json.dumps(words).encode() + b"\n")

    def live(self) -> None:
        """Go on for ever."""
        verbs = [self.save, self.save_for_all, self.save_to_throw, self.save_compactly]
        verbs += [self.compose, self.collect, self.verify, self.drop, self.undrop, self.harm, self.repair]
        while True:
            with Store(self._path) as store:
                for _ in range(self._chance.randrange(1, 6)):
                    verb = self._chance.choice(verbs)
                    try:
                        verb(store)
                    except (Locked, Conflict, NotFound) as error:
                        self.say("refused", verb.__name__, type(error).__name__, str(error))
                    else:
                        self.say("did", verb.__name__)

    def save(self, store: Store) -> None:
        """Save the next step of a run of one's own, or half of it."""
        self._step = self._step % len(STEPS) + 1
        store.ingest(self._arena.source(self._step), run=f"life{self._life}-{self._step % 2}")
        self.say("saved", f"life{self._life}-{self._step % 2}@{self._step}", self._step)

    def save_for_all(self, store: Store) -> None:
        """Save any step of the run that all save."""
        step = self._chance.choice(STEPS)
        store.ingest(self._arena.source(step), run="all")
        self.say("saved", f"all@{step}", step)

    def save_compactly(self, store: Store) -> None:
        """Save differences to a commit that is thrown away at once: what they refer to stays."""
        self._saves += 1
        step, run = self._chance.choice(STEPS[1:]), f"compact{self._life}-{self._saves}"
        store.ingest(self._arena.source(1), run="thrown-key")
        _save_compactly(store, self._arena.source(step), run, "thrown-key@1")
        self.say("saved", f"{run}@{step}", f"{step} compact")
        store.drop("thrown-key@1")

    def save_to_throw(self, store: Store) -> None:
        """Save what collections take."""
        policy = self._chance.choice(["full", "parity"])
        store.ingest(self._arena.source(self._chance.choice(STEPS)), run="thrown", policy=policy)

    def drop(self, store: Store) -> None:
        """Drop one of these."""
        store.drop("thrown")

    def undrop(self, store: Store) -> None:
        """Bring one of these back."""
        dropped = store.dropped("thrown")
        if dropped:
            store.undrop(self._chance.choice(dropped).commit.id)

    def compose(self, store: Store) -> None:
        """Compose what anybody has been told is saved."""
        said = list(saved(self._path.parent).items())
        if said:
            ref, step = self._chance.choice(said)
            scratch = self._path.parent / f"scratch{self._life}"
            scratch.mkdir(exist_ok=True)
            if composed(store, ref, scratch) != self._arena.digest(step):
                self.say("wrong", f"{ref} composes to other bytes")

    def collect(self, store: Store) -> None:
        """Collect what may go; while an object is lost no commit does."""
        empty_trash = self._chance.random() < 0.5
        try:
            store.gc(Keep(last=1), runs=["thrown"], grace_seconds=GRACE_SECONDS, empty_trash=empty_trash)
        except IntegrityError as error:
            if self._arena.hurt_object not in str(error):
                raise
            raise Conflict(str(error)) from error

    def verify(self, store: Store) -> None:
        """Look for damage: only what is being thrown away, or was harmed, may not be whole when it is looked at."""
        for damage in store.verify(read_data=self._chance.random() < 0.5).damaged:
            if not all(name.startswith(("thrown", HURT)) for name in damage.needed_by) or not damage.needed_by:
                self.say("wrong", f"{damage.kind} {damage.path}: {damage.reason}, needed by {damage.needed_by}")

    def harm(self, store: Store) -> None:
        """Save what nobody else has, and damage it: whatever a repair has taken away is written again here."""
        store.ingest(self._arena.source(HURT), run=HURT)
        path = store.path / "objects" / self._arena.hurt_object[:2] / self._arena.hurt_object
        with contextlib.suppress(FileNotFoundError):  # to the trash it goes, and comes back
            flip(path)

    def repair(self, store: Store) -> None:
        """Repair: what was harmed goes to the trash, or is healed, and nothing else is touched."""
        read_data, heals = (self._chance.random() < 0.5 for _ in range(2))
        sources = [self._arena.folder / "alone"] if heals else []
        done = store.repair(read_data=read_data, sources=sources)
        self.say("repaired", len(done.moved), len(done.fetched))
        moved = {Path(each.path).name for each in done.moved} | {Path(each.path).name for each in done.fetched}
        costs = {cost.holder for cost in done.lost if not cost.holder.startswith(("thrown", HURT))}
        if moved - {self._arena.hurt_object} or costs or done.unreadable:
            self.say("wrong", f"a repair did {done}")


def _live(path: Path, arena: Arena, life: int, seed: int) -> None:
    os.environ["LAYERSTORE_LOCK_TIMEOUT"] = "20"
    warnings.simplefilter("error")
    # Who is killed between a record and the index leaves that to the next one.
    warnings.filterwarnings("ignore", ".* no longer there", IndexNotice)
    worker = _Worker(path, arena, life, seed)
    try:
        worker.live()
    except BaseException:  # noqa: BLE001  # told, whatever it is
        worker.say("wrong", traceback.format_exc())


def journals(folder: Path) -> Iterator[list[object]]:
    """Yield all that was written down."""
    for journal in folder.glob("journal*"):
        yield from map(json.loads, journal.read_text().splitlines())


def saved(folder: Path) -> dict[str, str]:
    """Return the commits that somebody was told are saved, with what each has to be."""
    return {str(words[1]): str(words[2]) for words in journals(folder) if words[0] == "saved"}


def _melee(folder: Path, arena: Arena, seconds: float, seed: int) -> tuple[int, Counter[str]]:
    """Let processes be at it for a while; return how many were killed, and what was done."""
    chance = random.Random(seed)
    path = folder / "store"
    init(path).close()
    lives = iter(range(10**6))

    def begin() -> tuple[BaseProcess, Path]:
        life = next(lives)
        process = begun(_live, path, arena, life, chance.randrange(10**9))
        return process, folder / f"journal{life}"

    processes = [begin() for _ in range(PROCESSES)]
    killed, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2 + chance.random())
        place = chance.randrange(PROCESSES)
        process, _ = processes[place]
        process.kill()
        process.join()
        killed += 1
        processes[place] = begin()
    # Whoever is there now may finish something: then all are alive.
    deadline = time.monotonic() + QUIET_SECONDS_MAX
    while not all(journal.exists() and b'"did"' in journal.read_bytes() for _, journal in processes):
        assert time.monotonic() < deadline, "somebody waits for ever"
        time.sleep(0.1)
    for process, _ in processes:
        process.kill()
        process.join()
    done = Counter(f"{words[0]} {words[1]}" for words in journals(folder) if words[0] in ("did", "refused"))
    for words in journals(folder):
        if words[0] == "repaired":
            done.update({"taken by repairs": int(str(words[1])), "healed by repairs": int(str(words[2]))})
    wrong = [words for words in journals(folder) if words[0] == "wrong"]
    assert wrong == []
    return killed, done


def _at_peace(path: Path, arena: Arena) -> list[str]:
    """Return what is wrong once all are dead."""
    composites = {ref: arena.digest(step) for ref, step in saved(path.parent).items()}
    with Store(path) as store:
        store.repair(read_data=True, sources=[arena.folder / "alone"])
    found = problems(path, path.parent, composites)
    with Store(path) as store:
        for entry in store.log():
            found += [] if entry.damage is None else [f"{entry.run}@{entry.step}: {entry.damage}"]
            store.compose(entry.commit).write(path.parent / "any", durable=False)
            shutil.rmtree(path.parent / "any")
        store.gc(grace_seconds=0.0)
        store.ingest(arena.source(1), run="after")
    return found + problems(path, path.parent, composites)


@pytest.mark.fault(47, 48, 49, 50)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(6.0, marks=pytest.mark.full), pytest.param(240.0, marks=pytest.mark.exhaustive)],
)
def test_killed_processes_lose_nothing(fast_path: Path, arena: Arena, seconds: float) -> None:
    """Ingesting, composing, collecting, dropping, verifying, harming and repairing for some seconds."""
    seed = seeded("at once").randrange(10**9)
    killed, done = _melee(fast_path, arena, seconds, seed)
    count = len(saved(fast_path))
    print(f"{killed} killed in {seconds:g} s; {count} commits reported; {dict(sorted(done.items()))}")
    assert in_child(_at_peace, fast_path / "store", arena, timeout_seconds=600.0).needed() == []
    assert killed
    assert count


# -- suspended ones ------------------------------------------------------------------------------------------------


def _do_and_stop(path: Path, arena: Arena, deed: str, call: Call) -> None:
    """Save or collect, suspended before *call*; files beside the store say so, and that it came to its end."""

    def stop(_: Path) -> None:
        (path.parent / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    with Store(path, hook=Recorder(call, stop)) as store:
        _do(store, arena, deed)
    (path.parent / "finished").touch()


def _do(store: Store, arena: Arena, deed: str) -> object:
    """Collect, with or without a grace, or ingest what ``RUN@STEP`` says."""
    run, _, step = deed.partition("@")
    if step:
        return store.ingest(arena.source(step), run=run)
    return store.gc(Keep(last=1), grace_seconds=0.0 if deed == "gc at once" else None)


def _try(path: Path, arena: Arena, deed: str, deadline_seconds: str = "0.5") -> Failure | None:
    os.environ["LAYERSTORE_LOCK_TIMEOUT"] = deadline_seconds
    with Store(path) as store:
        return attempt(lambda: _do(store, arena, deed))


@contextlib.contextmanager
def _suspended(path: Path, arena: Arena, deed: str, call: Call) -> Iterator[int]:
    """Let somebody do *deed* who is suspended at *call* until the block ends; yield the process."""
    with child(_do_and_stop, path, arena, deed, call) as holder:
        wait_for(path.parent / "stopped")
        assert holder.pid is not None
        yield holder.pid
        os.kill(holder.pid, signal.SIGCONT)
        wait_for(path.parent / "finished")


@pytest.mark.full
@pytest.mark.fault(47, 54, 55)
def test_a_suspended_ingest_is_named_and_holds_up_nobody_else(fast_path: Path, arena: Arena) -> None:
    """Another ingest of its run is told at its deadline; other runs and a collection go on, and so does it at last."""
    path = fast_path / "store"
    init(path).close()
    with _suspended(path, arena, "run@1", Call("link", 3)) as pid:
        refused = in_child(_try, path, arena, "run@2").needed()

        assert (refused.kind, refused.exit_code) == ("Locked", 11)
        assert f"pid {pid}" in refused.message
        assert refused.hint
        assert in_child(_try, path, arena, "other@1").needed() is None
        assert in_child(_try, path, arena, "gc").needed() is None

    composites = {"run@1": arena.digest(1), "other@1": arena.digest(1)}
    assert in_child(problems, path, fast_path, composites).needed() == []


@pytest.mark.fault(51, 54)
def test_a_suspended_collection_holds_up_only_collections(fast_path: Path, arena: Arena) -> None:
    """What it was about to take is saved again meanwhile, and it leaves that alone when it wakes up."""
    path = fast_path / "store"
    with init(path) as store:
        for step in (1, 2, 3):
            store.ingest(arena.source(step), run="run")
    time.sleep(0.05)
    with _suspended(path, arena, "gc at once", Call("rename", 2)):
        refused = in_child(_try, path, arena, "gc").needed()

        assert (refused.kind, refused.exit_code) == ("Locked", 11)
        assert in_child(_try, path, arena, "again@1").needed() is None

    composites = {"run@3": arena.digest(3), "again@1": arena.digest(1)}
    assert in_child(problems, path, fast_path, composites).needed() == []


# -- two verbs, step by step ---------------------------------------------------------------------------------------


def _old(path: Path) -> None:
    """Let all that is there be old: only what is touched from now on is young."""
    for file in (path / "objects").rglob("*"):
        if file.is_file():
            os.utime(file, (1, 1))


class Gate:
    """A hook that counts calls, and stops before the one of this number until it is let on."""

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        self.calls_made = 0
        self.reached = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, operation: str, path: Path) -> None:
        """Count, and wait at the right one."""
        self.calls_made += 1
        if self.calls_made - 1 == self._number:
            self.reached.set()
            assert self.may_go.wait(60)


class _NoHold:
    """What a collection holds that believes it has a lock."""

    def check(self) -> None:
        """Find it held."""


class _Lockless(Repository):
    """A repository that locks nobody out of a collection."""

    def lock_gc(self) -> AbstractContextManager[Any]:
        """Lock nothing."""
        return contextlib.nullcontext(_NoHold())


def _collect(store: Store, arena: Arena) -> object:
    return store.gc(Keep(last=1), runs=["run"])


def _collect_without_a_lock(store: Store, arena: Arena) -> object:
    store._opened = _Lockless(**{field.name: getattr(store.repo, field.name) for field in fields(Repository)})
    return _collect(store, arena)


Deed = Callable[[Store, Arena], object]
COLLECTS = "collects"
MEETING: dict[str, Deed] = {
    "saves again": lambda store, arena: store.ingest(arena.source(1), run="again"),
    "saves the same": lambda store, arena: store.ingest(arena.source(1), run="run"),
    "saves compactly": lambda store, arena: _save_compactly(store, arena.source(2), "compact", "run@1"),
    "saves half": lambda store, arena: store.ingest(arena.source(2), run="run", policy="parity"),
    "pins": lambda store, arena: store.pin("named", "run@1"),
    "composes": lambda store, arena: store.compose("run@1").write(store.path.parent / "out", durable=False),
    "drops": lambda store, arena: store.drop("run@3"),
    "undrops": lambda store, arena: store.undrop("run@2"),
    "collects without a lock": _collect_without_a_lock,
}
DEEDS = MEETING | {COLLECTS: _collect}


def _run_with(path: Path, arena: Arena, deed: str, gate: Gate, failures: list[BaseException]) -> None:
    try:
        with Store(path, hook=gate) as store:
            DEEDS[deed](store, arena)
    except BaseException as error:  # noqa: BLE001  # the caller judges it
        failures.append(error)
    finally:
        gate.reached.set()


def _meet(path: Path, arena: Arena, deed: str, at: int, collected: int) -> list[str]:
    """Let a collection come to its step *collected* while *deed* waits at its step *at*; then both go on, in turn."""
    mine, theirs = Gate(at), Gate(collected)
    failed: list[BaseException] = []
    gc_failed: list[BaseException] = []
    doing = threading.Thread(target=_run_with, args=(path, arena, deed, mine, failed))
    collecting = threading.Thread(target=_run_with, args=(path, arena, COLLECTS, theirs, gc_failed))
    doing.start()
    assert mine.reached.wait(60)
    collecting.start()
    assert theirs.reached.wait(60)
    mine.may_go.set()
    doing.join(60)
    theirs.may_go.set()
    collecting.join(60)
    assert not any(thread.is_alive() for thread in (doing, collecting))
    return _meeting_problems(path, arena, deed, failed, gc_failed)


def _meeting_problems(
    path: Path, arena: Arena, deed: str, failed: list[BaseException], gc_failed: list[BaseException]
) -> list[str]:
    found = [f"the collection failed: {error!r}" for error in gc_failed]
    # Only who needs the very commit that is collected may be told so, and to repeat the command.
    allowed = () if deed == "saves again" else (Conflict, NotFound)
    found += [f"it failed: {error!r}" for error in failed if not isinstance(error, allowed)]
    composites, out = {"run@3": arena.digest(3)}, path.parent / "out"
    if deed == "composes" and out.exists() == bool(failed):
        found.append(f"there is {'a' if failed else 'no'} target")
    if not failed:
        composites |= _brought(path, arena, deed)
    shutil.rmtree(out, ignore_errors=True)
    found += problems(path, path.parent, composites)
    with Store(path) as store:
        for entry in store.log():
            store.compose(entry.commit).write(out, durable=False)
            shutil.rmtree(out)
    return found


def _brought(path: Path, arena: Arena, deed: str) -> dict[str, str]:
    """Return what has to be there, with its digest, once *deed* has reported success."""
    brought = {"saves again": {"again@1": "1"}, "pins": {"named": "1"}, "saves compactly": {"compact@2": "2 compact"}}
    found = {ref: arena.digest(step) for ref, step in brought.get(deed, {}).items()}
    with Store(path) as store:
        if deed == "drops":
            store.undrop("run@3")  # whatever was collected meanwhile, what was dropped is in the trash
        if deed == "undrops" and any((entry.run, entry.step) == ("run", 2) for entry in store.log()):
            found = {"run@2": arena.digest(2)}
    return found


def _calls(path: Path, arena: Arena, deed: str) -> int:
    gate, failed = Gate(), list[BaseException]()
    _run_with(path, arena, deed, gate, failed)
    assert failed == [], [str(each) for each in failed]
    return gate.calls_made


def _meetings(folder: Path, arena: Arena, deed: str, count: int, seed: int) -> tuple[int, int, list[str]]:
    """Let *deed* meet a collection at *count* pairs of steps, or at all; return how many there are and were."""
    vars(transfer)["WORKERS_MAX"] = 1
    with init(folder / "before") as store:
        for step in (1, 2, 3):
            store.ingest(arena.source(step), run="run")
        store.drop("run@2")

    def fresh() -> Path:
        copied(folder / "before", folder / "store")
        _old(folder / "store")
        return folder / "store"

    mine, theirs = _calls(fresh(), arena, deed), _calls(fresh(), arena, COLLECTS)
    shutil.rmtree(folder / "out", ignore_errors=True)
    pairs = [(at, collected) for at in range(mine) for collected in range(theirs + 1)]
    chosen = random.Random(seed).sample(pairs, min(count, len(pairs)))
    found = []
    for at, collected in chosen:
        wrong = _meet(fresh(), arena, deed, at, collected)
        found += [f"{deed} at {at}, collection at {collected}: {each}" for each in wrong]
    return len(pairs), len(chosen), found


@pytest.mark.fault(49, 50, 51)
@pytest.mark.parametrize("deed", MEETING)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3, marks=pytest.mark.sample(1, by="deed", always=("drops",))),
        pytest.param(1000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_whatever_meets_a_collection_is_whole_or_refused(fast_path: Path, arena: Arena, deed: str, count: int) -> None:
    """Pairs of steps of an ingest of what goes, one that inherits from it, a pin and a composite of it, and others."""
    seed = seeded(deed).randrange(10**9)
    outcome = in_child(_meetings, fast_path, arena, deed, count, seed, timeout_seconds=7000.0)
    pairs, done, found = outcome.needed()
    print(f"{deed}: {done} of {pairs} pairs")
    assert found == []


# -- ingests, readers, forks and threads ---------------------------------------------------------------------------


@pytest.mark.fault(47, 102, 105)
@pytest.mark.parametrize(
    ("deeds", "deadline_seconds", "refusal", "refused_max"),
    [
        (["run@2", "run@4"], "60", "", 0),
        (["run@2", "run@4"], "0", Locked.__name__, 1),
        (["run@2", "run@2", "twin@2"], "60", "", 0),
        pytest.param(["run@1", f"run@{HURT}"], "60", Conflict.__name__, 1, marks=pytest.mark.full),
    ],
    ids=["two steps", "two steps that wait for nobody", "the same", "two contents"],
)
def test_two_ingests_at_once_both_succeed_or_one_is_refused(
    arena: Arena, fast_path: Path, deeds: list[str], deadline_seconds: str, refusal: str, refused_max: int
) -> None:
    """All get in, or the second is told who is busy or what is there; never something in between."""
    for number in range(ROUNDS):
        path = fast_path / f"store{number}"
        init(path).close()
        with ThreadPoolExecutor(len(deeds)) as pool:
            outcomes = pool.map(lambda deed: in_child(_try, path, arena, deed, deadline_seconds), deeds)  # noqa: B023
            failures = [outcome.needed() for outcome in outcomes]

        kinds = [failure.kind for failure in failures if failure is not None]
        assert set(kinds) <= {refusal}, failures
        assert len(kinds) == refused_max if refusal == Conflict.__name__ else len(kinds) <= refused_max
        done = {deed for deed, failure in zip(deeds, failures, strict=True) if failure is None}
        composites = {deed.replace(HURT, "1"): arena.digest(deed.partition("@")[2]) for deed in done}
        assert problems(path, fast_path, composites) == []
        assert leftovers(path) == []
        with Store(path) as store:
            assert len(store.log()) == len(done)


def _ingest_slowly(path: Path, source: Path, runs: list[str]) -> None:
    with Store(path) as store:
        for run in runs:
            store.ingest(source, run=run)


def _read_all_the_time(path: Path, source: Path, digest: str, scratch: Path) -> list[str]:
    found = []
    with child(_ingest_slowly, path, source, [f"run{number}" for number in range(25)]) as writer:
        while writer.is_alive():
            with Store(path) as store:
                for entry in store.log():
                    if entry.damage is not None or composed(store, f"{entry.run}@{entry.step}", scratch) != digest:
                        found.append(f"{entry.run} was seen before it was whole")
        writer.join()
    return found


@pytest.mark.full
@pytest.mark.fault(48)
def test_readers_see_whole_commits_only(arena: Arena, fast_path: Path) -> None:
    """Whatever a log shows while another process writes, composes at once; and the index does not grow with readers."""
    path = fast_path / "store"
    init(path).close()

    assert _read_all_the_time(path, arena.source(2), arena.digest(2), fast_path) == []
    assert len([*(path / "commits").iterdir()]) == 25
    assert (path / "manifest" / "data.mdb").stat().st_size < 2**20


def _with_one_commit(path: Path, arena: Arena) -> Path:
    with init(path) as store:
        store.ingest(arena.source(2), run="run")
    return path


def _forked(work: Callable[[], object]) -> Failure | None:
    """Call *work* in a plain fork of this process; return what it raised."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        sender.send(attempt(work))
        os._exit(0)
    sender.close()
    failure: Failure | None = receiver.recv()
    os.waitpid(pid, 0)
    return failure


def _use_after_fork(path: Path, source: Path) -> list[str]:
    found = []
    with Store(path) as store:
        store.log()
        for work in (store.log, lambda: store.compose("run@2"), lambda: store.ingest(source, run="run")):
            failure = _forked(work)
            if failure is None or failure.kind != Internal.__name__ or "opened in process" not in failure.message:
                found.append(f"{failure}")
        fresh = _forked(lambda: Store(path).log())
        found += [] if fresh is None else [fresh.trace]
        found += [] if [entry.step for entry in store.log()] == [2] else ["the parent is confused"]
        store.ingest(source, run="run")
        found += [] if store.verify(read_data=True).ok else ["the parent's store is damaged"]
    return found


@pytest.mark.fault(52)
def test_a_store_does_not_survive_a_fork(arena: Arena, fast_path: Path) -> None:
    """The child is told so, its parent does not notice, and a store opened afresh in the child works."""
    path = _with_one_commit(fast_path / "store", arena)

    assert in_child(_use_after_fork, path, arena.source(4)).needed() == []


@pytest.mark.fault(53)
def test_threads_and_stores_of_one_process_share_an_index(arena: Arena, fast_path: Path) -> None:
    """LMDB forbids opening a file twice; ingests, questions and composites go on while other stores are closed."""
    path = fast_path / "store"

    def work(number: int) -> None:
        run, step = f"run{number % 4}", 2 if number % 2 else 4
        with Store(path) as mine:
            mine.ingest(arena.source(step), run=run)
            mine.log()
        assert composed(store, f"{run}@{step}", fast_path / f"scratch{number}") == arena.digest(step)

    with init(path) as store:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(16)))
        assert store.verify(read_data=True).ok
        assert len(store.log()) == 4


@pytest.mark.fault(53)
def test_threads_survive_a_damaged_index(arena: Arena, fast_path: Path) -> None:
    """One of them replaces it, all get their answers."""
    path = _with_one_commit(fast_path / "store", arena)
    (path / "manifest" / "data.mdb").write_bytes(os.urandom(20_000))
    assert in_child(_ask_from_threads, path).needed() == [2] * 24


def _ask_from_threads(path: Path) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Store(path) as store, ThreadPoolExecutor(6) as pool:
            return list(pool.map(lambda _: store.log()[0].step, range(24)))


# -- ranks ---------------------------------------------------------------------------------------------------------

SESSION = "0" * 32


def _join(path: Path, arena: Arena, ready: Path, go: Path) -> str:
    with Store(path) as store:
        save = begun_after(store, arena.source(3), session=SESSION)
        ready.touch()
        wait_for(go)
        return save.finish().id


@pytest.mark.fault(105)
def test_two_who_join_the_same_parts_make_one_commit(fast_path: Path, arena: Arena) -> None:
    """One link wins, and both are told that it is saved; whoever comes too late finds no parts."""
    path, go = fast_path / "store", fast_path / "go"
    with init(path) as store:
        store.ingest(arena.source(1), run="run")
        begun_after(store, arena.source(3), session=SESSION).write_all()
    ready = [fast_path / "one", fast_path / "other"]
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(in_child, _join, path, arena, each, go) for each in ready]
        for each in ready:
            wait_for(each)
        go.touch()

    (made,) = {join.result().value for join in joins} - {None}
    with Store(path) as store:
        assert next((entry.step, entry.commit) for entry in store.log()) == (3, made)
        assert store.verify(read_data=True).ok


@pytest.mark.fault(104)
def test_parts_of_two_sessions_are_never_joined(fast_path: Path, arena: Arena) -> None:
    """A rank died before its part: the other's part waits in vain, and that of the next session is none of it."""
    path = fast_path / "store"
    with init(path) as store:
        store.ingest(arena.source(1), run="run")
        first = begun_after(store, arena.source(3), session=SESSION)
        first.write(0)
        second = begun_after(store, arena.source(3), session="1" * 32)
        second.write(1)
        for save in (first, second):
            with pytest.raises(AssertionError, match="a rank has left no part"):
                save.finish()
        assert [entry.step for entry in store.log()] == [1]

        store.gc(grace_seconds=None)
        assert len(list((path / "parts").rglob("0.*"))) == 2, "nobody knows yet that these are dead"
        store.gc(grace_seconds=0.0)

        assert list((path / "parts").iterdir()) == []
        assert store.verify().orphans == 0
