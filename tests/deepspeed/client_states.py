"""What users keep in ``client_state``: trees that a checkpoint must hand back as it got them.

Every tree has a counter or a tensor that moves with each step. So a resumed run that loaded a value wrongly
saves another tree at the next checkpoint, and the comparison there sees it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.deepspeed.scenarios import ClientState


def initial(kind: ClientState) -> dict[str, Any]:
    """Return the *kind* of state as it is before the first step."""
    return {"none": dict, "plain": plain, "tensors": tensors, "numpy": numpy_values, "lightning": lightning}[kind]()


def advance(state: dict[str, Any]) -> None:
    """Move *state* on by one step, in place, each value from its own former one."""
    if "seen" in state:
        state["seen"] += 16
    if "averages" in state:
        state["averages"]["loss"].mul_(0.75).add_(0.1)
    if "history" in state:
        state["history"] = np.append(state["history"], state["history"][-1] * 0.5 - 0.125)
        state["ratio"] = np.float32(state["ratio"] * np.float32(0.9))
    if "loops" in state:
        state["global_step"] += 1
        state["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def plain() -> dict[str, Any]:
    """Return nested plain values, with those that other formats get wrong."""
    return {
        "seen": 2**70,
        "note": "naïve ☃ \x00 text",
        "blob": bytes(range(256)),
        "nothing": None,
        "flags": {"on": True, "off": False},
        "floats": [0.1, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324],
        "integers": [0, -1, 2**31, -(2**63), 2**64],
        "tuple": (1, ("nested", [2.5, ()])),
        "mixed keys": {1: "int", "1": "str", (1, 2): "tuple", None: "none", 2.5: "float"},
        "set": {"a"},
        "empty": [{}, [], "", b""],
    }


def tensors() -> dict[str, Any]:
    """Return tensors of several dtypes and shapes, two of them views of one storage."""
    base = torch.arange(24, dtype=torch.float32)
    return {
        "averages": {
            "loss": torch.full((3,), 0.3),
            "scalar": torch.tensor(1.5, dtype=torch.float64),
            "empty": torch.zeros(0, 4),
            "mask": torch.tensor([True, False, True]),
            "half": torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16),
            "counts": torch.tensor([[1, 2], [3, 4]], dtype=torch.int64),
            "view": base[6:12].view(2, 3),
            "transposed": base.view(4, 6).t(),
            "shape": base.view(4, 6).shape,
            "dtype": torch.float16,
        }
    }


def numpy_values() -> dict[str, Any]:
    """Return numpy scalars and arrays, as metric loggers leave them."""
    return {
        "history": np.array([1.0, -0.0, np.nan, 0.25]),
        "ratio": np.float32(0.7),
        "best": np.float64(0.1),
        "count": np.int64(12),
        "matrix": np.arange(6, dtype=np.int16).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "flags": np.array([True, False]),
    }


def lightning() -> dict[str, Any]:
    """Return the state that Lightning's Trainer adds; synthetic, keys and types of version 2.6.6."""
    progress = {"total": {"ready": 0, "completed": 0}, "current": {"ready": 0, "completed": 0}}
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": "2.6.6",
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": 0},
                "epoch_loop.scheduler_progress": progress,
                "epoch_progress": progress,
            },
            "validate_loop": {"state_dict": {}},
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': None, 'mode': 'min', 'every_n_train_steps': 2}": {
                "monitor": None,
                "best_model_score": None,
                "best_model_path": "",
                "best_k_models": {},
                "kth_value": torch.tensor(float("inf")),
            }
        },
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3, "betas": (0.9, 0.999)},
    }
