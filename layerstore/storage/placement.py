"""
Where the index may live: LMDB maps its file, and mapped files of network filesystems differ from node to node.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import InvalidInput
from layerstore.format import digest
from layerstore.layout import Layout

MANIFEST_DIR_VARIABLE = "LAYERSTORE_MANIFEST_DIR"
_PLACE_DIGITS = 8
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3"}
)


def manifest_directory(layout: Layout, *, store_id: str) -> Path:
    """
    Return the folder for the index of the store *store_id*.

    Inside the store on a local disk; in the folder that LAYERSTORE_MANIFEST_DIR names, or in the user's cache,
    when the store is on a network filesystem. There it is called by the store's id and by where the store lies:
    two stores never share one, and a copy has its original's id.

    Raises:
        InvalidInput: LAYERSTORE_MANIFEST_DIR itself is on a network filesystem.
    """
    chosen = os.environ.get(MANIFEST_DIR_VARIABLE)
    if chosen:
        kind = network_filesystem(Path(chosen))
        if kind is not None:
            raise InvalidInput(
                f"{MANIFEST_DIR_VARIABLE} is {chosen}, which is on {kind}: an LMDB index must be on a local disk",
                hint="name a folder on a disk of this node, such as one below /tmp",
            )
        return Path(chosen).absolute() / _name(layout, store_id)
    if network_filesystem(layout.root) is not None:
        return _local_folder() / _name(layout, store_id)
    return layout.manifest


def _name(layout: Layout, store_id: str) -> str:
    place = digest(os.fsencode(os.path.realpath(layout.root)))
    return f"{store_id}-{place.hex()[:_PLACE_DIGITS]}"


def _local_folder() -> Path:
    """Return a folder on a disk of this node: the user's cache, or where that is on the network too, the system's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerstore" / "manifests"
    temporary = Path(tempfile.gettempdir()) / f"layerstore-{os.getuid()}"
    for folder in (cache, temporary):
        if network_filesystem(folder) is None:
            return folder
    raise InvalidInput(
        "the store, the home folder and the temporary folder are all on network filesystems: no place for the index",
        hint=f"set {MANIFEST_DIR_VARIABLE} to a folder on a disk of this node",
    )


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem that a path is on, as the system lists it."""

    point: Path
    kind: str
    options: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        """Whether other hosts may have it too: so far as its kind tells, and FUSE may be anything."""
        return self.kind in _NETWORK_FILESYSTEMS or self.kind.startswith("fuse.")


def network_filesystem(path: Path) -> str | None:
    """Return the kind of network filesystem that *path* is on, None for a local one or where nobody can tell."""
    mount = mount_of(path)
    return mount.kind if mount is not None and mount.is_network else None


def mount_of(path: Path) -> Mount | None:
    """Return the filesystem that *path* is on, or will be if it is not there yet; None where nobody can tell."""
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None  # not Linux, or no /proc: LMDB's own checks remain
    real = Path(os.path.realpath(path))
    above = {str(place): len(place.parts) for place in (real, *real.parents)}
    best, depth = None, 0
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if point in above and above[point] >= depth:
            best, depth = Mount(Path(point), tail.split()[0], tuple(fields.split()[5].split(","))), above[point]
    return best
