"""
A delta between the exported weights of two composites, for inference servers that hold an export of the first.

Each tensor is built in memory for both composites, or once if both make it from the same objects, and compared.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from layerstore.assemble import (
    Exported,
    ExportPlan,
    OutputFile,
    WeightTensor,
    Writing,
    appearing,
    checked_target,
    files_in,
    fill_pieces,
)
from layerstore.compose import Composition, compose_latest
from layerstore.delta.codec import Encoding, encode_tensor
from layerstore.delta.delta_folder import DeltaWriter, is_delta
from layerstore.dtypes import DTypeName, by_code
from layerstore.errors import AlreadyExists, LayoutMismatch
from layerstore.filenames import SUMMARY, WEIGHTS_INDEX
from layerstore.hashing import object_id
from layerstore.hf import CONFIG, plan_export
from layerstore.history import references_to, resolve
from layerstore.model import BlobRef
from layerstore.progress import Progress
from layerstore.slices import Piece
from layerstore.storage import Repository
from layerstore.units import size

_ONE_FILE = 1 << 62
"""The file size limit of both plans: all tensors are in one file, so that file boundaries do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWritten(Exported):
    """A delta that was written."""

    _JSON: ClassVar = (
        "run step since encoding dtype out tensors tensors_changed elements elements_changed bytes_whole bytes_written "
        "seconds notes"
    )

    since: str
    """The base that the delta applies to."""
    encoding: Encoding
    tensors: int
    tensors_changed: int
    elements: int
    elements_changed: int
    bytes_whole: int
    """The size of all weights."""

    def __repr__(self) -> str:
        share = f"{self.elements_changed} of {self.elements} elements"
        return (
            f"<DeltaWritten {self.since} to {self.run}@{self.step}: {share}, {size(self.bytes_written)} in {self.out}>"
        )


