"""Promises of the rule that names layers: by structure alone, for any architecture and any name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import InvalidInput
from layerstore.layers import block_index, check_name, compile_pattern, layer_of, layers_in_order, strip_wrappers

NAMES = {
    # Llama and its kin.
    "model.embed_tokens.weight": "model.embed_tokens",
    "model.layers.3.self_attn.q_proj.weight": "model.layers.3",
    "model.layers.12.mlp.down_proj.bias": "model.layers.12",
    "model.norm.weight": "model.norm",
    "lm_head.weight": "lm_head",
    "model.rotary_emb.inv_freq": "model.rotary_emb",
    # GPT-2, GPT-NeoX, OPT, BLOOM, Falcon.
    "transformer.h.3.attn.c_attn.weight": "transformer.h.3",
    "transformer.wte.weight": "transformer.wte",
    "transformer.wpe.weight": "transformer.wpe",
    "transformer.ln_f.bias": "transformer.ln_f",
    "gpt_neox.layers.0.attention.query_key_value.weight": "gpt_neox.layers.0",
    "model.decoder.layers.7.fc1.weight": "model.decoder.layers.7",
    "transformer.word_embeddings_layernorm.weight": "transformer.word_embeddings_layernorm",
    # Encoders, encoder-decoders, vision, speech, multimodal: several stacks.
    "bert.encoder.layer.11.output.dense.weight": "bert.encoder.layer.11",
    "bert.embeddings.position_embeddings.weight": "bert.embeddings.position_embeddings",
    "encoder.block.0.layer.1.DenseReluDense.wi.weight": "encoder.block.0",
    "decoder.block.5.layer.0.SelfAttention.q.weight": "decoder.block.5",
    "shared.weight": "shared",
    "model.visual.blocks.31.attn.qkv.weight": "model.visual.blocks.31",
    "model.language_model.layers.2.mlp.gate_proj.weight": "model.language_model.layers.2",
    "vit.encoder.layer.0.attention.attention.key.bias": "vit.encoder.layer.0",
    "vit.embeddings.cls_token": "vit.embeddings",
    "classifier.weight": "classifier",
    # State space models and mixtures of experts: an expert belongs to its block.
    "backbone.layers.4.mixer.A_log": "backbone.layers.4",
    "model.layers.3.mlp.experts.7.w1.weight": "model.layers.3",
    "model.layers.3.block_sparse_moe.gate.weight": "model.layers.3",
    "module.model.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts.0.fc.weight": "model.layers.1",
    # Nested stacks: the outermost index is the block.
    "stages.2.blocks.5.norm.weight": "stages.2",
    # Plain Sequential and single modules.
    "0.weight": "0",
    "net.0.weight": "net.0",
    "weight": "weight",
    "prompt.0": "prompt",
    # Wrappers.
    "_orig_mod.model.norm.weight": "model.norm",
    "model._orig_mod.layers.0.mlp.weight": "model.layers.0",
    "model.layers.0._checkpoint_wrapped_module.mlp.weight": "model.layers.0",
    "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.weight": "model.layers.0",
    "module.lm_head.weight": "lm_head",
    # PEFT: an adapter belongs to the layer of what it adapts.
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": "model.layers.0",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": "model.layers.0",
    "base_model.model.lm_head.base_layer.weight": "lm_head",
    "base_model.model.lm_head.lora_B.other.weight": "lm_head",
    "base_model.model.lm_head.modules_to_save.default.weight": "lm_head",
    "base_model.model.lm_head.original_module.weight": "lm_head",
    "base_model.model.model.embed_tokens.lora_embedding_A.default": "model.embed_tokens",
    "base_model.model.classifier.ia3_l.default": "classifier",
    "base_model.model.model.norm.weight": "model.norm",
}


@pytest.mark.known_fault("llmtailor 2")
@pytest.mark.parametrize(("name", "layer"), NAMES.items())
def test_layers_are_named_by_structure(name: str, layer: str) -> None:
    """Blocks end in their outermost index, everything else is named after the module that owns it."""
    assert layer == layer_of(name)


@pytest.mark.parametrize(
    ("layer", "index"),
    [
        ("model.layers.3", 3),
        ("transformer.h.0", 0),
        ("0", 0),
        ("lm_head", None),
        ("model.norm", None),
        ("", None),
        ("layers.3b", None),
    ],
)
def test_blocks_have_an_index(layer: str, index: int | None) -> None:
    """A block's index is its last component; auxiliary layers have none."""
    assert index == block_index(layer)


