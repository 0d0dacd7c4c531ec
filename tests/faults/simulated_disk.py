"""
A disk that loses what was not synced, and keeps what it likes of it: what a power cut may leave of a verb's work.

A `Trace` notes all that the seam does to a folder. Replayed into a `Disk`, it says at each moment what is durable and
what is only on its way, and makes folders that the disk may hold when the power comes back:

- Of a file that was not synced since, each sector of 512 bytes is as before or after any write; and it may be short.
- A name in a folder lasts once that folder was synced, never by a sync of the file. Of names that were made or removed
  since, any may be there and any may not; only the changes of one name keep their order.
- A rename is never half lost: the old name stays until the new one is there, and both may be there. Of folders it is
  one change.

Not simulated: times, and what the index does, which syncs itself: it is as it was at that moment, or gone.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layerstore.disk import Files

SECTOR_BYTES = 512

Tree = dict[str, bytes | None]
"""Every path of a folder with its bytes, None for folders."""


# -- what was done -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that was done, with paths below the folder."""

    kind: str
    path: str
    source: str = ""
    """Where a link or rename comes from."""
    data: bytes = b""
    """All that a file holds after a write."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


class Trace:
    """A hook that notes what is done below *root*. It is called before each deed, so it looks what that will be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.indexes: list[Tree] = []
        """The index before each operation, and at the end."""
        self.before: Tree = {}
        self._guard = threading.RLock()
        self._sources = threading.local()
        self._dirty: dict[Path, int] = {}

    def coming_from(self, source: Path) -> None:
        """Note what the next link or rename of this thread takes."""
        self._sources.path = source

    def __call__(self, operation: str, path: Path) -> None:
        """Note one deed."""
        with self._guard:
            self._begin()
            self._note_writes()
            self._note(operation, path)
            if operation in {"fsync", "unlink"}:
                self._dirty.pop(path, None)  # whoever wrote to it has said that this was all

    def finish(self) -> None:
        """Note what was still under way."""
        with self._guard:
            self._begin()
            self._note_writes()
            self.indexes.append(self._index())

    def _begin(self) -> None:
        """Note what was there before the first deed."""
        if not self.indexes:
            self.before = self.before or _without_index(tree_of(self.root))

    def _note(self, operation: str, path: Path) -> None:
        match operation:
            case "write" | "copy" | "truncate":
                self._dirty[path] = threading.get_ident()
            case "mkdir" | "create" if not path.exists():
                self._append(operation, path)
            case "link" if not path.exists():
                self._append(operation, path, source=self._sources.path)
            case "rename" if self._sources.path.exists():
                self._append(operation, path, source=self._sources.path)
            case "fsync" | "unlink" | "rmtree" if path.exists():
                self._append(operation, path)
            case "rmdir" if path.is_dir() and not any(path.iterdir()):
                self._append("unlink", path)

    def _note_writes(self) -> None:
        """Note what files hold that were written to: all of it, unless another thread is at it."""
        for path, thread in list(self._dirty.items()):
            self._append("write", path, data=path.read_bytes())
            if thread == threading.get_ident():
                del self._dirty[path]

    def _append(self, kind: str, path: Path, *, source: Path | None = None, data: bytes = b"") -> None:
        if not path.is_relative_to(self.root):
            return
        self.operations.append(Operation(kind, self._name(path), "" if source is None else self._name(source), data))
        self.indexes.append(self._index())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _index(self) -> Tree:
        found: Tree = {}
        for folder in self.root.glob("*/manifest"):
            for path in (folder, *(folder / name for name in ("data.mdb", "copies"))):
                if path.exists():
                    found[self._name(path)] = path.read_bytes() if path.is_file() else None
        # Most operations do not touch it: one copy of each state is enough.
        return self.indexes[-1] if self.indexes and self.indexes[-1] == found else found


class TracedFiles(Files):
    """The seam as it is, which also tells a trace what its links and renames take."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.trace = trace

    def link_exclusive(self, source: Path, target: Path) -> bool:
        """Link."""
        self.trace.coming_from(source)
        return super().link_exclusive(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Rename."""
        self.trace.coming_from(source)
        super().rename(source, target)

    def move_folder(self, source: Path, target: Path) -> bool:
        """Rename."""
        self.trace.coming_from(source)
        return super().move_folder(source, target)


def tree_of(root: Path) -> Tree:
    """Return all that is below *root*."""
    found: Tree = {}
    for folder, names, files in os.walk(root):
        found |= {os.path.relpath(os.path.join(folder, name), root): None for name in names}  # noqa: PTH118  # quick
        found |= {os.path.relpath(os.path.join(folder, name), root): Path(folder, name).read_bytes() for name in files}  # noqa: PTH118
    return found


