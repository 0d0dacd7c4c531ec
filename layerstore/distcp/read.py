"""
Read the tensors of a distributed checkpoint as flat runs of bytes, however they were chunked when saved.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from layerstore.distcp.metadata import Entry, read_metadata
from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.filenames import DCP_METADATA
from layerstore.limits import RENAMED_RUNS_MAX
from layerstore.numbers import box_runs
from layerstore.source import damaged, open_source
from layerstore.tree import Located, Storage, Tensor, Tree
from layerstore.zero3 import holds_zero, linked, several_distributed
from layerstore.zero3.pt import Pickles, read_section


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """Consecutive elements of a flat tensor that are also contiguous in a file."""

    first: int
    elements: int
    path: Path
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensor:
    """A tensor as runs that cover it, in order."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[FileRun, ...]

    def stretch(self, first: int, elements: int) -> Iterator[FileRun]:
        """Yield the runs, or parts of them, that hold *elements* from *first*."""
        last = first + elements
        at = bisect_right(self.runs, first, key=lambda run: run.first) - 1
        while first < last:
            run = self.runs[at]
            skipped, end = first - run.first, min(last, run.first + run.elements)
            offset = run.offset_bytes + skipped * by_code(self.dtype).bytes
            yield replace(run, first=first, elements=end - first, offset_bytes=offset)
            first, at = end, at + 1


def _metadata_files(path: Path) -> list[Path]:
    if (path / DCP_METADATA).is_file():
        return [path / DCP_METADATA]
    files = (
        sorted(inner / DCP_METADATA for inner in path.iterdir() if (inner / DCP_METADATA).is_file())
        if path.is_dir()
        else []
    )
    if not files:
        raise (several_distributed(path) if path.is_dir() else None) or SourceCheckpoint(
            f"{path} is not a distributed checkpoint: it has no file {DCP_METADATA!r}",
            hint="leave --onto out for a checkpoint of DeepSpeed"
            if path.is_dir() and holds_zero(path)
            else "--onto is for the folders that torch.distributed.checkpoint, or a Trainer under FSDP, saved",
        )
    return files


class DcpFolder:
    """A distributed checkpoint on disk."""

    def __init__(self, path: Path, pickles: Pickles | None = None, *, follow: bool = False) -> None:
        """
        Read the metadata in *path* or, since Accelerate keeps model and optimizer apart, in each folder below it.

        *path* must contain no links; links in the folder are followed only with *follow*.

        Raises:
            SourceCheckpoint: *path* is no checkpoint, or one that is damaged or a link.
        """
        self.path = path
        self._follow = follow
        self.metadata = [self.allowed(file) for file in _metadata_files(path)]
        """The metadata files."""
        self.entries: dict[str, Entry] = {}
        for file in self.metadata:
            below = file.parent.relative_to(path)
            for key, entry in read_metadata(file.parent).items():
                if key in self.entries:
                    raise several_distributed(path) or damaged(path, f"two of its folders have {key!r}")
                chunks = tuple(replace(chunk, file=(below / chunk.file).as_posix()) for chunk in entry.chunks)
                self.entries[key] = replace(entry, chunks=chunks)
        self.checks: list[tuple[str, Located]] = []
        """For each tensor that was looked up: its name, and the position and expected checksum of its bytes."""
        self._pickles = pickles or Pickles()

    def allowed(self, path: Path) -> Path:
        """Return *path*; raise SourceCheckpoint if it is reached by a link that must not be followed."""
        if not self._follow and path.resolve() != path:
            raise linked(path)
        return path

    @property
    def files(self) -> set[Path]:
        """The data files."""
        return {self.path / chunk.file for entry in self.entries.values() for chunk in entry.chunks}

    def value(self, key: str) -> Tree:
        """Return a value that is not a tensor, or a scalar tensor, whose storage points into its file."""
        entry = self.entries[key]
        if len(entry.chunks) != 1:
            raise damaged(self.path, f"{key!r} should be in one chunk, but is in {len(entry.chunks)}")
        return self._content(entry, 0)

    def tensor(self, key: str) -> FlatTensor:
        """
        Return the tensor *key*; its chunks are checked, but not its bytes.

        Raises:
            SourceCheckpoint: A chunk contradicts the metadata, is missing, or overlaps another chunk.
        """
        entry = self.entries[key]
        if entry.dtype is None:
            raise LayoutMismatch(f"{self.path}: {key!r} is not a tensor")
        runs = sorted(self._runs(entry), key=lambda run: run.first)
        end = 0
        for run in runs:
            if run.first != end:
                raise damaged(self.path, f"the chunks of {key!r} overlap or leave a gap at element {end}")
            end += run.elements
        if end != prod(entry.shape):
            raise damaged(self.path, f"the chunks of {key!r} hold {end} elements of {prod(entry.shape)}")
        return FlatTensor(key=key, dtype=entry.dtype, shape=entry.shape, runs=tuple(runs))

    def _runs(self, entry: Entry) -> Iterator[FileRun]:
        count = 0
        for number, chunk in enumerate(entry.chunks):
            tensor = self._content(entry, number)
            if not isinstance(tensor, Tensor) or tensor.shape != chunk.sizes or tensor.storage.dtype != entry.dtype:
                raise damaged(self.path / chunk.file, f"what should be a chunk of {entry.key!r} is something else")
            if not tensor.is_contiguous:
                raise Unsupported(f"{self.path / chunk.file}: a chunk of {entry.key!r} is not contiguous")
            located, item = tensor.storage.content, by_code(tensor.storage.dtype).bytes
            assert isinstance(located, Located)
            offset = located.offset_bytes + tensor.offset * item
            for first, elements in box_runs(entry.shape, chunk.offsets, chunk.sizes):
                count += 1
                # A chunk of a few columns has a run for each row: do not let sizes from a file fill the memory.
                if count > RENAMED_RUNS_MAX:
                    raise Unsupported(f"{self.path}: {entry.key!r} lies in more than {RENAMED_RUNS_MAX} pieces")
                yield FileRun(first=first, elements=elements, path=located.path, offset_bytes=offset)
                offset += elements * item

    def _content(self, entry: Entry, number: int) -> Tree:
        """Return the content of a chunk."""
        chunk = entry.chunks[number]
        with open_source(self.allowed(self.path / chunk.file)) as source:
            section = read_section(source, chunk.offset_bytes, chunk.size_bytes, self._pickles)
        self._note_checks(entry, section.storages)
        return section.tree

    def _note_checks(self, entry: Entry, storages: Iterable[Storage]) -> None:
        for storage in storages:
            assert isinstance(storage.content, Located)
            self.checks.append((f"of {entry.key}", storage.content))
