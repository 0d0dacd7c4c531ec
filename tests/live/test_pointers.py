"""Folders of pointers that a trainer resumes from: each leads to the very composite that it was made for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.errors import InvalidInput, NotFound, SourceCheckpoint
from layerstore.live.pointer_files import composition_of, pointer_to
from layerstore.store import Store
from layerstore.transformers import checkpoint
from layerstore.zero3 import Pointer, read_pointer
from tests.generated import generate

SMALL: dict[str, Any] = {"layers": 4, "hidden": 8, "vocab": 8, "layout": "hf"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with two steps of the run sft, and of the run raw one that no Trainer has saved."""
    with layerstore.init(tmp_path / "store") as made:
        for step in (2, 4):
            made.ingest(generated(tmp_path / f"checkpoint-{step}", step), run="sft")
        made.ingest(generated(tmp_path / "raw", 4, layout="raw"), run="raw")
        yield made


def generated(folder: Path, step: int, **options: Any) -> Path:
    """Return a checkpoint of two ranks."""
    generate(folder, step=step, seed=step, **SMALL | options)
    return folder


def shards(folder: Path) -> list[Path]:
    """Return the files in a folder that stand where shards would."""
    return sorted(folder.rglob("*zero_pp_rank_*_states.pt"))


def the_pointer(folder: Path) -> Pointer:
    """Return what all files of a folder of pointers lead to."""
    first, *others = (read_pointer(path) for path in shards(folder))
    assert first is not None
    assert others == [first] * len(others)
    return first


def test_a_reference_becomes_a_folder_for_the_trainer(store: Store, tmp_path: Path) -> None:
    """Beside the pointers lie the Trainer's files as the commit has them; no weights, and no shards."""
    resume = checkpoint(store, "sft@2", folder=tmp_path / "resume")

    assert resume == str(tmp_path / "resume")
    source = tmp_path / "checkpoint-2"
    names = {path.name for path in Path(resume).iterdir()}
    assert {"global_step2", "latest", "trainer_state.json", "config.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    assert (tmp_path / "resume" / "trainer_state.json").read_bytes() == (source / "trainer_state.json").read_bytes()
    assert (tmp_path / "resume" / "latest").read_text() == "global_step2"
    assert composition_of(store, the_pointer(Path(resume))) == store.compose("sft@2").composition


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_folder_is_for_as_many_ranks_as_there_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Random states go along where they mean something, that is at the number of ranks that saved."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))

    resume = checkpoint(store, "sft", folder=tmp_path / "resume")

    assert resume is not None
    saved_by = len(list((tmp_path / "checkpoint-4" / "global_step4").glob("*model_states.pt")))
    assert len(shards(Path(resume))) == 2 * ranks
    assert len(list(Path(resume).glob("rng_state*"))) == (ranks if ranks == saved_by else 0)


def test_a_mixture_and_a_pin_are_led_to(store: Store, tmp_path: Path) -> None:
    """The layers of a policy are in the pointer; a pin is followed by its name, even if its base is gone."""
    mixture = store.compose("sft", policy="parity").composition
    store.compose("sft", policy="parity").pin("mixed")

    mixed = the_pointer(Path(checkpoint(store, "sft", policy="parity", folder=tmp_path / "mixed") or ""))
    pinned = the_pointer(Path(checkpoint(store, "mixed", folder=tmp_path / "pinned") or ""))
    store.drop("sft@4")

    assert composition_of(store, pinned).layers == mixture.layers
    assert mixed.command.startswith("layerstore compose sft@4 --policy parity -o FOLDER")
    assert (pinned.is_pin, pinned.layers) == (True, None)
    with pytest.raises(NotFound, match="not in the store"):
        composition_of(store, mixed)
    store.ingest(tmp_path / "checkpoint-4", run="sft")
    assert composition_of(store, mixed).layers == mixture.layers


def test_an_attempt_that_was_left_is_led_to_by_its_own_name(store: Store, tmp_path: Path) -> None:
    """The command in the pointer means that attempt's commit, not the newest one's."""
    store.ingest(generated(tmp_path / "again", 4, layout="hf"), run="sft", rollback=True)
    left = store.compose("sft~1@4").composition

    pointer = pointer_to(store, left, pin=None)

    assert pointer.name == "sft~1@4"
    assert composition_of(store, pointer) == left


def test_a_run_without_commits_has_nothing_to_resume(store: Store) -> None:
    """None, so that training begins; but a step that is not there is an error."""
    assert checkpoint(store, "nothing-yet") is None
    with pytest.raises(NotFound):
        checkpoint(store, "nothing-yet@4")
    with pytest.raises(NotFound):
        checkpoint(store, "sft@3")


def test_what_no_trainer_has_saved_is_refused(store: Store, tmp_path: Path) -> None:
    """A Trainer cannot begin without its own state, and the hint names what can."""
    with pytest.raises(NotFound, match="the commit was not saved by a Trainer") as raised:
        checkpoint(store, "raw", folder=tmp_path / "resume")

    assert "layerstore.resume" in str(raised.value.hint)


def test_ingest_tells_pointers_from_shards(store: Store, tmp_path: Path) -> None:
    """One folder is refused with the commit that it leads to; below many it is passed over with a note."""
    resume = checkpoint(store, "sft@2", folder=tmp_path / "out" / "checkpoint-2")
    assert resume is not None

    with pytest.raises(InvalidInput, match=r"holds pointers instead of shards.*as sft@2"):
        store.ingest(resume)
    with pytest.raises(SourceCheckpoint) as raised:
        layerstore.find_checkpoints(tmp_path / "out")
    assert "it holds pointers to sft@2" in str(raised.value.hint)
    found = layerstore.find_checkpoints(tmp_path / "out", tmp_path / "checkpoint-4")
    assert [each.folder.name for each in found.found] == ["checkpoint-4"]
    assert len(found.notes) == 1
