"""
Timings of saves, one line each under ``stats/RUN/``. Advisory: no answer depends on them.

Each session has a file, to which its first rank appends. Damaged or torn lines are skipped.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from layerstore.errors import LayerstoreError
from layerstore.json_text import parse_json
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.storage import Repository

_SUFFIX = ".jsonl"

# No save takes longer than this.
_SECONDS_MAX = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """The timing of one save on the first rank."""

    _JSON: ClassVar = "blocked_seconds durable_seconds visible_seconds copied_bytes written_bytes queued"

    run: str
    attempt: int
    step: int
    save_number: int
    blocked_seconds: float
    """How long training was blocked: inside ``save`` and before the next update."""
    durable_seconds: float
    """From the call of ``save`` until the rank's share was on disk."""
    visible_seconds: float | None
    """From the call of ``save`` until the commit was visible and durable; None if the save was given up."""
    copied_bytes: int
    """Bytes copied from this rank's memory."""
    written_bytes: int
    """Bytes that were new to the store."""
    layers_saved: int
    layers: int
    queued: int
    """How many earlier saves of this rank were still being written when this save began."""
    failure: str
    """Why the save was given up; empty if it was not."""
    commit: str = ""
    """The commit's id; empty if the save was given up."""
    precision: str = "exact"
    """The precision requested for the save."""


def note_timing(repo: Repository, session: str, timing: SaveTiming) -> None:
    """Append *timing* to the file of *session*."""
    folder = repo.layout.stats / timing.run
    # Nothing is synced: a power cut may lose the newest lines, but no answer depends on them.
    repo.files.make_directory(repo.layout.stats, durable=False)
    repo.files.make_directory(folder, durable=False)
    repo.files.append(folder / f"{session}{_SUFFIX}", json.dumps(asdict(timing)).encode() + b"\n")


def read_timings(repo: Repository, run: str) -> dict[tuple[int, int], SaveTiming]:
    """Return the known timings of *run*, by attempt and step."""
    folder = repo.layout.stats / run
    timings: dict[tuple[int, int], SaveTiming] = {}
    for name in repo.files.names_in_folder(folder):
        if name.endswith(_SUFFIX):
            timings |= {(timing.attempt, timing.step): timing for timing in _read(repo, run, name)}
    return timings


def _read(repo: Repository, run: str, name: str) -> Iterator[SaveTiming]:
    try:
        data = repo.files.read(repo.layout.stats / run / name, size_bytes_max=RECORD_BYTES_MAX)
    except LayerstoreError:
        return  # too long or unreadable: no answer depends on timings
    for line in data.splitlines():
        timing = _timing(line)
        if timing is not None and timing.run == run:
            yield timing


def _timing(line: bytes) -> SaveTiming | None:
    try:
        values: Any = {"commit": "", "precision": "exact", **parse_json(line)}  # older savers omit these two
        visible = values["visible_seconds"]
        seconds = values["blocked_seconds"], values["durable_seconds"], 0.0 if visible is None else visible
        # Attempt and step identify the timing; the other values checked here are used in calculations.
        if not all(type(values[name]) is int for name in ("attempt", "step", "copied_bytes")):
            return None
        if not all(type(value) in {int, float} and 0 <= value < _SECONDS_MAX for value in seconds):
            return None
        return SaveTiming(**{field.name: values[field.name] for field in fields(SaveTiming)})
    except (ValueError, KeyError, TypeError):
        return None
