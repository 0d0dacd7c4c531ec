"""
The folder of a delta: safetensors files with the changes, and an index that identifies the two versions.

The layout is slime's for deltas on disk: the files' metadata has the checksum of each new tensor, by the tensor's name,
and the index has ``version``, ``base_version`` and the encoding. We add checksums of all tensors before the delta, and
the names of the two commits.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from layerstore.delta.codec import COMPRESSIONS, ENCODINGS, INDICES, VALUES, Encoding, Parts
from layerstore.disk import Files, mapped_errors
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.filenames import WEIGHTS_INDEX
from layerstore.json_text import parse_json
from layerstore.limits import MIB, RECORD_BYTES_MAX
from layerstore.source import open_source, read_header, read_source_file, tensors_in

CHECKSUM = "xxh3-128"

_FILE_BYTES = 64 * MIB
"""Bytes collected in memory before a file is written; writing takes three times as much memory."""


class DeltaWriter:
    """Writes a delta to a new folder."""

    def __init__(self, files: Files, folder: Path, encoding: Encoding, *, durable: bool = True) -> None:
        self._files = files
        self._folder = folder
        self._encoding = encoding
        self._durable = durable
        self._waiting: Parts = {}
        self._targets: dict[str, str] = {}
        self._bases: dict[str, str] = {}
        self._placed: dict[str, str] = {}
        self._count = 0
        self.bytes_written = 0

    def unchanged(self, name: str, checksum: str) -> None:
        """Note the *checksum* of a tensor that is the same in both versions."""
        self._bases[name] = checksum

    def add(self, name: str, parts: Parts, *, base: str, target: str) -> None:
        """Add a tensor's *parts*, and its checksums before and after."""
        self._waiting |= parts
        self._targets[name] = target
        self._bases[name] = base
        if sum(part.nbytes for part in self._waiting.values()) >= _FILE_BYTES:
            self._flush()

    def finish(self, *, version: int, base_version: int, name: str, base_name: str) -> None:
        """Write the remaining tensors, and the index; *name* and *base_name* are the commits' names."""
        self._flush()
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{base_version:06d}",
            "delta_encoding": self._encoding,
            "compression_format": COMPRESSIONS[self._encoding],
            "checksum_format": CHECKSUM,
            "name": name,
            "base_name": base_name,
            "base_checksums": self._bases,
        }
        index = {"metadata": metadata, "weight_map": self._placed}
        self.write(WEIGHTS_INDEX, json.dumps(index, indent=1, sort_keys=True).encode() + b"\n")

    def _flush(self) -> None:
        from safetensors.numpy import save

        if not self._waiting:
            return
        name = f"model-{self._count:05d}.safetensors"
        self.write(name, *_in_order(save(self._waiting, metadata=self._targets)))
        self._placed |= dict.fromkeys(self._waiting, name)
        self._count += 1
        self._waiting, self._targets = {}, {}

    def write(self, name: str, *parts: bytes | memoryview) -> None:
        """Write *parts* as the file *name*."""
        with self._files.create(self._folder / name) as file:
            offset = 0
            for part in parts:
                file.write_at(offset, part)
                offset += len(part)
            if self._durable:
                file.sync()
        self.bytes_written += offset


def _in_order(data: bytes) -> tuple[bytes, bytes, memoryview]:
    """Return a safetensors file in parts, its metadata sorted: the safetensors package writes it in random order."""
    begin, end = 8, 8 + int.from_bytes(data[:8], "little")
    fields = json.loads(data[begin:end])
    fields["__metadata__"] = dict(sorted(fields["__metadata__"].items()))
    # The package pads the header with spaces, so that the tensors begin at a multiple of 8.
    header = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode().ljust(end - begin)
    assert len(header) == end - begin, "it is the same text in another order"
    return data[:begin], header, memoryview(data)[end:]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTensor:
    """What changed in one tensor."""

    name: str
    parts: tuple[tuple[Path, int, int], ...]
    """File, offset and size of each part."""
    target: str
    """The checksum after the delta."""
    base: str | None
    """The checksum before the delta; None if the delta does not state it."""

    def read(self) -> list[bytes]:
        """Return the bytes of its parts, in the order of `encode_tensor`."""
        parts = []
        for path, offset, size_bytes in self.parts:
            with open_source(path) as source:
                parts.append(source.read_at(offset, size_bytes))
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFolder:
    """A delta on disk."""

    path: Path
    name: str
    """The target: a commit's name, or a version number."""
    base_name: str
    encoding: Encoding
    tensors: Mapping[str, DeltaTensor]
    """By name."""
    unchanged: Mapping[str, str]
    """The checksums of all other tensors, by name, if the delta states them."""


