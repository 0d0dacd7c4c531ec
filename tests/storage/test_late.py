"""What another host has written and this one cannot see yet is looked for again, within a bound, on networks alone."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerstore.disk import Files, files, open_files
from layerstore.errors import IntegrityError, NotFound, StorageIO
from layerstore.hashing import object_id
from layerstore.layout import layout_at
from layerstore.model import BlobRef, CommitId
from layerstore.storage import ObjectStore, ObjectWriter, RecordName, make_store, open_repository

DATA = b"what another host has written"
REF = BlobRef(id=object_id(DATA), size_bytes=len(DATA))


@pytest.fixture(params=["nfs4", "ext4"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the store be on a filesystem of this kind; the search for what is late takes half a second."""
    listing = tmp_path / "mountinfo"
    listing.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n33 22 0:42 / {tmp_path} rw - {request.param} x rw\n")
    monkeypatch.setattr(files, "_MOUNTS", listing)
    monkeypatch.setattr(open_files, "LATE_SECONDS", 0.5)
    return str(request.param)


class Late(Files):
    """Files of a host that sees what another one has written once it looks again."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self._store = store
        self.looks = 0

    def names_unsorted(self, directory: Path) -> list[str]:
        """List, as whoever looks again does first; the second time the other host's object is seen."""
        self.looks += directory == self._store / "objects"
        if self.looks == 2:
            layout, files = layout_at(self._store), Files()
            with ObjectWriter(layout, files, ObjectStore(layout, files)) as writer:
                writer.put(DATA, REF)
                writer.publish()
        return super().names_unsorted(directory)


@pytest.fixture
def objects(tmp_path: Path, kind: str) -> ObjectStore:
    """Return the objects of a new store."""
    make_store(tmp_path / "store", Files())
    return ObjectStore(layout_at(tmp_path / "store"), Late(tmp_path / "store"))


WAYS: dict[str, Callable[[ObjectStore], bytes]] = {
    "read": lambda objects: objects.read(REF),
    "find": lambda objects: (objects.find(REF) or Path("nowhere")).read_bytes(),
}


