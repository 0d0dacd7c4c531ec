"""
What each rank does: save with every system in turns, load what was saved, flip a bit of it and load again.

With ``--saves 0`` it runs on other ranks, and only loads what the first ones saved.
Rank 0 writes rows; each time in them is the slowest rank's.
"""

import argparse
import ctypes
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

from tests.bench.loop_job import Training, shape_of
from tests.bench.measure import FamilyPeak, disk_bytes, make_empty, seconds_until, wait_for_quiet
from tests.bench.peers.state import State
from tests.bench.peers.systems import IMPOSSIBLE, SYSTEMS, System
from tests.bench.ranked import asked, begin, leave
from tests.bench.rows import Row, Rows
from tests.ranks.launch import tell

LOADS = 3
SAVES_BETWEEN = 3
"""Of each system in all rounds but the last."""

Kind = type[System]


class Failed(Exception):
    """What a rank said when a system raised an error there."""


def main() -> None:
    """Do as the command line says."""
    options = asked(gb=float, saves=int, rounds=int, is_patient=int)
    begin()
    job = Job(Training(shape_of(options.gb)), options)
    if options.saves:
        job.save_all(rounds=options.rounds, saves=options.saves)
    else:
        job.load_all()
    leave()


def folder_of(kind: Kind, stores: Path) -> Path:
    """Return the folder of a system's saves."""
    return stores / kind.name.replace(", ", "-").replace(" ", "-")


