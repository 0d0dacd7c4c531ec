"""Which models are trained with which optimizers, and what these keep. Read by tests and by a page; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tests.deepspeed.scenarios import FAMILIES

MODELS = {
    "llama": "Llama",
    "qwen2": "Qwen2, tied embeddings",
    "qwen2_untied": "Qwen2",
    "qwen3": "Qwen3, tied embeddings",
    "qwen3_untied": "Qwen3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "phi": "Phi",
    "phi3": "Phi-3",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX",
    "bert": "BERT",
    "t5": "T5",
    "mixtral": "Mixtral, its blocks of experts as leaf modules",
    "qwen3_moe": "Qwen3-MoE, its blocks of experts as leaf modules",
}
"""By the name of `FAMILIES`, which has models of images, too."""
assert MODELS.keys() == set(FAMILIES) - {"vit", "llava"}

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "torch AdamW": ("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPUAdam": ("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPULion": ("exp_avg", "exp_avg_sq"),
    "Adafactor": ("exp_avg_sq",),
    "Muon": ("exp_avg", "exp_avg_sq", "momentum_buffer"),
}
"""With the moments that each keeps. DeepSpeed's Lion allocates the second one, and leaves it zero."""

SAVES = 3
"""Steps that are saved: the first one whole, the others by parity."""
STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and an optimizer."""

    family: str
    optimizer: str

    @property
    def name(self) -> str:
        """Its run."""
        return f"{self.family}-{self.optimizer.replace(' ', '-')}"


CASES = tuple(Case(family=family, optimizer=optimizer) for family in MODELS for optimizer in OPTIMIZERS)
