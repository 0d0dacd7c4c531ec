"""
The folder of an export, whatever its format: its plan, how it is written, and the result.

The formats (``hf``, ``dcp``, ``universal``) make the plans.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.assemble.assemble import Assembly, OutputFile, assembling, inside
from layerstore.assemble.safetensors import WeightsFile
from layerstore.assemble.target import Writing, appearing, checked_target
from layerstore.compose import Composition
from layerstore.disk import Files
from layerstore.model import Kind, LayerVersion
from layerstore.progress import Progress
from layerstore.slices import Slices
from layerstore.states import RankState
from layerstore.storage import Repository
from layerstore.units import size
from layerstore.zero3.trees import TreeView, leaves_out_frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """An export before it is written."""

    composition: Composition
    format: str
    """``hf``, ``dcp`` or ``universal``."""
    dtype: str
    """``bf16``, ``fp16``, ``fp32``, or ``mixed``."""
    files: tuple[OutputFile, ...]
    """The weights, their index, and the files that go with them."""
    notes: tuple[str, ...]
    """What the reader of the folder should know."""
    seconds: float
    """How long planning took, including the queries to Transformers."""
    signs: tuple[str, ...]
    """Every export in this format has at least one of these files."""
    is_older_form: Callable[[Path], bool]
    """Whether a file belongs to an older export that this one replaces."""
    model_class: str | None = None
    """The class of Transformers that the config names."""
    loading: str = ""
    """How to load the folder, whose name replaces ``{folder}``; empty if that is not known."""
    links: tuple[tuple[str, str], ...] = ()
    """Second names of files: the new name, and the file's own."""
    weights: tuple[WeightsFile, ...] = ()
    """The weights files, with the position of each tensor."""

    def __repr__(self) -> str:
        base = self.composition.base
        files = f"{len(self.files)} files of {self.dtype}, {size(self.size_bytes)}"
        return f"<ExportPlan {base.run}@{base.step}: format {self.format}, {files}>"

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, whatever the format."""

    run: str
    step: int
    policy: str
    format: str
    dtype: str = "mixed"
    """``bf16``, ``fp16``, ``fp32``, or ``mixed``."""
    out: Path
    files: tuple[str, ...]
    """Below *out*."""
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]
    """What the reader of the folder should know."""
    model_class: str | None = None
    """The class of Transformers that loads the folder, if its config names one."""
    how_to_load: str = ""
    """In one line; empty if that is not known."""

    def __repr__(self) -> str:
        written = f"{len(self.files)} files of {self.dtype}, {size(self.bytes_written)} in {self.out}"
        return f"<Exported {self.run}@{self.step}: {written}{self.how_to_load and f'; {self.how_to_load}'}>"


def execute_export(repo: Repository, plan: ExportPlan, out: Path, how: Writing, *, progress: Progress) -> Exported:
    """
    Write *plan* to the folder *out*, which appears whole or not at all.

    Raises:
        AlreadyExists: *out* exists, and must not be replaced.
        IntegrityError: An object is damaged or missing; nothing is left at *out*.
    """
    started = time.monotonic()
    target = checked_target(repo, out, what="an export", signs=plan.signs, force=how.force)
    with (
        appearing(repo, target, is_older_form=plan.is_older_form) as folder,
        assembling(
            repo,
            folder,
            how,
            is_export=True,
            has_means=plan.composition.mean is not None,
            progress=progress,
        ) as assembly,
    ):
        progress.start("export", sum(piece.size_bytes for file in plan.files for piece in file.pieces))
        assembly.write(plan.files)
        for new, old in plan.links:
            _link(repo.files, folder / inside(old), folder / inside(new))
        # Before the block ends: a folder with wrong numbers must not appear.
        for weights in plan.weights:
            assembly.check_converted(weights.name, weights.checks())
    base = plan.composition.base
    return Exported(
        run=base.run,
        step=base.step,
        policy=plan.composition.policy,
        format=plan.format,
        dtype=plan.dtype,
        out=target.path,
        files=(*(file.path for file in plan.files), *(new for new, _ in plan.links)),
        bytes_written=plan.size_bytes,
        seconds=plan.seconds + time.monotonic() - started,
        notes=(*plan.notes, *_infinity_notes(assembly, plan)),
        model_class=plan.model_class,
        # The folder's path as a Python string literal, in double quotes.
        how_to_load=plan.loading.replace("{folder}", json.dumps(str(target.path), ensure_ascii=False)),
    )


def _link(files: Files, path: Path, other: Path) -> None:
    """Give the file *path* a second name, or a second copy if the filesystem has no hard links."""
    files.make_directories(other.parent)
    files.link_exclusive(path, other)
    if not files.exists(path):  # without hard links, the file was moved
        with files.open(other) as source, files.create(path) as file:
            file.copy_from(source, 0, 0, source.size_bytes)
            file.sync()


def _infinity_notes(assembly: Assembly, plan: ExportPlan) -> Iterator[str]:
    """Report values that left the range of their new type."""
    counts: dict[str, int] = {}
    for file in plan.weights:
        for offset, part in sorted(assembly.converted.get(assembly.folder / file.name, {}).items()):
            if part.newly_infinite:
                name = file.tensor_at(offset).name
                counts[name] = counts.get(name, 0) + part.newly_infinite
    if counts:
        name, count = next(iter(counts.items()))
        rest = f", and others of {len(counts) - 1} more tensors," if len(counts) > 1 else ""
        yield f"{count} values of {name!r}{rest} are beyond the range of {plan.dtype} and became infinite"


def export_notes(state: RankState, versions: list[LayerVersion], slices: Slices) -> Iterator[str]:
    """Yield a note for everything that the export may lack."""
    model = TreeView.of(state.model)
    if leaves_out_frozen(state):
        yield "the checkpoint was saved without its frozen parameters, if it has any: they are not in the export"
    buffers = [buffer.name for version in versions for buffer in version.buffers]
    differing = [name for name in buffers if slices.shards(Kind.BUFFERS, name) > 1]
    if differing:
        yield f"{differing[0]!r} is one of {len(differing)} buffers that differ by rank: the first rank's are written"
    names = model.get("buffer_names")
    odd = {str(name) for name in names.sequence()} - {*buffers} if names is not None else set()
    if odd and not state.gathered:
        yield f"buffers are not plain blocks of memory ({min(odd)!r} is one of {len(odd)}): they are left out"
