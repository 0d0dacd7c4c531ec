"""Promises of tensor objects: real safetensors files, one sequence of bytes per content, payloads on pages."""

from collections.abc import Sequence
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from layerstore.framing import Frame, canonical_order, frame
from layerstore.limits import PAGE_BYTES
from layerstore.model import StoredTensor

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


def stored(name: str, elements: int, *, dtype: str = "F32", state: str = "") -> StoredTensor:
    """Return a slice."""
    return StoredTensor(name=name, state=state, dtype=dtype, elements=elements, crc32=0)


def content(tensor: StoredTensor) -> bytes:
    """Return bytes that are different for every slice."""
    pattern = f"{tensor.key}|".encode()
    return (pattern * (tensor.size_bytes // len(pattern) + 1))[: tensor.size_bytes]


def file_of(tensors: Sequence[StoredTensor]) -> tuple[Frame, bytes]:
    """Return the frame of *tensors* and a file made by it."""
    framing = frame(tensors)
    return framing, framing.header + b"".join(map(content, tensors))


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SLICES = st.lists(
    st.builds(
        stored,
        KEYS,
        st.integers(1, 40) | st.sampled_from([1024, 2048, 4096]),
        dtype=st.sampled_from(sorted(NUMPY)),
        state=st.sampled_from(["", "exp_avg", "exp_avg_sq"]),
    ),
    max_size=8,
    unique_by=lambda tensor: tensor.key,
)


@given(SLICES)
def test_the_safetensors_library_reads_every_object(slices: list[StoredTensor]) -> None:
    """Names, types, shapes and bytes are what the library finds, for any names and sizes."""
    if any(tensor.key == "__metadata__" for tensor in slices):
        return
    tensors = canonical_order(slices)
    _, data = file_of(tensors)

    found = load(data)

    assert {tensor.key for tensor in tensors} == found.keys()
    for tensor in tensors:
        expected = np.frombuffer(content(tensor), dtype=NUMPY[tensor.dtype])
        assert found[tensor.key].dtype == expected.dtype
        assert found[tensor.key].tobytes() == expected.tobytes()


@given(SLICES)
def test_payloads_start_on_a_page_and_offsets_are_true(slices: list[StoredTensor]) -> None:
    """The header fills whole pages, tensors follow without a gap, and slices of whole pages stay on pages."""
    tensors = canonical_order(slices)

    framing, data = file_of(tensors)

    assert len(framing.header) % PAGE_BYTES == 0
    assert len(data) == framing.size_bytes
    for tensor, offset in zip(tensors, framing.offsets, strict=True):
        assert content(tensor) == data[offset : offset + tensor.size_bytes]
        if tensor.size_bytes % PAGE_BYTES == 0:
            assert offset % PAGE_BYTES == 0


@given(SLICES, st.randoms())
def test_one_content_has_one_sequence_of_bytes(slices: list[StoredTensor], random: Random) -> None:
    """The order in which the slices are found makes no difference."""
    shuffled = list(slices)
    random.shuffle(shuffled)

    assert frame(canonical_order(slices)) == frame(canonical_order(shuffled))


def test_the_order_is_pages_first_then_by_key() -> None:
    """Slices of whole pages come first; within each part keys are in order of their code points."""
    slices = [stored("b", 1), stored("z", 1024), stored("B", 1), stored("é", 1), stored("a", 2048), stored("c", 1023)]

    assert "".join(tensor.key for tensor in canonical_order(slices)) == "azBbcé"


def test_the_header_is_pinned() -> None:
    """Key order, spacing and padding to the byte: they are hashed, so a change here is a change of format."""
    tensors = canonical_order([stored("bias", 3), stored("wé", 1024, dtype="BF16", state="exp_avg"), stored("w", 1024)])

    header = frame(tensors).header

    text = (
        '{"w":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]},'
        '"bias":{"dtype":"F32","shape":[3],"data_offsets":[4096,4108]},'
        '"exp_avg/wé":{"dtype":"BF16","shape":[1024],"data_offsets":[4108,6156]}}'
    ).encode()
    assert header == (4096 - 8).to_bytes(8, "little") + text + b" " * (4096 - 8 - len(text))


def test_a_long_header_takes_the_pages_that_it_needs() -> None:
    """A header of more than a page is padded to the next page."""
    tensors = canonical_order([stored(f"layer.{number:04d}.weight", 1) for number in range(400)])

    framing, data = file_of(tensors)

    assert len(framing.header) > PAGE_BYTES - 1
    assert len(framing.header) % PAGE_BYTES == 0
    assert len(load(data)) == 400
