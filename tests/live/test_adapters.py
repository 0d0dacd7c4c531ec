"""What PEFT trains is kept as PEFT saves it: composed folders and exports are loaded by PEFT itself, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import layerstore
from layerstore.composite import Composite
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.hf.peft import name_in_file
from layerstore.model import BlobRef
from layerstore.states import RankState, SourceFile
from layerstore.storage import Repository
from layerstore.store import Store
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, train

pytest.importorskip("peft", reason="PEFT is not installed: it comes with the extra 'test'")

pytestmark = [
    pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX),
    # transformers' own, of peft's import
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what all jobs left."""
    out = tmp_path_factory.mktemp("adapters")
    train("tests.live.adapters", ["--out", str(out)], log=out / "train.log")
    return out


@pytest.fixture
def store(trained: Path) -> Iterator[Store]:
    """Return the store that they saved to."""
    with layerstore.open(trained / "store") as opened:
        yield opened


def loaded(trained: Path, folder: Path, *, second: Path | None = None) -> Tensors:
    """Return the whole state of the model that PEFT makes of the base and the adapter in *folder*."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(trained / "base", dtype=torch.bfloat16)
    model: Any = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
    if second is not None:
        model.load_adapter(str(second), "second", autocast_adapter_dtype=False)
    state: Tensors = model.state_dict()
    return state


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    """Compare names, types, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


def masters(store: Store, ref: str, *, adapter: str = "default") -> Tensors:
    """Return what the layers of *ref* have of *adapter*, rounded by torch, by PEFT's names."""
    found = {}
    composite = store.compose(ref)
    parameters = {
        parameter.name: parameter
        for entry in composite.composition.layers
        for parameter in store.repo.version_of(entry).parameters
    }
    for name, array in composite.tensors().items():
        in_file = name_in_file(name, adapter)
        if in_file is not None:
            tensor = torch.from_numpy(array.copy()).view(parameters[name].shape)
            found[in_file] = tensor.to(torch.bfloat16)
    return found


# -- composed folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 4])
def test_a_composite_of_a_live_save_has_the_adapter_as_the_trainer_wrote_it(
    trained: Path, store: Store, tmp_path: Path, *, step: int
) -> None:
    """Byte for byte; PEFT loads it, and what it loads is what it loads of the Trainer's own folder."""
    store.compose(f"stored@{step}").write(tmp_path / "composed")

    own = trained / "files" / f"checkpoint-{step}"
    for name in (WEIGHTS, CONFIG, "README.md"):
        assert (tmp_path / "composed" / name).read_bytes() == (trained / "stored" / own.name / name).read_bytes()
    assert_equal(load_file(tmp_path / "composed" / WEIGHTS), load_file(own / WEIGHTS))
    assert_equal(loaded(trained, tmp_path / "composed"), loaded(trained, own))


def test_a_mixture_has_the_values_of_its_own_layers(trained: Path, store: Store, tmp_path: Path) -> None:
    """Saved live under a policy: half of the layers are as they were two steps before, in the adapter's file too."""
    composite = store.compose("parity@4")
    ages = {choice.step for choice in composite.layers.values()}
    composite.write(tmp_path / "composed")

    found = load_file(tmp_path / "composed" / WEIGHTS)
    assert ages == {2, 4}
    assert_equal(found, masters(store, "parity@4"))
    first, last = (load_file(trained / "files" / f"checkpoint-{step}" / WEIGHTS) for step in (2, 4))
    sources = {name: (torch.equal(found[name], first[name]), torch.equal(found[name], last[name])) for name in found}
    assert set(sources.values()) == {(True, False), (False, True)}
    assert loaded(trained, tmp_path / "composed")


def test_several_adapters_are_mixed_each_in_its_folder(trained: Path, store: Store, tmp_path: Path) -> None:
    """One of them with DoRA, whose names are its own."""
    store.compose("two@4").write(tmp_path / "composed")

    assert_equal(load_file(tmp_path / "composed" / WEIGHTS), masters(store, "two@4"))
    second = load_file(tmp_path / "composed" / "second" / WEIGHTS)
    assert_equal(second, masters(store, "two@4", adapter="second"))
    assert any(name.endswith("lora_magnitude_vector") for name in second)
    assert loaded(trained, tmp_path / "composed", second=tmp_path / "composed" / "second")