class Job:
    """One launch."""

    def __init__(self, training: Training, options: argparse.Namespace) -> None:
        import torch.distributed as dist

        self._training, self._state = training, State(training.engine)
        training.step()  # the optimizer has its moments now
        self._stores: Path = options.data
        self._rows = Rows(options.out)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._is_patient = bool(options.is_patient)
        self._begun = 0.0
        """When the newest save began, by the clock of files."""

    def save_all(self, *, rounds: int, saves: int) -> None:
        """Let all systems save in turns, then load, in an order that is reversed from round to round."""
        state = {"kind": "state", "bytes": self._training.state_bytes(), "parameters": self._training.parameters}
        self._add(state | {"ranks": self._ranks})
        for name, reason in IMPOSSIBLE.items():
            self._add({"kind": "absent", "system": name, "reason": reason})
        able = [kind for kind in SYSTEMS if not self._is_refused(kind)]
        for number in range(rounds):
            is_last = number == rounds - 1
            for kind in list(able)[:: -1 if (rounds - number) % 2 == 0 else 1]:
                try:
                    self._turn(kind, number=number, saves=saves if is_last else min(saves, SAVES_BETWEEN))
                    if is_last:
                        self._load(kind)
                        self._flip(kind)
                except Failed as failure:
                    able.remove(kind)
                    self._add({"kind": "absent", "system": kind.name, "reason": f"failed: {failure}"})
                if not is_last or not kind.is_for_any_world:
                    self._alone(partial(shutil.rmtree, folder_of(kind, self._stores), ignore_errors=True))

    def load_all(self) -> None:
        """Load, on other ranks, what there is."""
        for kind in SYSTEMS:
            if kind.is_for_any_world and folder_of(kind, self._stores).exists():
                self._load(kind)

    def _is_refused(self, kind: Kind) -> bool:
        missing = kind.missing()
        if missing:
            self._add({"kind": "absent", "system": kind.name, "reason": missing})
        return bool(missing)

    # -- saves ---------------------------------------------------------------------------------------------------

    def _turn(self, kind: Kind, *, number: int, saves: int) -> None:
        """Save *saves* times, a step of training beside each."""
        folder, removed = folder_of(kind, self._stores), 0
        self._alone(lambda: make_empty(folder))
        _trim()
        with FamilyPeak() as idle:
            self._training.step()
        digests, used = [], 0.0
        with closing(self._opened(kind)) as system:
            for count in range(saves):
                if count >= saves - kind.saves_mixed:
                    digests.append(self._state.digests())
                _trim()
                with FamilyPeak() as peak:
                    row = self._save(system) | {"system": kind.name, "round": number, "number": count + 1}
                used = max(used, self._sum(peak.size_bytes - idle.size_bytes))
                size = disk_bytes(folder)
                self._add(row | {"bytes": removed + size})
                self._alone(system.forget_earlier)
                removed += size - disk_bytes(folder)
        self._add({"kind": "memory", "system": kind.name, "round": number, "bytes": int(used)})
        stepped = self._state.digests()
        self._alone(lambda: self._digests_of(kind).write_text(json.dumps([digests, stepped])))
        if self._rank == 0:
            tell("turn", what=f"round {number + 1}: {kind.name}")

    def _save(self, system: System) -> Row:
        self._settle()
        self._begun = time.time()
        elsewhere, started = system.blocked_elsewhere(), time.monotonic()
        blocked = self._timed(system.save)  # all ranks meet at its end
        if system.is_waited_for_beside:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(seconds_until, system.wait, started)
                self._training.step()
                self._timed(waiting.result)
            durable = waiting.result()
        else:
            self._training.step()
            self._timed(system.wait)
            durable = system.durable_seconds()
        held = self._max(system.blocked_elsewhere() - elsewhere)
        blocked += held
        return {"kind": "save", "blocked": blocked, "durable": max(self._max(durable), blocked)}

    # -- loads ---------------------------------------------------------------------------------------------------

    def _load(self, kind: Kind) -> None:
        """Load some times; note how long that takes, and whether all comes back to the last bit."""
        row = {"kind": "load", "system": kind.name, "ranks": self._ranks}
        seconds = []
        with closing(self._opened(kind)) as system:
            try:
                for _ in range(LOADS if self._is_patient else 1):
                    self._training.step()  # or nothing would have to be loaded
                    self._settle()
                    seconds.append(self._timed(system.load) + self._timed(system.finish))
            except Failed as failure:
                self._add(row | {"problem": str(failure)})
            else:
                self._add(row | {"seconds": median(seconds), "is_same": self._is_same(kind)})

    def _is_same(self, kind: Kind) -> bool:
        """Whether every tensor is that of a save which may have it, and the next step has the result that it had."""
        saved, stepped = json.loads(self._digests_of(kind).read_text())
        loaded = self._state.digests()
        is_same = all(digest in {each[key] for each in saved} for key, digest in loaded.items())
        if kind.saves_mixed == 1 and self._is_first_world():
            self._training.step()
            is_same = is_same and stepped == self._state.digests()
        return is_same

    def _is_first_world(self) -> bool:
        return bool(self._rows.find(kind="state")[-1]["ranks"] == self._ranks)

    def _flip(self, kind: Kind) -> None:
        """Flip a bit in the middle of the newest save's largest file, and note what a load does."""
        path = _largest(folder_of(kind, self._stores) / kind.data, since=self._begun)
        row = {"kind": "flip", "system": kind.name, "file": path.name}
        self._training.step()
        self._alone(lambda: _flip(path))
        try:
            self._load_once(kind)
            self._add(row | {"outcome": "not read" if self._is_same(kind) else "loaded"})
        except Failed as failure:
            self._add(row | {"outcome": "noticed", "says": str(failure)})
        self._alone(lambda: _flip(path))
        self._load_once(kind)  # or the next system would save what no training could have

    def _load_once(self, kind: Kind) -> None:
        with closing(self._opened(kind)) as system:
            self._timed(system.load)
            self._timed(system.finish)

    def _opened(self, kind: Kind) -> System:
        found: list[System] = []
        self._timed(lambda: found.append(kind(self._training.engine, folder_of(kind, self._stores))))
        return found[0]

    def _digests_of(self, kind: Kind) -> Path:
        return folder_of(kind, self._stores).with_suffix(".json")

    # -- all ranks -----------------------------------------------------------------------------------------------

    def _timed(self, work: Callable[[], object]) -> float:
        """
        Run *work* on all ranks; return the seconds of the slowest.

        Raises:
            Failed: It raised on one of them.
        """
        import torch.distributed as dist

        dist.barrier()
        started, says = time.monotonic(), ""
        try:
            work()
        except Exception as exc:  # noqa: BLE001  # other people's code may raise anything
            traceback.print_exc()
            says = f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"
        seconds = time.monotonic() - started
        heard: list[tuple[float, str]] = [(0.0, "")] * self._ranks
        dist.all_gather_object(heard, (seconds, says))
        for _, said in heard:
            if said:
                raise Failed(said)
        return max(seconds for seconds, _ in heard)

    def _settle(self) -> None:
        """Wait until disk and processors have nothing else to do, but not for ever."""
        if self._is_patient:
            self._alone(os.sync)
            self._alone(wait_for_quiet)

    def _alone(self, work: Callable[[], object]) -> None:
        """Let rank 0 do *work* while the others wait."""
        import torch.distributed as dist

        dist.barrier()
        if self._rank == 0:
            work()
        dist.barrier()

    def _add(self, row: Row) -> None:
        if self._rank == 0:
            self._rows.add(row)

    def _max(self, value: float) -> float:
        return max(self._all(value))

    def _sum(self, value: float) -> float:
        return sum(self._all(value))

    def _all(self, value: float) -> list[float]:
        import torch.distributed as dist

        found: list[float] = [0.0] * self._ranks
        dist.all_gather_object(found, value)
        return found


def _trim() -> None:
    """Give back what was freed: or it would count as somebody's memory."""
    ctypes.CDLL(None).malloc_trim(0)


def _largest(folder: Path, *, since: float) -> Path:
    """Return the largest file in *folder* that was written after *since*."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_mtime >= since - 0.05]
    return max(found, key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    """Flip a bit in the middle of a file, or flip it back."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    path.chmod(mode)


if __name__ == "__main__":
    main()
