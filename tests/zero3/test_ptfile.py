"""Promises of the ``.pt`` reader and writer, checked against torch in both directions."""

import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from isal import isal_zlib

from layerstore.dtypes import DTYPES
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.limits import PAGE_BYTES
from layerstore.tree import Global, Inert, Located, OrderedMap, Size, Storage, Tensor, Tree
from layerstore.zero3.pt import PtFile, layout_pt, read_pt
from tests.zero3.ptfiles import held, write_pt

DTYPE_NAMES = [row.torch_name for row in DTYPES]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same tensors in any order of tests."""
    torch.manual_seed(7)


def saved(path: Path, value: object) -> PtFile:
    """Save *value* with torch and read the file."""
    torch.save(value, path)
    return read_pt(path)


def entries(tree: Tree) -> dict[Tree, Tree]:
    """Return *tree* as a dict, which it must be."""
    assert isinstance(tree, dict)
    return tree


def tensor_at(tree: Tree, key: str) -> Tensor:
    """Return the tensor under *key*."""
    found = entries(tree)[key]
    assert isinstance(found, Tensor)
    return found


def rewritten(path: Path, value: object) -> Path:
    """Save *value* with torch, read it, and write it again beside."""
    return write_pt(path.with_name(f"again-{path.name}"), saved(path, value).tree)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements of *tensor*, in order."""
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())


def sample(dtype_name: str) -> torch.Tensor:
    """Make a tensor of any element type from fixed bits, NaNs of all kinds among them."""
    bits = torch.arange(4096, dtype=torch.int64).mul(2654435761).remainder(251).to(torch.uint8)
    dtype = getattr(torch, dtype_name)
    return bits.remainder(2).bool() if dtype is torch.bool else bits.view(dtype)


@pytest.mark.fault(69)
@pytest.mark.parametrize("dtype_name", DTYPE_NAMES)
def test_every_element_type_goes_both_ways(tmp_path: Path, dtype_name: str) -> None:
    """The bytes of a torch tensor are where the reader says, and torch reads ours back bit for bit."""
    source = sample(dtype_name)

    file = saved(tmp_path / "a.pt", {"t": source})
    again = torch.load(write_pt(tmp_path / "b.pt", file.tree))["t"]

    assert raw(source) == held(tensor_at(file.tree, "t").storage)
    assert (source.dtype, raw(source)) == (again.dtype, raw(again))


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu"}, {"weights_only": False}])
def test_torch_loads_what_we_write(tmp_path: Path, options: dict[str, Any]) -> None:
    """Plain, mapped, relocated, trusting: every way of torch.load takes our files."""
    source = OrderedDict(weight=torch.randn(5, 7), step=torch.tensor(3.0), empty=torch.empty(0), name="x")

    read = torch.load(rewritten(tmp_path / "a.pt", source), **options)

    assert list(read) == list(source)
    assert all(torch.equal(read[key], cast(torch.Tensor, source[key])) for key in ("weight", "step", "empty"))


def test_payloads_start_on_pages_and_empty_ones_cost_nothing(tmp_path: Path) -> None:
    """Every payload that is not empty is page-aligned, or as asked; a thousand placeholders stay small."""
    placeholders: dict[str, torch.Tensor] = {str(number): torch.empty(0) for number in range(1000)}
    tree = saved(tmp_path / "a.pt", {"a": torch.ones(5), "b": torch.ones(9999), **placeholders}).tree

    for alignment_bytes in (PAGE_BYTES, 64, 1, 512):
        layout = layout_pt(tree, name="a", alignment_bytes=alignment_bytes)
        assert all(offset % alignment_bytes == 0 for storage, offset in layout.storages if storage.elements)
        assert layout.size_bytes < 400_000


@pytest.mark.fault(69)
def test_shared_storages_stay_shared(tmp_path: Path) -> None:
    """Views with offsets and strides of one storage share it in the tree, and in what torch loads of ours."""
    flat = torch.arange(12, dtype=torch.float32)
    source = {"flat": flat, "part": flat.narrow(0, 3, 4), "matrix": flat.view(3, 4).t(), "other": flat.clone()}

    file = saved(tmp_path / "a.pt", source)
    again = torch.load(write_pt(tmp_path / "b.pt", file.tree))

    part, matrix = tensor_at(file.tree, "part"), tensor_at(file.tree, "matrix")
    assert part.storage is matrix.storage is tensor_at(file.tree, "flat").storage
    assert part.storage is not tensor_at(file.tree, "other").storage
    assert (part.offset, part.shape, part.stride) == (3, Size((4,)), (1,))
    assert (matrix.shape, matrix.stride, matrix.is_contiguous) == (Size((4, 3)), (1, 4), False)
    assert len(file.storages) == 2
    assert all(torch.equal(again[key], source[key]) for key in source)
    again["flat"][3] = 100.0
    assert again["part"][0] == again["matrix"][3, 0] == 100.0
    assert again["other"][3] == 3.0


