"""A model on the meta device has the parameters of the real one, whatever its family; and nothing else happens."""

from __future__ import annotations

import json
import socket
import sys
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import pytest

from layerstore.errors import Unsupported
from layerstore.hf.meta_model import parameter_shapes
from layerstore.inspect import model_at

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = TEXT | {"num_key_value_heads": 1}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    "image_size": 16,
    "patch_size": 8,
}
LLAMA = {"model_type": "llama", **GROUPED}
LLAMA_MODEL = LLAMA | {"architectures": ["LlamaForCausalLM"]}
# Model type, class, settings.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, tied": ("llama", "LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "llama, a reward model": ("llama", "LlamaForSequenceClassification", GROUPED | {"num_labels": 1}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        GROUPED | {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    ),
    "llava": (
        "llava",
        "LlavaForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_are_those_of_the_real_model(family: str, tmp_path: Path) -> None:
    """Names, shapes and order, by the config that ``save_pretrained`` writes; tied weights once."""
    import transformers

    kind, name, settings = FAMILIES[family]
    real = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **settings))
    real.config.architectures = [name]
    real.config.save_pretrained(tmp_path)

    model = model_at(tmp_path, ask_transformers=parameter_shapes)

    shapes = parameter_shapes(json.loads((tmp_path / "config.json").read_text()))
    assert list(shapes) == [(each, tuple(parameter.shape)) for each, parameter in real.named_parameters()]
    assert (model.architecture, model.source) == (kind, "config")
    assert model.parameters == real.num_parameters()


def test_nothing_of_the_folder_is_run_and_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code, kernels and packing that a config names are ignored: they do not affect shapes."""
    ran = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    named = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "evil/repo--modeling_evil.Model"}
    kernels = {"attn_implementation": "evil/kernels", "_attn_implementation": "evil/kernels"}
    config = LLAMA_MODEL | {"auto_map": named} | kernels
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)

    model = model_at(tmp_path, ask_transformers=parameter_shapes)
    assert model.parameters == sum(prod(shape) for _, shape in parameter_shapes(LLAMA_MODEL))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "names no model class of Transformers .*: None"),
        (LLAMA | {"architectures": ["MyOwnModel"]}, r"names no model class of Transformers .*: \['MyOwnModel'\]"),
        (LLAMA | {"architectures": ["load_tool"]}, "names no model class"),
        (LLAMA_MODEL | {"hidden_size": "wide"}, "cannot make a model from the config: .*hidden_size"),
        (LLAMA_MODEL | {"hidden_size": 10**10}, "cannot make a model from the config"),
    ],
)
def test_what_transformers_does_not_know_is_refused(config: dict[str, Any], message: str) -> None:
    """In one line, with the way that needs no config; nothing is guessed."""
    with pytest.raises(Unsupported, match=message) as refused:
        parameter_shapes(config)

    assert "--params 8B --layers 32" in str(refused.value.hint)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_without_transformers_there_is_the_way_on(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint says what to install, and what works without."""
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(Unsupported, match="only Transformers knows what a config") as refused:
        parameter_shapes(LLAMA_MODEL)
    assert "pip install 'layerstore[demo]'" in str(refused.value.hint)
    assert "--params 8B --layers 32" in str(refused.value.hint)
