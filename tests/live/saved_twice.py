"""
Training whose steps are saved twice: by a saver, and by DeepSpeed itself. The program that each rank runs.

Every parameter stays gathered between steps, embedding and head are tied, some parameters are frozen, one buffer
changes in forward. That a save leaves parameters gathered is checked here, what it saves by who runs this.
A second saver, after the first, goes by how far layers have moved; at last the engine is filled from its run, and makes
one step more.
"""

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import layerstore
from layerstore.live.saver.saver import Saver
from layerstore.policy import Drift
from layerstore.store import Store
from tests.live.plain import plainly
from tests.live.tiny import done

STEPS = range(1, 4)
DRIFT_STEPS = range(4, 7)
LAST = 7
CHANGED_AT = 2
"""The step after which a frozen weight is changed by hand."""
RUN = "live"
EXCLUDED_RUN = "excluded"
DRIFT_RUN = "drift"
DRIFT = Drift(budget=50_000, stalest=100)
"""Enough for one block of three."""


def run(options: Any) -> None:
    """Train a few steps, and save each of them twice."""
    folder = Path(options["out"])
    engine = build_engine()
    if dist.get_rank() == 0:
        layerstore.init(folder / "store").close()
    dist.barrier()
    store = layerstore.open(folder / "store")
    with layerstore.attach(engine, store, run=RUN) as saver:
        for step in STEPS:
            train_step(engine, step)
            if step == CHANGED_AT:
                change_frozen(engine)
            gathered = gathered_names(engine)
            save(engine, saver, folder)
            if not gathered or gathered_names(engine) != gathered:
                raise SystemExit(f"{len(gathered)} parameters were gathered, and {len(gathered_names(engine))} are")
    with layerstore.attach(engine, store, run=DRIFT_RUN, policy=DRIFT) as saver:
        for step in DRIFT_STEPS:
            train_step(engine, step)
            save(engine, saver, folder)
    layerstore.resume(engine, store, run=DRIFT_RUN, must_exist=True)
    with layerstore.attach(engine, store, run=DRIFT_RUN, policy=DRIFT) as saver:
        train_step(engine, LAST)
        saver.save()
    save_excluded(engine, store, folder)
    done()


def train_step(engine: Any, step: int) -> None:
    """Make one step."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    tokens = torch.randint(0, 60, (2, 16), generator=generator)
    engine.module.seen += 1
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def change_frozen(engine: Any) -> None:
    """Change a frozen parameter as DeepSpeed says that one may."""
    weight = engine.module.model.norm.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(2)


def save(engine: Any, saver: Saver, folder: Path) -> None:
    """Save through *saver*, and by DeepSpeed itself."""
    client_state = {"epoch": engine.global_steps}
    saver.save(client_state=client_state)
    with plainly(engine):
        engine.save_checkpoint(str(folder / "deepspeed"), client_state=client_state)


def save_excluded(engine: Any, store: Store, folder: Path) -> None:
    """Let the engine save by itself without frozen weights, to the store and to files, and load that again."""
    named: dict[str, Any] = {"client_state": {"epoch": LAST}}
    with layerstore.attach(engine, store, run=EXCLUDED_RUN, frozen="exclude"):
        engine.save_checkpoint(str(folder / "pointers"), **named)
        with plainly(engine):
            engine.save_checkpoint(str(folder / EXCLUDED_RUN), exclude_frozen_parameters=True, **named)
        engine.load_checkpoint(str(folder / "pointers"), load_module_strict=False)


def gathered_names(engine: Any) -> set[str]:
    """Return the names of the parameters that are whole on this rank."""
    return {name for name, parameter in engine.module.named_parameters() if parameter.numel()}


def build_engine() -> Any:
    """Return an engine around a tiny Llama."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1_000_000_000},
    }
    llama = LlamaConfig(
        hidden_size=20,
        intermediate_size=36,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=61,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(llama)
    model.register_buffer("seen", torch.zeros(3))
    for parameter in [*model.model.layers[0].parameters(), model.model.norm.weight]:
        parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config)
    return engine
