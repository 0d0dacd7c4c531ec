"""
Break a store on purpose, in a child process, and look at what is left.

Faults go in through the one seam that writes, ``layerstore.disk.files``, or come from the system itself:
signals, limits, full disks. Whatever might kill an interpreter runs in a child of a clean fork server.
"""

from __future__ import annotations

import errno as errnos
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # which a verb imports late, from where nobody may not read or beyond a limit
import pytest

from layerstore.errors import LayerstoreError, StorageIO, Unsupported
from layerstore.history import resolve
from layerstore.store import Store
from tests.bench.generate import Layout
from tests.generated import generate

TIMEOUT_SECONDS = 120.0


# -- what is broken ------------------------------------------------------------------------------------------------


def tiny_checkpoint(
    folder: Path, *, step: int = 2, seed: int = 0, layout: Layout = "raw", world_size: int = 2, stage: int = 3
) -> Path:
    """Write the smallest checkpoint that has everything, into *folder*."""
    return generate(
        folder,
        layers=1,
        hidden=16,
        vocab=16,
        step=step,
        seed=seed,
        layout=layout,
        world_size=world_size,
        stage=stage,
    )


def snapshot(tree: Path) -> dict[str, str]:
    """Return every path below *tree* with its kind and content: equal snapshots, equal trees."""
    found = {}
    for folder, names, files in os.walk(tree):
        for name in (*names, *files):
            path = Path(folder, name)
            found[os.fspath(path.relative_to(tree))] = _content(path)
    return found


def _content(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {path.readlink()}"
    if stat.S_ISREG(mode):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"kind {stat.S_IFMT(mode):o}"


def truth(store: Path) -> dict[str, str]:
    """Return the snapshot of *store* without what may differ: the index, locks and empty folders."""
    return {
        name: content
        for name, content in snapshot(store).items()
        if name.split("/")[0].partition(".")[0] not in {"manifest", "locks"} and not content.startswith("kind")
    }


def fingerprint(tree: Path) -> str:
    """Return one digest of all that is in *tree*, but for what a composite says of itself."""
    found = {path: content for path, content in snapshot(tree).items() if path != "layerstore.json"}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def flip(file: Path, place: int = -1, bit: int = 0) -> None:
    """Flip a bit of *file*, as a rule of its last byte; nothing else of it changes at any moment."""
    size_bytes = file.stat().st_size
    if not size_bytes:
        return
    fd = os.open(file, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, place % size_bytes)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit]), place % size_bytes)
    finally:
        os.close(fd)


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def seeded(name: str) -> random.Random:
    """Return a generator whose seed is printed, and can be given as LAYERSTORE_FAULTS_SEED."""
    seed = os.environ.get("LAYERSTORE_FAULTS_SEED") or str(random.SystemRandom().randrange(10**9))
    print(f"{name}: LAYERSTORE_FAULTS_SEED={seed}")
    return random.Random(f"{name}/{seed}")


# -- faults at the seam --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """The n-th call of one operation, from 1: threads mix the operations, but each keeps its count."""

    operation: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.operation} {self.ordinal}"


class Recorder:
    """A hook that notes what would be done, and does a *deed* of its own in front of one call."""

    def __init__(self, call: Call | None = None, deed: Callable[[Path], object] = lambda _: None) -> None:
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._call = call
        self._deed = deed
        self.paths: list[tuple[Call, Path]] = []

    def __call__(self, operation: str, path: Path) -> None:
        """Note one call."""
        with self._guard:
            self._counts[operation] += 1
            self.paths.append((Call(operation, self._counts[operation]), path))
            if self.paths[-1][0] == self._call:
                self._deed(path)

    @property
    def calls(self) -> list[Call]:
        """All calls, in order."""
        return [call for call, _ in self.paths]


class Refuser(Recorder):
    """A hook that lets one call fail as the system would, or that one and all like it from then on."""

    # A full disk or a broken one still lets files go.
    _ALWAYS_WORK = frozenset({"unlink", "rmtree"})

    def __init__(self, call: Call, number: int, *, lasting: bool = False) -> None:
        super().__init__(call, self._refuse)
        self._number = number
        self._lasting = lasting
        self.failed: list[Path] = []

    def __call__(self, operation: str, path: Path) -> None:
        """Raise, if this is the call, or a later one."""
        had_failed = bool(self.failed)
        super().__call__(operation, path)
        if self._lasting and had_failed and operation not in self._ALWAYS_WORK:
            self._refuse(path)

    def _refuse(self, path: Path) -> None:
        self.failed.append(path)
        raise StorageIO(f"{path} refused: made up", errno=self._number, filename=str(path), hint="none")


def refuse_links(*_: object, **__: object) -> None:
    """Answer as a filesystem without hard links does; to be put in the place of ``os.link``."""
    raise OSError(errnos.EPERM, os.strerror(errnos.EPERM))


# -- children ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a child, as far as it can travel."""

    kind: str
    exit_code: int
    errno: int | None
    message: str
    hint: str | None
    trace: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended."""

    exit_code: int | None
    """Negative for a signal; None where it had to be killed because it hung."""
    value: Any = None
    failure: Failure | None = None
    notices: tuple[str, ...] = ()
    """The warnings it gave, each with its class."""

    def needed(self) -> Any:
        """Return the value; raise if the child failed."""
        assert self.exit_code == 0, self
        assert self.failure is None, self.failure.trace
        return self.value


_CONTEXT = multiprocessing.get_context("forkserver")
# With what is imported late: a child that has become another user may not read the interpreter's folder.
_CONTEXT.set_forkserver_preload(["layerstore.store", "layerstore.nearest", "difflib", "tests.faults.harness"])


def in_child(work: Callable[..., Any], *args: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> Outcome:
    """Call *work* with *args* in a child process, forked where no store was ever open."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(sender, work, args))
    process.start()
    sender.close()
    with receiver:
        try:
            outcome: Outcome | None = receiver.recv() if receiver.poll(timeout_seconds) else None
        except EOFError:
            outcome = Outcome(_signal_of(process))
    process.kill()
    process.join()
    process.close()
    return outcome or Outcome(None)