def _without_index(tree: Tree) -> Tree:
    return {path: data for path, data in tree.items() if "manifest" not in path.split("/")}


# -- what the disk holds -------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class File:
    """A file's bytes: as it was synced, and after each write since."""

    label: str
    versions: list[bytes]

    def choices(self) -> int:
        """Count the ways in which it may have come through: synced, written, torn, short."""
        return 1 if len(self.versions) == 1 else 4

    def content(self, way: int, chance: random.Random) -> bytes:
        """Return what it holds then."""
        if way in (0, 1) or len(self.versions) == 1:
            return self.versions[0 if way == 0 else -1]
        size_bytes = len(chance.choice(self.versions))
        found = bytearray(size_bytes)
        for start in range(0, size_bytes, SECTOR_BYTES):
            sector = chance.choice(self.versions)[start : start + SECTOR_BYTES][: size_bytes - start]
            found[start : start + len(sector)] = sector
        if way == 3:
            del found[chance.randrange(0, size_bytes + 1) // SECTOR_BYTES * SECTOR_BYTES :]
        return bytes(found)


@dataclass(eq=False, slots=True)
class Entry:
    """What a name stood for from one change to the next: a file, a folder or nothing."""

    node: File | Folder | None
    requires: Entry | None = None
    """What is there wherever this is: the new name of what was renamed."""


@dataclass(eq=False, slots=True)
class Folder:
    """A folder's names, each with what it stood for since the folder was last synced."""

    label: str
    names: dict[str, list[Entry]] = field(default_factory=dict)

    def live(self, name: str) -> File | Folder | None:
        """Return what *name* stands for now."""
        return self.names[name][-1].node if name in self.names else None

    def put(self, name: str, entry: Entry) -> Entry:
        """Let *name* stand for something else."""
        self.names.setdefault(name, [Entry(None)]).append(entry)
        return entry


@dataclass(frozen=True, slots=True)
class Choice:
    """Something that the disk may have lost, or kept."""

    node: File | Folder
    name: str
    """Of an entry of a folder; empty for a file's bytes."""
    ways: int
    """So many; 0 is what was synced, and all that came since is lost."""

    def __str__(self) -> str:
        return f"the name {self.node.label}/{self.name}" if self.name else f"the bytes of {self.node.label}"

    @property
    def kept(self) -> int:
        """The way in which nothing is lost."""
        return self.ways - 1 if self.name else 1


Picks = Mapping[Choice, int]


class Disk:
    """What is durable, and what is not."""

    def __init__(self, tree: Tree) -> None:
        self.root = Folder("")
        self._places: dict[Entry, tuple[Folder, str, int]] = {}
        self._needed: list[tuple[Entry, Folder, str, int]] = []
        for path, data in sorted(tree.items()):
            node = Folder(path) if data is None else File(path, [data])
            folder, name = self._place(path)
            folder.names[name] = [Entry(node)]

    def _place(self, path: str) -> tuple[Folder, str]:
        *above, name = path.split("/")
        folder = self.root
        for part in above:
            inner = folder.live(part)
            assert isinstance(inner, Folder), path
            folder = inner
        return folder, name

    def _live(self, path: str) -> File | Folder:
        if path == ".":
            return self.root
        folder, name = self._place(path)
        node = folder.live(name)
        assert node is not None, path
        return node

    def apply(self, operation: Operation) -> None:
        """Do what was done."""
        path = operation.path
        if operation.kind == "fsync":
            _sync(self._live(path))
            return
        folder, name = self._place(path)
        match operation.kind:
            case "mkdir":
                folder.put(name, Entry(Folder(path)))
            case "create":
                folder.put(name, Entry(File(path, [b""])))
            case "write":
                file = self._live(path)
                assert isinstance(file, File)
                file.versions.append(operation.data)
            case "link":
                node = self._live(operation.source)
                node.label = path
                folder.put(name, Entry(node))
            case "rename":
                self._rename(operation.source, folder, name)
            case "unlink":
                folder.put(name, Entry(None))
            case "rmtree":
                self._remove_tree(folder, name)

    def _rename(self, source: str, folder: Folder, name: str) -> None:
        node = self._live(source)
        node.label = f"{folder.label}/{name}"
        arrival = folder.put(name, Entry(node))
        old_folder, old_name = self._place(source)
        departure = old_folder.put(old_name, Entry(None, requires=arrival))
        if isinstance(node, Folder):
            arrival.requires = departure

    def _remove_tree(self, folder: Folder, name: str) -> None:
        node = folder.live(name)
        if isinstance(node, Folder):
            for inner in node.names:
                if node.live(inner) is not None:
                    self._remove_tree(node, inner)
        folder.put(name, Entry(None))

    # -- what may be left ----------------------------------------------------------------------------------------

    def choices(self) -> list[Choice]:
        """Return what is not durable, in a fixed order: of this every image is a choice."""
        self._look()
        found: dict[tuple[int, str], Choice] = {}
        waiting: list[File | Folder] = [self.root]
        seen = set()
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, File):
                if node.choices() > 1:
                    found[id(node), ""] = Choice(node, "", node.choices())
                continue
            for name, entries in node.names.items():
                if len(entries) > 1:
                    found[id(node), name] = Choice(node, name, len(entries))
                waiting += [entry.node for entry in entries if entry.node is not None]
        return list(found.values())

    def _look(self) -> None:
        """Find out which changes of names need others, for all images of this moment."""
        self._places = {
            entry: (folder, name, number)
            for folder in self._folders()
            for name, entries in folder.names.items()
            for number, entry in enumerate(entries)
        }
        self._needed = [(entry, *place) for entry, place in self._places.items() if entry.requires is not None]

    def image(self, picks: Picks, chance: random.Random) -> Tree:
        """Return what is left if *picks* is the way things went; what it does not name came through."""
        ways = {(choice.node, choice.name): way for choice, way in picks.items()}
        self._complete(ways)
        found: Tree = {}
        self._fill(found, self.root, "", ways, chance)
        return found

    def _complete(self, ways: dict[tuple[File | Folder, str], int]) -> None:
        """Let nothing be there without what has to be there with it: what cannot be lost any more brings that along."""
        needed = [needed for needed in self._needed if needed[0].requires in self._places]
        is_stable = False
        while not is_stable:
            is_stable = True
            for entry, folder, name, number in needed:
                there = ways.get((folder, name), len(folder.names[name]) - 1)
                assert entry.requires is not None
                other, other_name, other_number = self._places[entry.requires]
                if there < number or ways.get((other, other_name), other_number) >= other_number:
                    continue
                is_stable = False
                if number:
                    ways[folder, name] = number - 1
                else:
                    ways[other, other_name] = other_number

    def _folders(self) -> Iterator[Folder]:
        waiting, seen = [self.root], set()
        while waiting:
            folder = waiting.pop()
            if id(folder) not in seen:
                seen.add(id(folder))
                yield folder
                for entries in folder.names.values():
                    waiting += [entry.node for entry in entries if isinstance(entry.node, Folder)]

    def _fill(
        self,
        found: Tree,
        folder: Folder,
        above: str,
        ways: Mapping[tuple[File | Folder, str], int],
        chance: random.Random,
    ) -> None:
        for name, entries in folder.names.items():
            node = entries[ways.get((folder, name), len(entries) - 1)].node
            path = f"{above}{name}"
            if isinstance(node, File):
                found[path] = node.content(ways.get((node, ""), 1), chance)
            elif node is not None:
                found[path] = None
                self._fill(found, node, f"{path}/", ways, chance)


