"""Make models of all architectures as Transformers does, and print what their parameters are.

    python -m tests.deepspeed.architectures FOLDER

A program of its own, so that pytest never imports transformers. Below FOLDER it writes a config.json for every case,
as ``save_pretrained`` does. The last line on stdout is a JSON object: each case's parameters with their shapes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 33,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2}
MOE: dict[str, Any] = GROUPED | {"num_experts": 5, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = MOE | {"shared_expert_intermediate_size": 20}
GPT2: dict[str, Any] = {"vocab_size": 97, "n_positions": 33, "n_embd": 24, "n_layer": 3, "n_head": 4}

# Case -> model type, settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama-old": ("llama", SMALL),
    "llama-biased": ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama-tied": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "mistral": ("mistral", GROUPED),
    "mistral-wide": ("mistral", GROUPED | {"head_dim": 16}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2-tied": ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", GROUPED),
    "qwen3-biased": ("qwen3", GROUPED | {"head_dim": 8, "attention_bias": True}),
    "gemma": ("gemma", GROUPED),
    "gemma-untied": ("gemma", GROUPED | {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("gemma2", GROUPED),
    "gemma3_text": ("gemma3_text", GROUPED | {"head_dim": 8}),
    "phi": ("phi", SMALL),
    "phi-normed": ("phi", GROUPED | {"qk_layernorm": True, "tie_word_embeddings": True}),
    "phi3": ("phi3", GROUPED),
    "phi3-old": ("phi3", SMALL | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", GPT2 | {"n_inner": 36, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", SMALL),
    "gpt_neox-tied": ("gpt_neox", SMALL | {"attention_bias": False, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 5}),
    "qwen2_moe": ("qwen2_moe", SHARED),
    "qwen2_moe-mixed": ("qwen2_moe", SHARED | {"qkv_bias": False, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-mixed": ("qwen3_moe", MOE | {"head_dim": 8, "attention_bias": True, "mlp_only_layers": [1]}),
}


def main() -> None:
    """Write and describe every case."""
    folder = Path(sys.argv[1])
    print("\n" + json.dumps({case: describe(folder / case, *CASES[case]) for case in CASES}))


def describe(folder: Path, kind: str, settings: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return the parameters of a model of *kind*, whose config is written into *folder*."""
    made: Any = AutoModelForCausalLM
    config: Any = AutoConfig.for_model(kind, **settings)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = made.from_config(config)
    return [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]


if __name__ == "__main__":
    main()
