"""Promises about what a composite replaces, and when it does not appear at all."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstore import Store
from layerstore.assemble import assemble
from layerstore.disk import Hook
from layerstore.errors import AlreadyExists, IntegrityError, InvalidInput
from layerstore.formats.hf import HuggingFace
from layerstore.numbers import convert
from tests.unit.checkpoints import checkpoint, digests


def write_composite(store: Store, out: Path, *, force: bool) -> object:
    """Compose."""
    return store.compose("sft").write(out, force=force)


def write_export(store: Store, out: Path, *, force: bool) -> object:
    """Export."""
    return store.compose("sft").export(out, force=force)


def add_file(out: Path) -> str:
    """Put a file of the user's into *out*."""
    (out / "notes.txt").write_text("mine")
    return "notes.txt"


def add_tag(out: Path) -> str:
    """Let a later save put its tag beside that in *out*."""
    checkpoint(out.parent / "later", step=4).joinpath("global_step4").rename(out / "global_step4")
    return "global_step4"


@pytest.mark.fault(78)
def test_what_may_not_be_a_target_is_refused(store: Store, tmp_path: Path) -> None:
    """Nothing is written into the store or around it, through a link, or in the place of a file."""
    store.ingest(checkpoint(tmp_path))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = digests(tmp_path)

    for out, error, words in (
        (store.path / "objects" / "new", InvalidInput, "is inside the store"),
        (store.path, InvalidInput, "is inside the store"),
        (store.path.parent, InvalidInput, "contains the store"),
        (tmp_path / "file", AlreadyExists, "is not a folder"),
        (tmp_path / "link", AlreadyExists, "is not a folder"),
        (tmp_path / "file" / "out", InvalidInput, "file is not a folder"),
        (Path("a\0b"), InvalidInput, "is not a path"),
    ):
        for write in (write_composite, write_export):
            with pytest.raises(error, match=words):
                write(store, out, force=True)

    assert before == digests(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_format_has_only_its_own_options(store: Store, tmp_path: Path) -> None:
    """By name or as a value: what it does not have is refused in one line, and so is a class."""
    store.ingest(checkpoint(tmp_path))
    composite = store.compose()
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"format": "dcp", "dtype": "bf16"}, "format dcp has no option dtype"),
        ({"format": "hf", "first": 1, "second": 2}, "format hf has no option first"),
        ({"format": "gguf"}, "there is no format 'gguf'"),
        ({"format": HuggingFace(), "dtype": "bf16"}, "a format was given together with options"),
        ({"format": HuggingFace}, "a format was given together with options"),
        ({"verfy": False}, "format hf has no option verfy"),
    ]

    for words, message in mistakes:
        with pytest.raises(InvalidInput, match=message):
            composite.export(tmp_path / "out", **words)
    assert not (tmp_path / "out").exists()


@pytest.mark.known_fault("llmtailor 9")
def test_an_older_one_is_replaced_only_when_told_and_only_one_of_its_kind(store: Store, tmp_path: Path) -> None:
    """Shards replace shards, an export an export, and neither a folder of something else."""
    store.ingest(checkpoint(tmp_path, layout="hf"))
    composite = store.compose("sft")
    out = composite.export(tmp_path / "out", max_shard_size="2KB").out
    shards = composite.write(tmp_path / "shards").out
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    before = digests(tmp_path)

    for write, at in ((write_composite, shards), (write_export, out)):
        with pytest.raises(AlreadyExists, match="is not empty; nothing was changed"):
            write(store, at, force=False)
    with pytest.raises(AlreadyExists, match="also holds 'global_step2'"):
        composite.export(shards, force=True)
    with pytest.raises(AlreadyExists, match="is not a checkpoint"):
        composite.write(out, force=True)
    with pytest.raises(AlreadyExists, match="is not an export"):
        composite.export(tmp_path / "home", force=True)
    assert before == digests(tmp_path)

    composite.export(out, force=True)
    composite.write(shards, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "layerstore.json", "model.safetensors"]


def test_what_layerstore_did_not_write_is_replaced_only_by_name(store: Store, tmp_path: Path) -> None:
    """A checkpoint of DeepSpeed, or an export of Transformers, may be the only one of its kind."""
    theirs = checkpoint(tmp_path / "theirs", layout="hf")
    store.ingest(theirs)
    composite = store.compose("sft")
    model = composite.export(tmp_path / "model").out
    foreign: list[tuple[Any, Path]] = [(composite.write, theirs), (composite.export, model)]
    (model / "layerstore.json").unlink()
    before = digests(tmp_path)

    for write, out in foreign:
        for force in (False, True):
            with pytest.raises(AlreadyExists, match="that layerstore did not write") as refused:
                write(out, force=force)
            assert "--force-foreign" in str(refused.value.hint)
    assert before == digests(tmp_path)

    for write, out in foreign:
        write(out, force="foreign")
        assert (out / "layerstore.json").exists()


def test_what_a_trainer_has_saved_since_is_replaced_only_by_name(store: Store, tmp_path: Path) -> None:
    """It resumed from the folder, and saved into it."""
    store.ingest(checkpoint(tmp_path, layout="hf"))
    composite = store.compose("sft")
    shards, model = composite.write(tmp_path / "shards").out, composite.export(tmp_path / "model").out
    composite.write(shards, force=True)
    composite.export(model, force=True)
    later = time.time() + 3600
    for saved in (shards / "latest", model / "model.safetensors"):
        os.utime(saved, (later, later))
    before = digests(tmp_path)

    for write in (write_composite, write_export):
        with pytest.raises(AlreadyExists, match="or that has changed since"):
            write(store, shards if write is write_composite else model, force=True)

    assert before == digests(tmp_path)


