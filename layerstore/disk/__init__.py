"""The disk: the only package that opens and changes files, and its locks."""

from layerstore.disk.files import Files, Mount, WeakDurability, mount_of, network_filesystem
from layerstore.disk.locks import HeldLock, alone, host_name, hosts_seen, lock, open_lock_file, try_flock
from layerstore.disk.open_files import Hook, NewFile, OpenFile, Syncing, hours_on, mapped_errors, no_hook, pauses
from layerstore.disk.stream import Stream

__all__ = [
    "Files",
    "HeldLock",
    "Hook",
    "Mount",
    "NewFile",
    "OpenFile",
    "Stream",
    "Syncing",
    "WeakDurability",
    "alone",
    "host_name",
    "hosts_seen",
    "hours_on",
    "lock",
    "mapped_errors",
    "mount_of",
    "network_filesystem",
    "no_hook",
    "open_lock_file",
    "pauses",
    "try_flock",
]
