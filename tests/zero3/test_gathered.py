"""Headers of safetensors files, read as the safetensors package reads them, but without mapping the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from layerstore.dtypes import by_code
from layerstore.errors import SourceCheckpoint
from layerstore.model import Buffer, Parameter
from layerstore.source import GatheredSource, open_source, read_header, tensors_in
from layerstore.source.gathered import read_gathered


def file_of(path: Path, header: Any, payload: bytes = b"") -> Path:
    """Write a safetensors file; *header* may be bytes that are none."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
    return path


def entry(dtype: str, *shape: int, begin: int = 0, end: int) -> dict[str, object]:
    """Return a tensor's entry in a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def read(path: Path) -> tuple[GatheredSource, ...]:
    """Return the tensors of *path*."""
    with open_source(path) as file:
        return tensors_in(path, read_header(path, file.read_at, file.size_bytes), file.size_bytes, {})


@given(st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
def test_headers_are_read_as_the_package_reads_them(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, list[int]]]
) -> None:
    """Names, types and places of whatever tensors; the package tells the order, and files have no holes."""
    header, end = {}, 0
    for number, (dtype, shape) in enumerate(tensors):
        elements = 1
        for extent in shape:
            elements *= extent
        begin, end = end, end + elements * by_code(dtype).bytes
        header[f"t{number}"] = entry(dtype, *shape, begin=begin, end=end)
    path = file_of(tmp_path_factory.mktemp("headers") / "model.safetensors", header, bytes(end))

    found = read(path)

    with safe_open(path, framework="numpy") as package:
        assert sorted(package.keys()) == sorted(tensor.name for tensor in found)
        for tensor in found:
            assert (tensor.dtype, tensor.size_bytes) == (
                package.get_slice(tensor.name).get_dtype(),
                package.get_tensor(tensor.name).nbytes if tensor.dtype != "BF16" else tensor.elements * 2,
            )
    assert sum(tensor.size_bytes for tensor in found) == end


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        pytest.param({"a": entry("BF16", 2, end=4)}, b"ab", id="short"),
        pytest.param({"a": entry("BF16", 2, end=4)}, b"abcdef", id="long"),
        pytest.param({"a": entry("BF16", 2, begin=2, end=6)}, b"abcdef", id="hole"),
        pytest.param({"a": entry("U8", 2, end=2), "b": entry("U8", 2, begin=1, end=3)}, b"abc", id="overlap"),
        pytest.param({"a": entry("F32", 2, end=4)}, b"abcd", id="another size than its shape"),
        pytest.param({"a": entry("F32", 1 << 62, 16, end=4)}, b"abcd", id="sizes beyond 64 bits"),
        pytest.param({"a": {"dtype": "F32", "shape": [1]}}, b"abcd", id="no place"),
        pytest.param(b'{"a":', b"", id="no JSON"),
        pytest.param(b"[]", b"", id="no object"),
    ],
)
def test_what_the_package_refuses_is_damaged(tmp_path: Path, header: Any, payload: bytes) -> None:
    """A header that does not add up is an error that names the file."""
    path = file_of(tmp_path / "model.safetensors", header, payload)

    with pytest.raises(SafetensorError), safe_open(path, framework="numpy"):
        pass
    with pytest.raises(SourceCheckpoint, match=r"model\.safetensors is damaged"):
        read(path)


@pytest.mark.parametrize("data", [b"", bytes(7), (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_length_that_the_file_cannot_hold_is_damage(tmp_path: Path, data: bytes) -> None:
    """Nothing is read for a header that the file is too short for."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)

    with pytest.raises(SourceCheckpoint, match="is damaged"):
        read(path)


def test_tensors_are_matched_by_name(tmp_path: Path) -> None:
    """By a name of their own, an alias, or one without wrappers; files without any known name are kept as they are."""
    weight = Parameter(name="module.a", dtype="BF16", shape=(2,), frozen=False, aliases=("tied",))
    buffer = Buffer(name="scale", dtype="F32", shape=(1,))
    header = {
        "a": entry("BF16", 2, end=4),
        "tied": entry("BF16", 2, begin=4, end=8),
        "scale": entry("F32", 1, begin=8, end=12),
        "other": entry("U8", 1, begin=12, end=13),
    }
    known = file_of(tmp_path / "model.safetensors", header, bytes(13))
    unknown = file_of(tmp_path / "unknown.safetensors", {"other": entry("U8", 1, end=1)}, b"a")
    strange = file_of(tmp_path / "strange.safetensors", {"a": entry("F9", 1, end=1)}, b"a")

    gathered, opaque = read_gathered(
        [known, unknown, strange], parameters={weight.name: weight}, buffers={buffer.name: buffer}
    )

    assert opaque == (unknown, strange)
    assert [(tensor.name, tensor.supplier) for tensor in gathered[0].tensors] == [
        ("a", "module.a"),
        ("tied", "module.a"),
        ("scale", "scale"),
        ("other", ""),
    ]
