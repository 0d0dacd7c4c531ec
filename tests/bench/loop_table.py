"""
How many bytes a save takes in the steady state, computed: the policies' own answers for models of real size.

Nothing is trained. Twelve bytes a parameter are its master and two moments; what is saved beside them is too small
to be seen here.
"""

from collections.abc import Iterator, Mapping
from functools import cache

from layerstore.inspect import Model
from layerstore.inspect.estimate import cycle_of, due_sets
from layerstore.inspect.model_shapes import model_of_shapes
from layerstore.live.meta_model import parameter_shapes
from layerstore.policy import Filter, Latest, Parity, Policy
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


def elements_of(model: Model) -> dict[str, int]:
    """Return the elements of every layer, in the model's order."""
    return {layer: sum(elements.values()) for layer, elements in model.layers.items()}


POLICIES: tuple[tuple[str, Policy], ...] = (
    ("full", Latest()),
    ("parity", Parity()),
    ("filter", Filter()),
    ("filter, embeddings and head always", Filter(aux="always")),
)


def steady_elements(policy: Policy, elements: Mapping[str, int]) -> tuple[float, int]:
    """Return how many parameters' states a save takes: on average over whole cycles, and at most."""
    due = due_sets(policy, tuple(elements))
    sums = [sum(elements[layer] for layer in layers) for layers in due[: cycle_of(due)]]
    return sum(sums) / len(sums), max(sums)


def lines() -> Iterator[str]:
    """Yield the table."""
    yield "bytes per save in the steady state, computed over a whole cycle of saves:"
    for model in models():
        elements = elements_of(model)
        total = sum(elements.values())
        yield ""
        yield f"{model.name}: {total / 1e9:.2f} billion parameters, {len(elements)} layers"
        yield (
            f"  {'':<36}{'average':>10}{'largest':>10}{'x fewer than DeepSpeed (12)':>30}{'than HF Trainer (14)':>24}"
        )
        for name, policy in POLICIES:
            found, most = (count * DEEPSPEED_BYTES for count in steady_elements(policy, elements))
            yield (
                f"  {name:<36}{found / 1e9:>7.1f} GB{most / 1e9:>7.1f} GB{total * DEEPSPEED_BYTES / found:>29.2f}x"
                f"{total * TRAINER_BYTES / found:>23.2f}x"
            )
