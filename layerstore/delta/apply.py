"""
Put a delta onto a folder of weights: each file that changes is written anew beside the old one, then renamed over it.

Every tensor is compared with its checksum before and after. If a kill leaves some files old and some new, the same
command finishes: what is as it should be already is passed over.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from layerstore.delta.codec import Encoding, decode_into
from layerstore.delta.folder import Delta, DeltaTensor, read_delta
from layerstore.errors import LayoutMismatch, SourceCheckpoint
from layerstore.format import object_id
from layerstore.layers import typed
from layerstore.storage import Files, NewFile, OpenFile
from layerstore.units import size
from layerstore.zero3 import SUMMARY, GatheredSource, open_source, read_header, tensors_in

WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a delta has changed."""

    folder: Path
    version: str
    base_version: str
    tensors: int
    """That the delta has."""
    tensors_changed: int
    """Fewer if some were as they should be already."""
    bytes_written: int
    seconds: float

    def __repr__(self) -> str:
        done = f"{self.tensors_changed} of {self.tensors} tensors, {size(self.bytes_written)}, {self.seconds:.1f} s"
        return f"<Applied {self.base_version} to {self.version} on {self.folder}: {done}>"


def apply_delta(delta: Path, folder: Path) -> Applied:
    """
    Make the weights in *folder*, an export of the base, those of the target of *delta*.

    Raises:
        SourceCheckpoint: The delta or the folder is damaged, or not one.
        LayoutMismatch: The folder is of another base; nothing was changed.
    """
    started = time.monotonic()
    files, of = Files(), read_delta(delta)
    held = _tensors_of(folder)
    lacking = [tensor.name for tensor in of.tensors if tensor.name not in held]
    if lacking:
        raise LayoutMismatch(
            f"{folder} has no tensor {lacking[0]!r}, which the delta changes; nothing was changed",
            hint="is it an export of the same model?",
        )
    to_do = [tensor for tensor in of.tensors if _is_due(tensor, held[tensor.name], of)]
    written = 0
    with ExitStack() as stack:
        done: list[tuple[Path, Path]] = []
        for path in sorted({held[tensor.name].file for tensor in to_do}):
            partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
            stack.callback(files.discard, partial)
            changes = {tensor.name: tensor for tensor in to_do if held[tensor.name].file == path}
            with files.open(path) as source, files.create(partial, sync_ahead=True) as file:
                _patch(file, source, [(held[name], tensor) for name, tensor in changes.items()], of.encoding)
                written += source.size_bytes
            done.append((partial, path))
        for partial, path in done:
            files.rename(partial, path)
        if (delta / SUMMARY).is_file() and (folder / SUMMARY).is_file():
            _copy(files, delta / SUMMARY, folder)
        files.sync_directory(folder)
    return Applied(
        folder=folder,
        version=of.version,
        base_version=of.base_version,
        tensors=len(of.tensors),
        tensors_changed=len(to_do),
        bytes_written=written,
        seconds=time.monotonic() - started,
    )


def _tensors_of(folder: Path) -> dict[str, GatheredSource]:
    """Return all tensors in the weights files of *folder*, by name."""
    paths = sorted(folder.glob(WEIGHTS)) if folder.is_dir() else []
    if not paths:
        raise SourceCheckpoint(
            f"{folder} has no weights files ({WEIGHTS})",
            hint=f"export the base there: layerstore compose REF --format hf -o {typed(str(folder))}",
        )
    found: dict[str, GatheredSource] = {}
    for path in paths:
        with open_source(path) as source:
            header = read_header(path, source.read_at, source.size_bytes)
            found |= {tensor.name: tensor for tensor in tensors_in(path, header, source.size_bytes, {})}
    return found


def _is_due(tensor: DeltaTensor, held: GatheredSource, delta: Delta) -> bool:
    """Whether *held* is as before the delta; raise if it is neither as before nor as after."""
    with open_source(held.file) as source:
        now = object_id(source.read_at(held.offset_bytes, held.size_bytes))
    if now == tensor.target:
        return False
    if tensor.base is not None and now != tensor.base:
        raise LayoutMismatch(
            f"{tensor.name!r} in {held.file} is not that of version {delta.base_version}, which the delta is for; "
            "nothing was changed",
            hint="put on the deltas in between first, or export the base again",
        )
    return True


def _patch(
    file: NewFile, source: OpenFile, changes: Sequence[tuple[GatheredSource, DeltaTensor]], encoding: Encoding
) -> None:
    """Write *source* with *changes* to *file*."""
    if not file.clone(source):
        file.set_size(source.size_bytes)
        for begin, end in _between(source.size_bytes, [of for of, _ in changes]):
            file.copy_from(source, begin, begin, end - begin)
    for of, tensor in changes:
        data = bytearray(source.read_at(of.offset_bytes, of.size_bytes))
        decode_into(data, tensor.read(), dtype=of.dtype, encoding=encoding)
        if object_id(data) != tensor.target:
            raise SourceCheckpoint(
                f"{tensor.name!r} is not what it should be with the delta put on; nothing was changed",
                hint="copy the delta again; if it says nothing about its base, the folder may be of another",
            )
        file.write_at(of.offset_bytes, data)
    file.sync()


def _between(size_bytes: int, changed: Sequence[GatheredSource]) -> Iterator[tuple[int, int]]:
    """Yield what stays of a file, as begin and end of each stretch."""
    begin = 0
    for tensor in sorted(changed, key=lambda of: of.offset_bytes):
        if tensor.offset_bytes > begin:
            yield begin, tensor.offset_bytes
        begin = tensor.offset_bytes + tensor.size_bytes
    if begin < size_bytes:
        yield begin, size_bytes


def _copy(files: Files, source: Path, folder: Path) -> None:
    """Put a small file into *folder*, in one step."""
    partial = folder / f".{source.name}.partial-{secrets.token_hex(4)}"
    with files.open(source) as read, files.create(partial) as file:
        file.write_at(0, read.read_at(0, read.size_bytes))
        file.sync()
    files.rename(partial, folder / source.name)