def limit_address_space(more_bytes: int) -> None:
    """Let this process have so much more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))


def _signal_of(process: BaseProcess) -> int:
    """Return how *process*, which ended without a word, ended."""
    process.join()
    # The fork server does not always know.
    crashes = (-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT)
    return process.exitcode if process.exitcode in crashes else -signal.SIGKILL


def _child(sender: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value, failure = None, None
        try:
            value = work(*args)
        except BaseException as error:  # noqa: BLE001 - the parent judges it
            failure = failure_of(error)
    notices = tuple(f"{notice.category.__name__}: {notice.message}" for notice in caught)
    sender.send(Outcome(0, value, failure, notices))


def begun(work: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start *work* in a child that whoever asks for it has to end."""
    process = _CONTEXT.Process(target=work, args=args)
    process.start()
    return process


@contextmanager
def child(work: Callable[..., Any], *args: Any) -> Iterator[BaseProcess]:
    """Run *work* in a child meanwhile; what it says is lost, and it is killed if it is still there."""
    process = begun(work, *args)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def traced(options: Sequence[str], program: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the Python *program* with *args* under strace, which injects what *options* say."""
    command = ["strace", "-f", "-qq", "-o", os.devnull, *options, sys.executable, "-c", program, *map(str, args)]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | {"PYTHONPATH": paths},
    )


def wait_for(path: Path) -> None:
    """Wait until *path* is there."""
    give_up_at = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        assert time.monotonic() < give_up_at, f"{path} did not appear"
        time.sleep(0.005)


def failure_of(error: BaseException) -> Failure:
    """Return what the command line would show of *error*."""
    return Failure(
        kind=type(error).__name__,
        exit_code=error.exit_code if isinstance(error, LayerstoreError) else -1,
        errno=error.errno if isinstance(error, OSError) else None,
        message=str(error),
        hint=getattr(error, "hint", None),
        trace="".join(traceback.format_exception(error)),
    )


def attempt(work: Callable[[], Any]) -> Failure | None:
    """Call *work*; return what it raised, if it did."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the caller judges it
        return failure_of(error)
    return None


def become_nobody(*groups: int) -> None:
    """Give up root's rights, which would make every permission vanish; be of *groups* only."""
    if os.getuid() == 0:
        os.setgroups(groups)
        os.setgid(groups[0] if groups else 65534)
        os.setuid(65534)


# -- what is left --------------------------------------------------------------------------------------------------


def masters(store: Store, ref: str, *, policy: str = "latest") -> dict[str, bytes]:
    """Return every tensor of a composite."""
    return {name: value.tobytes() for name, value in store.compose(ref, policy=policy).tensors().items()}


def object_of(store: Store, ref: str, layer: str, kind: str = "master") -> Path:
    """Return the file of the first object of that *kind*."""
    entry = next(entry for entry in resolve(store.repo, ref).record.layers if entry.layer == layer)
    stored = next(each for each in store.repo.version_of(entry).objects if each.kind == kind)
    return store.repo.layout.object(stored.id)


def composed(store: Store, ref: str | None, scratch: Path) -> str:
    """Return the fingerprint of *ref*, written below *scratch*."""
    target = scratch / "composed"
    shutil.rmtree(target, ignore_errors=True)
    store.compose(ref).write(target, durable=False)
    found = fingerprint(target)
    shutil.rmtree(target)
    return found


def problems(path: Path, scratch: Path, composites: Mapping[str, str]) -> list[str]:
    """
    Return what is wrong with the store at *path*; there should be nothing.

    *composites* are the references that must be there, each with the fingerprint of its composite.
    """
    found = []
    with Store(path) as store:
        verdict = store.verify(read_data=True)
        found += [f"{damage.kind} {damage.path}: {damage.reason}" for damage in verdict.damaged]
        known = {f"{entry.run}@{entry.step}" for entry in store.log()} | {pin.name for pin in store.pins()}
        for ref, expected in composites.items():
            if ref not in known:
                found.append(f"{ref} is lost")
            elif composed(store, ref, scratch) != expected:
                found.append(f"{ref} composes to other bytes")
    return found


def said_well(error: LayerstoreError) -> None:
    """Check the manners of *error*: one line, and a second one with what to do, which a terminal can show."""
    message, hint = str(error), error.hint or ""
    assert message, "an error without words"
    # There is nothing to do about a setting that is not supported, and the system's own words have to do.
    assert hint or isinstance(error, Unsupported | StorageIO), f"no hint: {message}"
    assert not {"\n", "\r"} & set(message + hint)
    (message + hint).encode()


@contextmanager
def refused(tree: Path, *classes: type[LayerstoreError], naming: str = "") -> Iterator[None]:
    """Expect one of *classes*, well said, and all below *tree* as it was; lock files name their last holder."""
    before = snapshot(tree)
    with pytest.raises(classes) as caught:
        yield
    said_well(caught.value)
    assert naming in f"{caught.value} {caught.value.hint}"
    now = snapshot(tree)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    assert [name for name in changed if not name.endswith((".lock", "lock.mdb"))] == []


def leftovers(path: Path) -> list[str]:
    """Return what lies in the store's ``tmp/``."""
    return sorted(os.listdir(path / "tmp")) if (path / "tmp").is_dir() else []


def copied(source: Path, target: Path) -> Path:
    """Copy the store *source* to *target*, replacing what is there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target