def write_delta(
    repo: Repository,
    composition: Composition,
    out: Path,
    how: Writing,
    *,
    since: str,
    dtype: DTypeName | None,
    encoding: Encoding,
    progress: Progress,
) -> DeltaWritten:
    """
    Write to the folder *out* the delta that turns an export of the commit *since* into an export of *composition*.

    Raises:
        LayoutMismatch: The tensors of the two exports differ in names, types or shapes.
    """
    started = time.monotonic()
    base = compose_latest(resolve(repo, since))
    target = checked_target(repo, out, what="a delta", signs=(WEIGHTS_INDEX,), force=how.force)  # exports have it, too
    if target.older is not None and not target.is_empty and not is_delta(target.path):
        raise AlreadyExists(f"{out} is an export, not a delta, so it is not replaced", hint="choose another -o")
    plans = [plan_export(repo, end, dtype=dtype, max_shard_size=_ONE_FILE) for end in (base, composition)]
    base_name, target_name = _names(repo, base, composition)
    old, new = (_Weights(repo, plan, verify=how.verify) for plan in plans)
    _check_alike(old, new, base_name, target_name)
    notes = [note for note in plans[1].notes if CONFIG not in note]  # a delta has no config
    if composition.base.step == base.base.step:
        notes.append(f"both are of step {base.base.step}: a reader that compares versions sees no change")
    progress.start("delta", sum(tensor.size_bytes for tensor in new.tensors.values()))
    changed = elements_changed = 0
    with appearing(repo, target, is_older_form=lambda path: path.suffix == ".safetensors") as folder:
        writer = DeltaWriter(repo.files, folder, encoding, durable=how.durable)
        for name, tensor in new.tensors.items():
            progress.advance(tensor.size_bytes)
            old_data = old.read(name)
            # Equal pieces give equal bytes, so they are read only once.
            new_data = old_data if old.pieces(name) == new.pieces(name) else new.read(name)
            if old_data == new_data:
                writer.unchanged(name, object_id(old_data))
                continue
            changed += 1
            parts, count = encode_tensor(name, old_data, new_data, dtype=tensor.dtype, encoding=encoding)
            elements_changed += count
            writer.add(name, parts, base=object_id(old_data), target=object_id(new_data))
        writer.finish(version=composition.base.step, base_version=base.base.step, name=target_name, base_name=base_name)
        facts = {"since": base_name, "encoding": encoding, "elements_changed": elements_changed}
        summary = composition.summary_file(notes, format="hf", dtype=plans[1].dtype, delta=facts)
        writer.write(SUMMARY, summary)
        if how.durable:
            repo.files.sync_directory(folder)
    return DeltaWritten(
        run=composition.base.run,
        step=composition.base.step,
        policy=composition.policy,
        format="delta",
        since=base_name,
        encoding=encoding,
        dtype=plans[1].dtype,
        out=target.path,
        files=files_in(target.path),
        tensors=len(new.tensors),
        tensors_changed=changed,
        elements=sum(tensor.size_bytes // by_code(tensor.dtype).bytes for tensor in new.tensors.values()),
        elements_changed=elements_changed,
        bytes_whole=sum(tensor.size_bytes for tensor in new.tensors.values()),
        bytes_written=writer.bytes_written,
        seconds=time.monotonic() - started,
        notes=tuple(notes),
    )


def _check_alike(old: "_Weights", new: "_Weights", before: str, called: str) -> None:
    odd = sorted(old.tensors.keys() ^ new.tensors.keys())
    facts = [{name: (tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()} for weights in (old, new)]
    odd = odd or [name for name in facts[0] if facts[0][name] != facts[1][name]]
    if odd:
        raise LayoutMismatch(
            f"{odd[0]!r} is not the same kind of tensor in {before} and in {called}; nothing was written",
            hint="a delta is between two commits of one model; --dtype gives both the same type",
        )


def _names(repo: Repository, *compositions: Composition) -> list[str]:
    """Return a name for each composition; several compositions may have the same base."""
    references = references_to(repo, [composition.base for composition in compositions])
    pairs = zip(compositions, references, strict=True)
    return [name if composition.mixture is None else f"a composite of {name}" for composition, name in pairs]


class _Weights:
    """The tensors of an export that is planned but not written."""

    def __init__(self, repo: Repository, plan: ExportPlan, *, verify: bool) -> None:
        self._repo = repo
        self._verified: set[BlobRef] | None = set() if verify else None
        self.tensors: dict[str, WeightTensor] = {}
        self._placed: dict[str, tuple[OutputFile, int]] = {}
        files = {file.path: file for file in plan.files}
        for weights in plan.weights:
            for tensor, offset in zip(weights.tensors, weights.frame.offsets, strict=True):
                self.tensors[tensor.name] = tensor
                self._placed[tensor.name] = files[weights.name], offset

    def pieces(self, name: str) -> list[tuple[object, ...]]:
        """Return what the tensor is made of; two tensors made of equal pieces are equal."""
        return [
            (piece.object, piece.object_offset, piece.size_bytes, piece.rounding, piece.mean_of)
            for piece in self._cut(name)
        ]

    def read(self, name: str) -> bytearray:
        """Return the bytes of the tensor."""
        data = bytearray(self.tensors[name].size_bytes)
        _, begin = self._placed[name]
        pieces = list(self._cut(name))
        assert sum(piece.written_bytes for piece in pieces) == len(data), "a plan fills its tensors"
        fill_pieces(self._repo, pieces, memoryview(data), self._verified, begin=begin)
        return data

    def _cut(self, name: str) -> Iterator[Piece]:
        """Yield the tensor's pieces, cut at the tensor's ends: a plain piece may extend into the next tensor."""
        output, begin = self._placed[name]
        end = begin + self.tensors[name].size_bytes
        at = max(bisect_right(output.pieces, begin, key=lambda piece: piece.offset) - 1, 0)
        while at < len(output.pieces) and output.pieces[at].offset < end:
            yield from output.pieces[at].within(begin, end)
            at += 1
