"""Remotes: push a store to a bucket, and fetch from one."""

from layerstore.remote.bucket import Bucket, RemoteNotice
from layerstore.remote.collect import collect
from layerstore.remote.heal import heal, heal_identity
from layerstore.remote.identity import claim, kept_there, make_there
from layerstore.remote.mirror import Remote
from layerstore.remote.pull import (
    Pulled,
    check_same_store,
    clone,
    completed,
    make_partial,
    partial_of,
    pull,
    send_to_folder,
    take_over,
)
from layerstore.remote.push import Pushed, follow, push
from layerstore.remote.remotes import Remotes, checked_url, refuse_folder
