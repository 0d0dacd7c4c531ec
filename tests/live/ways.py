"""How a folder is loaded through DeepSpeed, as plain data: imports neither torch nor deepspeed."""

from __future__ import annotations

from typing import Any

SCENARIOS = ("tied", "frozen", "many_sub_groups", "bf16_master", "rank_buffers", "empty_parameter")

WAYS: dict[str, dict[str, Any]] = {
    "weights": {"load_optimizer_states": False},
    "module": {"load_module_only": True},
    "weights_of_module": {"load_module_only": True, "load_optimizer_states": False},
    "no_schedule": {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    # DeepSpeed reads `latest` all the same, for the weights.
    "earlier": {"load_optimizer_states": False, "tag": "global_step1"},
}
"""How a folder is loaded."""
