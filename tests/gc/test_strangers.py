"""A collection stops at whatever lies among records, pins and parts and is none by its name: it may be one of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import IntegrityError
from layerstore.parts import Part
from tests.gc.test_gc import collect, steps
from tests.unit.checkpoints import Checkpoints, snapshot

# That a record is no longer at its place is told, too.
pytestmark = pytest.mark.filterwarnings("ignore::layerstore.storage.IndexNotice")

SESSION = "a" * 32

Harm = Callable[[Path, Path], Path]
"""What renames or adds something in a store, given a folder outside it too; returns what then lies there."""


def renamed(place: str, name: str) -> Harm:
    """Return what renames the first file or folder that matches *place*."""

    def rename(store: Path, _: Path) -> Path:
        old = next(store.glob(place))
        return old.rename(old.with_name(name.format(old.name)))

    return rename


def linked(place: str) -> Harm:
    """Return what moves a folder elsewhere and leaves a link."""

    def link(store: Path, elsewhere: Path) -> Path:
        (store / place).rename(elsewhere / "moved")
        (store / place).symlink_to(elsewhere / "moved")
        return store / place

    return link


def added(place: str) -> Harm:
    """Return what adds a file, as an editor or a sync tool does."""

    def add(store: Path, _: Path) -> Path:
        (store / place).write_bytes(b"")
        return store / place

    return add


HARMS: dict[str, Harm] = {
    "a run's folder, renamed by a sync tool": renamed("commits/r", "a (copy)@1"),
    "a run's folder, hidden": renamed("commits/r", ".r"),
    "a run's folder, a link": linked("commits/r"),
    "a record, renamed by a sync tool": renamed("commits/r/20.*", "{}.sync-conflict-20260101-120000-ABCDEFG"),
    "a record, hidden as rsync does": renamed("commits/r/20.*", ".{}.Xy12Ab"),
    "a record, with a zero": renamed("commits/r/20.*", "0{}"),
    "a record, one folder up": lambda store, _: next(store.glob("commits/r/20.*")).rename(store / "commits" / "20@r"),
    "a file where folders belong": added("commits/s"),
    "a file of an editor": added("commits/r/.swp"),
    "a pin, renamed by a sync tool": renamed("pins/best", "best@2"),
    "a pin, hidden": renamed("pins/best", ".best.icloud"),
    "a file beside the pins": added("pins/.DS_Store"),
    "a session, renamed": renamed(f"parts/{SESSION}", f"{SESSION}-old"),
    "a session, a link": linked(f"parts/{SESSION}"),
    "a part, renamed": renamed(f"parts/{SESSION}/0.0", "{}.sync-conflict"),
    "a dropped record, renamed by a sync tool": renamed("trash/commits/r/10.*", "{}.sync-conflict"),
    "a dropped run's folder, renamed by a sync tool": renamed("trash/commits/r", "a (copy)@1"),
    "a file beside the sessions": added("parts/Thumbs.db"),
}


@pytest.fixture
def kept(store: Store, saved: Checkpoints) -> Store:
    """Return a store with three steps, a pin that alone keeps the first, and a session."""
    saved.into(store, 10, 20, 30)
    store.pin("best", "r@10")
    store.drop("r@10")
    part = Part(
        session=SESSION, save=0, rank=0, agreement="", layers=(), state=None, bytes_new=0, bytes_reused=0, failure=""
    )
    store.repo.parts.publish(part)
    return store


@pytest.mark.fault(128)
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_stranger_stops_a_collection(kept: Store, tmp_path: Path, harm: Harm) -> None:
    """Whatever it needs is unknown: nothing goes, the error names it, and everything else is still read."""
    (tmp_path / "elsewhere").mkdir()
    stranger = harm(kept.path, tmp_path / "elsewhere")
    name = stranger.relative_to(kept.path).as_posix()
    before = snapshot(kept)

    with layerstore.open(kept.path) as fresh:
        for keep in (None, Keep(last=1)):
            for dry_run in (True, False):
                with pytest.raises(IntegrityError, match="; nothing was removed") as caught:
                    collect(fresh, keep, dry_run=dry_run)
                assert str(caught.value).startswith(f"{name} is ")
                assert "give it back its name" in str(caught.value.hint)
        assert name in {damage.path for damage in fresh.verify().damaged if damage.kind == "stranger"}
        fresh.log()
        fresh.pins()

    assert snapshot(kept) == before


@pytest.mark.fault(128)
def test_what_has_its_name_back_is_collected_as_before(kept: Store) -> None:
    """A folder that a sync tool had renamed costs nothing."""
    run = kept.path / "commits" / "r"
    run.rename(run.with_name("r@1"))
    with pytest.raises(IntegrityError), layerstore.open(kept.path) as fresh:
        collect(fresh, Keep(last=1))

    run.with_name("r@1").rename(run)
    with layerstore.open(kept.path) as fresh:
        collect(fresh, Keep(last=1))

        assert steps(fresh) == [30]
        assert fresh.verify(read_data=True).ok
        assert fresh.compose("best").layers


@pytest.mark.fault(128)
def test_a_repair_leaves_strangers_where_they_are(kept: Store) -> None:
    """In the trash they would keep nothing alive, and the next collection would remove what they name."""
    stranger = renamed("commits/r/20.*", "{}.orig")(kept.path, kept.path)

    done = kept.repair()

    assert (done.moved, done.has_lost) == ((), True)
    assert done.strangers == (stranger.relative_to(kept.path).as_posix(),)
    with pytest.raises(IntegrityError):
        collect(kept)


@pytest.mark.parametrize("name", [".nfs0000000000e1a2c300000007", ".fuse_hidden0000001200000003"])
def test_a_removed_file_that_somebody_has_open_stops_nothing(kept: Store, name: str) -> None:
    """NFS and FUSE keep it under such a name until it is closed; a folder or a link of that name is a stranger."""
    for folder in ("commits", "commits/r", "pins", "parts"):
        (kept.path / folder / name).write_bytes(b"")

    assert len(collect(kept, Keep(last=1)).removed) == 1
    assert kept.verify().ok
    (kept.path / "commits" / name).unlink()
    (kept.path / "commits" / name).symlink_to(kept.path / "commits" / "r")
    with pytest.raises(IntegrityError, match=f"^commits/{name} is "):
        collect(kept)


def test_a_folder_that_has_become_a_link_is_not_used(kept: Store, tmp_path: Path) -> None:
    """Folders are looked at again before anything is written, not only when the store is opened."""
    (kept.path / "pins").rename(tmp_path / "pins")
    (kept.path / "pins").symlink_to(tmp_path / "pins")
    before = snapshot(kept)

    with pytest.raises(IntegrityError, match="is not a folder of the store but a link or file"):
        collect(kept, Keep(last=1))

    assert snapshot(kept) == before
