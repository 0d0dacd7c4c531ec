"""
Messages between the ranks of a job: small all-gathers over gloo, only in the main thread.

This room knows torch.distributed, but no engine.
"""

from layerstore.live.ranks.agreement import (
    SAVES_MAX,
    RankReport,
    agree_on_save,
    agreed_layers,
    exchange_reports,
    open_session,
)
from layerstore.live.ranks.attempt import AttemptLock
from layerstore.live.ranks.exchange import Exchange

__all__ = [
    "SAVES_MAX",
    "AttemptLock",
    "Exchange",
    "RankReport",
    "agree_on_save",
    "agreed_layers",
    "exchange_reports",
    "open_session",
]
