"""
The cache of mirrors: its location, its size limit, and eviction.

``LAYERSTORE_CACHE_DIR`` is the folder's path. After each command that fetches, all mirrors' objects together take at
most ``LAYERSTORE_CACHE_SIZE``. The least recently used objects are evicted first, and fetched again on demand.
"""

import os
import threading
import time
from pathlib import Path

from layerstore.disk import Files
from layerstore.layout import OBJECT_ID, layout_at
from layerstore.limits import CACHE_BYTES
from layerstore.units import size_in_bytes

FOLDER_VARIABLE = "LAYERSTORE_CACHE_DIR"
SIZE_VARIABLE = "LAYERSTORE_CACHE_SIZE"

_DOWNLOAD_SECONDS_MAX = 86_400.0

_guard = threading.Lock()
_sums: dict[Path, int] = {}
"""Bytes per folder: those found by this process's last scan, plus those that the process has added since."""


def cache_folder() -> Path:
    """Return the folder that holds mirrors and nothing else."""
    setting = os.environ.get(FOLDER_VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerstore"
    return (Path(setting) if setting else home) / "mirrors"


def cache_bytes() -> int:
    """Return the cache's size limit; raises InvalidInput if the setting is not a size."""
    setting = os.environ.get(SIZE_VARIABLE)
    return CACHE_BYTES if not setting else size_in_bytes(setting)


def trim(files: Files) -> None:
    """Remove the oldest objects of all mirrors until the cache is within its limit."""
    with _guard:
        _sums[cache_folder()] = _emptied(files, cache_folder(), left_max=cache_bytes())


def make_room(files: Files, size_bytes: int) -> None:
    """
    Make room for *size_bytes* more.

    On the first call, and if the limit would be exceeded, evict down to three quarters of it, so that scans are rare.
    """
    folder, limit = cache_folder(), cache_bytes()
    with _guard:
        if folder not in _sums or _sums[folder] + size_bytes > limit:
            _sums[folder] = _emptied(files, folder, left_max=limit * 3 // 4)
        _sums[folder] += size_bytes


def _emptied(files: Files, folder: Path, *, left_max: int) -> int:
    """
    Remove the oldest objects of all mirrors until at most *left_max* bytes are left; return how many are left.

    Files of killed downloads are removed after a day.
    """
    evictable = []
    for mirror in filter(OBJECT_ID.fullmatch, files.names_in_folder(folder)):  # mirrors are named like objects
        layout = layout_at(folder / mirror)
        for path in (layout.tmp / file_name for file_name in files.names_in_folder(layout.tmp)):
            state = files.look(path)
            if state is not None and state.st_mtime < time.time() - _DOWNLOAD_SECONDS_MAX:
                files.discard(path)
        objects = layout.objects
        for place in (layout.sparse, *(objects / prefix for prefix in files.names_in_folder(objects))):
            for path in (place / file_name for file_name in files.names_in_folder(place)):
                state = files.look(path)
                if state is not None:  # otherwise another process has evicted it
                    evictable.append((state.st_mtime_ns, state.st_blocks * 512, path))  # sparse files have holes
    left = sum(size_bytes for _, size_bytes, _ in evictable)
    if left <= left_max:
        return left
    for _, size_bytes, path in sorted(evictable):
        if left <= left_max:
            break
        # No lock against readers: an open file stays readable, and a reader that opens it too late fetches it again.
        files.discard(path)
        left -= size_bytes
    return left
