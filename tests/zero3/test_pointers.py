"""Pointer files: small, read back as written, and nobody loads one by mistake."""

from pathlib import Path
from typing import Any

import pytest
import torch

from layerstore.errors import InvalidInput
from layerstore.zero3 import Pointer, pointer_bytes, read_pointer

POINTER = Pointer(store="/data/runs.old/store", store_id="5e" * 16, name="sft@4", run="sft", attempt=2, step=4)


@pytest.mark.parametrize("layers", [None, [{"layer": "model.norm"}]])
def test_a_pointer_is_read_as_it_was_written(tmp_path: Path, layers: Any) -> None:
    """Every field comes back, and the file is small."""
    pointer = Pointer(**{name: getattr(POINTER, name) for name in Pointer.__slots__} | {"layers": layers})
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path.write_bytes(pointer_bytes(pointer, path))

    assert read_pointer(path) == pointer
    assert path.stat().st_size < 4096


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_fails_with_the_command_that_writes_shards(tmp_path: Path, *, weights_only: bool) -> None:
    """Whatever loads it, the text is there, whole."""
    path = tmp_path / "states.pt"
    path.write_bytes(pointer_bytes(POINTER, Path("states.pt")))

    with pytest.raises(RuntimeError) as raised:
        torch.load(path, weights_only=weights_only)

    assert "states.pt is a pointer: the state is in the layerstore /data/runs.old/store as sft@4" in str(raised.value)
    assert "layerstore compose sft@4 -o FOLDER --store /data/runs.old/store" in str(raised.value)


def test_other_files_are_no_pointers(tmp_path: Path) -> None:
    """A file of torch's, a file of no format, and one that is not there."""
    torch.save({"layerstore": {"run": "sft"}}, tmp_path / "tree.pt")
    (tmp_path / "noise.pt").write_bytes(b"noise")

    for name in ("tree.pt", "noise.pt", "absent.pt"):
        assert read_pointer(tmp_path / name) is None


def test_a_pointer_of_another_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is not known is never passed over."""
    path = tmp_path / "states.pt"
    with monkeypatch.context() as patched:
        patched.setattr("layerstore.zero3.pointers.asdict", lambda _: {"newer": 1})
        path.write_bytes(pointer_bytes(POINTER, Path("states.pt")))

    with pytest.raises(InvalidInput, match="pointer of another version"):
        read_pointer(path)


@pytest.mark.parametrize("change", [{"step": "4"}, {"is_pin": 1}, {"store": None}, {"attempt": True}])
def test_a_pointer_with_a_field_of_another_type_says_so(tmp_path: Path, change: dict[str, Any]) -> None:
    """It would lead to nothing, or to something else."""
    fields = {name: getattr(POINTER, name) for name in Pointer.__slots__}
    path = tmp_path / "states.pt"
    path.write_bytes(pointer_bytes(Pointer(**fields | change), Path("states.pt")))

    with pytest.raises(InvalidInput, match="pointer of another version"):
        read_pointer(path)
