"""
Where the time goes: what every thread was doing, looked at a thousand times a second.

Deterministic profilers see one thread and slow down small calls; here all threads count, waiting included,
and a call that releases the interpreter's lock (reading, hashing, fsync) is charged where it was made.
"""

import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Self

_INTERVAL_SECONDS = 0.001


class Stacks:
    """Samples all threads of this process but its own."""

    def __init__(self) -> None:
        self.samples = 0
        self._seen: Counter[tuple[str, str]] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def report(self, *, lines_max: int = 25) -> str:
        """Return who did what for how long, most time first: a share of the whole for each kind of thread."""
        rows = [
            f"{100 * count / max(self.samples, 1):6.1f} %  {thread:<12} {where}"
            for (thread, where), count in self._seen.most_common(lines_max)
        ]
        return "\n".join(["of the time, per kind of thread (several threads of a kind add up)", *rows])

    def _watch(self) -> None:
        own = threading.get_ident()
        while not self._stopped.is_set():
            time.sleep(_INTERVAL_SECONDS)
            names = {thread.ident: _kind(thread.name) for thread in threading.enumerate()}
            self.samples += 1
            for ident, frame in sys._current_frames().items():
                if ident != own and "AnonymousPeak" not in names.get(ident, ""):
                    self._seen[names.get(ident, "?"), _where(frame)] += 1


def _kind(name: str) -> str:
    return name.rpartition("_")[0].removeprefix("ThreadPoolExecutor") or name


def _where(frame: FrameType) -> str:
    """Return the innermost lines that are ours, outermost first."""
    places: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(places) < 3:
        code = at.f_code
        if "layerstore" in code.co_filename:
            places.append(f"{code.co_filename.rpartition('layerstore/')[2]}:{code.co_name}")
        at = at.f_back
    return " > ".join(reversed(places)) or f"{frame.f_code.co_name} (not ours)"