@pytest.mark.fault(69)
def test_shapes_at_the_edge(tmp_path: Path) -> None:
    """Scalars, empty tensors of any shape and expanded views come back in shape and stride."""
    source = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(3, 0, 2),
        "expanded": torch.ones(1).expand(4, 5),
        "end": torch.ones(4)[4:],
    }

    file = saved(tmp_path / "a.pt", source)
    again = torch.load(write_pt(tmp_path / "b.pt", file.tree))

    for key, tensor in source.items():
        assert (tuple(tensor.shape), tensor.stride()) == (
            tensor_at(file.tree, key).shape,
            tensor_at(file.tree, key).stride,
        )
        assert (tensor.shape, tensor.stride()) == (again[key].shape, again[key].stride())
        assert torch.equal(tensor, again[key])


def test_an_expanded_view_beyond_reason_is_not_supported(tmp_path: Path) -> None:
    """One element that claims to be a terabyte is refused before anybody writes it out."""
    with pytest.raises(Unsupported, match=r"at t: an expanded tensor"):
        saved(tmp_path / "a.pt", {"t": torch.ones(1).expand(2**40)})


def test_parameters_and_attributes(tmp_path: Path) -> None:
    """Parameters, required gradients and Python attributes (DeepSpeed's ds_id) survive both ways."""
    flat = torch.ones(3, requires_grad=True)
    cast(Any, flat).ds_id = "0_47"
    tagged = torch.nn.Parameter(torch.ones(2))
    cast(Any, tagged).tag = {"a": [1]}
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    small = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2), requires_grad=False)
    source = {"flat": flat, "tagged": tagged, "frozen": frozen, "small": small}

    file = saved(tmp_path / "a.pt", source)
    again = torch.load(write_pt(tmp_path / "b.pt", file.tree), weights_only=False)

    shown = {
        key: (item.is_parameter, item.requires_grad, item.attributes)
        for key, item in ((key, tensor_at(file.tree, key)) for key in source)
    }
    assert shown == {
        "flat": (False, True, {"ds_id": "0_47"}),
        "tagged": (True, True, {"tag": {"a": [1]}}),
        "frozen": (True, False, None),
        "small": (True, False, None),
    }
    assert (again["flat"].ds_id, again["flat"].requires_grad) == ("0_47", True)
    assert again["tagged"].tag == {"a": [1]}
    assert [type(again[key]) for key in source] == [torch.Tensor, *[torch.nn.Parameter] * 3]
    assert [again[key].requires_grad for key in source] == [True, True, False, False]
    assert again["small"].dtype == torch.float8_e5m2


def test_a_parameter_made_from_a_type_keeps_its_attributes(tmp_path: Path) -> None:
    """The form that wraps a parameter like any tensor with attributes is a parameter, too."""
    state: Tree = {"a": 1}
    storage = Storage(dtype="F32", elements=1, device="cpu", content=bytes(4))
    tensor = Tensor(storage=storage, offset=0, shape=Size((1,)), stride=(1,), attributes={"a": 1})
    path = write_pt(tmp_path / "a.pt", tensor)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    changed = records["a/data.pkl"].replace(b"ctorch\nTensor\n", b"ctorch.nn.parameter\nParameter\n")
    with zipfile.ZipFile(path, "w") as archive:
        for name, payload in (records | {"a/data.pkl": changed}).items():
            archive.writestr(name, payload)

    read = read_pt(path).tree

    assert isinstance(read, Tensor)
    assert (read.is_parameter, read.attributes) == (True, state)


