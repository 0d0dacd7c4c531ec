"""Policies: which layers are due at a save, where a composite's layers come from, which commits to keep. No I/O."""

from layerstore.policy.drift import Drift
from layerstore.policy.due import Latest, Policy, Save, anchored, due_layers, replay_policy
from layerstore.policy.filter import Filter
from layerstore.policy.keep import Best, Candidate, Keep, chosen_keep, duration
from layerstore.policy.parity import Parity
from layerstore.policy.registry import (
    EXACT,
    LATEST,
    OURS,
    PREDICTABLE,
    SELECTIVE,
    chosen_policy,
    is_ours,
    policy_named,
)
