"""Promises of the one module that changes the disk, on a real filesystem."""

import contextlib
import errno
import os
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerstore.disk import Files
from layerstore.errors import IntegrityError, StorageIO
from layerstore.limits import IO_CHUNK_BYTES
from tests.faults.harness import refuse_links


class Recorder:
    """A hook that remembers its calls, and raises at one of them if told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fail_on: str | None = None

    def __call__(self, operation: str, path: Path) -> None:
        """Remember the call."""
        self.calls.append((operation, path.name))
        if operation == self.fail_on:
            raise StorageIO("planted", errno=errno.EIO, filename=str(path))

    @property
    def operations(self) -> list[str]:
        """The names of the operations, in order."""
        return [operation for operation, _ in self.calls]


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Have the kernel refuse to let any file of ours grow beyond *size_bytes*."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


# -- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(24)
def test_a_short_write_is_continued_until_the_disk_refuses(tmp_path: Path) -> None:
    """The kernel takes a part first and refuses the rest then: the error names the file, and what fitted is there."""
    with Files().create(tmp_path / "f") as file, file_size_limit(5000), pytest.raises(StorageIO) as caught:
        file.write_at(0, b"x" * 8000)

    assert (caught.value.errno, caught.value.kind, caught.value.exit_code) == (errno.EFBIG, "no_space", 23)
    assert str(tmp_path / "f") in str(caught.value)
    assert caught.value.hint
    assert (tmp_path / "f").stat().st_size == 5000


def test_create_never_takes_over_a_file(tmp_path: Path) -> None:
    """What is there already is never opened for writing, a dangling link included."""
    files = Files()
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("f", "link"):
        with pytest.raises(StorageIO) as caught:
            files.create(tmp_path / name)
        assert caught.value.errno == errno.EEXIST

    assert (tmp_path / "f").read_bytes() == b"old"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.fault(33)
def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Files get what the user's umask leaves of 0666; executable ones may be run by whoever may read them."""
    old = os.umask(0o027)
    try:
        with Files().create(tmp_path / "plain"), Files().create(tmp_path / "script") as script:
            script.make_executable()
    finally:
        os.umask(old)

    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o750


@pytest.mark.parametrize("size_bytes", [0, IO_CHUNK_BYTES + 13])
def test_the_kernel_copies_between_files(tmp_path: Path, size_bytes: int) -> None:
    """Any range of any length arrives where it should."""
    files = Files()
    data = os.urandom(size_bytes + 10)
    (tmp_path / "source").write_bytes(data)
    with files.open(tmp_path / "source") as source, files.create(tmp_path / "target") as target:
        target.copy_from(source, 3, 7, size_bytes)

    found = (tmp_path / "target").read_bytes()
    assert found == (b"\0" * 7 + data[3 : 3 + size_bytes] if size_bytes else b"")


def test_copies_between_filesystems_go_through_a_buffer(tmp_path: Path) -> None:
    """Where the kernel cannot copy by itself the bytes arrive all the same."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev or not os.access(memory, os.W_OK):
        pytest.skip("no second filesystem to copy from")
    data = os.urandom(IO_CHUNK_BYTES * 2 + 5)
    files = Files()
    with (
        files.temporary(memory, data) as path,
        files.open(path) as source,
        files.create(tmp_path / "target") as target,
    ):
        target.copy_from(source, 0, 0, len(data))

    assert (tmp_path / "target").read_bytes() == data


def test_a_source_that_is_cut_short_is_noticed_while_copying(tmp_path: Path) -> None:
    """A copy of more than there is raises instead of leaving a hole."""
    files = Files()
    (tmp_path / "source").write_bytes(b"12345")
    with (
        files.open(tmp_path / "source") as source,
        files.create(tmp_path / "target") as target,
        pytest.raises(IntegrityError, match="cut short: expected at least 10 bytes, found 5"),
    ):
        target.copy_from(source, 0, 0, 10)


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault(97)
@pytest.mark.parametrize("number", [errno.EEXIST, errno.ESTALE, errno.EPERM])
def test_a_link_that_worked_although_it_failed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """When the reply was lost, name and source are one file: that is success, whatever the answer was."""
    link = os.link

    def link_and_lose_the_reply(source: Path, target: Path, *, follow_symlinks: bool) -> None:
        link(source, target, follow_symlinks=follow_symlinks)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link_and_lose_the_reply)
    (tmp_path / "one").write_bytes(b"1")

    assert Files().link_exclusive(tmp_path / "one", tmp_path / "name")
    assert (tmp_path / "name").read_bytes() == b"1"


@pytest.mark.fault(97)
def test_a_link_that_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is at the name, or another file, nobody is told that it worked."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", fail)
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "taken").write_bytes(b"1")
    for name in ("free", "taken"):
        with pytest.raises(StorageIO) as caught:
            Files().link_exclusive(tmp_path / "one", tmp_path / name)
        assert caught.value.errno == errno.EIO


@pytest.mark.fault(30)
def test_without_hard_links_names_are_exclusive_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is taken is not replaced, and the file that did not get it is still there."""
    monkeypatch.setattr(os, "link", refuse_links)
    files = Files()
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "two").write_bytes(b"2")

    assert files.link_exclusive(tmp_path / "one", tmp_path / "name")
    assert not files.link_exclusive(tmp_path / "two", tmp_path / "name")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"name": b"1", "two": b"2"}
    with pytest.raises(StorageIO) as caught:
        files.link_exclusive(tmp_path / "gone", tmp_path / "other")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("number", [None, errno.EINVAL])
