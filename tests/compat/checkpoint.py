"""
A tiny checkpoint that never changes: what the golden ids are the ids of.

Built by hand, value by value, from nothing that might learn something new: two ranks, the Trainer's layout,
a block, a frozen and a tied embedding, a norm, a buffer, slices that fill a page and slices that do not.
"""

import json
import struct
from pathlib import Path

from layerstore.tree import Inert, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3 import convert
from tests.zero3.ptfiles import write_pt

WORLD_SIZE = 2

# In the order of the optimizer's two groups; the frozen embedding is in none.
GROUPS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"model.layers.0.up.weight": (32, 64), "model.layers.0.down.weight": (5, 5)},
    {"model.norm.weight": (7,)},
)
FROZEN = {"model.embed_tokens.weight": (9, 7)}
BUFFER = "model.layers.0.rotary.inv_freq"
ALIAS = ("lm_head.weight", "model.embed_tokens.weight")
TRAINED = {name: shape for group in GROUPS for name, shape in group.items()}
MODULE = ("model.embed_tokens.weight", *GROUPS[0], BUFFER, "model.norm.weight")


def build(folder: Path, *, step: int = 2) -> Path:
    """Write the checkpoint of *step* into *folder* and return it."""
    shards = folder / f"global_step{step}"
    shards.mkdir(parents=True)
    for rank in range(WORLD_SIZE):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        write_pt(shards / f"{name}_model_states.pt", _model(rank, step))
        write_pt(shards / f"bf16_{name}_optim_states.pt", _optimizer(rank, step))
        (folder / f"rng_state_{rank}.pth").write_bytes(f"the random state of rank {rank}".encode())
    (folder / "model.safetensors").write_bytes(_gathered(step))
    (folder / "latest").write_text(f"global_step{step}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "config.json").write_text('{"model_type": "tiny"}\n')
    # Too large for a state blob: an object of its own.
    (folder / "tokenizer.json").write_text("[" + ", ".join(['"token"'] * 8000) + "]")
    return folder


# -- numbers -------------------------------------------------------------------------------------------------------


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _master(name: str, shape: tuple[int, ...], state: str, step: int) -> bytes:
    """Return float32 words that follow from their names alone; the exponents stay small."""
    seed = sum(f"{name}/{state}".encode()) * 7919 + step * 104_729
    words = [(seed + index * 2_654_435_761) % (1 << 24) | 0x3E000000 for index in range(_count(shape))]
    return struct.pack(f"<{len(words)}I", *words)


def _weights(name: str, shape: tuple[int, ...], step: int) -> bytes:
    return bytes(convert(_master(name, shape, "master", step), source="F32", target="BF16"))


def _frozen(name: str) -> bytes:
    return _weights(name, FROZEN[name], 0)


def _slice(data: bytes, item_bytes: int, rank: int) -> bytes:
    length = -(-len(data) // item_bytes // WORLD_SIZE) * item_bytes
    return data[rank * length : (rank + 1) * length].ljust(length, b"\xaa")  # padding is junk by nature


# -- trees ---------------------------------------------------------------------------------------------------------


def _tensor(dtype: str, item_bytes: int, data: bytes, *, shape: Size | None = None) -> Tensor:
    elements = len(data) // item_bytes
    storage = Storage(dtype=dtype, elements=elements, device="cpu", content=data)
    shape = Size((elements,)) if shape is None else shape
    return Tensor(storage=storage, offset=0, shape=shape, stride=(1,) * len(shape))


def _config() -> dict[Tree, Tree]:
    return {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def _model(rank: int, step: int) -> Tree:
    module = OrderedMap(
        {name: _tensor("BF16", 2, b"") for name in MODULE}, {"_metadata": OrderedMap({"": {"version": 1}})}
    )
    module[BUFFER] = _tensor("F32", 4, struct.pack("<3f", 1.0, 0.5, 0.25))
    module[ALIAS[0]] = _tensor("BF16", 2, b"")
    return {
        "module": module,
        "buffer_names": [BUFFER],
        "optimizer": None,
        "param_shapes": [OrderedMap({name: Size(shape) for name, shape in group.items()}) for group in GROUPS],
        "frozen_param_shapes": OrderedMap({name: Size(shape) for name, shape in FROZEN.items()}),
        "shared_params": {ALIAS[0]: ALIAS[1]} if rank == 0 else {},
        "frozen_param_fragments": OrderedMap(
            {name: _tensor("BF16", 2, _slice(_frozen(name), 2, rank)) for name in FROZEN}
        ),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": step * 4,
        "dp_world_size": WORLD_SIZE,
        "mp_world_size": 1,
        "ds_config": _config(),
        "ds_version": "0.19.8",
        "client": {"text": "é", "numbers": (1, 2.5, None), "big": 1 << 70},
    }


def _flat(group: dict[str, tuple[int, ...]], state: str, rank: int, step: int) -> Tensor:
    slices = (_slice(_master(name, shape, state, step), 4, rank) for name, shape in group.items())
    return _tensor("F32", 4, b"".join(slices))


def _optimizer(rank: int, step: int) -> Tree:
    states: dict[Tree, Tree] = {
        number: {
            "step": _tensor("F32", 4, struct.pack("<f", step), shape=Size(())),
            "exp_avg": _flat(group, "exp_avg", rank, step),
            "exp_avg_sq": _flat(group, "exp_avg_sq", rank, step),
        }
        for number, group in enumerate(GROUPS)
    }
    param_groups: list[Tree] = [
        {"weight_decay": decay, "lr": 1e-05, "betas": (0.9, 0.999), "eps": 1e-08, "params": [number]}
        for number, decay in enumerate((0.1, 0.0))
    ]
    optimizer: dict[Tree, Tree] = {
        "zero_stage": Inert(name="deepspeed.runtime.zero.config.ZeroStageEnum", arguments=(3,)),
        "loss_scaler": Inert(
            name="deepspeed.runtime.fp16.loss_scaler.LossScaler",
            made_by_new=True,
            state={"cur_scale": 1.0, "dynamic": False},
            has_state=True,
        ),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": WORLD_SIZE,
        "optimizer_state_dict": {"state": states, "param_groups": param_groups},
        "fp32_flat_groups": [_flat(group, "master", rank, step) for group in GROUPS],
    }
    return {"optimizer_state_dict": optimizer, "ds_config": _config(), "ds_version": "0.19.8"}


def _gathered(step: int) -> bytes:
    """Return all weights as a safetensors file: derived ones, frozen ones, and one that is neither."""
    tensors = {name: (shape, _weights(name, shape, step)) for name, shape in TRAINED.items()}
    tensors |= {name: (shape, _frozen(name)) for name, shape in FROZEN.items()}
    shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = shape, bytes([data[0] ^ 1]) + data[1:]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, (shape, data) in sorted(tensors.items()):
        offsets = [len(payload), len(payload) + len(data)]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        payload += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload
