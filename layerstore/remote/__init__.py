"""Remotes: push a store to a bucket, and fetch from one."""

from layerstore.remote.bucket import Bucket, RemoteNotice
from layerstore.remote.collect import collect
from layerstore.remote.heal import heal, verify_remote
from layerstore.remote.mirror import Remote, unmirrored
from layerstore.remote.pull import Pulled, clone, completed, pull
from layerstore.remote.push import Pushed, check_own, claim, follow, identity_of, push, pushed_records
from layerstore.remote.remotes import Remotes

__all__ = [
    "Bucket",
    "Pulled",
    "Pushed",
    "Remote",
    "RemoteNotice",
    "Remotes",
    "check_own",
    "claim",
    "clone",
    "collect",
    "completed",
    "follow",
    "heal",
    "identity_of",
    "pull",
    "push",
    "pushed_records",
    "unmirrored",
    "verify_remote",
]