@pytest.mark.known_fault("llmtailor 9")
@pytest.mark.parametrize("add", [add_file, add_tag])
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


def rounded_differently(data: Any, *, source: str, target: str) -> memoryview:
    """Round as another machine might: off by one bit."""
    rounded = bytearray(convert(data, source=source, target=target))
    rounded[-1] ^= 1
    return memoryview(rounded)


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_that_round_differently_stop_a_compose(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """What is derived is checked against what was saved; nothing appears at the target."""
    source = checkpoint(tmp_path, layout="hf", world_size=world_size)
    assert store.ingest(source).bytes_derived
    neighbours = sorted(tmp_path.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "convert", rounded_differently)
        with pytest.raises(IntegrityError, match="rounded from its master, does not match"):
            store.compose("sft").write(tmp_path / "out")
    assert neighbours == sorted(tmp_path.iterdir())

    out = store.compose("sft").write(tmp_path / "out").out
    assert digests(source, leave_out="_states.pt") == digests(out, leave_out="_states.pt")


def just_before(is_it: Callable[[str, Path], bool], do: Callable[[], object]) -> Hook:
    """Return a hook that does something else once, right before the first operation that *is_it*."""
    left = [do]

    def hook(operation: str, path: Path) -> None:
        if left and is_it(operation, path):
            left.pop()()

    return hook


def last_rename(out: Path) -> Callable[[str, Path], bool]:
    """Return what knows the rename that lets *out* appear."""
    return lambda operation, path: (operation, path) == ("rename", out)


def make_latest(out: Path) -> None:
    """Make a folder that looks like a composite and is none."""
    out.mkdir()
    (out / "latest").write_text("mine")


@pytest.mark.parametrize(
    ("come", "write", "force", "was_there"),
    [
        (Path.mkdir, write_composite, False, False),
        (make_latest, write_composite, True, True),
        (make_latest, write_export, False, True),
        (Path.touch, write_export, True, False),
    ],
    ids=["empty folder", "full folder with force", "full folder", "file with force"],
)
def test_what_comes_to_the_target_meanwhile_stays(
    store: Store, tmp_path: Path, come: Callable[[Path], None], write: Any, force: bool, was_there: bool
) -> None:
    """From nothing or from an empty folder: what was written is removed, and one error says so."""
    store.ingest(checkpoint(tmp_path))
    out = tmp_path / "out"
    if was_there:
        out.mkdir()
    neighbours = sorted([*tmp_path.iterdir(), *([] if was_there else [out])])
    with (
        Store(store.path, hook=just_before(last_rename(out), lambda: come(out))) as hooked,
        pytest.raises(AlreadyExists, match="appeared while we were writing") as caught,
    ):
        write(hooked, out, force=force)

    assert "-o" in (caught.value.hint or "")
    assert neighbours == sorted(tmp_path.iterdir())
    assert out.is_file() == (come is Path.touch)
    assert [path.name for path in out.glob("*")] == (["latest"] if come is make_latest else [])


def test_force_replaces_only_the_folder_that_was_looked_at(store: Store, tmp_path: Path) -> None:
    """Another one that takes its place meanwhile, also a composite, stays as it is."""
    store.ingest(checkpoint(tmp_path))
    out = store.compose("sft").write(tmp_path / "out").out

    def exchange() -> None:
        out.rename(tmp_path / "looked at")
        make_latest(out)

    hook = just_before(lambda operation, path: ".replaced-" in path.name, exchange)
    with Store(store.path, hook=hook) as hooked, pytest.raises(AlreadyExists, match="appeared while we were writing"):
        hooked.compose("sft").write(out, force=True)

    assert [path.name for path in out.iterdir()] == ["latest"]
    assert not list(tmp_path.glob("out.*"))


def test_what_force_has_moved_away_is_named_where_it_cannot_be_put_back(store: Store, tmp_path: Path) -> None:
    """Something has come to its place: both are whole, and it is said where the older one is."""
    store.ingest(checkpoint(tmp_path))
    out = store.compose("sft").write(tmp_path / "out").out
    before = digests(out)
    with (
        Store(store.path, hook=just_before(last_rename(out), lambda: make_latest(out))) as hooked,
        pytest.warns(UserWarning, match=r"is intact at .*out\.replaced-"),
        pytest.raises(AlreadyExists, match="appeared while we were writing"),
    ):
        hooked.compose("sft").write(out, force=True)

    [aside] = tmp_path.glob("out.*")
    assert before == digests(aside)
    assert [path.name for path in out.iterdir()] == ["latest"]


@pytest.mark.parametrize("was_there", [False, True], ids=["nothing was there", "an older report was there"])
def test_a_report_replaces_only_the_file_that_was_looked_at(store: Store, tmp_path: Path, was_there: bool) -> None:
    """What comes to its name meanwhile stays, and the report is not there."""
    store.ingest(checkpoint(tmp_path))
    out = tmp_path / "report.html"
    if was_there:
        store.report(out)

    def come() -> None:
        out.unlink(missing_ok=True)
        out.write_text("mine")

    hook = just_before(lambda operation, path: operation == "fsync" and ".partial-" in path.name, come)
    with Store(store.path, hook=hook) as hooked, pytest.raises(AlreadyExists, match="appeared while we were writing"):
        hooked.report(out)

    assert out.read_text() == "mine"
    assert not list(tmp_path.glob("report.html.*"))
