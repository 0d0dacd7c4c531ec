"""Promises of the table of element types, checked against torch and safetensors."""

import json

import pytest
import torch
from safetensors.torch import save

from layerstore.dtypes import DTYPES, DType, by_code, by_storage_class, by_torch_name
from layerstore.errors import Unsupported

ROWS = pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.code)


@ROWS
def test_sizes_are_torchs(row: DType) -> None:
    """An element takes as many bytes as in torch."""
    assert getattr(torch, row.torch_name).itemsize == row.bytes


@ROWS
def test_codes_are_those_of_safetensors(row: DType) -> None:
    """A tensor has the same code in a file that the safetensors library writes."""
    data = save({"x": torch.zeros(2, dtype=getattr(torch, row.torch_name))})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    assert header["x"]["dtype"] == row.code


@ROWS
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # the files still name these classes
def test_storage_classes_are_torchs(row: DType) -> None:
    """The class that torch.save names for a storage exists and has this element type."""
    if row.storage_class is not None:
        assert getattr(torch, row.storage_class)().dtype == getattr(torch, row.torch_name)


@ROWS
def test_every_name_leads_to_its_row(row: DType) -> None:
    """Code, torch name and storage class find the same row, and none stands for two."""
    assert row == by_code(row.code)
    assert row == by_torch_name(row.torch_name)
    assert row.storage_class is None or row == by_storage_class(row.storage_class)


@pytest.mark.parametrize("name", ["", "f32", "F4", "complex128", "QInt8Storage", "../x"])
def test_an_unknown_type_is_refused_by_name(name: str) -> None:
    """What is not in the table is unsupported, and the message says what it was."""
    for find in (by_code, by_torch_name, by_storage_class):
        with pytest.raises(Unsupported, match="is not supported") as caught:
            find(name)

        assert caught.value.facts == {"dtype": name}