def test_values_beside_tensors(tmp_path: Path) -> None:
    """The types of a model_states file that are not tensors, as torch saves them."""
    state = torch.nn.BatchNorm1d(3).state_dict()
    source = {
        "module": state,
        "shapes": [OrderedDict(w=torch.Size([2, 3]))],
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "names": {"b", "a"},
        "bytes": [b"", b"\x00\xff"],
        "betas": (0.9, 0.999),
        "buckets": float("inf"),
        "big": 2**100,
        "complex": 1 + 2j,
    }

    path = tmp_path / "a.pt"
    tree = entries(saved(path, source).tree)
    again = torch.load(write_pt(tmp_path / "b.pt", tree))

    module = tree["module"]
    assert isinstance(module, OrderedMap)
    assert list(module) == list(state)
    assert module.attributes is not None
    assert "_metadata" in module.attributes
    assert tree["shapes"] == [OrderedMap({"w": Size((2, 3))})]
    assert tree["dtype"] == Global("torch.bfloat16")
    assert tree["device"] == Inert(name="torch.device", arguments=("cuda", 1))
    assert again["module"]._metadata == cast(Any, state)._metadata
    assert {key: again[key] for key in list(source)[1:]} == {key: source[key] for key in list(source)[1:]}


def test_the_crc_of_every_payload_is_passed_on(tmp_path: Path) -> None:
    """The directory's CRC is the payload's own, for torch's files and for ours."""
    for path in (tmp_path / "a.pt", rewritten(tmp_path / "a.pt", {"w": torch.randn(999), "e": torch.empty(0)})):
        for storage in read_pt(path).storages:
            assert isinstance(storage.content, Located)
            assert isal_zlib.crc32(held(storage)) == storage.content.crc32


@pytest.mark.fault(69)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "torch._utils._rebuild_qtensor",
            marks=pytest.mark.filterwarnings("ignore"),
            id="quantized",
        ),
        pytest.param(lambda: torch.eye(2).to_sparse(), "torch._utils._rebuild_sparse_tensor", id="sparse"),
        pytest.param(
            lambda: torch.eye(2).to_sparse_csr(),
            "torch._utils._rebuild_sparse_tensor",
            marks=pytest.mark.filterwarnings("ignore"),
            id="compressed sparse",
        ),
        pytest.param(lambda: torch.empty(2, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage", id="meta"),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "torch._utils._rebuild_nested_tensor",
            marks=pytest.mark.filterwarnings("ignore"),
            id="nested",
        ),
        pytest.param(
            lambda: torch.ones(2, dtype=torch.complex128), "element type ComplexDoubleStorage", id="complex128"
        ),
        pytest.param(
            lambda: torch.ones(2).to(torch.float8_e8m0fnu), "element type float8_e8m0fnu", id="float8_e8m0fnu"
        ),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated", id="conjugated"),
        pytest.param(lambda: torch.ones(2).untyped_storage(), "a storage without a tensor", id="storage"),
        pytest.param(
            lambda: [(flat := torch.ones(2)).view(torch.uint16), flat.view(torch.float8_e5m2)],
            "viewed as U16 and as F8_E5M2",
            id="two element types",
        ),
    ],
)
def test_tensors_without_a_place_here_are_named(tmp_path: Path, make: Callable[[], object], what: str) -> None:
    """A layout or element type that is not supported is said by name, with its key path and file."""
    with pytest.raises(Unsupported) as caught:
        saved(tmp_path / "a.pt", {"client": {"extra": make()}})

    assert what in str(caught.value)
    assert "client.extra" in str(caught.value)
    assert str(tmp_path / "a.pt") in str(caught.value)


@pytest.mark.fault(57)
def test_the_legacy_stream_is_refused_by_its_setting(tmp_path: Path) -> None:
    """A file in torch's old format is recognised, and the DeepSpeed setting behind it named."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)

    with pytest.raises(SourceCheckpoint, match="legacy") as caught:
        read_pt(path)

    assert caught.value.hint is not None
    assert '"checkpoint": {"checkpoint_serialization": false}' in caught.value.hint


@pytest.mark.fault(87)
def test_big_endian_files_are_not_supported(tmp_path: Path) -> None:
    """Tensors of the other byte order are refused instead of misread."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        archive.writestr("a/byteorder", b"big")

    with pytest.raises(Unsupported, match="big-endian"):
        read_pt(path)


