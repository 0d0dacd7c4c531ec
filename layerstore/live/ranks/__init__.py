"""
Messages between the ranks of a job, sent over gloo, and only by the main thread.

Only `GroupParts` does not use gloo: background threads send parts through the job's key-value store. This package uses
torch.distributed, but is independent of engines.
"""

from layerstore.live.ranks.attempt import AttemptLock, place_resumed
from layerstore.live.ranks.exchange import (
    DIFFERENT_COMMITS_HINT,
    ONE_STORE_HINT,
    SAVES_MAX,
    Exchange,
    RankReport,
    agree_on_save,
    agreed_layers,
    as_text,
    exchange_reports,
    open_session,
)
from layerstore.live.ranks.group_parts import GroupParts
from layerstore.live.ranks.opening import log_nothing_yet, make_together, open_together, runs_here, store_if_there
from layerstore.live.ranks.own_versions import OwnVersions, own_versions, versions_to_load
