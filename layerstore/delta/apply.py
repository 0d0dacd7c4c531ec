"""
Apply a delta to a folder of weights: each file that changes is written next to the old one, then renamed over it.

Every tensor is compared with its checksum before and after. If a kill leaves some files old and some new, repeat the
command to finish: tensors that already match are skipped.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from layerstore.delta.codec import Encoding, decode_into, part_bytes_max
from layerstore.delta.delta_folder import DeltaFolder, DeltaTensor, read_delta
from layerstore.disk import Files, NewFile, OpenFile
from layerstore.errors import LayoutMismatch, SourceCheckpoint
from layerstore.filenames import SUMMARY
from layerstore.hashing import NameHasher, object_id
from layerstore.layers import typed
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.source import GatheredSource, open_source, read_header, tensors_in
from layerstore.units import size
from layerstore.zero3 import holds_zero

WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of applying a delta."""

    folder: Path
    name: str
    """The commit whose weights the folder has now, or the version number if the delta states no commit."""
    base_name: str
    tensors: int
    """The number of tensors that the delta changes."""
    tensors_changed: int
    """Fewer than *tensors* if some matched already."""
    bytes_written: int
    seconds: float

    def __repr__(self) -> str:
        extent = f"{self.tensors_changed} of {self.tensors} tensors, {size(self.bytes_written)}, {self.seconds:.1f} s"
        return f"<Applied {self.base_name} to {self.name} on {self.folder}: {extent}>"


def apply_delta(delta: Path, folder: Path) -> Applied:
    """
    Turn the weights in *folder*, an export of the base of *delta*, into those of the delta's target.

    Raises:
        SourceCheckpoint: *delta* is damaged or not a delta, or *folder* is damaged or not an export.
        LayoutMismatch: The folder is an export of a different base, or a checkpoint with shards; nothing was changed.
    """
    started = time.monotonic()
    files, content = Files(), read_delta(delta)
    held = _tensors_of(folder)
    checksums = _checked(content, held, folder)
    to_do = [tensor for name, tensor in content.tensors.items() if checksums[name] != tensor.target]
    written = 0
    with ExitStack() as stack:
        done: list[tuple[Path, Path]] = []
        for path in sorted({held[tensor.name].file for tensor in to_do}):
            partial = _partial(path)
            files.discard(partial)  # left by a run that was killed
            stack.callback(files.discard, partial)  # does nothing after the rename
            changes = [(held[tensor.name], tensor) for tensor in to_do if held[tensor.name].file == path]
            with files.open(path) as source, files.create(partial, sync_ahead=True) as file:
                _patch(file, source, changes, content.encoding)
                written += source.size_bytes
            done.append((partial, path))
        # Rename only now, when every new file is written and matches its checksums: until now no weights have changed.
        for partial, path in done:
            files.rename(partial, path)
        if (delta / SUMMARY).is_file() and (folder / SUMMARY).is_file():
            # After the weights, since the summary states which commit they come from.
            _copy(files, delta / SUMMARY, folder / SUMMARY)
        files.sync_directory(folder)
    return Applied(
        folder=folder,
        name=content.name,
        base_name=content.base_name,
        tensors=len(content.tensors),
        tensors_changed=len(to_do),
        bytes_written=written,
        seconds=time.monotonic() - started,
    )


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _checked(delta: DeltaFolder, held: Mapping[str, GatheredSource], folder: Path) -> dict[str, str]:
    """Return the checksum of every tensor; raise LayoutMismatch unless each is that of the base or of the target."""
    for name in (*delta.tensors, *delta.unchanged):
        if name not in held:
            raise LayoutMismatch(
                f"{folder} has no tensor {name!r}, which the delta names; nothing was changed",
                hint="apply it to an export of its model",
            )
    # The target's checksum is accepted, too, since an apply that was killed may be repeated.
    expected = {name: {tensor.base, tensor.target} for name, tensor in delta.tensors.items()}
    expected |= {name: {checksum} for name, checksum in delta.unchanged.items()}
    actual = {name: _checksum(held[name]) for name in expected}
    for name, checksums in expected.items():
        # None: a delta made by another tool has no checksums of the base.
        if None not in checksums and actual[name] not in checksums:
            raise LayoutMismatch(
                f"{name!r} in {folder} does not match {delta.base_name}, which the delta is for; nothing was changed",
                hint="apply the deltas in between first, or export the base again with the --dtype of the delta",
            )
    return actual


