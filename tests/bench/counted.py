"""
What the code asks of a filesystem, recorded call by call.

Calls are recorded where Python makes them, in this process, and only below one folder: reads and writes
of open files are left out, since they are bytes and no metadata.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

Call = tuple[str, str]
"""A call's name, and the path that it is about."""

# By the path that each of them is about: a link is about its new name, and a synced file about what it is called.
_ABOUT_FIRST = ("stat", "lstat", "utime", "unlink", "mkdir", "rmdir", "listdir", "scandir")
_ABOUT_SECOND = ("link", "rename", "replace")


@contextlib.contextmanager
def calls(folder: Path) -> Iterator[list[Call]]:
    """Record the calls about names below *folder*, in order; a new file's ``open`` is called ``create``."""
    found: list[Call] = []
    guard = threading.Lock()
    of_fd: dict[int, str] = {}
    real_open, real_close, real_fsync = os.open, os.close, os.fsync

    def noted(kind: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder):
            with guard:
                found.append((kind, str(Path(path).relative_to(folder))))

    def opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
        noted("create" if flags & os.O_CREAT else "open", path)
        fd = real_open(path, flags, *more, **options)
        of_fd[fd] = os.fspath(path)
        return fd

    def closed(fd: int) -> None:
        of_fd.pop(fd, None)
        real_close(fd)

    def synced(fd: int) -> None:
        noted("fsync", of_fd.get(fd))
        real_fsync(fd)

    def about(place: int, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*words: Any, **options: Any) -> Any:
            noted(kind, words[place] if len(words) > place else None)
            return call(*words, **options)

        return called

    with contextlib.ExitStack() as stack:
        for name in _ABOUT_FIRST:
            stack.enter_context(patch.object(os, name, about(0, name, getattr(os, name))))
        for name in _ABOUT_SECOND:
            stack.enter_context(patch.object(os, name, about(1, name, getattr(os, name))))
        for name, other in (("open", opened), ("close", closed), ("fsync", synced)):
            stack.enter_context(patch.object(os, name, other))
        yield found
