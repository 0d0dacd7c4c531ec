"""
Where the index may live: LMDB maps its file, and mapped files of network filesystems differ from node to node.
"""

import os
from pathlib import Path

from layerstore.errors import InvalidInput
from layerstore.storage.layout import Layout

MANIFEST_DIR_VARIABLE = "LAYERSTORE_MANIFEST_DIR"
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "9p", "ceph", "glusterfs", "afs", "orangefs"}
)


def manifest_directory(layout: Layout, *, store_id: str) -> Path:
    """
    Return the folder for the index of the store *store_id*.

    Inside the store on a local disk; in the folder that LAYERSTORE_MANIFEST_DIR names, or in the user's cache,
    when the store is on a network filesystem. There it is called by the store's id: two stores never share one.

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
        return Path(chosen).absolute() / store_id
    if network_filesystem(layout.root) is not None:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(cache) / "layerstore" / "manifests" / store_id
    return layout.manifest


def network_filesystem(path: Path) -> str | None:
    """Return the kind of network filesystem that *path* is on, None for a local one or where nobody can tell."""
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None  # not Linux, or no /proc: LMDB's own checks remain
    real = Path(os.path.realpath(path))
    best, kind = Path("/"), ""
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        point = Path(fields.split()[4].replace("\\040", " "))
        if point in (real, *real.parents) and len(point.parts) >= len(best.parts):
            best, kind = point, tail.split()[0]
    return kind if kind in _NETWORK_FILESYSTEMS or kind.startswith("fuse.") else None
