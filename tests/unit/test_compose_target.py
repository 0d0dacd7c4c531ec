"""Promises about what a composite replaces, and when it does not appear at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import AlreadyExists, IntegrityError
from layerstore.ops import assemble
from layerstore.zero3.rounding import round_master
from tests.unit.test_verbs import checkpoint, digests


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with layerstore.init(tmp_path / "store") as made:
        yield made


def add_file(out: Path) -> str:
    """Put a file of the user's into *out*."""
    (out / "notes.txt").write_text("mine")
    return "notes.txt"


def add_folder(out: Path) -> str:
    """Put a folder of the user's into *out*."""
    (out / "runs").mkdir()
    return "runs"


def add_tag(out: Path) -> str:
    """Let a later save put its tag beside that in *out*."""
    checkpoint(out.parent / "later", step=4).joinpath("global_step4").rename(out / "global_step4")
    return "global_step4"


def add_link(out: Path) -> str:
    """Put a link to nothing into *out*."""
    (out / "broken").symlink_to("nowhere")
    return "broken"


@pytest.mark.known_fault("llmtailor 9")
@pytest.mark.parametrize("add", [add_file, add_folder, add_tag, add_link])
def test_force_never_costs_what_the_composite_does_not_renew(store: Store, tmp_path: Path, add: Any) -> None:
    """Another tag or file in the folder is named, and everything stays as it was."""
    store.ingest(checkpoint(tmp_path))
    out = store.compose("sft").write(tmp_path / "out").out
    name = add(out)
    before, neighbours = digests(out), sorted(tmp_path.iterdir())

    with pytest.raises(AlreadyExists, match=f"also holds '{name}'"):
        store.compose("sft").write(out, force=True)

    assert before == digests(out)
    assert neighbours == sorted(tmp_path.iterdir())


@pytest.mark.known_fault("llmtailor 9")
def test_force_replaces_an_older_form_of_the_checkpoint(store: Store, tmp_path: Path) -> None:
    """Whatever the files held: they are what the store says afterwards."""
    store.ingest(checkpoint(tmp_path))
    out = store.compose("sft").write(tmp_path / "out").out
    expected = digests(out)
    for path in out.rglob("*.pt"):
        path.write_bytes(b"torn")

    store.compose("sft").write(out, force=True)

    assert expected == digests(out)


def rounded_differently(data: Any, *, master: str, weights: str) -> bytes:
    """Round as another machine might: off by one bit."""
    rounded = bytearray(round_master(data, master=master, weights=weights))
    rounded[-1] ^= 1
    return bytes(rounded)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_that_round_differently_stop_a_compose(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """What is derived is checked against what was saved; nothing appears at the target."""
    source = checkpoint(tmp_path, layout="hf", world_size=world_size)
    assert store.ingest(source).bytes_derived
    neighbours = sorted(tmp_path.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "round_master", rounded_differently)
        with pytest.raises(IntegrityError, match="rounded from its master, is not what it was"):
            store.compose("sft").write(tmp_path / "out")
    assert neighbours == sorted(tmp_path.iterdir())

    out = store.compose("sft").write(tmp_path / "out").out
    assert digests(source, leave_out="_states.pt") == digests(out, leave_out="_states.pt")