def test_a_folder_is_moved_only_to_where_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """Whether or not the filesystem has a rename for that: an empty folder counts as something, too."""

    def refuse(*_: object) -> bool:
        raise OSError(number, os.strerror(number or 0))

    if number is not None:
        monkeypatch.setattr("layerstore.disk.files.rename_exclusive", refuse)
    files, source, full, empty = Files(), tmp_path / "source", tmp_path / "full", tmp_path / "empty"
    for folder in (source, full, empty):
        folder.mkdir()
    (source / "new").touch()
    (full / "old").touch()
    (tmp_path / "file").touch()

    assert [files.move_folder(source, tmp_path / name) for name in ("full", "empty", "file")] == [False] * 3
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["new", "old"]
    assert files.move_folder(source, tmp_path / "free")
    assert (tmp_path / "free" / "new").is_file()
    assert not source.exists()


@pytest.mark.fault(30)
@pytest.mark.parametrize("number", [errno.EINVAL])
def test_without_links_and_without_such_a_rename_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nothing is replaced by an ordinary rename: what is asked of the filesystem is told, and who can tell more."""

    def refuse(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr("layerstore.disk.files.rename_exclusive", refuse)
    files = Files()
    (tmp_path / "one").write_bytes(b"1")

    with pytest.raises(StorageIO, match="no hard links, and no rename that refuses to replace") as caught:
        files.link_exclusive(tmp_path / "one", tmp_path / "name")
    assert "layerstore doctor" in (caught.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.fault(30)
@pytest.mark.parametrize("has_links", [True, False])
def test_only_one_of_many_links_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    """Of many writers that link at once exactly one is told that the name was free."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    files = Files()
    sources = [tmp_path / f"source-{number}" for number in range(16)]
    for source in sources:
        source.write_bytes(source.name.encode())
    barrier = threading.Barrier(len(sources))
    won: list[str] = []

    def race(source: Path) -> None:
        barrier.wait()
        if files.link_exclusive(source, tmp_path / "name"):
            won.append(source.name)

    threads = [threading.Thread(target=race, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [(tmp_path / "name").read_text()] == won


def test_a_folder_that_was_there_is_made_durable_too(tmp_path: Path) -> None:
    """Whoever made the folder may have died before its own fsync: the parent is synced in any case."""
    recorder = Recorder()
    files = Files(recorder)
    (tmp_path / "folder").mkdir()
    files.make_directory(tmp_path / "folder")

    assert recorder.calls == [("mkdir", "folder"), ("fsync", tmp_path.name)]


def test_remove_tree_does_not_follow_links(tmp_path: Path) -> None:
    """A link inside a tree is removed, what it points to is not."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "precious")
    Files().remove_tree(tmp_path / "tree")

    assert not (tmp_path / "tree").exists()
    assert (tmp_path / "precious" / "file").exists()


# -- reading -------------------------------------------------------------------------------------------------------


def make_odd(kind: str, path: Path) -> None:
    """Make something at *path* that is not a regular file."""
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(path.with_name("target"))
            path.with_name("target").write_bytes(b"secret")
        case _:
            path.symlink_to("/dev/null")


@pytest.mark.fault(38)
@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """A folder, pipe, link or device under an object's name is damage; it is not followed and does not block."""
    path = tmp_path / "object"
    make_odd(kind, path)
    files = Files()

    with pytest.raises(IntegrityError, match="is not a regular file"):
        files.open(path)
    with pytest.raises(IntegrityError, match="is not a regular file"):
        files.size(path)


# -- the hook ------------------------------------------------------------------------------------------------------


def test_the_hook_sees_every_change_in_order(tmp_path: Path) -> None:
    """Each change is announced before it happens, by name, so that tests can put a fault at any of them."""
    recorder = Recorder()
    files = Files(recorder)
    (tmp_path / "source").write_bytes(b"12345678")
    with files.create(tmp_path / "f") as file, files.open(tmp_path / "source") as source:
        file.set_size(8)
        file.write_at(0, b"x")
        file.copy_from(source, 0, 0, 8)
        file.sync()
    files.link_exclusive(tmp_path / "f", tmp_path / "g")
    files.rename(tmp_path / "g", tmp_path / "h")
    files.touch(tmp_path / "h")
    files.unlink(tmp_path / "h")
    files.make_directory(tmp_path / "d")
    files.remove_tree(tmp_path / "d")

    assert recorder.calls == [
        ("create", "f"),
        ("truncate", "f"),
        ("write", "f"),
        ("copy", "f"),
        ("fsync", "f"),
        ("link", "g"),
        ("rename", "h"),
        ("touch", "h"),
        ("unlink", "h"),
        ("mkdir", "d"),
        ("fsync", tmp_path.name),
        ("rmtree", "d"),
    ]