def test_every_flipped_bit_of_the_pickle_is_found(tmp_path: Path) -> None:
    """The pickle's CRC is checked before a single opcode is believed."""
    path = rewritten(tmp_path / "a.pt", {"lr": 0.1, "w": torch.ones(2)})
    with zipfile.ZipFile(path) as archive:
        payload = archive.read(f"{path.stem}/data.pkl")
    whole = path.read_bytes()
    start = whole.index(payload)
    for bit in range(len(payload) * 8):
        flipped = bytearray(whole)
        flipped[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)

        with pytest.raises(SourceCheckpoint, match=r"the entry data\.pkl has the CRC") as caught:
            read_pt(path)

        assert caught.value.facts["reason"] == "damaged"


@pytest.mark.fault(61)
def test_every_truncation_of_a_torch_file_is_incomplete(tmp_path: Path) -> None:
    """A rank file cut at any point is reported as truncated."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(200)}, path)
    whole = path.read_bytes()
    for size_bytes in range(0, len(whole), 7):
        path.write_bytes(whole[:size_bytes])

        with pytest.raises(SourceCheckpoint, match="truncated") as caught:
            read_pt(path)

        assert caught.value.facts["reason"] == "truncated"


@pytest.mark.fault(69)
def test_a_storage_beyond_four_gigabytes(tmp_path: Path) -> None:
    """ZIP64 both ways: torch maps a storage of more than 4 GiB and one behind it, and so do we."""
    large = Storage(dtype="BF16", elements=2**31 + 17, device="cpu")
    small = Storage(dtype="I64", elements=2, device="cpu", content=(5).to_bytes(8, "little") * 2)
    tree: Tree = {
        "large": Tensor(storage=large, offset=0, shape=Size((large.elements,)), stride=(1,)),
        "small": Tensor(storage=small, offset=0, shape=Size((2,)), stride=(1,)),
    }
    layout = layout_pt(tree, name="large")
    offsets = dict(layout.storages)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:  # the large payload stays a hole, whose last element is set
        for offset, piece in [
            *layout.skeleton({large: 0, small: isal_zlib.crc32(held(small))}),
            (offsets[small], held(small)),
            (offsets[large] + 2 * (large.elements - 1), b"\x80\x3f"),
        ]:
            file.seek(offset)
            file.write(piece)

    read = torch.load(path, mmap=True)
    located = [storage.content for storage in read_pt(path).storages]

    assert path.stat().st_size == layout.size_bytes > 2**32
    assert read["large"].shape == (large.elements,)
    assert (read["large"][-1].item(), read["large"][-2].item()) == (1.0, 0.0)
    assert read["small"].tolist() == [5, 5]
    assert [offsets[large], offsets[small]] == [cast(Located, place).offset_bytes for place in located]
    assert cast(Located, located[0]).size_bytes == 2 * large.elements
    with zipfile.ZipFile(path) as archive:
        assert archive.read("large/data/1") == held(small)


def test_a_torch_file_beyond_four_gigabytes(tmp_path: Path) -> None:
    """The ZIP64 forms that torch itself writes are read: sizes and offsets above 32 bits."""
    path = tmp_path / "large.pt"
    with torch.serialization.skip_data():  # lays the payloads out as holes
        torch.save({"large": torch.empty(2**32 + 17, dtype=torch.int8), "small": torch.ones(3)}, path)

    located = [cast(Located, storage.content) for storage in read_pt(path).storages]

    assert [place.size_bytes for place in located] == [2**32 + 17, 12]
    assert located[1].offset_bytes > 2**32


@pytest.mark.fault(87)
def test_reading_imports_neither_torch_nor_pickle(tmp_path: Path) -> None:
    """A file is read and laid out without torch, numpy or the pickle module in the process."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "s": torch.Size([1])}, path)
    # The packages' own __init__ may need more: here only the modules under test are imported.
    code = (
        "import pathlib, sys, types\n"
        "for name in ('layerstore', 'layerstore.zero3'):\n"
        "    package = sys.modules[name] = types.ModuleType(name)\n"
        "    package.__path__ = [str(pathlib.Path(sys.argv[2], *name.split('.')))]\n"
        "from layerstore.zero3.pt import layout_pt, read_pt\n"
        "layout_pt(read_pt(pathlib.Path(sys.argv[1])).tree, name='a')\n"
        "print(sorted({'torch', 'numpy', 'pickle', '_pickle', 'pickletools'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", code, str(path), str(Path(__file__).parents[2])]

    done = subprocess.run(command, check=True, capture_output=True, text=True)

    assert done.stdout == "[]\n"
