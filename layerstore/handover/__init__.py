"""
What one trainer's commit needs for another trainer: a distributed state, or DeepSpeed's trees with advanced counts.
"""

from layerstore.handover.advance import UpdatesSince, advance, is_stale, since
from layerstore.handover.dcp_state import (
    CLIENT_STATE,
    PARAM_GROUPS,
    DcpState,
    Held,
    KeyPath,
    SavedTensor,
    SavedValue,
    group_settings,
    plain_setting,
    updates_counted,
)
