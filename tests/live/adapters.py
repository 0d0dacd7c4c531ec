"""Train adapters with PEFT on CPU ranks, through the Trainer and without: all that the tests compare.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.live.adapters --out OUT
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import layerstore
from layerstore.transformers import LayerstoreCallback
from tests.deepspeed import models
from tests.deepspeed.trainer import Batches, forget_state, training_arguments, zero_config
from tests.live.training import begin, end, options

STEPS = 4
SAVE_STEPS = 2
SECOND = "second"


def main() -> None:
    """Train everything."""
    out = options().out
    begin(out)
    if dist.get_rank() == 0:
        base_model().save_pretrained(out / "base")
    dist.barrier()
    job(out, "files")
    job(out, "stored", to_store=True)
    job(out, "parity", to_store=True, policy="parity")
    job(out, "two", to_store=True, several=True, policy="parity")
    raw(out)
    end()


def base_model() -> Any:
    """Return the model that is adapted, the same one every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=models.VOCABULARY,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type] # transformers' own signature


def adapted(out: Path, *, several: bool) -> Any:
    """Return a model with an adapter and a whole module that is trained, or with two adapters."""
    model = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.bfloat16)
    targets = ["q_proj", "v_proj"]
    torch.manual_seed(1)
    if not several:
        whole = LoraConfig(r=3, target_modules=[*targets, "embed_tokens"], modules_to_save=["lm_head"])
        return get_peft_model(model, whole, autocast_adapter_dtype=False)
    found = get_peft_model(model, LoraConfig(r=2, target_modules=targets), autocast_adapter_dtype=False)
    cast(PeftModel, found).add_adapter(
        SECOND, LoraConfig(r=3, target_modules=["q_proj", "o_proj"], use_dora=True), autocast_adapter_dtype=False
    )
    cast(Any, found).base_model.set_adapter(["default", SECOND])
    return found


def job(out: Path, name: str, *, to_store: bool = False, several: bool = False, **settings: Any) -> None:
    """Train the job *name* with the Trainer; what it saves goes to the store, or to files."""
    say(name)
    arguments = training_arguments(
        out / name, deepspeed=zero_config(), learning_rate=1e-2, max_steps=STEPS, save_steps=SAVE_STEPS
    )
    callbacks = [LayerstoreCallback(out / "store", run=name, **settings)] if to_store else []
    trainer = Trainer(
        model=adapted(out, several=several), args=arguments, train_dataset=Batches(), callbacks=[*callbacks]
    )
    trainer.train()
    cast(Any, trainer).model_wrapped.destroy()
    forget_state()


def raw(out: Path) -> None:
    """Train without a Trainer: frozen weights are saved too, and files only where they are named."""
    say("raw")
    model = adapted(out, several=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = zero_config()
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=config)
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(str(out / "config"))
    with layerstore.attach(engine, out / "store", run="raw") as saver:
        for step in (1, 2):
            batch = models.batch("llama", step=step, rank=dist.get_rank(), dtype=torch.bfloat16)
            engine.backward(engine(**batch).loss)
            engine.step()
            named: dict[str, Any] = {"adapter_config.json": out / "config" / "adapter_config.json"}
            saver.save(extra_files=named if step == 2 and dist.get_rank() == 0 else None)
    state = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            state[name] = parameter.detach().clone()
    if dist.get_rank() == 0:
        # The base's own embeddings, which are frozen, are in the base already.
        model.save_pretrained(out / "raw", state_dict=state, save_embedding_layers=False)
    engine.destroy()


def say(words: str) -> None:
    """Print *words* once."""
    if dist.get_rank() == 0:
        print(f"=== {words}", flush=True)


if __name__ == "__main__":
    main()
