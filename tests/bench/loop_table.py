"""
How many bytes a save takes in the steady state, computed: the policies' own answers for models of real size.

Nothing is trained. Twelve bytes a parameter are its master and two moments; what is saved beside them is too small
to be seen here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from layerstore.layers import layer_of
from layerstore.policy import Filter, Latest, Parity, Policy
from layerstore.policy.anatomy import anatomy, norms
from layerstore.policy.due import Save, due_layers

DEEPSPEED_BYTES = 12
"""Of a parameter in ``engine.save_checkpoint``: a master and two moments."""
TRAINER_BYTES = 14
"""Of a parameter in HF Trainer's checkpoints: the same, and the gathered half-precision weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The sizes of a published model."""

    name: str
    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    vocab: int
    has_qkv_bias: bool = False

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, in the model's order; embedding and head are not tied."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for block in range(self.blocks):
            prefix = f"model.layers.{block}"
            for part, width in (("q", self.hidden), ("k", kv), ("v", kv)):
                yield f"{prefix}.self_attn.{part}_proj.weight", (width, self.hidden)
                if self.has_qkv_bias:
                    yield f"{prefix}.self_attn.{part}_proj.bias", (width,)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    def elements(self) -> dict[str, int]:
        """Return the elements of every layer, in the model's order."""
        found: dict[str, int] = {}
        for name, shape in self.parameters():
            found[layer_of(name)] = found.get(layer_of(name), 0) + prod(shape)
        return found


MODELS = (
    Llama(name="Llama-3.1-8B", hidden=4096, intermediate=14336, blocks=32, heads=32, kv_heads=8, vocab=128256),
    Llama(
        name="Qwen2.5-7B",
        hidden=3584,
        intermediate=18944,
        blocks=28,
        heads=28,
        kv_heads=4,
        vocab=152064,
        has_qkv_bias=True,
    ),
)

POLICIES: tuple[tuple[str, Policy], ...] = (
    ("full", Latest()),
    ("parity", Parity()),
    ("filter", Filter()),
    ("filter, embeddings and head always", Filter(aux="always")),
)


def steady_elements(policy: Policy, elements: Mapping[str, int]) -> tuple[float, int]:
    """Return how many parameters' states a save takes: on average over whole cycles, and at most."""
    layers = tuple(elements)
    # A cycle of filter ends with a turn after which all that wait for turns have had equally many.
    count = 2
    if isinstance(policy, Filter):
        parts = anatomy(layers)
        count = policy.every * (len(layers) - len(parts.ends(policy.first, policy.last) | norms(parts.auxiliary)))
        count -= policy.every * (policy.aux == "always") * len(set(parts.auxiliary) - norms(parts.auxiliary))
    sums = [
        sum(elements[layer] for layer in due_layers(policy, _save(number, layers))) for number in range(1, 1 + count)
    ]
    return sum(sums) / count, max(sums)


def _save(number: int, layers: tuple[str, ...]) -> Save:
    return Save(number=number, layers=layers, ages=dict.fromkeys(layers, 1))


def lines() -> Iterator[str]:
    """Yield the table."""
    yield "bytes per save in the steady state, computed over a whole cycle of saves:"
    for model in MODELS:
        elements = model.elements()
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
        yield f"  {_limit(elements)}"


def _limit(elements: Mapping[str, int]) -> str:
    """Say what keeps filter's factor down."""
    total, layers = sum(elements.values()), tuple(elements)
    parts, policy = anatomy(layers), Filter()
    ends = sum(elements[layer] for layer in parts.ends(policy.first, policy.last))
    large = sum(elements[layer] for layer in parts.auxiliary)
    turns = policy.every / float(policy.share)
    return (
        f"filter: the {policy.first} + {policy.last} blocks that are always due are {ends / total:.0%} of the model; "
        f"embeddings and head are {large / total:.0%}:\n"
        f"  in rotation they add 1/{turns:.0f} of that to an average save (all of it with aux=always), "
        "and the save with their turn is the largest"
    )