@pytest.mark.fault(106)
@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_is_seen_late_is_waited_for(
    way: str, objects: ObjectStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a network, with a word in the log; on a disk of this host what is missing is missing, at once."""
    if kind == "nfs4":
        assert WAYS[way](objects) == DATA
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert f"{REF.id} is not there, or nfs4 does not show it yet; looking again" in caplog.text
    else:
        with pytest.raises((IntegrityError, FileNotFoundError)):
            WAYS[way](objects)
        assert caplog.records == []


@pytest.mark.fault(106)
@pytest.mark.parametrize("kind", ["nfs4"], indirect=True)
def test_a_search_in_vain_is_made_once(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged store is told so within the bound, and does not pay it for each object."""
    objects = ObjectStore(layout_at(tmp_path), Files())
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(IntegrityError, match="is missing"):
            objects.open(REF)

    assert time.monotonic() - started >= 0.5
    assert len(caplog.records) == 1, "each search is announced"


def once(number: int, real: Callable[..., Any], *, of: Path) -> Callable[..., Any]:
    """Return *real*, but its first call for the file *of* fails with the errno *number*."""
    left = [number]

    def call(file: Any, *args: Any, **options: Any) -> Any:
        path = str(Path(f"/proc/self/fd/{file}").readlink()) if isinstance(file, int) else os.fspath(file)
        if left and path == str(of):
            raise OSError(left.pop(), "made up", str(of))
        return real(file, *args, **options)

    return call


@pytest.mark.fault(106)
@pytest.mark.parametrize("kind", ["nfs4"], indirect=True)
def test_a_record_that_is_missing_for_a_moment_is_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where another host has renamed over it, JuiceFS does not find it for a moment; one that is not listed is gone."""
    make_store(tmp_path / "store", Files())
    repo = open_repository(tmp_path / "store", Files())
    name = RecordName("run", 1, CommitId("0" * 32))
    path = repo.layout.record("run", 1, name.id)
    path.parent.mkdir()
    path.write_bytes(DATA)
    monkeypatch.setattr(os, "open", once(errno.ENOENT, os.open, of=path))

    assert repo.records.read_bytes(name) == DATA

    path.unlink()
    caplog.clear()
    with pytest.raises(IntegrityError, match="is gone"):
        repo.records.read_bytes(name)
    assert caplog.records == [], "it is not searched for"


@pytest.mark.fault(106)
def test_a_record_that_was_removed_elsewhere_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may say for a minute that it is there: what its folder does not list was dropped."""
    make_store(tmp_path / "store", Files())
    repo = open_repository(tmp_path / "store", Files())
    name = RecordName("run", 1, CommitId("0" * 32))
    path = repo.layout.record("run", 1, name.id)
    path.parent.mkdir()
    monkeypatch.setattr(os, "lstat", lambda at, real=os.lstat: real(tmp_path / "store.json" if at == path else at))
    (tmp_path / "store.json").touch()

    assert repo.records.is_there(name)
    assert list(repo.records.each([name])) == []
    with pytest.raises(NotFound, match="was removed by a collection meanwhile"):
        repo.catalog.commit(name)


# -- stale handles -------------------------------------------------------------------------------------------------

STALE: dict[str, Callable[[Files, Path], object]] = {
    "open": lambda files, path: files.read(path, size_bytes_max=100),
    "preadv": lambda files, path: files.read(path, size_bytes_max=100),
    "lstat": lambda files, path: files.size(path),
    "utime": lambda files, path: files.touch(path),
}


@pytest.mark.fault(106)
@pytest.mark.parametrize("call", STALE)
def test_a_stale_handle_is_looked_up_again(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was replaced by another host is read as it is now, and the log says so; other errors are told at once."""
    use = STALE[call]
    path = tmp_path / "file"
    path.write_bytes(DATA)
    expected = use(Files(), path)
    real = getattr(os, call)

    monkeypatch.setattr(os, call, once(errno.ESTALE, real, of=path))
    assert use(Files(), path) == expected
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: stale file handle; looking it up again for up to 10 s"
    ]

    monkeypatch.setattr(os, call, once(errno.EIO, real, of=path))
    with pytest.raises(StorageIO) as caught:
        use(Files(), path)
    assert caught.value.errno == errno.EIO


def test_a_hook_may_say_that_a_handle_is_stale(tmp_path: Path) -> None:
    """Touching is done again; what goes on for too long is told, with its errno."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    stale = [errno.ESTALE, errno.ESTALE]

    def hook(operation: str, of: Path) -> None:
        if stale:
            raise StorageIO("made up", errno=stale.pop(), filename=str(of))

    assert Files(hook).touch(path)
    assert stale == []


def test_a_handle_that_stays_stale_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound, as the error that it is."""
    monkeypatch.setattr(open_files, "LATE_SECONDS", 0.2)

    def refuse(*_: object, **__: object) -> object:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "listdir", refuse)
    started = time.monotonic()
    with pytest.raises(StorageIO) as caught:
        Files().names(tmp_path)

    assert caught.value.errno == errno.ESTALE
    assert 0.2 <= time.monotonic() - started < 30.0


def test_what_was_replaced_while_it_was_read_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another size is another file: its bytes do not continue those of the first."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with Files().open(path) as file:
        path.write_bytes(DATA * 2)
        monkeypatch.setattr(os, "preadv", once(errno.ESTALE, os.preadv, of=path))
        with pytest.raises(IntegrityError, match="was replaced by something else while it was read"):
            file.read_at(0, len(DATA))


def test_a_copy_goes_on_after_a_stale_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's copy refuses it; read through a buffer, the source is opened again."""
    files = Files()
    (tmp_path / "source").write_bytes(DATA)
    monkeypatch.setattr(os, "copy_file_range", once(errno.ESTALE, os.copy_file_range, of=tmp_path / "source"))
    monkeypatch.setattr(os, "preadv", once(errno.ESTALE, os.preadv, of=tmp_path / "source"))
    with files.open(tmp_path / "source") as source, files.create(tmp_path / "target") as target:
        target.copy_from(source, 0, 0, len(DATA))

    assert (tmp_path / "target").read_bytes() == DATA
