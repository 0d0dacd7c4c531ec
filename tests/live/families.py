"""Training the models that people train, with the optimizers that they train them with. What each rank runs.

A run saves by parity at each of its first steps and goes on to the end. It is resumed from its first save, which is
complete; from a mixture, by layerstore; and from the same mixture as shards, by DeepSpeed's own loader. After every
step and resume the ranks tell a digest of each parameter's master and moments, gathered by DeepSpeed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.optimization import Adafactor

import layerstore
from layerstore.store import Store
from tests.deepspeed.families import MODELS, Batches
from tests.deepspeed.pretrained import digest
from tests.forked import tell
from tests.live.family_cases import SAVES, STEPS, Case
from tests.live.tiny import Engine, done

LEAVES = {"mixtral": MixtralSparseMoeBlock, "qwen3_moe": Qwen3MoeSparseMoeBlock}
"""What ZeRO-3 is told to gather as one: which experts a token reaches differs between ranks."""


def run(options: Any) -> None:
    """Train each of the cases, and resume it in each way."""
    out = Path(options["out"])
    with Store(out / "store") as store:
        for family, optimizer in options["cases"]:
            _run(Case(family=family, optimizer=optimizer), store, out)
    done()


def _run(case: Case, store: Store, out: Path) -> None:
    with _built(case) as engine:
        config = out / case.name / "config.json"
        if dist.get_rank() == 0:
            _write_config(engine.module, config.parent)
        dist.barrier()
        with layerstore.attach(engine, store, run=case.name, policy="parity") as saver:
            for _ in range(SAVES):
                _train(case, engine, engine.global_steps + 1, way="trained")
                saver.save(extra_files={"config.json": config})
        _train(case, engine, STEPS, way="trained")
    with _built(case) as engine:
        layerstore.resume(engine, store, run=case.name, step=1, must_exist=True)
        _train(case, engine, STEPS, way="resumed")
    with _built(case) as engine:
        found = layerstore.resume(engine, store, run=case.name, step=SAVES, policy="parity", must_exist=True)
        assert found is not None
        _tell(case, engine, way="mixed", layers=found.layers)
        _train(case, engine, STEPS, way="mixed")
    folder = out / f"{case.name}-shards"
    if dist.get_rank() == 0:
        store.compose(f"{case.name}@{SAVES}", policy="parity").write(folder)
    dist.barrier()
    with _built(case) as engine:
        engine.load_checkpoint(str(folder))
        _tell(case, engine, way="loaded")
        _train(case, engine, STEPS, way="loaded")


def _write_config(model: Any, folder: Path) -> None:
    """Write what ``model.save_pretrained`` would say of the model."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)


@contextmanager
def _built(case: Case) -> Iterator[Engine]:
    """Build the engine of *case*, the same one every time, and take it down again."""
    Init.param_id = 0
    torch.manual_seed(0)
    kind, name, settings = MODELS[case.family]
    model = getattr(transformers, name)(AutoConfig.for_model(kind, **settings))
    if case.family in LEAVES:
        deepspeed.utils.set_z3_leaf_modules(model, [LEAVES[case.family]])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = None
    if case.optimizer == "Muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}
        config["zero_optimization"]["reduce_scatter"] = False
    else:
        optimizer = _optimizer(case.optimizer, model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model, optimizer
        gc.collect()


def _optimizer(name: str, model: torch.nn.Module) -> Any:
    if name == "torch AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "DeepSpeedCPUAdam":
        # The powers of these betas are exact: at the usual ones DeepSpeed's own resume differs in the last bits.
        return DeepSpeedCPUAdam(model.parameters(), lr=1e-2, betas=(0.75, 0.875))
    if name == "DeepSpeedCPULion":
        return DeepSpeedCPULion(model.parameters(), lr=1e-3)
    assert name == "Adafactor"
    return Adafactor(model.parameters())  # type: ignore[no-untyped-call]


def _train(case: Case, engine: Engine, upto: int, *, way: str) -> None:
    """Train up to step *upto*; what a step reads and draws follows from its number."""
    items = Batches(case.family)
    while engine.global_steps < upto:
        number = 2 * engine.global_steps + dist.get_rank()
        torch.manual_seed(number)
        pair = (items[2 * number % len(items)], items[(2 * number + 1) % len(items)])
        loss = engine(**{key: torch.stack([item[key] for item in pair]) for key in pair[0]}).loss
        engine.backward(loss)
        engine.step()
        _tell(case, engine, way=way, loss=float(loss.detach()).hex())


def _tell(case: Case, engine: Engine, *, way: str, **facts: Any) -> None:
    """Tell what the state is now; every rank tells its own loss."""
    digests = {name: _digests(engine, parameter) for name, parameter in engine.module.named_parameters()}
    if dist.get_rank():
        digests = {}
    tell("state", name=case.name, way=way, step=engine.global_steps, digests=digests, **facts)


def _digests(engine: Engine, parameter: Any) -> dict[str, str]:
    """Return a digest of each tensor that is kept of *parameter*, and of the weight that follows from it."""
    zero = engine.optimizer
    group, *_ = zero.grad_position[zero.get_param_id(parameter)]
    flat = zero.fp32_partitioned_groups_flat[group]
    master = safe_get_full_fp32_param(parameter)
    assert master is not None
    found = {"weight": digest(master.to(torch.bfloat16)), "master": digest(master)}
    for key, value in zero.optimizer.state[flat].items():
        if isinstance(value, torch.Tensor) and value.numel() == flat.numel() > 1:
            moment = safe_get_full_optimizer_state(parameter, key)
            assert moment is not None
            found[key] = digest(moment)
    return found
