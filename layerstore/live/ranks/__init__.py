"""
What the ranks of a job tell each other: small all-gathers over gloo, in the main thread alone.

Knows torch.distributed and no engine.
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
