"""
Trials: composites as folders for ``from_pretrained``, each with a weights file for every layer.

A file is named by what is in it, so a trial links the files that an earlier one has, and writes only the others.
"""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from layerstore.compose import Composition, Exported, WeightTensor, check_members, execute_export, plan_export
from layerstore.model import TensorSource
from layerstore.progress import Silent
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

    def write(self, composition: Composition) -> Exported:
        """Make `folder` the export of *composition*."""
        versions = check_members(self._repo, composition)
        owner: dict[str, tuple[int, str]] = {}
        for number, (entry, version) in enumerate(zip(composition.layers, versions, strict=True)):
            names = [of.name for of in version.parameters] + [of.name for of in version.buffers]
            owner |= dict.fromkeys(names, (number, entry.version.id))

        def file_of(tensor: WeightTensor) -> str:
            """Name the file by the layers that the tensor is made of, and by its type."""
            names = [run.name for run in tensor.runs] or [tensor.layer_name]
            if tensor.source is TensorSource.STORED:
                return _named("base", [composition.commit])
            owners = sorted({owner[name] for name in names})
            return _named(f"{owners[0][0]:05d}", [tensor.dtype, *(version for _, version in owners)])

        plan = plan_export(self._repo, composition, dtype=self._dtype, file_of=file_of)
        self._repo.files.remove_tree(self.folder)
        return execute_export(self._repo, plan, self.folder, durable=False, reuse=self._files, progress=Silent())

    def keep(self, role: str) -> None:
        """Keep the weights files of the present trial for later ones, in its *role*; forget those without one."""
        self._kept[role] = frozenset(path.name for path in self.folder.glob("*.safetensors"))
        self._repo.files.make_directories(self._files)
        for name in self._kept[role]:
            self._repo.files.link_exclusive(self.folder / name, self._files / name)
        needed = frozenset().union(*self._kept.values())
        for name in self._repo.files.names(self._files):
            if name not in needed:
                self._repo.files.discard(self._files / name)

    def end(self) -> None:
        """Remove what the trials have written."""
        for folder in (self.folder, self._files):
            self._repo.files.remove_tree(folder)


def _named(prefix: str, parts: Iterable[str]) -> str:
    return f"{prefix}-{sha256(' '.join(parts).encode()).hexdigest()[:_DIGITS]}.safetensors"