def test_layers_keep_the_order_of_the_model() -> None:
    """Layers come in the order of their first name, and no name is lost or doubled."""
    names = ["wte.weight", "h.0.a", "h.0.b.weight", "h.1.a", "ln_f.weight", "h.0.late.weight", "lm_head.weight"]

    found = layers_in_order(names)

    assert list(found) == ["wte", "h.0", "h.1", "ln_f", "lm_head"]
    assert found["h.0"] == ["h.0.a", "h.0.b.weight", "h.0.late.weight"]
    assert sorted(names) == sorted(name for members in found.values() for name in members)


@pytest.mark.parametrize(
    ("pattern", "layer"),
    [
        (r"encoder\.stage\d+", "encoder.stage2"),
        (r"encoder\.(stage\d+)", "stage2"),
        (r"(encoder)\.(?P<layer>stage\d+)", "stage2"),
        (r"no such thing", "encoder.stage2.conv"),
        (r"bias$", "bias"),
    ],
)
def test_a_pattern_overrides_the_rule_where_it_matches(pattern: str, layer: str) -> None:
    """The group ``layer``, else the first group, else the match is the name; without a match the rule decides."""
    assert layer == layer_of("encoder.stage2.conv.bias", pattern=compile_pattern(pattern))


@pytest.mark.parametrize("pattern", ["()x*", "(?P<layer>)e", "(z)?encoder", "$"])
def test_a_pattern_that_gives_no_name_is_refused(pattern: str) -> None:
    """A match that is empty would lump strangers together: it is refused, and the hint says what to write."""
    with pytest.raises(InvalidInput, match=r"gives 'encoder\.bias' no layer name") as caught:
        layer_of("encoder.bias", pattern=re.compile(pattern))

    assert caught.value.hint


def test_a_pattern_that_is_no_expression_is_refused() -> None:
    """A broken expression is the user's mistake, not a traceback."""
    with pytest.raises(InvalidInput, match="is not a regular expression"):
        compile_pattern("(")


COMPONENTS = st.one_of(
    st.sampled_from(
        ["model", "layers", "0", "17", "_orig_mod", "lora_A", "default", "base_model", "module", "", "weight"]
    ),
    st.text(max_size=8),
)


@given(st.lists(COMPONENTS, min_size=1, max_size=8).map(".".join).filter(bool))
def test_every_name_has_a_layer(name: str) -> None:
    """Whatever a parameter is called, it has one layer, which begins its bare name and depends on nothing else."""
    layer = layer_of(name)

    assert layer
    assert strip_wrappers(name).startswith(layer)
    assert layer == layer_of(name)


@given(
    st.lists(COMPONENTS, min_size=1, max_size=4), st.integers(0, 10**6), st.lists(COMPONENTS, min_size=1, max_size=4)
)
def test_all_parameters_of_a_block_are_in_it(stack: list[str], index: int, tail: list[str]) -> None:
    """Whatever follows a block's index makes no difference to its layer."""
    block = ".".join([*stack, str(index)])

    assert layer_of(f"{block}.weight") == layer_of(".".join([block, "x", *tail, "weight"]))


@pytest.mark.parametrize("name", ["sft", "run-1", "a", "Größe", "日本", "50%", "a:b", "a b", "é" * 100])
def test_ordinary_names_are_allowed(name: str) -> None:
    """Names of runs and pins may use any script, digits and ordinary signs."""
    assert name == check_name(name, what="the run's name")


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        ("é" * 101, "longer than 200 bytes"),
        ("x" * 10_000, "longer than 200 bytes"),
        ("\ud800", "not valid Unicode"),
        ("e\u0301", "composed form"),
        ("a\nb", "control characters"),
        ("a\0b", "control characters"),
        ("\u202eabc", "control characters"),
        ("a\u2028b", "control characters"),
        ("-x", "starts with '-'"),
        ("a@b", "contains one of"),
        ("a~1", "contains one of"),
        ("a/b", "contains one of"),
        ("a\\b", "contains one of"),
        ("a*", "contains one of"),
        (".", "starts with '.'"),
        ("..", "starts with '.'"),
        (".hidden", "starts with '.'"),
        ("a..b", "starts with '.'"),
    ],
)
def test_names_that_could_be_mistaken_are_refused(name: str, problem: str) -> None:
    """Nothing that could be a path, an option, a reference or an invisible twin may name a run or a pin."""
    with pytest.raises(InvalidInput, match=problem) as caught:
        check_name(name, what="the run's name")

    assert caught.value.hint == "a name is like sft-8b_lr2.5; with spaces it needs quotes"


@pytest.mark.fault(71)
@given(st.text(max_size=20))
def test_an_allowed_name_is_safe_in_a_path_and_in_a_reference(name: str) -> None:
    """Whatever is allowed has one spelling, one line and no sign that a path or a reference uses."""
    try:
        check_name(name, what="the name")
    except InvalidInput:
        return

    assert not set(name) & set("/\\@~\0\n\r")
    assert name not in {"", ".", ".."}
    assert name.encode().decode() == name
