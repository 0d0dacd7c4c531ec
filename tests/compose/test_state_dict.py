"""A composite's weights as torch tensors: the numbers of an export, in memory of their own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from layerstore import Store
from layerstore.dtypes import DTypeName
from layerstore.errors import InvalidInput
from tests.unit.checkpoints import checkpoint


@pytest.mark.parametrize("dtype", [None, "bf16", "fp32"])
def test_the_numbers_are_those_of_an_export(store: Store, tmp_path: Path, dtype: DTypeName | None) -> None:
    """Bit for bit, under the same names, whichever type is asked for."""
    store.ingest(checkpoint(tmp_path, world_size=2, frozen=("model.layers.0",)))
    composite = store.compose()
    composite.export(tmp_path / "model", dtype=dtype)
    expected = load_file(tmp_path / "model" / "model.safetensors")

    actual = composite.state_dict(dtype=dtype)

    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8))


def test_tensors_may_be_written_to(store: Store, tmp_path: Path) -> None:
    """They are copies: the store stays as it is."""
    store.ingest(checkpoint(tmp_path))

    for tensor in store.compose().state_dict(dtype="bf16").values():
        tensor.zero_()

    assert store.verify(read_data=True).ok
    assert any(tensor.any() for tensor in store.compose().state_dict().values())


def test_an_unknown_type_is_refused(store: Store, tmp_path: Path) -> None:
    """With the types that there are."""
    store.ingest(checkpoint(tmp_path))

    with pytest.raises(InvalidInput, match="'int8' is not an element type to export"):
        store.compose().state_dict(dtype="int8")  # type: ignore[arg-type]  # what the test is about
