"""
What a model consists of by its ``config.json``: the names and shapes that Transformers would give its parameters.

Nothing is imported that could build a model. Each architecture below is compared with the real one by a test;
one that is not here is refused, never guessed. What a layer is follows from the names, as everywhere (``layers.py``).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Literal, NoReturn

from layerstore.errors import InvalidInput, SourceCheckpoint, Unsupported
from layerstore.layers import layers_in_order
from layerstore.limits import MODEL_BLOCKS_MAX, MODEL_DIMENSION_MAX, RECORD_BYTES_MAX
from layerstore.zero3 import read_source_file, real_path

CONFIG = "config.json"
MADE_UP_VOCABULARY = 128_000
"""Of a model of which only the size is known: what the tokenizers of today have, about."""

INSTEAD = "--params 8B --layers 32 does without a config"

Shapes = Iterator[tuple[str, tuple[int, ...]]]

Source = Literal["config", "params", "checkpoint", "commit"]

ADAM = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each element beside its master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as its checkpoints are concerned."""

    name: str
    """What to call it."""
    architecture: str | None
    """Transformers' name of it (``model_type``); None where no config tells it."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Its parameters with their shapes, in the model's order; a tied one has its first name."""
    source: Source = "config"
    """What that is known from; ``params`` where the model is made up."""
    gathered: Mapping[str, Sequence[str]] | None = None
    """The parameters of each layer, where somebody has seen them; else their names tell."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""
    states: tuple[str, ...] = ADAM
    """What the optimizer keeps of each trained element beside its master."""
    world_size: int | None = None
    """Ranks that it was saved by; None where it was not."""
    dtype: str | None = None
    """Code of the element type that most of it is trained in; likewise."""

    @property
    def layers(self) -> Mapping[str, Sequence[str]]:
        """Return the parameters of each layer, in the model's order."""
        return layers_in_order(name for name, _ in self.shapes) if self.gathered is None else self.gathered

    @property
    def parameters(self) -> int:
        """Count the elements of all of them."""
        return sum(prod(shape) for _, shape in self.shapes)


def model_of(path: Path) -> Model:
    """
    Return the model of *path*: a ``config.json``, or a folder with one.

    Raises:
        InvalidInput: There is none, or a size in it is missing or none.
        Unsupported: The architecture is not known here.
    """
    place = real_path(path)
    file = place / CONFIG if place.is_dir() else place
    config = _Config(_read(file), str(path))
    kind = config.fields.get("model_type")
    architecture = _ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        raise Unsupported(
            f"{path} is of model type {kind!r}, whose parameters are not known here",
            hint=f"{INSTEAD}; known are {', '.join(sorted(_ARCHITECTURES))}",
        )
    name = file.parent.name if file.name == CONFIG else file.stem
    return Model(name=name, architecture=str(kind), shapes=tuple(architecture(config)))


def made_up(parameters: int, blocks: int) -> Model:
    """
    Return a model of *parameters* elements in *blocks* equal blocks, with an embedding, a norm and a head.

    As wide as a Transformer of that size and depth is: a block has 12 times the square of the width.

    Raises:
        InvalidInput: No model has so many blocks, or one of so many is not so small.
    """
    if not 0 < blocks <= MODEL_BLOCKS_MAX:
        raise InvalidInput(f"no model has {blocks:,} blocks", hint=f"--layers is from 1 to {MODEL_BLOCKS_MAX:,}")
    vocabulary = MADE_UP_VOCABULARY
    width = max(1, (isqrt(vocabulary**2 + 12 * blocks * parameters) - vocabulary) // (12 * blocks))
    block, rest = divmod(parameters - 2 * vocabulary * width - width, blocks)
    if block < 1:
        raise InvalidInput(
            f"{parameters:,} parameters are too few for {blocks} blocks, an embedding and a head",
            hint="--params and --layers are of the whole model: 8B and 32",
        )
    names = [("model.embed_tokens", vocabulary * width + rest)]
    names += [(f"model.layers.{index}", block) for index in range(blocks)]
    names += [("model.norm", width), ("lm_head", vocabulary * width)]
    shapes = tuple((f"{name}.weight", (elements,)) for name, elements in names)
    return Model(name=f"a model of {blocks} blocks", architecture=None, shapes=shapes, source="params")


def _read(path: Path) -> Mapping[str, object]:
    try:
        fields = json.loads(read_source_file(path, size_bytes_max=RECORD_BYTES_MAX))
    except SourceCheckpoint as exc:
        raise InvalidInput(f"there is no {CONFIG} to estimate from: {exc}", hint=INSTEAD) from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path} is not JSON: {exc}", hint=INSTEAD) from exc
    if not isinstance(fields, dict):
        raise InvalidInput(f"{path} is not an object", hint=INSTEAD)
    return fields