def _sync(node: File | Folder) -> None:
    if isinstance(node, File):
        del node.versions[:-1]
    else:
        for entries in node.names.values():
            del entries[:-1]


def samples(choices: list[Choice], chance: random.Random, *, most: int) -> Iterator[dict[Choice, int]]:
    """
    Yield ways in which all may have come through: every one if these are at most *most*, else so many.

    First all lost and all kept, then each thing lost alone and kept alone in a random order, then anything.
    """
    count = 1
    for choice in choices:
        count *= choice.ways
    if count <= most:
        yield from _every(choices)
        return
    lost, kept = dict.fromkeys(choices, 0), {choice: choice.kept for choice in choices}
    yield lost
    yield kept
    alone = [kept | {choice: 0} for choice in choices] + [lost | {choice: choice.kept} for choice in choices]
    chance.shuffle(alone)
    yield from alone[: (most - 2) // 2]
    for _ in range(most - 2 - len(alone[: (most - 2) // 2])):
        yield {choice: chance.randrange(choice.ways) for choice in choices}


def _every(choices: list[Choice]) -> Iterator[dict[Choice, int]]:
    if not choices:
        yield {}
        return
    for rest in _every(choices[1:]):
        for way in range(choices[0].ways):
            yield {choices[0]: way, **rest}


def written(tree: Tree, folder: Path) -> None:
    """Make *folder* hold *tree*."""
    folder.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def digest(tree: Tree) -> str:
    """Return what tells *tree* from others."""
    return hashlib.blake2b(repr(sorted(tree.items())).encode(), digest_size=16).hexdigest()
