"""What others have published: sizes of checkpoints, and two models that LLMTailor was measured with."""

from collections.abc import Mapping
from functools import cache

from layerstore.hf import parameter_shapes
from layerstore.inspect import Model
from layerstore.inspect.model_shapes import model_of_shapes
from tests.docs.scene import LLAMA_8B

DEEPSPEED_BYTES = 12
"""Of a parameter in ``engine.save_checkpoint``: a master and two moments."""
TRAINER_BYTES = DEEPSPEED_BYTES + 2
"""Of a parameter in HF Trainer's checkpoints: the same, and the gathered half-precision weights."""

_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
}


@cache
def models() -> list[Model]:
    """Return the two published models that LLMTailor was measured with, as Transformers makes them."""
    return [model_of_shapes(name, parameter_shapes(fields)) for name, fields in _CONFIGS.items()]
