"""Promises of sizes and element types as users write them."""

import pytest

from layerstore.dtypes import dtype_code
from layerstore.errors import InvalidInput
from layerstore.units import size_in_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("8KB", 8000),
        ("1.5 kib", 1536),
        ("1tb", 10**12),
        ("123", 123),
        ("123B", 123),
        (77, 77),
    ],
)
def test_sizes_are_read(text: int | str, expected: int) -> None:
    """Decimal and binary units, in any case, with or without a blank."""
    assert expected == size_in_bytes(text)


@pytest.mark.parametrize("text", ["", "GB", "5 GB please", "-1", "5XB", "iB", "3iB", "1e3", "0", "0.1B", 0, -5, "٣GB!"])
def test_what_is_no_size_is_refused(text: int | str) -> None:
    """In one line that shows how to write one."""
    with pytest.raises(InvalidInput, match=r"not a size|at least one byte") as caught:
        size_in_bytes(text)
    assert "2GiB" in str(caught.value.hint)


def test_only_three_types_may_be_asked_for() -> None:
    """The error names them."""
    assert [dtype_code(name) for name in ("bf16", "fp16", "fp32", None)] == ["BF16", "F16", "F32", None]
    with pytest.raises(InvalidInput, match="'int8'") as caught:
        dtype_code("int8")
    assert caught.value.hint == "choose one of bf16, fp16, fp32"
