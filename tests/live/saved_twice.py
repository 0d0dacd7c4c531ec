"""
Training whose steps are saved twice: by a saver, and by DeepSpeed itself. The program that each rank runs.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.live.saved_twice FOLDER

Every parameter stays gathered between steps, embedding and head are tied, some parameters are frozen, one buffer
changes in forward. That a save leaves parameters gathered is checked here, what it saves by who runs this.
"""

import os
import sys
from pathlib import Path
from typing import Any

from tests.live.plain import plainly

STEPS = 3
RUN = "live"


def main() -> None:
    """Train a few steps, and save each of them twice."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import layerstore

    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build_engine()
    if dist.get_rank() == 0:
        layerstore.init(folder / "store").close()
    dist.barrier()
    with layerstore.attach(engine, folder / "store", run=RUN) as saver:
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            tokens = torch.randint(0, 60, (2, 16), generator=generator)
            engine.module.seen += 1
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            gathered = gathered_names(engine)
            saver.save(client_state={"epoch": step})
            if not gathered or gathered_names(engine) != gathered:
                raise SystemExit(f"{len(gathered)} parameters were gathered, and {len(gathered_names(engine))} are")
            with plainly(engine):
                engine.save_checkpoint(
                    str(folder / "deepspeed"), tag=f"global_step{step}", client_state={"epoch": step}
                )
    dist.barrier()
    os._exit(0)  # taking down threads of torch and gloo now and then aborts the process


def gathered_names(engine: Any) -> set[str]:
    """Return the names of the parameters that are whole on this rank."""
    return {name for name, parameter in engine.module.named_parameters() if parameter.numel()}


def build_engine() -> Any:
    """Return an engine around a tiny Llama."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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


if __name__ == "__main__":
    main()
