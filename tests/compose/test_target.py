"""Promises about what a composite replaces, and when it does not appear at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstore import Store
from layerstore.compose import assemble
from layerstore.errors import AlreadyExists, IntegrityError
from layerstore.storage import Hook
from layerstore.zero3 import convert
from tests.unit.checkpoints import checkpoint, digests


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


def rounded_differently(data: Any, *, source: str, target: str) -> memoryview:
    """Round as another machine might: off by one bit."""
    rounded = bytearray(convert(data, source=source, target=target))
    rounded[-1] ^= 1
    return memoryview(rounded)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_that_round_differently_stop_a_compose(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """What is derived is checked against what was saved; nothing appears at the target."""
    source = checkpoint(tmp_path, layout="hf", world_size=world_size)
    assert store.ingest(source).bytes_derived
    neighbours = sorted(tmp_path.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "convert", rounded_differently)
        with pytest.raises(IntegrityError, match="rounded from its master, is not what it was"):
            store.compose("sft").write(tmp_path / "out")
    assert neighbours == sorted(tmp_path.iterdir())

    out = store.compose("sft").write(tmp_path / "out").out
    assert digests(source, leave_out="_states.pt") == digests(out, leave_out="_states.pt")


def write_composite(store: Store, out: Path, *, force: bool) -> object:
    """Compose."""
    return store.compose("sft").write(out, force=force)


def write_export(store: Store, out: Path, *, force: bool) -> object:
    """Export."""
    return store.compose("sft").export(out, force=force)


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


@pytest.mark.parametrize("come", [Path.mkdir, make_latest, Path.touch], ids=["empty folder", "full folder", "file"])
@pytest.mark.parametrize("write", [write_composite, write_export])
@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize("was_there", [False, True], ids=["from nothing", "from an empty folder"])
def test_what_comes_to_the_target_meanwhile_stays(
    store: Store, tmp_path: Path, write: Any, come: Callable[[Path], None], force: bool, was_there: bool
) -> None:
    """With and without --force: what was written is removed, and one error says so."""
    store.ingest(checkpoint(tmp_path))
    out = tmp_path / "out"
    if was_there:
        out.mkdir()
    neighbours = sorted([*tmp_path.iterdir(), *([] if was_there else [out])])
    with (
        Store(store.path, hook=just_before(last_rename(out), lambda: come(out))) as hooked,
        pytest.raises(AlreadyExists, match="has come to be there meanwhile") as caught,
    ):
        write(hooked, out, force=force)

    assert "-o" in (caught.value.hint or "")
    assert neighbours == sorted(tmp_path.iterdir())
    assert out.is_file() == (come is Path.touch)
    assert [path.name for path in out.glob("*")] == (["latest"] if come is make_latest else [])


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
def test_two_composes_to_one_folder_do_not_both_succeed(store: Store, tmp_path: Path, force: bool) -> None:
    """The one that is later is refused, and what the first one wrote stays."""
    store.ingest(checkpoint(tmp_path))
    store.ingest(checkpoint(tmp_path, step=4), tag="global_step4")
    out = tmp_path / "out"
    hook = just_before(last_rename(out), lambda: store.compose("sft@2").write(out, force=force))
    with Store(store.path, hook=hook) as hooked, pytest.raises(AlreadyExists, match="has come to be there meanwhile"):
        hooked.compose("sft@4").write(out, force=force)

    assert (out / "latest").read_text() == "global_step2"
    assert not list(tmp_path.glob("out.*"))


def test_force_replaces_only_the_folder_that_was_looked_at(store: Store, tmp_path: Path) -> None:
    """Another one that takes its place meanwhile, also a composite, stays as it is."""
    store.ingest(checkpoint(tmp_path))
    out = store.compose("sft").write(tmp_path / "out").out

    def exchange() -> None:
        out.rename(tmp_path / "looked at")
        make_latest(out)

    hook = just_before(lambda operation, path: ".replaced-" in path.name, exchange)
    with Store(store.path, hook=hook) as hooked, pytest.raises(AlreadyExists, match="has come to be there meanwhile"):
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
        pytest.warns(UserWarning, match=r"is whole at .*out\.replaced-"),
        pytest.raises(AlreadyExists, match="has come to be there meanwhile"),
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
    with Store(store.path, hook=hook) as hooked, pytest.raises(AlreadyExists, match="has come to be there meanwhile"):
        hooked.report(out)

    assert out.read_text() == "mine"
    assert not list(tmp_path.glob("report.html.*"))