def is_delta(path: Path) -> bool:
    """Whether the folder *path* is a delta, sound or not."""
    with mapped_errors(path, doing="look at"):
        if not (path / WEIGHTS_INDEX).is_file():
            return False
    try:
        fields = parse_json(read_source_file(path / WEIGHTS_INDEX, size_bytes_max=RECORD_BYTES_MAX))
        return "delta_encoding" in fields["metadata"]
    except (ValueError, TypeError, KeyError):
        return False  # an index of something else


def read_delta(path: Path) -> DeltaFolder:
    """
    Return the delta in the folder *path*; its tensors are not read.

    Raises:
        SourceCheckpoint: *path* is not a delta, or is damaged.
        Unsupported: The delta uses an unknown encoding, compression or kind of checksum.
    """
    if not is_delta(path):
        raise SourceCheckpoint(
            f"{path} is not a delta: no {WEIGHTS_INDEX} in it says how it is encoded",
            hint="layerstore compose REF --format hf --since BASE -o DIR makes one; DELTA comes before FOLDER",
        )
    fields = parse_json(read_source_file(path / WEIGHTS_INDEX, size_bytes_max=RECORD_BYTES_MAX))
    metadata, placed = fields["metadata"], fields.get("weight_map")
    # slime's own deltas lack the checksums that we add: their tensors can be verified only after the delta is applied.
    encoding, bases = metadata["delta_encoding"], metadata.get("base_checksums", {})
    formats = metadata.get("compression_format"), metadata.get("checksum_format")
    if encoding not in ENCODINGS or formats != (COMPRESSIONS[cast("Encoding", encoding)], CHECKSUM):
        known = ", ".join(f"{known_encoding} ({compression})" for known_encoding, compression in COMPRESSIONS.items())
        raise Unsupported(
            f"{path} is encoded as {encoding} ({formats[0]}), with checksums of {formats[1]}",
            hint=f"what can be applied: {known}, with {CHECKSUM}",
        )
    if not (isinstance(placed, dict) and isinstance(bases, dict)):
        raise _damaged(path, "its index")
    places: dict[str, tuple[Path, int, int]] = {}
    targets: dict[str, str] = {}
    for name in sorted({str(file) for file in placed.values()}):
        if "/" in name or name in {".", ".."} or "\0" in name or not (path / name).is_file():
            raise _damaged(path, f"the file {name!r}")
        targets |= _add_file(path / name, places)
    if {key: place[0].name for key, place in places.items()} != placed:
        raise _damaged(path, "a file that fits its index")
    tensors = {tensor.name: tensor for tensor in _tensors(path, encoding, places, targets, bases)}
    names = [str(metadata.get(key) or metadata.get(other)) for key, other in _NAMES]
    return DeltaFolder(
        path=path,
        name=names[0],
        base_name=names[1],
        encoding=encoding,
        tensors=tensors,
        unchanged={str(name): str(checksum) for name, checksum in bases.items() if name not in tensors},
    )


# The metadata keys: our commits' names, or else slime's version numbers.
_NAMES = (("name", "version"), ("base_name", "base_version"))


def _damaged(path: Path, what: str) -> SourceCheckpoint:
    return SourceCheckpoint(f"{path} is not a whole delta: it lacks {what}", hint="copy the delta again")


def _add_file(path: Path, places: dict[str, tuple[Path, int, int]]) -> dict[str, str]:
    """Add the tensors of a file to *places*, and return the checksums in its metadata."""
    with open_source(path) as source:
        header = read_header(path, source.read_at, source.size_bytes)
        for tensor in tensors_in(path, header, source.size_bytes, {}):
            places[tensor.name] = path, tensor.offset_bytes, tensor.size_bytes
    metadata = parse_json(header[8:]).get("__metadata__")
    if not isinstance(metadata, dict):
        raise _damaged(path.parent, f"the checksums in {path.name}")
    return {str(name): str(value) for name, value in metadata.items()}


def _tensors(
    path: Path,
    encoding: Encoding,
    places: Mapping[str, tuple[Path, int, int]],
    targets: Mapping[str, str],
    bases: Mapping[str, Any],
) -> Iterator[DeltaTensor]:
    suffixes = [INDICES, VALUES] if encoding == "sparse" else [""]
    names = {key.removesuffix(suffixes[-1]) for key in places if key.endswith(suffixes[-1])}
    if len(places) != len(names) * len(suffixes):
        raise _damaged(path, "a part of a tensor")
    for name in sorted(names):
        if name not in targets or any(name + suffix not in places for suffix in suffixes):
            raise _damaged(path, f"a part of {name!r}")
        base = bases.get(name)
        yield DeltaTensor(
            name=name,
            parts=tuple(places[name + suffix] for suffix in suffixes),
            target=targets[name],
            base=base if isinstance(base, str) else None,
        )
