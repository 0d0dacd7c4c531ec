"""
Ingest a PyTorch distributed checkpoint onto a base commit of the same model.

The checkpoint holds masters and moments. Everything else that DeepSpeed needs comes from the base, advanced by the
updates since the base (see ``advance``). Slices are cut for as many ranks as in the base, whatever the folder's chunks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from layerstore.distcp.read import DcpFolder
from layerstore.distcp.transfer import Versions, Wanted, stage
from layerstore.distcp.whole import open_folder
from layerstore.dtypes import by_code, dtype_name
from layerstore.errors import LayoutMismatch, Overtaken
from layerstore.filenames import SCHEDULES
from layerstore.format import WITHOUT_MOMENTS
from layerstore.framing import canonical_order
from layerstore.handover import (
    PARAM_GROUPS,
    UpdatesSince,
    advance,
    group_settings,
    is_stale,
    plain_setting,
    since,
    updates_counted,
)
from layerstore.hashing import crc32
from layerstore.history import Resolved, objects_of_state, references_to
from layerstore.layers import unwrapped
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.model import BlobRef, Buffer, CommitRecord, Kind, LayerVersion, Parameter
from layerstore.numbers import can_convert
from layerstore.slices import Slices
from layerstore.source import read_source_file, stat_source
from layerstore.staging import Content, Staging
from layerstore.states import RankState, SourceFile
from layerstore.storage import ObjectWriter, Repository
from layerstore.tree import Tree
from layerstore.zero3 import (
    Checkpoint,
    FoundCheckpoint,
    LayerSource,
    ObjectSource,
    SliceSource,
    checked_step,
    stamp_of,
)
from layerstore.zero3.trees import STEP

_USUAL = ("model.", "optim.")
"""The prefixes of names in a folder written as PyTorch's own examples do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """The states of a base's ranks, and what has changed in them since."""

    base: CommitRecord
    states: tuple[RankState, ...]
    updates_since: UpdatesSince
    files: Mapping[str, Path]
    """Files of the folder that replace files of the base, by path in the base."""

    def stage(
        self, staging: Staging, writer: ObjectWriter, versions: Versions
    ) -> tuple[tuple[BlobRef, ...], list[str]]:
        """Stage the ranks' states; return references to them, and a note if the new weights made files stale."""
        states, base = self.states, self.base
        if self.updates_since.is_nothing and versions == {entry.layer: entry.version for entry in base.layers}:
            # Nothing was updated since the base: the folder holds the base's own save.
            self._claim([*base.states, *(ref for state in states for ref in objects_of_state(state))], writer)
            return base.states, []
        paths = {file.path for state in states for file in state.files} | {
            weights.path for state in states for weights in state.gathered
        }
        notes = [
            f"whole weights beside the shards are left out ({stale}): compose --format hf makes them"
            for stale in sorted(filter(is_stale, paths))[:1]
        ]
        return tuple(self._stage_state(state, staging, writer) for state in states), notes

    def _stage_state(self, state: RankState, staging: Staging, writer: ObjectWriter) -> BlobRef:
        """Stage the base's *state*, with its counters advanced."""
        files = {
            name: SourceFile(
                path=name,
                executable=False,
                content=staging.content_at(path, 0, stat_source(path).st_size),
            )
            for name, path in self.files.items()
        }
        moved = advance(state, self.updates_since, files)
        self._claim(objects_of_state(moved), writer)
        return staging.whole_state(moved)

    def _claim(self, refs: Iterable[BlobRef], writer: ObjectWriter) -> None:
        """Claim *refs*, which the base needs, so that no collection removes them; raise Overtaken if one is gone."""
        for ref in refs:
            if not writer.reuse(ref):
                raise Overtaken(
                    f"a rank's state of {self.base.run}@{self.base.step} is gone; nothing was saved",
                    hint="repeat the command",
                )


# -- reading the folder --------------------------------------------------------------------------------------------