def _checksum(held: GatheredSource) -> str:
    hasher = NameHasher()
    with open_source(held.file) as source:
        for start in range(0, held.size_bytes, IO_CHUNK_BYTES):
            count = min(IO_CHUNK_BYTES, held.size_bytes - start)
            hasher.update(source.read_at(held.offset_bytes + start, count))
    return hasher.id()


def _tensors_of(folder: Path) -> dict[str, GatheredSource]:
    """Return all tensors in the weights files of *folder*, by name."""
    paths = sorted(folder.glob(WEIGHTS)) if folder.is_dir() else []
    if not paths:
        raise SourceCheckpoint(
            f"{folder} has no weights files ({WEIGHTS})",
            hint=f"export the base there: layerstore compose REF --format hf -o {typed(str(folder))}",
        )
    if holds_zero(folder):
        raise LayoutMismatch(
            f"{folder} is a checkpoint to resume from, whose shards the new weights would make stale; "
            "nothing was changed",
            hint="layerstore compose REF --format hf -o DIR makes a folder of weights alone",
        )
    tensors: dict[str, GatheredSource] = {}
    for path in paths:
        if path.is_symlink():
            raise SourceCheckpoint(f"{path} is a link; nothing was changed", hint="replace it with a copy: cp -L")
        with open_source(path) as source:
            header = read_header(path, source.read_at, source.size_bytes)
            for tensor in tensors_in(path, header, source.size_bytes, {}):
                if tensor.name in tensors:
                    other = tensors[tensor.name].file.name
                    raise SourceCheckpoint(
                        f"{tensor.name!r} is in {other} and in {path.name}; nothing was changed",
                        hint="remove the file that is not used",
                    )
                tensors[tensor.name] = tensor
    return tensors


def _patch(
    file: NewFile, source: OpenFile, changes: Sequence[tuple[GatheredSource, DeltaTensor]], encoding: Encoding
) -> None:
    """Write *source* with *changes* to *file*."""
    # If the filesystem can share blocks, only the changes are written.
    if not file.clone(source):
        file.set_size(source.size_bytes)
        for begin, end in _unchanged_stretches(source.size_bytes, [held for held, _ in changes]):
            file.copy_from(source, begin, begin, end - begin)
    for held, tensor in changes:
        data = bytearray(source.read_at(held.offset_bytes, held.size_bytes))
        # Check the size before reading the part into memory: the header may claim any size.
        if max(size_bytes for _, _, size_bytes in tensor.parts) > part_bytes_max(held.size_bytes, dtype=held.dtype):
            raise _wrong(tensor)
        try:
            decode_into(data, tensor.read(), dtype=held.dtype, encoding=encoding)
        except SourceCheckpoint as exc:
            raise _wrong(tensor) from exc
        if object_id(data) != tensor.target:
            raise _wrong(tensor)
        file.write_at(held.offset_bytes, data)
    file.sync()


def _wrong(tensor: DeltaTensor) -> SourceCheckpoint:
    return SourceCheckpoint(
        f"{tensor.name!r} does not match its checksum after applying the delta; nothing was changed",
        hint="copy the delta again; if it has no checksums of its base, it may be for another base",
    )


def _unchanged_stretches(size_bytes: int, changed: Sequence[GatheredSource]) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each unchanged stretch of a file."""
    begin = 0
    for tensor in sorted(changed, key=lambda place: place.offset_bytes):
        if tensor.offset_bytes > begin:
            yield begin, tensor.offset_bytes
        begin = tensor.offset_bytes + tensor.size_bytes
    if begin < size_bytes:
        yield begin, size_bytes


def _copy(files: Files, source: Path, target: Path) -> None:
    """Replace *target* with a copy of the small file *source*, atomically."""
    partial = _partial(target)
    files.discard(partial)
    with files.open(source) as read, files.create(partial) as file:
        file.write_at(0, read.read_at(0, read.size_bytes))
        file.sync()
    files.rename(partial, target)
