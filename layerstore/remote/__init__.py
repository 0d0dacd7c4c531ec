"""Other places: what a store sends to a bucket, and fetches from there."""

from layerstore.remote.bucket import Bucket, RemoteNotice
from layerstore.remote.collect import collect
from layerstore.remote.heal import heal, verify_remote
from layerstore.remote.mirror import Remote, unmirrored
from layerstore.remote.pull import Pulled, clone, completed, pull
from layerstore.remote.push import Pushed, claim, follow, push, pushed_records
from layerstore.remote.remotes import Remotes

__all__ = [
    "Bucket",
    "Pulled",
    "Pushed",
    "Remote",
    "RemoteNotice",
    "Remotes",
    "claim",
    "clone",
    "collect",
    "completed",
    "follow",
    "heal",
    "pull",
    "push",
    "pushed_records",
    "unmirrored",
    "verify_remote",
]
