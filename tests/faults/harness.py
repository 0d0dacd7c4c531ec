"""
Break a store on purpose, in a child process, and look at what is left.

Faults go in through the one seam that writes, ``layerstore.storage.files``, or come from the system itself:
signals, limits, full disks. Whatever might kill an interpreter runs in a child of a clean fork server.
"""

from __future__ import annotations

import errno as errnos
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from layerstore.errors import LayerstoreError, StorageIO
from layerstore.store import Store
from tests.bench.generate import Layout, generate

TIMEOUT_SECONDS = 120.0


# -- what is broken ------------------------------------------------------------------------------------------------


def tiny_checkpoint(folder: Path, *, step: int = 2, seed: int = 0, layout: Layout = "raw", world_size: int = 2) -> Path:
    """Write the smallest checkpoint that has everything, into *folder*."""
    return generate(
        folder, layers=1, hidden=16, vocab=16, step=step, seed=seed, layout=layout, world_size=world_size
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
    """Return one digest of all that is in *tree*."""
    return hashlib.sha256(repr(sorted(snapshot(tree).items())).encode()).hexdigest()


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
    """A hook that notes what would have been done."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.paths: list[tuple[Call, Path]] = []

    def __call__(self, operation: str, path: Path) -> None:
        """Note one call."""
        with self._guard:
            self.paths.append((self.count(operation), path))

    def count(self, operation: str) -> Call:
        """Count one call of *operation*."""
        self._counts[operation] += 1
        return Call(operation, self._counts[operation])

    @property
    def calls(self) -> list[Call]:
        """All calls, in order."""
        return [call for call, _ in self.paths]


class Killer(Recorder):
    """A hook that kills its process with SIGKILL in front of one call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __call__(self, operation: str, path: Path) -> None:
        """Die, if this is the call."""
        with self._guard:
            if self.count(operation) == self._call:
                os.kill(os.getpid(), signal.SIGKILL)


class Refuser(Recorder):
    """A hook that lets one call fail as the system would: the error is raised where the real one is mapped."""

    def __init__(self, call: Call, number: int) -> None:
        super().__init__()
        self._call = call
        self._number = number

    def __call__(self, operation: str, path: Path) -> None:
        """Raise, if this is the call."""
        super().__call__(operation, path)
        if self.paths[-1][0] == self._call or (self._call, path) in self.paths[-8:]:
            self._refuse(path)

    def _refuse(self, path: Path) -> None:
        if self._call in self.done:
            return
        self.done.add(self._call)
        raise StorageIO(
            f"cannot change {path}: {os.strerror(self._number)}", errno=self._number, filename=str(path), hint="a test"
        )
