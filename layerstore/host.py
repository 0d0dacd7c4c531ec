"""
The host: check the machine and the libraries that a store needs, once, before anything is read or written.

An installer respects the version ranges, but a later install may break them, and a library that encodes or hashes
differently would write stores that nobody can read.
"""

import re
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from layerstore.errors import Unsupported

# Library -> the first version that works, and the first untested one; pyproject.toml has the same ranges.
NEEDS = {
    "lmdb": ((3,), (4,)),
    "msgpack": ((1, 1), (2,)),
    "xxhash": ((4,), (5,)),
}


@cache
def check_host() -> None:
    """
    Make sure that stores can be read and written on this machine.

    Raises:
        Unsupported: The machine is big-endian, or a library has a version that is not known to work.
    """
    if sys.byteorder != "little":
        raise Unsupported(
            f"this machine is {sys.byteorder}-endian; tensors in checkpoints and stores are little-endian",
            hint="use a little-endian machine, such as x86-64 or ARM",
        )
    for library, (least, beyond) in NEEDS.items():
        try:
            installed = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue  # installed in some other way; if the library is missing, its import fails
        if not least <= _numbers(installed) < beyond:
            requirement = f"{library}>={_dotted(least)},<{_dotted(beyond)}"
            raise Unsupported(
                f"{library} is {installed} here; layerstore needs {requirement}", hint=f'pip install "{requirement}"'
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def free_memory_bytes() -> int:
    """Return how much memory is free on this host, or in this container if that is less; 0 if that is unknown."""
    limits = []
    # Only Linux has these files; without control groups, the second is missing.
    with suppress(OSError, ValueError):
        match = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        limits += [] if match is None else [int(match[1]) * 1024]
        limit = Path("/sys/fs/cgroup/memory.max").read_text()  # "max" if there is no limit
        limits.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(limits, default=0)