# -- exports -------------------------------------------------------------------------------------------------------


def test_an_export_is_the_folder_that_the_trainer_left(trained: Path, store: Store, tmp_path: Path) -> None:
    """Of the very step, weights and config byte for byte, with the model card; no whole weights, nothing to resume."""
    exported = store.compose("stored@4").export(tmp_path / "out")

    own = trained / "stored" / "checkpoint-4"
    assert set(exported.files) == {WEIGHTS, CONFIG, "README.md", "layerstore.json"}
    assert exported.notes == ()
    assert exported.dtype == "bf16"
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "out" / name).read_bytes() == (own / name).read_bytes()
    assert_equal(loaded(trained, tmp_path / "out"), loaded(trained, own))
    store.compose("stored@2").export(tmp_path / "out", force=True)


def test_several_adapters_are_exported_each_to_its_folder(trained: Path, store: Store, tmp_path: Path) -> None:
    """As PEFT itself saves them."""
    store.compose("two@2").export(tmp_path / "out")

    own = trained / "two" / "checkpoint-2"
    for name in (WEIGHTS, CONFIG, f"second/{WEIGHTS}", f"second/{CONFIG}"):
        assert (tmp_path / "out" / name).read_bytes() == (own / name).read_bytes()
    assert_equal(
        loaded(trained, tmp_path / "out", second=tmp_path / "out" / "second"),
        loaded(trained, own, second=own / "second"),
    )


@pytest.mark.parametrize("ref", ["stored@4", "raw@2"], ids=["with the trainer's file", "without one"])
def test_an_adapter_in_another_type(store: Store, tmp_path: Path, *, ref: str) -> None:
    """The masters themselves, under PEFT's names."""
    store.compose(ref).export(tmp_path / "out", dtype="fp32")

    found = load_file(tmp_path / "out" / WEIGHTS)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert_equal({name: tensor.to(torch.bfloat16) for name, tensor in found.items()}, masters(store, ref))


def test_a_run_with_frozen_weights_is_exported_as_its_adapter(trained: Path, store: Store, tmp_path: Path) -> None:
    """Without a Trainer, but with the config as an extra file: what PEFT makes of the same weights; a note says so."""
    exported = store.compose("raw@2").export(tmp_path / "out")

    assert any("frozen weights are left out" in note for note in exported.notes)
    assert_equal(load_file(tmp_path / "out" / WEIGHTS), load_file(trained / "raw" / WEIGHTS))
    with safe_open(tmp_path / "out" / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_equal(loaded(trained, tmp_path / "out"), loaded(trained, trained / "raw"))


@pytest.mark.parametrize("case", ["method", "absent", "stray", "garbage"])
def test_what_peft_has_no_place_for_is_refused(trained: Path, store: Store, tmp_path: Path, *, case: str) -> None:
    """A method whose files have rules of their own; an adapter without parameters; a stray weight; no config."""
    own = (trained / "config" / CONFIG).read_bytes()
    other = json.dumps({**json.loads(own), "peft_type": "VBLORA"}).encode()
    ref, files, error, words = {
        "method": ("raw@2", {CONFIG: other}, Unsupported, "'default' is of type VBLORA"),
        "absent": ("raw@2", {CONFIG: own, f"other/{CONFIG}": own}, Unsupported, "no parameter of adapter 'other'"),
        "stray": ("two@2", {CONFIG: own}, Unsupported, "belongs to no adapter with a config"),
        "garbage": ("raw@2", {CONFIG: b"{"}, SourceCheckpoint, "is not a config of an adapter"),
    }[case]
    composite = Composite(cast(Any, OtherFiles(store.repo, files)), store.compose(ref).composition)

    with pytest.raises(error, match=words):
        composite.export(tmp_path / "out")

    assert list(tmp_path.iterdir()) == []


class OtherFiles:
    """The repository of a store whose commits have other small files beside their shards."""

    def __init__(self, repo: Repository, files: dict[str, bytes]) -> None:
        self._repo = repo
        self._files = tuple(SourceFile(path=path, executable=False, content=data) for path, data in files.items())

    def state(self, ref: BlobRef) -> RankState:
        """Return a rank's state with these files."""
        return replace(self._repo.state(ref), files=self._files)

    def __getattr__(self, name: str) -> object:
        return getattr(self._repo, name)