@dataclass(frozen=True, slots=True)
class _Config:
    """Typed looks at a config; whatever is not as it should be is an error that names it."""

    fields: Mapping[str, object]
    path: str

    def size(self, key: str, default: int | None = None, *, most: int = MODEL_DIMENSION_MAX) -> int:
        """Return the size *key*; without a *default* it has to be there."""
        value = self.fields.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            self._refuse(key, f"a whole number from 1 to {most:,}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return the switch *key*."""
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def indexes(self, key: str) -> frozenset[int]:
        """Return the numbers of blocks that *key* lists."""
        value = self.fields.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            self._refuse(key, "a list of numbers")
        return frozenset(value)

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        found = f"is {self.fields[key]!r}" if key in self.fields else "is missing"
        raise InvalidInput(f"{self.path}: {key} {found}, where it has to be {wanted}", hint=INSTEAD)

    @property
    def blocks(self) -> range:
        """All blocks."""
        return range(self.size("num_hidden_layers", most=MODEL_BLOCKS_MAX))

    @property
    def experts(self) -> int:
        """Count the experts of a block: each of the two names is what some release of Transformers writes."""
        return self.size("num_local_experts" if "num_local_experts" in self.fields else "num_experts")

    def heads(self, *, grouped: bool = False, default_length: int | None = None) -> tuple[int, int, int]:
        """
        Return the width of all queries together, that of all keys, and the length of one head.

        Where heads are always *grouped* a config has to say how; a null means that they are not.
        """
        heads, key = self.size("num_attention_heads"), "num_key_value_heads"
        length = self.size("head_dim", default_length or max(1, self.size("hidden_size") // heads))
        keys = self.size(key, None if grouped and key not in self.fields else heads)
        return heads * length, keys * length, length


# -- parts of models -----------------------------------------------------------------------------------------------


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int, *, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (size,)
    if bias:
        yield f"{name}.bias", (size,)


def _ends(config: _Config, *, tied: bool, bias: bool = False) -> tuple[Shapes, Shapes]:
    """Return what lies before and after the blocks of most models, but for the last norm."""
    vocabulary, width = config.size("vocab_size"), config.size("hidden_size")
    is_tied = config.flag("tie_word_embeddings", default=tied)

    def head() -> Shapes:
        if not is_tied:
            yield "lm_head.weight", (vocabulary, width)
        if bias:
            yield "lm_head.bias", (vocabulary,)

    return _linear("model.embed_tokens", vocabulary, width), head()


_SWITCHED = "attention_bias"
_ON_UNLESS_SAID = frozenset({"qkv_bias"})

# -- architectures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Llama:
    """Llama and what descends from it. A switch is on, off, or the key of the config that tells."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    """Whether queries and keys have norms of their own."""
    mlp_norms: bool = False
    """Whether there is a norm before and after the MLP, too."""
    grouped: bool = True
    """Whether a config has to tell how many heads its keys have."""
    head_length: int | None = None
    """Where the config does not tell; None for the width over the number of heads."""
    tied: bool = False
    mlp: Callable[[_Config, str, int], Shapes] | None = None
    """What is in the place of the usual MLP: of a config, a prefix, and a block's index."""

    def __call__(self, config: _Config) -> Shapes:
        """Yield all parameters."""
        before, after = _ends(config, tied=self.tied)
        yield from before
        for index in config.blocks:
            yield from self._block(config, f"model.layers.{index}", index)
        yield from _norm("model.norm", config.size("hidden_size"))
        yield from after

    def _block(self, config: _Config, prefix: str, index: int) -> Shapes:
        width = config.size("hidden_size")
        yield from self._attention(config, f"{prefix}.self_attn")
        if self.mlp is None:
            yield from _gated(config, f"{prefix}.mlp", config.size("intermediate_size"), bias=self._is(config, "mlp"))
        else:
            yield from self.mlp(config, f"{prefix}.mlp", index)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * self.mlp_norms
        for name in norms:
            yield from _norm(f"{prefix}.{name}", width)

    def _attention(self, config: _Config, prefix: str) -> Shapes:
        width = config.size("hidden_size")
        queries, keys, length = config.heads(grouped=self.grouped, default_length=self.head_length)
        for part, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(f"{prefix}.{part}", size, width, bias=self._is(config, "qkv"))
        yield from _linear(f"{prefix}.o_proj", width, queries, bias=self._is(config, "out"))
        if self.head_norms:
            yield from _norm(f"{prefix}.q_norm", length)
            yield from _norm(f"{prefix}.k_norm", length)

    def _is(self, config: _Config, part: str) -> bool:
        switch: bool | str = {"qkv": self.qkv_bias, "out": self.out_bias, "mlp": self.mlp_bias}[part]
        return config.flag(switch, default=switch in _ON_UNLESS_SAID) if isinstance(switch, str) else switch


def _gated(config: _Config, prefix: str, inner: int, *, bias: bool = False) -> Shapes:
    width = config.size("hidden_size")
    yield from _linear(f"{prefix}.gate_proj", inner, width, bias=bias)
    yield from _linear(f"{prefix}.up_proj", inner, width, bias=bias)
    yield from _linear(f"{prefix}.down_proj", width, inner, bias=bias)


def _experts(config: _Config, prefix: str, *, count: int, inner: int) -> Shapes:
    width = config.size("hidden_size")
    yield f"{prefix}.experts.gate_up_proj", (count, 2 * inner, width)
    yield f"{prefix}.experts.down_proj", (count, width, inner)


def _mixtral_mlp(config: _Config, prefix: str, index: int) -> Shapes:
    count = config.experts
    yield from _linear(f"{prefix}.gate", count, config.size("hidden_size"))
    yield from _experts(config, prefix, count=count, inner=config.size("intermediate_size"))


def _has_experts(config: _Config, index: int) -> bool:
    is_dense = index in config.indexes("mlp_only_layers") or (index + 1) % config.size("decoder_sparse_step", 1)
    return not is_dense


def _qwen2_moe_mlp(config: _Config, prefix: str, index: int) -> Shapes:
    if not _has_experts(config, index):
        yield from _gated(config, prefix, config.size("intermediate_size"))
        return
    count, width = config.experts, config.size("hidden_size")
    yield from _linear(f"{prefix}.gate", count, width)
    yield from _experts(config, prefix, count=count, inner=config.size("moe_intermediate_size"))
    yield from _gated(config, f"{prefix}.shared_expert", config.size("shared_expert_intermediate_size"))
    yield from _linear(f"{prefix}.shared_expert_gate", 1, width)


def _qwen3_moe_mlp(config: _Config, prefix: str, index: int) -> Shapes:
    if not _has_experts(config, index):
        yield from _gated(config, prefix, config.size("intermediate_size"))
        return
    count = config.experts
    yield from _experts(config, prefix, count=count, inner=config.size("moe_intermediate_size"))
    yield from _linear(f"{prefix}.gate", count, config.size("hidden_size"))


def _phi(config: _Config) -> Shapes:
    before, after = _ends(config, tied=False, bias=True)
    width, inner = config.size("hidden_size"), config.size("intermediate_size")
    queries, keys, _ = config.heads()
    of_a_head = width // config.size("num_attention_heads")
    yield from before
    for index in config.blocks:
        prefix = f"model.layers.{index}"
        for part, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(f"{prefix}.self_attn.{part}", size, width, bias=True)
        yield from _linear(f"{prefix}.self_attn.dense", width, queries, bias=True)
        if config.flag("qk_layernorm"):
            yield from _norm(f"{prefix}.self_attn.q_layernorm", of_a_head, bias=True)
            yield from _norm(f"{prefix}.self_attn.k_layernorm", of_a_head, bias=True)
        yield from _linear(f"{prefix}.mlp.fc1", inner, width, bias=True)
        yield from _linear(f"{prefix}.mlp.fc2", width, inner, bias=True)
        yield from _norm(f"{prefix}.input_layernorm", width, bias=True)
    yield from _norm("model.final_layernorm", width, bias=True)
    yield from after


def _phi3(config: _Config) -> Shapes:
    before, after = _ends(config, tied=False)
    width, inner = config.size("hidden_size"), config.size("intermediate_size")
    queries, keys, _ = config.heads()
    yield from before
    for index in config.blocks:
        prefix = f"model.layers.{index}"
        yield from _linear(f"{prefix}.self_attn.o_proj", width, queries)
        yield from _linear(f"{prefix}.self_attn.qkv_proj", queries + 2 * keys, width)
        yield from _linear(f"{prefix}.mlp.gate_up_proj", 2 * inner, width)
        yield from _linear(f"{prefix}.mlp.down_proj", width, inner)
        yield from _norm(f"{prefix}.input_layernorm", width)
        yield from _norm(f"{prefix}.post_attention_layernorm", width)
    yield from _norm("model.norm", width)
    yield from after


def _gpt2(config: _Config) -> Shapes:
    width, vocabulary = config.size("n_embd"), config.size("vocab_size")
    inner = config.size("n_inner", 4 * width)
    if config.flag("add_cross_attention"):
        raise Unsupported(f"{config.path}: a GPT-2 with cross-attention is not known here", hint=INSTEAD)
    yield "transformer.wte.weight", (vocabulary, width)
    yield "transformer.wpe.weight", (config.size("n_positions"), width)
    for index in range(config.size("n_layer", most=MODEL_BLOCKS_MAX)):
        prefix = f"transformer.h.{index}"
        yield from _norm(f"{prefix}.ln_1", width, bias=True)
        yield from _transposed(f"{prefix}.attn.c_attn", 3 * width, width)
        yield from _transposed(f"{prefix}.attn.c_proj", width, width)
        yield from _norm(f"{prefix}.ln_2", width, bias=True)
        yield from _transposed(f"{prefix}.mlp.c_fc", inner, width)
        yield from _transposed(f"{prefix}.mlp.c_proj", width, inner)
    yield from _norm("transformer.ln_f", width, bias=True)
    if not config.flag("tie_word_embeddings", default=True):
        yield "lm_head.weight", (vocabulary, width)


def _transposed(name: str, outputs: int, inputs: int) -> Shapes:
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


def _gpt_neox(config: _Config) -> Shapes:
    width, inner, vocabulary = config.size("hidden_size"), config.size("intermediate_size"), config.size("vocab_size")
    bias = config.flag("attention_bias", default=True)
    yield "gpt_neox.embed_in.weight", (vocabulary, width)
    for index in config.blocks:
        prefix = f"gpt_neox.layers.{index}"
        yield from _norm(f"{prefix}.input_layernorm", width, bias=True)
        yield from _norm(f"{prefix}.post_attention_layernorm", width, bias=True)
        yield from _linear(f"{prefix}.attention.query_key_value", 3 * width, width, bias=bias)
        yield from _linear(f"{prefix}.attention.dense", width, width, bias=bias)
        yield from _linear(f"{prefix}.mlp.dense_h_to_4h", inner, width, bias=True)
        yield from _linear(f"{prefix}.mlp.dense_4h_to_h", width, inner, bias=True)
    yield from _norm("gpt_neox.final_layer_norm", width, bias=True)
    if not config.flag("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, width)


_ARCHITECTURES: Mapping[str, Callable[[_Config], Shapes]] = {
    "llama": _Llama(grouped=False, qkv_bias=_SWITCHED, out_bias=_SWITCHED, mlp_bias="mlp_bias"),
    "mistral": _Llama(),
    "qwen2": _Llama(qkv_bias=True),
    "qwen3": _Llama(qkv_bias=_SWITCHED, out_bias=_SWITCHED, head_norms=True, head_length=128),
    "gemma": _Llama(qkv_bias=_SWITCHED, out_bias=_SWITCHED, head_length=256, tied=True),
    "gemma2": _Llama(qkv_bias=_SWITCHED, out_bias=_SWITCHED, head_length=256, tied=True, mlp_norms=True),
    "gemma3_text": _Llama(
        qkv_bias=_SWITCHED, out_bias=_SWITCHED, head_length=256, tied=True, mlp_norms=True, head_norms=True
    ),
    "mixtral": _Llama(mlp=_mixtral_mlp),
    "qwen2_moe": _Llama(qkv_bias="qkv_bias", mlp=_qwen2_moe_mlp),
    "qwen3_moe": _Llama(qkv_bias=_SWITCHED, out_bias=_SWITCHED, head_norms=True, mlp=_qwen3_moe_mlp),
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


def known_architectures() -> list[str]:
    """Return the model types whose parameters are known."""
    return sorted(_ARCHITECTURES)
