"""Promises of an export's weights files: what Transformers would write, laid out on pages."""

import json
from pathlib import Path

import safetensors
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from layerstore.assemble.safetensors import WeightTensor, weights_files
from layerstore.hf.plan import index_of
from layerstore.limits import PAGE_BYTES
from layerstore.states import TensorSource


def member(name: str, *shape: int, dtype: str = "BF16") -> WeightTensor:
    """Return a parameter of an export."""
    return WeightTensor(name=name, dtype=dtype, shape=shape, source=TensorSource.PARAMETER, layer_name=name)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_tensors_are_dealt_out_as_transformers_does(elements: list[int], shard_bytes_max: int) -> None:
    """The same tensors in files of the same names, and so the same index."""
    tensors = [member(f"t{number:02d}", count) for number, count in enumerate(elements)]
    expected = split_state_dict_into_shards_factory(
        {tensor.name: tensor for tensor in tensors},
        get_storage_size=lambda tensor: tensor.size_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes_max,
    )

    files = weights_files(tensors, shard_bytes_max=shard_bytes_max)

    assert {name: sorted(names) for name, names in expected.filename_to_tensors.items()} == {
        file.name: sorted(tensor.name for tensor in file.tensors) for file in files
    }
    index = json.loads(index_of(files))
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"] == {"total_parameters": sum(elements), "total_size": 2 * sum(elements)}
    assert all(
        sum(tensor.size_bytes for tensor in file.tensors) <= shard_bytes_max or len(file.tensors) == 1 for file in files
    )


def test_a_shards_payload_starts_on_pages(tmp_path: Path) -> None:
    """Whole pages come first, each tensor lies on a multiple of its element, and safetensors reads the header."""
    tensors = [member("a", 3), member("b", PAGE_BYTES, dtype="F32"), member("c", 5, dtype="F32"), member("d", 2048)]

    (file,) = weights_files(tensors, shard_bytes_max=10**9)

    starts = {tensor.name: offset for tensor, offset in zip(file.tensors, file.frame.offsets, strict=True)}
    assert list(starts) == ["b", "d", "c", "a"]
    assert len(file.frame.header) % PAGE_BYTES == 0
    assert [starts[name] % PAGE_BYTES for name in ("b", "d", "c")] == [0, 0, 0]
    assert file.tensor_at(starts["d"]).name == file.tensor_at(starts["c"] - 1).name == "d"
    path = tmp_path / file.name
    path.write_bytes(file.frame.header + bytes(file.frame.size_bytes - len(file.frame.header)))
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert sorted(opened.keys()) == ["a", "b", "c", "d"]
        assert opened.get_slice("b").get_shape() == [PAGE_BYTES]
