"""A remote in a folder: no link in it is followed, for reading, writing, listing or removing."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import AlreadyExists, IntegrityError, LayerstoreError, StorageIO
from layerstore.remote import Bucket
from layerstore.remote.folder import Folder
from tests.faults.harness import attempt, in_child, limit_address_space
from tests.unit.checkpoints import Checkpoints


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a folder."""
    return f"file://{tmp_path}/remote"


@pytest.fixture
def remote(pinned: Store, tmp_path: Path) -> Path:
    """Return the folder of the remote."""
    return tmp_path / "remote"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a folder of somebody else's, with names as in a store."""
    folder = tmp_path / "elsewhere"
    for name in ("thesis.tex", "2." + "0" * 32, "0" * 32, "r/2." + "0" * 32, "deep/down/notes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    return folder


def content(folder: Path) -> dict[str, bytes | str]:
    """Return everything in *folder*; links as what they say."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


VERBS: dict[str, Callable[[Store, str], object]] = {
    "gc": lambda store, _: store.gc(Keep(last=1), remote="origin", grace_seconds=0),
    "push": lambda store, _: store.push(),
    "log": lambda _, url: layerstore.open(url).log(),
    "pin --delete": lambda store, _: store.delete_pin("best", remote="origin"),
    "repair": lambda store, _: store.repair(remote="origin"),
    "pull": lambda store, _: store.pull(),
}


@pytest.mark.fault(118)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "name", ["trash", "trash/commits", "trash/commits/r", "gc", "gc/at-work", "objects/00", "commits/root", "pins/p"]
)
def test_a_planted_link_is_refused_before_anything_is_changed(
    pinned: Store, saved: Checkpoints, remote: Path, elsewhere: Path, url: str, name: str, verb: str
) -> None:
    """By its name, by every verb, neither the remote nor the folder that it leads to is touched."""
    saved.into(pinned, 8)
    link = remote / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(remote.parent / "moved")
    link.symlink_to("/" if name == "commits/root" else elsewhere)
    before = content(remote), content(elsewhere)

    with pytest.raises(IntegrityError, match=f"{link} is a link"):
        VERBS[verb](pinned, url)

    assert (content(remote), content(elsewhere)) == before


@pytest.mark.fault(118)
@pytest.mark.parametrize("verb", ["gc", "push", "repair"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_in_the_place_of_an_object_is_refused(
    pinned: Store, saved: Checkpoints, remote: Path, elsewhere: Path, url: str, verb: str, kind: str
) -> None:
    """Also before anything is removed, although others are listed first; nor is a fifo waited for."""
    saved.into(pinned, 8)
    victim = max((remote / "objects").rglob("??/*"))
    victim.unlink()
    if kind == "link":
        victim.symlink_to(elsewhere / "thesis.tex")
    else:
        os.mkfifo(victim)
    before = content(remote), content(elsewhere)

    with pytest.raises(IntegrityError, match=victim.name):
        VERBS[verb](pinned, url)
    with pytest.raises(IntegrityError, match=victim.name):
        layerstore.clone(url, remote.parent / "clone")

    assert (content(remote), content(elsewhere)) == before


@pytest.mark.fault(118)
def test_a_link_that_is_planted_later_is_refused(pinned: Store, remote: Path, elsewhere: Path, url: str) -> None:
    """Each request looks at the folders on its way."""
    bucket = Bucket(url)
    (remote / "gc/planted").symlink_to(elsewhere)
    (remote / "gc/file").symlink_to(elsewhere / "thesis.tex")
    before = content(elsewhere)
    attempts: list[Callable[[], object]] = [
        lambda: bucket.write("gc/planted/new", lambda: [b"new"]),
        lambda: bucket.create("gc/planted/new", b"new"),
        lambda: bucket.write("gc/file", lambda: [b"new"]),
        lambda: bucket.read("gc/planted/thesis.tex", size_bytes_max=100),
        lambda: bucket.read("gc/file", size_bytes_max=100),
        lambda: list(bucket.chunks("gc/file", start=0, size_bytes=4)),
        lambda: bucket.size("gc/planted/thesis.tex"),
        lambda: bucket.listed("gc"),
        lambda: bucket.listed("gc/planted"),
        lambda: bucket.remove(["gc/planted/thesis.tex"]),
        lambda: bucket.remove(["gc/file"]),
        lambda: bucket.remove(["gc/../gc/ended/x"]),
        lambda: bucket.write("../elsewhere/new", lambda: [b"new"]),
    ]
    for request in attempts:
        with pytest.raises(LayerstoreError, match=r"is a link|not a regular file|not a name in a remote"):
            request()
    assert content(elsewhere) == before


def test_the_remote_itself_may_be_reached_through_a_link(pinned: Store, remote: Path, tmp_path: Path) -> None:
    """Its path is resolved once, as that of a store."""
    (tmp_path / "short").symlink_to(remote)
    with layerstore.open(f"file://{tmp_path}/short") as opened:
        assert [entry.step for entry in opened.log()] == [6, 4, 2]


def test_a_folder_with_other_things_does_not_become_a_remote(pinned: Store, tmp_path: Path) -> None:
    """A mistyped path would mix a store into somebody's checkpoints."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("other")

    with pytest.raises(AlreadyExists, match=r"mine is not empty: it holds 'notes.txt'; nothing was sent"):
        pinned.push((tmp_path / "mine").as_uri())

    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_what_a_killed_push_has_left_goes_with_a_collection(
    pinned: Store, url: str, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never had a name that a reader looks at."""
    names = content(remote)

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("layerstore.disk.files.Files.rename", cut)
        patched.setattr("layerstore.disk.files.Files.discard", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            Bucket(url).write("objects/00/half", lambda: [b"half"])
    [left] = content(remote).keys() - names.keys()
    assert left.startswith("gc/unfinished/")

    pinned.gc(remote="origin", grace_seconds=0)

    assert left not in content(remote)


def test_what_is_written_there_is_durable(pinned: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a store: the bytes are synced before they have a name, and then the name."""
    done: list[str] = []
    bucket = Bucket(url)
    assert isinstance(bucket._client, Folder)
    monkeypatch.setattr(bucket._client._files, "_hook", lambda operation, path: done.append(operation))

    bucket.write("gc/mark", lambda: [b"mark"])

    assert [name for name in done if name in {"write", "fsync", "rename"}] == ["write", "fsync", "rename", "fsync"]


def test_a_folder_that_is_gone_is_not_empty(pinned: Store, url: str, remote: Path) -> None:
    """A disk that was unplugged must not make everything look unneeded, nor a push fill the place where it was."""
    bucket = Bucket(url)
    remote.rename(remote.parent / "unplugged")
    with pytest.raises(StorageIO, match="cannot list commits"):
        bucket.listed("commits")
    with pytest.raises(StorageIO, match="cannot write commits/r/1"):
        bucket.write("commits/r/1", lambda: [b""])
    assert not remote.exists()


@pytest.mark.fault(118)
def test_a_link_in_the_cache_of_remotes_is_not_followed(
    pinned: Store, url: str, tmp_path: Path, elsewhere: Path
) -> None:
    """Its records are compared with the bucket's, and what that does not list is removed."""
    layerstore.open(url).close()
    [mirror] = (tmp_path / "cache").rglob("commits")
    (mirror / "s").symlink_to(elsewhere)
    before = content(elsewhere)

    layerstore.open(url).close()

    assert content(elsewhere) == before


@pytest.mark.fault(116)
def test_a_name_of_several_lines_is_a_stranger(pinned: Store, remote: Path, url: str, tmp_path: Path) -> None:
    """It stops nothing that it has nothing to do with, and is reported in one line."""
    for folder in ("commits/r", "pins", "objects/ab", "objects", "trash/commits"):
        (remote / folder).mkdir(parents=True, exist_ok=True)
        (remote / folder / "two\nlines").write_text("mine")
    with layerstore.open(url) as opened:
        assert [entry.step for entry in opened.log()] == [6, 4, 2]
        opened.compose("r@6").write(tmp_path / "out")
        assert {damage.path for damage in opened.verify().damaged} == {
            f"{folder}/two\nlines" for folder in ("commits/r", "pins", "trash/commits")
        }
    layerstore.clone(url, tmp_path / "clone").close()
    pinned.push()
    with pytest.raises(IntegrityError, match=r"two\\nlines"):
        pinned.gc(Keep(last=1), remote="origin")


@pytest.mark.fault(116)
@pytest.mark.parametrize("victim", ["store.json", "commits/r/4.*", "pins/best", "objects/*/*"])
def test_a_fifo_is_not_waited_for(pinned: Store, remote: Path, url: str, tmp_path: Path, victim: str) -> None:
    """Whatever it takes the place of, a clone ends at once, and names it."""
    path = next(remote.glob(victim))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(IntegrityError, match=re.escape(path.name)):
        layerstore.clone(url, tmp_path / "clone")


@pytest.mark.fault(116)
@pytest.mark.parametrize("place", ["", "/store.json", "/partial.json", "/remotes.json"])
def test_a_fifo_in_the_place_of_a_clone_is_not_waited_for(pinned: Store, url: str, tmp_path: Path, place: str) -> None:
    """Nor in the folder that a clone is made in."""
    if place:
        layerstore.clone(url, tmp_path / "clone").close()
        (tmp_path / "clone" / place[1:]).unlink(missing_ok=True)
    os.mkfifo(f"{tmp_path}/clone{place}")
    with pytest.raises(LayerstoreError):
        layerstore.clone(url, tmp_path / "clone")


@pytest.mark.fault(129)
def test_a_record_in_the_trash_under_another_run_stops_a_collection(pinned: Store, remote: Path) -> None:
    """A sync tool has renamed the run's folder to what might be a run, too; a damaged record stops nothing."""
    pinned.gc(Keep(last=1), remote="origin")
    (remote / "trash/commits/r").rename(remote / "trash/commits/r (copy)")
    for path in (remote / "objects").glob("*/*"):
        os.utime(path, (0, 0))

    before = content(remote / "objects")

    with pytest.raises(IntegrityError, match=r"^trash/commits/r \(copy\)/2\..*; nothing was removed"):
        pinned.gc(Keep(last=1), remote="origin")

    assert content(remote / "objects") == before
    (remote / "trash/commits/r (copy)").rename(remote / "trash/commits/r")
    [record] = (remote / "trash/commits/r").iterdir()
    record.write_bytes(b"rotten")
    assert pinned.gc(Keep(last=1), remote="origin", grace_seconds=0).objects.count == 27


@pytest.mark.full
@pytest.mark.parametrize("name", [".nfs0000000000e1a2c300000007", ".fuse_hidden0000001200000003"])
def test_a_removed_file_that_somebody_has_open_stops_nothing(
    pinned: Store, remote: Path, url: str, tmp_path: Path, name: str
) -> None:
    """As in a store: NFS and FUSE keep it under such a name; a link of that name is refused."""
    pinned.gc(Keep(last=2), remote="origin")
    for folder in ("commits", "commits/r", "pins", "objects", "objects/00", "trash/commits/r", "gc"):
        (remote / folder).mkdir(parents=True, exist_ok=True)
        (remote / folder / name).write_bytes(b"")

    assert len(pinned.gc(Keep(last=1), remote="origin", grace_seconds=0).removed) == 0
    pinned.push()
    with layerstore.clone(url, tmp_path / "clone") as clone:
        assert clone.verify().ok
    assert layerstore.open(url).verify(read_data=True).ok
    (remote / "pins" / name).unlink()
    (remote / "pins" / name).symlink_to(tmp_path)
    with pytest.raises(IntegrityError, match="is a link"):
        layerstore.open(url)


def _collected_in_little(path: Path, url: str) -> bool:
    """Collect the remote with more and more memory until that is enough."""
    for mib in range(0, 400, 2):
        limit_address_space(mib << 20)
        failure = attempt(lambda: layerstore.open(path).gc(remote=url, dry_run=True))
        if failure is None:
            return True
    return False


@pytest.mark.fault(117)
def test_a_collection_without_room_for_threads_ends(pinned: Store, url: str) -> None:
    """By an error, with any amount of memory: no request waits for a thread that cannot be."""
    assert in_child(_collected_in_little, pinned.path, url, timeout_seconds=100).needed()
