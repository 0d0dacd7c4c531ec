"""How Transformers writes models: asked by configs that a stranger may have written, and held against what it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerstore.errors import Unsupported
from layerstore.hf.weight_names import FileTensor, ask_transformers, may_be_renamed
from tests.environment import REPOSITORY
from tests.ranks.launch import cpu_environment

EXPERTS = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
}
UP_AND_GATE = "model.layers.0.mlp.experts.gate_up_proj"
SHAPES = {UP_AND_GATE: (2, 12, 8)}


def runs(written: FileTensor) -> list[tuple[str, int, int]]:
    """Return where the elements of a tensor come from."""
    return [(run.name, run.start, run.elements) for run in written.runs]


def test_experts_are_cut_as_their_files_have_them() -> None:
    """Each is a stretch of the tensor in memory; what a config says of code and of hubs is passed over."""
    config = EXPERTS | {"auto_map": {"AutoModel": "evil--module.Class"}, "attn_implementation": "evil/kernels"}

    written = ask_transformers(config, SHAPES, {})

    prefix = "model.layers.0.block_sparse_moe.experts"
    assert {name: (tensor.shape, runs(tensor)) for name, tensor in written.items()} == {
        f"{prefix}.{expert}.{part}.weight": ((6, 8), [(UP_AND_GATE, 96 * expert + start, 48)])
        for expert in (0, 1)
        for part, start in (("w1", 0), ("w3", 48))
    }


@pytest.mark.parametrize(
    ("config", "shapes", "expected", "message"),
    [
        (EXPERTS | {"architectures": None}, SHAPES, {}, "names no model class"),
        (EXPERTS, {"elsewhere": (2,)}, {}, "has no 'elsewhere' of shape"),
        (EXPERTS, SHAPES, {"other": (2,)}, "would not write 'other' of shape"),
        (EXPERTS | {"hidden_size": "wide"}, SHAPES, {}, "cannot say how it writes the weights"),
    ],
)
def test_what_it_does_not_know_is_refused(
    config: dict[str, Any], shapes: dict[str, Any], expected: dict[str, Any], message: str
) -> None:
    """The error is one line; its hint names an alternative."""
    with pytest.raises(Unsupported, match=message) as refused:
        ask_transformers(config, shapes, expected)

    assert "\n" not in str(refused.value)
    assert "compose --format shards" in str(refused.value.hint)


def test_nothing_of_the_folder_that_somebody_stands_in_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a checkpoint's folder, with files of any name."""
    (tmp_path / "torch.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    monkeypatch.chdir(tmp_path)

    ask_transformers(EXPERTS, SHAPES, {})

    assert [path.name for path in tmp_path.iterdir()] == ["torch.py"]


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"transformers_version": "5.23.0"}, True),
        ({"transformers_version": "5.0.0.dev0"}, True),
        ({"transformers_version": "4.57.1"}, False),
        ({"transformers_version": "5.23.0", "auto_map": {"AutoModel": "modeling.Mine"}}, False),
        ({"transformers_version": "soon"}, False),
        ({}, False),
    ],
)
def test_only_models_of_transformers_5_may_be_renamed(config: dict[str, object], answer: bool) -> None:
    """Older ones, and a user's own classes, are written as they are in memory."""
    assert may_be_renamed(config) is answer


def test_cuts_and_joints_are_followed_through_everything_torch_does() -> None:
    """What is turned, split, joined, copied and reshaped comes from where a real tensor's elements come from."""
    command = [sys.executable, "-m", "tests.hf.origins"]
    done = subprocess.run(command, cwd=REPOSITORY, env=cpu_environment(), check=True, capture_output=True, text=True)

    found = json.loads(done.stdout.splitlines()[-1])

    assert all(found.values())
    assert len(found) > 8
