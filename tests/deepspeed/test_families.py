"""
Families of models: an export is what their own Trainer wrote, under the names and in the cuts of its files.

Transformers 5 holds some of them otherwise in memory; whoever loads an export must not have to know.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import layerstore
from layerstore import Store
from layerstore.errors import Unsupported
from layerstore.layers import layer_of
from tests.compose.test_hf import weights_in
from tests.deepspeed.compare import differing
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch, printed
from tests.deepspeed.scenarios import FAMILIES, FAMILY_STEPS, FAMILY_VARIANTS
from tests.environment import REPOSITORY

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

OLDER = "transformers==4.46.3"
"""What did not know the names that Transformers 5 has in memory."""

# Qwen3 is younger than that. Of Llava's own files, written by Transformers 5, it misses the tower's prefix.
UNKNOWN_TO_OLDER = ("qwen3", "llava")

each_family = pytest.mark.parametrize("family", FAMILIES)
each_variant = pytest.mark.parametrize("variant", FAMILY_VARIANTS)

sampled = pytest.mark.sample(1, always=("mixtral", "llava"), by="family")
sampled_variants = pytest.mark.sample(1, always=("mixtral", "mixtral-shards", "llava-loaded"), by="variant")


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest, launch_cache: Path) -> Launch:
    """Return what was trained of the families that tests of this run ask about."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    found = [item.callspec.params for item in functions if item.path == Path(__file__) and hasattr(item, "callspec")]
    asked = {str(params.get("family") or params.get("variant")).partition("-")[0] for params in found}
    return cached_launch(launch_cache, "families", names=[family for family in FAMILIES if family in asked])


@pytest.fixture(scope="module")
def store(families: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store with both saves of each."""
    with layerstore.init(tmp_path_factory.mktemp("families") / "store") as made:
        for folder in sorted(families.root.iterdir()):
            for step in FAMILY_STEPS:
                made.ingest(folder / f"checkpoint-{step}", run=folder.name)
        yield made


def own_weights(families: Launch, variant: str) -> dict[str, Any]:
    """Return what the Trainer wrote of the last step; without gathered weights, what it wrote of the same with them."""
    name = variant.removesuffix("-shards")
    return load_file(families.root / name / f"checkpoint-{FAMILY_STEPS[-1]}" / "model.safetensors")


@sampled_variants
@each_variant
def test_an_export_has_the_tensors_of_the_trainers_own_file(
    variant: str, store: Store, families: Launch, tmp_path: Path
) -> None:
    """Names, shapes, types and bits; also of a model that was loaded from a file, and where no weights were saved."""
    exported = store.compose(f"{variant}@{FAMILY_STEPS[-1]}").export(tmp_path / "out")

    expected, actual = own_weights(families, variant), weights_in(exported.out)
    assert expected.keys() == actual.keys()
    assert {name: tensor.shape for name, tensor in expected.items()} == {name: t.shape for name, t in actual.items()}
    assert not differing(expected, actual)


def loaded(folders: dict[str, Path], *, libraries: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return what Transformers makes of *folders*, or the one in *libraries*, by name."""
    environment = {} if libraries is None else {"PYTHONPATH": f"{REPOSITORY}:{libraries}"}
    described = printed("pretrained", folders.values(), environment=environment)
    return {name: described[str(folder)] for name, folder in folders.items()}


@pytest.fixture(scope="module")
def exports(store: Store, families: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return, for each family that was trained, the Trainer's folders of both steps, an export, and one of both."""
    root, found = tmp_path_factory.mktemp("exports"), {}
    for family in FAMILIES:
        if (families.root / family).exists():
            for step in FAMILY_STEPS:
                found[f"{family} {step}"] = families.root / family / f"checkpoint-{step}"
            found[f"{family} export"] = store.compose(f"{family}@{FAMILY_STEPS[-1]}").export(root / family).out
            found[f"{family} mixed"] = store.compose(family, policy="parity").export(root / f"{family}-mixed").out
    return found


@pytest.fixture(scope="module")
def in_transformers(exports: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what the Transformers that trained them makes of these folders."""
    return loaded(exports)


@sampled
@each_family
def test_transformers_loads_an_export_like_the_trainers_own_folder(
    family: str, in_transformers: dict[str, dict[str, Any]]
) -> None:
    """No key is missing or unknown, and every tensor is the same to the last bit."""
    assert in_transformers[f"{family} 2"]["complaints"] == {}
    assert in_transformers[f"{family} export"] == in_transformers[f"{family} 2"]


@sampled
@each_family
def test_a_mixture_has_each_tensor_from_the_step_of_its_layer(
    family: str, store: Store, in_transformers: dict[str, dict[str, Any]]
) -> None:
    """Also where a file has one tensor of many, or many of one."""
    layers = store.compose(family, policy="parity").layers
    of_step = {step: in_transformers[f"{family} {step}"]["tensors"] for step in FAMILY_STEPS}

    mixed = in_transformers[f"{family} mixed"]

    assert mixed["complaints"] == {}
    chosen = {name: layers[layer_of(name)].step for name in mixed["tensors"] if layer_of(name) in layers}
    assert set(chosen.values()) == set(FAMILY_STEPS)
    assert {name: of_step[step][name] for name, step in chosen.items()} == {
        name: mixed["tensors"][name] for name in chosen
    }


def test_a_mixture_to_resume_from_says_which_whole_weights_are_the_bases_alone(store: Store, tmp_path: Path) -> None:
    """They have names that no layer has; of a composite of one step nothing need be said."""
    mixed = store.compose("mixtral", policy="parity").write(tmp_path / "mixed")
    same = store.compose("mixtral").write(tmp_path / "same")

    assert any("names that no layer has (" in note and "block_sparse_moe" in note for note in mixed.notes)
    assert same.notes == ()


@pytest.mark.exhaustive
def test_an_older_transformers_loads_exports_like_the_trainers_own_folders(
    exports: dict[str, Path], older: Path
) -> None:
    """It knows only the names in files."""
    folders = {
        name: folder
        for name, folder in exports.items()
        if name.endswith((" 2", " export")) and not name.startswith(UNKNOWN_TO_OLDER)
    }

    found = loaded(folders, libraries=older)

    assert any(name.startswith("mixtral") for name in found)
    for name in (name for name in found if name.endswith(" export")):
        assert found[name]["complaints"] == {}
        assert found[name] == found[name.replace(" export", " 2")]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an older Transformers; skip where it cannot be had."""
    folder = tmp_path_factory.mktemp("older")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), OLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{OLDER} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_names_that_nobody_can_tell_are_refused(
    store: Store, families: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Transformers there is no export of such a model, and nothing is left where it was to be."""
    monkeypatch.setattr("layerstore.hf.weight_names.importlib.util.find_spec", lambda name: None)

    with pytest.raises(Unsupported, match="it is not installed here") as refused:
        store.compose("mixtral").export(tmp_path / "out")

    assert "pip install 'transformers>=5'" in str(refused.value.hint)
    assert not [*tmp_path.iterdir()]
