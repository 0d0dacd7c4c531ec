"""The disk: locks, and the files of stores and composites, which only this package opens (except the index)."""

from layerstore.disk.files import Files, Mount, WeakDurability, mount_of, network_filesystem
from layerstore.disk.locks import HeldLock, alone, host_name, hosts_seen, lock, open_lock_file, try_flock
from layerstore.disk.open_files import Hook, NewFile, OpenFile, Syncing, hours_on, mapped_errors, no_hook, pauses
from layerstore.disk.stream import Stream
