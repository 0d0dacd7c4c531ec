"""The families that ``families.py`` trains, as plain data: pytest reads it while collecting."""

RENAMED = ("mixtral", "qwen3_moe", "vit", "llava")
"""Transformers 5 holds them otherwise in memory than in their files."""

FAMILIES = ("llama", "qwen2", "gemma2", "phi3", "gpt2", "gpt_neox", "bert", "t5", *RENAMED)

VARIANTS = (*FAMILIES, *(f"{family}-{variant}" for family in RENAMED for variant in ("loaded", "shards")))
"""With the ways in which the renamed ones are trained again."""

STEPS = (1, 2)
"""All steps of a training; each is saved."""
