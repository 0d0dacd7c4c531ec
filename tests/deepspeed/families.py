"""Train models of every family with the Trainer: one launch, each saved twice.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.deepspeed.families --out OUT [--scenario FAMILY]…

Each is as small as its architecture allows, and is saved with its gathered weights, as ``save_pretrained`` names and
cuts them. Families that Transformers holds otherwise in memory than in files are trained again from what
``from_pretrained`` made of such a file (``NAME-loaded``), and without gathered weights (``NAME-shards``).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, Trainer

from tests.deepspeed.scenarios import FAMILIES, FAMILY_STEPS, RENAMED_FAMILIES
from tests.deepspeed.trainer import forget_state, training_arguments, zero_config

VOCABULARY = 61
LENGTH = 12
IMAGE = 16

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = TEXT | {"num_key_value_heads": 1}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE,
    "patch_size": 8,
}
EXPERTS = GROUPED | {"num_experts_per_tok": 2}

# Model type, class, settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", GROUPED),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "qwen2_untied": ("qwen2", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8, "tie_word_embeddings": False}),
    "mistral": ("mistral", "MistralForCausalLM", GROUPED),
    "gemma": ("gemma", "GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", GROUPED | {"head_dim": 8}),
    "phi": ("phi", "PhiForCausalLM", TEXT),
    "phi3": ("phi3", "Phi3ForCausalLM", GROUPED),
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 3,
            "n_head": 2,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", TEXT),
    "bert": ("bert", "BertForMaskedLM", TEXT | {"pad_token_id": 0}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0},
    ),
    "mixtral": ("mixtral", "MixtralForCausalLM", EXPERTS | {"num_local_experts": 3}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 3, "moe_intermediate_size": 8}),
    "vit": ("vit", "ViTForImageClassification", VISION | {"num_labels": 3}),
    "llava": (
        "llava",
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **VISION},
            "image_token_index": VOCABULARY - 1,
            "vision_feature_layer": -1,
        },
    ),
}


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What a family is trained on, one item per index."""

    def __init__(self, family: str) -> None:
        """Make items for *family*."""
        self.family = family

    def __len__(self) -> int:
        """Return enough items for all steps of all ranks."""
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the item of *index*."""
        generator = torch.Generator().manual_seed(index)
        pixels = torch.rand((3, IMAGE, IMAGE), generator=generator)
        if self.family == "vit":
            return {"pixel_values": pixels, "labels": torch.tensor(index % 3)}
        tokens = torch.randint(1, VOCABULARY - 1, (LENGTH,), generator=generator)
        if self.family == "llava":
            tokens[: (IMAGE // 8) ** 2] = VOCABULARY - 1  # where the image goes
            return {"input_ids": tokens, "labels": tokens, "pixel_values": pixels}
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train what the command line asks for, all without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--scenario", action="append", choices=FAMILIES)
    arguments = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    for family in arguments.scenario or FAMILIES:
        train(family, arguments.out)
        if family in RENAMED_FAMILIES:
            train(
                family, arguments.out, source=arguments.out / family / f"checkpoint-{FAMILY_STEPS[0]}", variant="loaded"
            )
            train(family, arguments.out, variant="shards")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see trainer.py


def train(family: str, out: Path, *, source: Path | None = None, variant: str = "") -> None:
    """Train *family* and save it after each of FAMILY_STEPS; a new model, or the one in *source*."""
    if dist.get_rank() == 0:
        print(f"=== {family} {variant}", flush=True)
    kind, name, settings = MODELS[family]
    config = zero_config()
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = variant != "shards"
    folder = out / "-".join(filter(None, [family, variant]))
    arguments = training_arguments(
        folder, deepspeed=config, learning_rate=1e-2, max_steps=FAMILY_STEPS[-1], save_steps=1, label_names=["labels"]
    )
    torch.manual_seed(0)
    made: Any = getattr(transformers, name)
    model = made(AutoConfig.for_model(kind, **settings)) if source is None else made.from_pretrained(source)
    model = model.to(torch.bfloat16)  # Llava's parts would have different types, which DeepSpeed does not take
    trainer = Trainer(model=model, args=arguments, train_dataset=cast(Any, Batches(family)))
    trainer.train()
    cast(Any, trainer).model_wrapped.destroy()
    forget_state()


if __name__ == "__main__":
    main()
