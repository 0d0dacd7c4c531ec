"""
Trials: composites as folders for ``from_pretrained``, each with a weights file for every layer.

A file is named by the versions that are in it, so a trial links the files that an earlier one has, and writes only the
others. A file that a judge has changed is written again.
"""

from collections.abc import Callable
from pathlib import Path

from layerstore.assemble import Exported, ExportPlan, WeightTensor, Writing, execute_export
from layerstore.compose import Composition, naming_damage
from layerstore.filenames import SUMMARY
from layerstore.hashing import digest
from layerstore.hf import plan_export
from layerstore.model import LayerVersion
from layerstore.progress import Silent
from layerstore.states import TensorSource
from layerstore.storage import Repository

_DIGITS = 12


class Trials:
    """The folder of one trial after the other, and the weights files that they share."""

    def __init__(self, repo: Repository, folder: Path, *, dtype: str | None) -> None:
        self._repo = repo
        self._files = folder / "files"
        self.folder = folder / "trial"
        self._dtype = dtype
        self._kept: dict[str, frozenset[str]] = {}
        self._stamps: dict[str, tuple[int, ...] | None] = {}
        repo.files.remove_tree(self._files)  # of an earlier process, which a power cut may have torn

    def plan(self, composition: Composition) -> ExportPlan:
        """Return what *composition* is as a folder; raises as an export does."""
        with naming_damage(self._repo, composition):
            versions = [self._repo.version_of(entry) for entry in composition.layers]
            file_of = _files_by_layer(composition, versions)
            return plan_export(self._repo, composition, dtype=self._dtype, file_of=file_of)

    def write(self, plan: ExportPlan) -> Exported:
        """Make `folder` what *plan* says."""
        for name, stamp in [*self._stamps.items()]:
            if self._repo.files.identity(self._files / name) != stamp:
                self._repo.files.discard(self._files / name)
                del self._stamps[name]
        self._repo.files.remove_tree(self.folder)
        with naming_damage(self._repo, plan.composition):
            return execute_export(
                self._repo, plan, self.folder, Writing(durable=False), reuse=self._files, progress=Silent()
            )

    def keep(self, plan: ExportPlan, role: str) -> None:
        """Keep the weights files of the present trial for later ones, until there is another one of its *role*."""
        self._kept[role] = plan.linkable
        self._repo.files.make_directories(self._files)
        for name in plan.linkable:
            self._repo.files.link_exclusive(self.folder / name, self._files / name)
        needed = frozenset().union(*self._kept.values())
        for name in self._repo.files.names(self._files):
            if name not in needed:
                self._repo.files.discard(self._files / name)
        self._stamps = {name: self._repo.files.identity(self._files / name) for name in needed}

    def end(self) -> None:
        """Remove what the trials have written."""
        for folder in (self.folder, self._files):
            self._repo.files.remove_tree(folder)


def key_of(plan: ExportPlan) -> str:
    """Return a name for what a judge would see: equal for equal folders, whichever saves they are from."""
    seen = [(file.path, file.size_bytes, file.literals, file.pieces) for file in plan.files if file.path != SUMMARY]
    return digest(repr(sorted(seen, key=lambda each: each[0])).encode()).hex()


def _files_by_layer(composition: Composition, versions: list[LayerVersion]) -> Callable[[WeightTensor], str]:
    """Return what names the file of a tensor: by the versions of the layers that it is made of, and by its type."""
    owner: dict[str, tuple[int, str]] = {}
    for number, (entry, version) in enumerate(zip(composition.layers, versions, strict=True)):
        names = [of.name for of in version.parameters] + [of.name for of in version.buffers]
        owner |= dict.fromkeys(names, (number, entry.version.id))

    def file_of(tensor: WeightTensor) -> str:
        parts: list[str] = [composition.commit]
        place = "base"
        if tensor.source is not TensorSource.STORED:
            owners = sorted({owner[name] for name in [run.name for run in tensor.runs] or [tensor.layer_name]})
            place, parts = f"{owners[0][0]:05d}", [tensor.dtype, *(version for _, version in owners)]
        return f"{place}-{digest(' '.join(parts).encode()).hex()[:_DIGITS]}.safetensors"

    return file_of
