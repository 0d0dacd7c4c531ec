"""Promises about what else may lie in a store or beside a checkpoint, and about settings that make no sense."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import InvalidInput
from tests.unit.checkpoints import checkpoint, digests, snapshot


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with layerstore.init(tmp_path / "store") as made:
        yield made


@pytest.mark.parametrize("name", [b"\xff", b"a@b", "e\u0301".encode(), b"new\nline"], ids=ascii)
def test_a_folder_that_cannot_be_a_run_is_a_stranger(store: Store, tmp_path: Path, name: bytes) -> None:
    """Every answer is as without it; verify alone names it."""
    store.ingest(checkpoint(tmp_path))
    before = (store.runs, store.log(), store.show())
    (store.path / "commits" / os.fsdecode(name)).mkdir()

    assert before == (store.runs, store.log(), store.show())
    assert [("stranger", b"commits/" + name)] == [
        (damage.kind, os.fsencode(damage.path)) for damage in store.verify().damaged
    ]


def test_a_pin_whose_name_is_none_harms_nobody(store: Store, tmp_path: Path) -> None:
    """A stray file beside the pins is not taken for one."""
    store.ingest(checkpoint(tmp_path), pin="best")
    (store.path / "pins" / os.fsdecode(b"\xff")).write_bytes(b"?")

    assert [pin.name for pin in store.pins()] == ["best"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "soon", ""])
def test_a_lock_timeout_that_is_no_time_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    """It would wait for ever, or never; nothing is written."""
    source, before = checkpoint(tmp_path), snapshot(store)
    monkeypatch.setenv("LAYERSTORE_LOCK_TIMEOUT", seconds)

    with pytest.raises(InvalidInput, match="LAYERSTORE_LOCK_TIMEOUT"):
        store.ingest(source)

    assert before == snapshot(store)


def test_a_store_inside_a_checkpoint_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Otherwise every save would hold all saves before it."""
    source = checkpoint(tmp_path, layout="hf")
    expected = digests(source, leave_out="_states.pt")
    with layerstore.init(source / "mine") as store:
        (note,) = store.ingest(source).notes
        out = store.compose("sft").write(tmp_path / "out").out

    assert "it is a store" in note
    assert expected == digests(out, leave_out="_states.pt")


def test_weights_of_an_unknown_type_are_kept_as_they_are(store: Store, tmp_path: Path) -> None:
    """Safetensors may gain element types that nobody here knows."""
    source = checkpoint(tmp_path, layout="hf")
    entry = {"dtype": "F3_E1M1", "shape": [8], "data_offsets": [0, 3]}
    header = json.dumps({"lm_head.weight": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + b"odd"
    (source / "adapter.safetensors").write_bytes(data)

    store.ingest(source)
    out = store.compose("sft").write(tmp_path / "out").out

    assert data == (out / "adapter.safetensors").read_bytes()
