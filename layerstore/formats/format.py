"""The protocol of output formats."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, TypedDict, Union, runtime_checkable

from layerstore.dtypes import DTypeName
from layerstore.rank_options import AdamStep, Moments

if TYPE_CHECKING:
    from layerstore.assemble import Exported, ExportPlan, Writing
    from layerstore.compose import Composition
    from layerstore.progress import Progress
    from layerstore.shards import RankStates
    from layerstore.storage import Repository

# Union, since | cannot join quoted names, and importing those classes takes long.
Plan: TypeAlias = Union["ExportPlan", "RankStates"]
"""What would be written: files, or the states of ranks."""


class FormatKeywords(TypedDict, total=False):
    """The options of all formats, for type checkers: each format accepts some of them, and checks their values."""

    world_size: int | None
    adam_step: AdamStep
    moments: Moments
    as_zero3: bool
    like: str | None
    dtype: DTypeName | None
    max_shard_size: int | str
    since: str
    encoding: Literal["xor", "sparse"]


@runtime_checkable
class Format(Protocol):
    """An output format, with its options."""

    name: ClassVar[str]
    about: ClassVar[str]
    """The format's purpose, for the list of formats."""

    def plan(self, repo: "Repository", composition: "Composition") -> Plan:
        """Return what would be written, without writing it."""

    def write(
        self, repo: "Repository", composition: "Composition", out: Path, how: "Writing", progress: "Progress"
    ) -> "Exported":
        """Write *composition* to the folder *out*, which appears whole or not at all."""


class FilesFormat:
    """A format whose plan lists its files."""

    def plan(self, repo: "Repository", composition: "Composition") -> "ExportPlan":
        """Return what would be written, without writing it."""
        raise NotImplementedError

    def write(
        self, repo: "Repository", composition: "Composition", out: Path, how: "Writing", progress: "Progress"
    ) -> "Exported":
        """Write *composition* to the folder *out*, which appears whole or not at all."""
        from layerstore.assemble import execute_export

        return execute_export(repo, self.plan(repo, composition), out, how, progress=progress)