def read_dcp(
    repo: Repository, path: Path, base: Resolved, *, follow: bool = False
) -> tuple[Checkpoint, Callable[..., Content]]:
    """
    Read the FSDP checkpoint in the folder *path* onto *base*; links in it are followed only with *follow*.

    Return the checkpoint as if DeepSpeed had saved it, and the function that stages it. The paths in the checkpoint's
    slices identify tensors instead of files.

    Raises:
        SourceCheckpoint: The checkpoint is incomplete, damaged or untrusted.
        LayoutMismatch: The checkpoint has a different model or optimizer from *base*, or is older.
    """
    return _Reading(repo, open_folder(path, follow=follow), base).checkpoint()


class _Reading:
    """Finds the base's tensors in a folder."""

    def __init__(self, repo: Repository, folder: DcpFolder, base: Resolved) -> None:
        self._repo = repo
        self._folder = folder
        self._base = base.record
        self._called = references_to(repo, [base.record])[0]
        self._versions = [repo.version_of(entry) for entry in base.record.layers]
        self._slices = Slices(self._versions)
        self._wanted: dict[Path, Wanted] = {}
        names = [unwrapped(name) for name in (*self._slices.parameters, *self._slices.buffers())]
        self._model = self._prefix(names, "tensor")
        self._states: dict[str, list[str]] = {}
        for name, state in sorted(key for version in self._versions for key in version.optimizer_states):
            self._states.setdefault(name, []).append(state)
        if WITHOUT_MOMENTS in base.record.flags or not self._states:
            raise LayoutMismatch(
                f"{self._called} has no optimizer moments: those of a folder cannot be identified",
                hint="choose a base with moments: an earlier or later save of the same training",
            )
        moments = [f"state.{unwrapped(name)}.{state}" for name, states in self._states.items() for state in states]
        self._optimizer = self._prefix(moments, "moment")
        self._check_nothing_else(set(names))

    def checkpoint(self) -> tuple[Checkpoint, Callable[..., Content]]:
        """Return the folder as a checkpoint with the layers of its base, and the function that stages it."""
        base, folder = self._base, self._folder
        states = tuple(self._repo.state(ref) for ref in base.states)
        trained = list(self._states)
        counts = {name: self._count(name) for name in trained}
        updates_since = since(states[0], counts, self._settings(trained), later="the folder", earlier="the base")
        # First: looking up tensors fills `folder.checks` and `_wanted`, which are used below.
        layers = tuple(self._layer(version, counts) for version in self._versions)
        kept = [file for state in states for file in state.files if not is_stale(file.path)]
        files = {file.path: folder.path / file.path for file in kept if self._has_its_own(file)}
        stamps = {path: stamp_of(path) for path in (*folder.files, *folder.metadata, *files.values())}
        found = FoundCheckpoint(
            folder=folder.path,
            tag=updates_since.tag,
            flavour=base.layout.flavour,
            ranks=(),
            others=(),
            stamps=stamps,
            notes=(),
        )
        checkpoint = Checkpoint(
            found=found,
            step=checked_step(base.step + updates_since.updates, folder.path),
            world_size=base.world_size,
            stage=base.stage,
            layers=layers,
            states=states,
            gathered=(),
            files=(),
            checks=tuple(folder.checks),
            notes=tuple(self._notes(updates_since, {file.path for file in kept} - files.keys())),
            layer_pattern=base.layout.layer_pattern,
        )
        return checkpoint, partial(
            stage,
            checkpoint,
            self._wanted,
            world_sizes={version.layer: version.world_size for version in self._versions},
            stage_states=_States(base=base, states=states, updates_since=updates_since, files=files).stage,
        )

    def _has_its_own(self, file: SourceFile) -> bool:
        """Whether the folder has a file at this path that differs from the base's: an equal one is an export's copy."""
        path = self._folder.path / file.path
        if not path.is_file():
            return False
        data = read_source_file(self._folder.allowed(path), size_bytes_max=RECORD_BYTES_MAX)
        if isinstance(file.content, bytes):
            return data != file.content
        return (len(data), crc32(data)) != (file.content.size_bytes, file.content.crc32)

    def _notes(self, updates_since: UpdatesSince, paths: set[str]) -> Iterator[str]:
        if updates_since.updates:
            yield (
                f"everything but weights and moments, such as random states and loss scale, comes from {self._called}; "
                f"steps, and a schedule that DeepSpeed keeps, are advanced by {updates_since.updates}"
            )
            beside = sorted({path for path in paths if path.rpartition("/")[2] in SCHEDULES})
            if beside:
                earlier = f"{updates_since.updates} steps earlier"
                yield f"{beside[0]} comes from {self._called}, {earlier}: set the schedule yourself"
        rounded = [
            wanted for wanted in self._wanted.values() if wanted.is_rounded and wanted.tensor.dtype != wanted.dtype
        ]
        if rounded:
            first, others = rounded[0], f" and {len(rounded) - 1} others" if len(rounded) > 1 else ""
            types = f"{dtype_name(first.tensor.dtype)} to the base's {dtype_name(first.dtype)}"
            yield f"buffer {first.tensor.key!r}{others} rounded from {types}"

    # -- names -----------------------------------------------------------------------------------------------------

    def _prefix(self, names: Collection[str], what: str) -> str:
        """Return the prefix of all *names* in the folder; if several fit, a usual prefix, otherwise the shortest."""
        keys = self._folder.entries.keys()
        first = next(iter(names), "")
        prefixes = {key.removesuffix(first) for key in keys if key.endswith(first)}
        fitting = [prefix for prefix in prefixes if not prefix or prefix.endswith(".")]
        fitting.sort(key=lambda prefix: (prefix not in _USUAL, len(prefix), prefix))
        missing = [next((name for name in names if prefix + name not in keys), None) for prefix in fitting]
        if None in missing:
            return fitting[missing.index(None)]
        lost = missing[0] if missing else first
        raise LayoutMismatch(
            f"{self._folder.path} has no {what} {lost!r}, which {self._called} has; nothing was ingested",
            hint="is it the same model and optimizer, saved as a whole? use --onto with a commit of that model",
        )

    def _check_nothing_else(self, names: set[str]) -> None:
        """Raise if the folder's model has tensors that the base lacks."""
        known = names | {
            unwrapped(alias) for parameter in self._slices.parameters.values() for alias in parameter.aliases
        }
        for key, entry in self._folder.entries.items():
            name = key.removeprefix(self._model)
            is_alias = ".".join(map(str, entry.path)) != key  # as in folders that we wrote: a tensor has several keys
            is_of_model = self._model and key.startswith(self._model) and entry.dtype is not None and not is_alias
            if is_of_model and name not in known:
                raise LayoutMismatch(
                    f"{self._folder.path} has a tensor {name!r}, which {self._called} lacks; nothing was ingested",
                    hint="use --onto with a commit of the same model",
                )

    # -- the optimizer ---------------------------------------------------------------------------------------------

    def _count(self, name: str) -> int | None:
        """Return how many updates the parameter *name* has had."""
        key = f"{self._optimizer}state.{unwrapped(name)}.{STEP}"
        return updates_counted(self._folder.value(key)) if key in self._folder.entries else None

    def _settings(self, names: Iterable[str]) -> dict[str, dict[str, Tree]]:
        """Return the settings of each parameter's group, whether groups are nested or flattened."""
        folder, start = self._folder, f"{self._optimizer}{PARAM_GROUPS}"
        keys = (key for key in folder.entries if key.startswith(start))
        return group_settings(
            names, {key: plain_setting(folder.value(key), f"{key!r} of {folder.path}") for key in keys}
        )

    # -- layers ----------------------------------------------------------------------------------------------------

    def _layer(self, version: LayerVersion, counts: Mapping[str, int | None]) -> LayerSource:
        """Return a layer like *version*, cut the same way, with the folder's tensors."""
        objects: dict[tuple[Kind, int, int], list[SliceSource]] = {}
        for parameter in version.parameters:
            for kind, state in self._kinds_kept(parameter):
                begin = 0
                for stored, _, elements in self._slices.stretches(
                    kind, parameter.name, state=state, begin=0, end=prod(parameter.shape)
                ):
                    place = kind, stored.object.shard, stored.object.shards
                    objects.setdefault(place, []).append(self._slice(kind, parameter, state, begin, elements))
                    begin += elements
        buffers = [
            self._slice(Kind.BUFFERS, buffer, "", 0, prod(buffer.shape))
            for buffer in version.buffers
            if prod(buffer.shape)
        ]
        if buffers:
            objects[Kind.BUFFERS, 0, 1] = buffers  # one copy, as in the folder, however many the base has
        steps = {counts[parameter.name] for parameter in version.parameters if parameter.name in counts}
        return LayerSource(
            layer=version.layer,
            parameters=version.parameters,
            buffers=version.buffers,
            objects=tuple(
                ObjectSource(kind=kind, shard=shard, shards=shards, slices=tuple(canonical_order(slices)))
                for (kind, shard, shards), slices in objects.items()
            ),
            optimizer_step=steps.pop() if len(steps) == 1 else None,
            cut=version.cut,
        )

    def _kinds_kept(self, parameter: Parameter) -> Iterator[tuple[Kind, str]]:
        """Yield the kinds kept for a parameter: its master and its moments, or its weights if it has no master."""
        if not self._slices.shards(Kind.MASTER, parameter.name):
            yield Kind.WEIGHTS, ""
            return
        yield Kind.MASTER, ""
        yield from ((Kind.OPTIMIZER, state) for state in self._states.get(parameter.name, ()))

    def _slice(self, kind: Kind, described: Parameter | Buffer, state: str, first: int, elements: int) -> SliceSource:
        """Return *elements* of a tensor from the *first*, in the type that the base keeps."""
        bare = unwrapped(described.name)
        key = f"{self._optimizer}state.{bare}.{state}" if state else self._model + bare
        dtype = self._slices.dtype(kind, described.name, state=state)
        # Not the path of a file: it identifies a tensor, which the reader looks up in `wanted`.
        path = self._folder.path / key
        if path not in self._wanted:
            self._wanted[path] = self._checked(kind, key, described, dtype)
        return SliceSource(
            name=described.name,
            state=state,
            dtype=dtype,
            elements=elements,
            begin=first,
            path=path,
            offset_bytes=first * by_code(dtype).bytes,
        )

    def _checked(self, kind: Kind, key: str, described: Parameter | Buffer, dtype: str) -> Wanted:
        """Return the tensor *key*; masters and moments must have the type of the base."""
        tensor = self._folder.tensor(key)
        if tensor.shape != described.shape:
            shapes = ["×".join(map(str, shape)) or "a scalar" for shape in (tensor.shape, described.shape)]
            raise LayoutMismatch(
                f"{key!r} of {self._folder.path} is {shapes[0]}, in {self._called} {shapes[1]}; nothing was ingested",
                hint="use --onto with a commit of the same model",
            )
        is_kept = kind in {Kind.MASTER, Kind.OPTIMIZER}
        if tensor.dtype != dtype and (is_kept or not can_convert(tensor.dtype, dtype)):
            raise LayoutMismatch(
                f"{key!r} of {self._folder.path} is {dtype_name(tensor.dtype)}, {self._called} keeps "
                f"{dtype_name(dtype)}; nothing was ingested",
                hint="train fp32 parameters under FSDP2, with a MixedPrecisionPolicy for the rest",
            )
        return Wanted(tensor=tensor, dtype=dtype, is_rounded=kind is Kind.BUFFERS)
