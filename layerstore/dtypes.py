"""The element types that layerstore moves: one row each, under the code that safetensors uses."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from layerstore.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type."""

    code: str
    """The name in safetensors headers and in version blobs."""
    bytes: int
    """Size of one element."""
    torch_name: str
    """``torch.<name>``."""
    numpy: str
    """The numpy type for its bytes: integers for the bits of bfloat16 and 8-bit floats, which numpy itself lacks."""
    storage_class: str | None
    """The storage class that ``torch.save`` writes for this type; None if torch has only untyped storages for it."""


def _row(code: str, size: int, torch_name: str, numpy: str, storage_class: str | None = None) -> DType:
    return DType(code=code, bytes=size, torch_name=torch_name, numpy=numpy, storage_class=storage_class)


DTYPES = (
    _row("F64", 8, "float64", "<f8", "DoubleStorage"),
    _row("F32", 4, "float32", "<f4", "FloatStorage"),
    _row("F16", 2, "float16", "<f2", "HalfStorage"),
    _row("BF16", 2, "bfloat16", "<u2", "BFloat16Storage"),
    _row("I64", 8, "int64", "<i8", "LongStorage"),
    _row("I32", 4, "int32", "<i4", "IntStorage"),
    _row("I16", 2, "int16", "<i2", "ShortStorage"),
    _row("I8", 1, "int8", "i1", "CharStorage"),
    _row("U8", 1, "uint8", "u1", "ByteStorage"),
    _row("BOOL", 1, "bool", "?", "BoolStorage"),
    _row("C64", 8, "complex64", "<c8", "ComplexFloatStorage"),
    _row("F8_E4M3", 1, "float8_e4m3fn", "u1"),
    _row("F8_E5M2", 1, "float8_e5m2", "u1"),
    _row("U16", 2, "uint16", "<u2"),
    _row("U32", 4, "uint32", "<u4"),
    _row("U64", 8, "uint64", "<u8"),
)

_BY_CODE = {row.code: row for row in DTYPES}
_BY_STORAGE_CLASS = {row.storage_class: row for row in DTYPES if row.storage_class}
_BY_TORCH_NAME = {row.torch_name: row for row in DTYPES}


FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that are rounded or widened to a requested type; others stay as they are."""


@cache  # a save makes millions of calls; unknown codes raise, so the cache stays as small as the table
def by_code(code: str) -> DType:
    """Return the row of the safetensors code *code*."""
    return _find(_BY_CODE, code)


def by_torch_name(name: str) -> DType:
    """Return the row of ``torch.<name>``."""
    return _find(_BY_TORCH_NAME, name)


def knows_torch_name(name: str) -> bool:
    """Whether there is a row of ``torch.<name>``."""
    return name in _BY_TORCH_NAME


def by_storage_class(name: str) -> DType:
    """Return the row of the storage class ``torch.<name>``."""
    return _find(_BY_STORAGE_CLASS, name)


# -- users' names --------------------------------------------------------------------------------------------------

DTypeName = Literal["bf16", "fp16", "fp32"]

_EXPORTED: dict[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def dtype_code(name: str | None) -> str | None:
    """Return the code of *name*, the element type of an export as users write it; None stays None."""
    if name is None:
        return None
    if name not in _EXPORTED:
        raise InvalidInput(f"{name!r} is not an element type to export", hint=f"choose one of {', '.join(_EXPORTED)}")
    return _EXPORTED[name]


def dtype_name(code: str) -> str:
    """Return the name of the element type *code* as users write it."""
    return next((name for name, known in _EXPORTED.items() if known == code), by_code(code).torch_name)


def _find(rows: dict[str, DType], name: str) -> DType:
    try:
        return rows[name]
    except KeyError as exc:
        raise Unsupported(f"element type {name!r} is not supported", dtype=name) from exc
