"""
Ingest a PyTorch distributed checkpoint by itself: nothing from DeepSpeed is known or needed.

Tensors are cut, while they are read, into the fewest slices that keep objects small. Everything else becomes one state.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path

from layerstore.distcp.contents import Contents
from layerstore.distcp.metadata import DATA_SUFFIX
from layerstore.distcp.read import DcpFolder
from layerstore.distcp.transfer import Versions, Wanted, stage
from layerstore.distcp.whole import open_folder
from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput
from layerstore.filenames import SUMMARY, TRAINER_STATE
from layerstore.framing import canonical_order
from layerstore.handover import DcpState, Held
from layerstore.layers import layer_of, layers_in_order
from layerstore.limits import SLICED_BYTES, STEP_MAX
from layerstore.model import DCP, BlobRef, Kind
from layerstore.slices import slice_length, valid_elements
from layerstore.source import list_folder, stat_source
from layerstore.staging import Content, Staging
from layerstore.states import SourceFile
from layerstore.storage import ObjectWriter
from layerstore.tree import Tree
from layerstore.zero3 import (
    Checkpoint,
    FoundCheckpoint,
    LayerSource,
    ObjectSource,
    SliceSource,
    checked_step,
    stamp_of,
    step_of_trainer,
)
from layerstore.zero3.trees import STAGE_3, number_of

_STEP_KEYS = ("step", "global_step", "train_state.step")
"""The keys under which trainers keep their own step, as a value of the state."""


def read_standalone(
    path: Path,
    *,
    step: int | None = None,
    layer_pattern: re.Pattern[str] | None = None,
    allowed_globals: frozenset[str] = frozenset(),
    follow: bool = False,
) -> tuple[Checkpoint, Callable[..., Content]]:
    """
    Read the DCP checkpoint in the folder *path*, as step *step* if given, otherwise as the step in the checkpoint.

    Return the checkpoint as if DeepSpeed had saved it, and the function that stages it. The paths in the checkpoint's
    slices identify tensors instead of files.

    Raises:
        SourceCheckpoint: The checkpoint is incomplete, damaged or untrusted.
        Unsupported: The checkpoint has values of unknown classes.
        InvalidInput: The checkpoint states no step, and *step* is None.
    """
    folder = open_folder(path, allowed_globals=allowed_globals, follow=follow)
    contents = Contents.of(folder.entries)
    values = {key: folder.value(key) for key in contents.values}
    cut, counts = _Cut(folder, contents, layer_pattern), _counts(contents, values)
    beside = tuple(_beside(folder))
    stamps = {file: stamp_of(file) for file in (*folder.files, *folder.metadata, *beside)}
    found = FoundCheckpoint(folder=folder.path, tag=DCP, flavour=DCP, ranks=(), others=(), stamps=stamps, notes=())
    checkpoint = Checkpoint(
        found=found,
        step=_step(folder, values, counts.values(), given=step),
        # No ranks are known: count one rank for each slice.
        world_size=cut.shards,
        stage=STAGE_3,
        layers=tuple(cut.layers(counts)),
        states=(),
        gathered=(),
        files=(),
        checks=tuple(folder.checks),
        notes=(),
        layer_pattern=None if layer_pattern is None else layer_pattern.pattern,
        flags=(DCP,),
    )
    return checkpoint, partial(
        stage,
        checkpoint,
        cut.wanted,
        world_sizes=dict.fromkeys((layer.layer for layer in checkpoint.layers), cut.shards),
        stage_states=partial(
            _stage_state, state=contents.state(folder.entries, values), beside=beside, folder=folder.path
        ),
    )


def _stage_state(
    staging: Staging, writer: ObjectWriter, versions: Versions, *, state: DcpState, beside: Iterable[Path], folder: Path
) -> tuple[tuple[BlobRef, ...], tuple[str, ...]]:
    """Stage *state*, which is everything that is not a layer, with the files *beside* the checkpoint's own."""
    del writer, versions
    files = [
        SourceFile(
            path=path.relative_to(folder).as_posix(),
            executable=False,
            content=staging.content_at(path, 0, stat_source(path).st_size),
        )
        for path in beside
    ]
    return (staging.whole_state(state.kept(files)),), ()


def _counts(contents: Contents, values: Mapping[str, Tree]) -> dict[str, int]:
    """Return how many updates each parameter has had, if known."""
    counts = {name: number_of(values[key]) for name, key in contents.counters.items()}
    # The bounds also keep out NaN and infinities, which int() refuses.
    return {name: int(count) for name, count in counts.items() if count is not None and 0 <= count < STEP_MAX}


def _step(folder: DcpFolder, values: Mapping[str, Tree], counts: Collection[int], *, given: int | None) -> int:
    """Return *given*; if None, the step in the trainer's own file, else in a value, else the number of updates."""
    path = folder.path / TRAINER_STATE
    stated = step_of_trainer(path) if path.is_file() else None
    if stated is None:
        numbers = (number_of(values[key]) for key in _STEP_KEYS if key in values)
        # Also false for NaN and infinities, which int() refuses.
        whole = (int(number) for number in numbers if number is not None and number % 1 == 0)
        stated = next(whole, max(counts, default=None))
    if given is None and stated is None:
        raise InvalidInput(f"{folder.path} does not state its step", hint="ingest it alone, with --step")
    return checked_step(stated if given is None else given, folder.path)


def _beside(folder: DcpFolder) -> Iterator[Path]:
    """Yield the files in the folder that are not the checkpoint's own."""
    own = {*folder.files, *folder.metadata}
    for name in list_folder(folder.path):
        path = folder.path / name
        if path.is_file() and path not in own and path.suffix != DATA_SUFFIX and name != SUMMARY:
            yield folder.allowed(path)


# -- layers ------------------------------------------------------------------------------------------------------------


class _Cut:
    """Cuts the tensors of a folder into slices, layer by layer."""

    def __init__(self, folder: DcpFolder, contents: Contents, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._contents = contents
        own = {held: key for key, held in reversed([*contents.tensors.items()])}  # of several keys, the first
        self.wanted = {
            folder.path / key: Wanted(tensor=(tensor := folder.tensor(key)), dtype=tensor.dtype) for key in own.values()
        }
        """The tensors, by the path in their slices."""
        self._by_name: dict[str, list[tuple[Held, Path]]] = {}
        for held, path in zip(own, self.wanted, strict=True):
            self._by_name.setdefault(held.name, []).append((held, path))
        self.shards = max(1, -(-max(self._sizes().values(), default=0) // SLICED_BYTES))

    def _sizes(self) -> dict[tuple[str, Kind], int]:
        """Return the size that each object would have without cutting."""
        sizes: dict[tuple[str, Kind], int] = {}
        for held, path in (held_tensor for tensors in self._by_name.values() for held_tensor in tensors):
            tensor, place = self.wanted[path].tensor, (layer_of(held.name, pattern=self._pattern), held.kind)
            sizes[place] = sizes.get(place, 0) + prod(tensor.shape) * by_code(tensor.dtype).bytes
        return sizes

    def layers(self, counts: Mapping[str, int]) -> Iterator[LayerSource]:
        """Yield every layer; *counts* has each parameter's number of updates."""
        for layer, names in layers_in_order(self._contents.parameters, pattern=self._pattern).items():
            objects: dict[tuple[Kind, int], list[SliceSource]] = {}
            for held, path in (held_tensor for name in names for held_tensor in self._by_name[name]):
                for shard, part in self._slices(held, path):
                    objects.setdefault((held.kind, shard), []).append(part)
            steps = {counts.get(name) for name in names if name in self._contents.counters}
            yield LayerSource(
                layer=layer,
                parameters=tuple(self._contents.parameters[name] for name in sorted(names)),
                buffers=(),
                objects=tuple(
                    ObjectSource(kind=kind, shard=shard, shards=self.shards, slices=tuple(canonical_order(slices)))
                    for (kind, shard), slices in objects.items()
                ),
                optimizer_step=steps.pop() if len(steps) == 1 else None,
            )

    def _slices(self, held: Held, path: Path) -> Iterator[tuple[int, SliceSource]]:
        tensor = self.wanted[path].tensor
        elements = prod(tensor.shape)
        length = slice_length(elements, self.shards)
        for shard in range(self.shards):
            if valid := valid_elements(elements, self.shards, shard):
                yield (
                    shard,
                    SliceSource(
                        name=held.name,
                        state=held.state,
                        dtype=tensor.dtype,
                        elements=valid,
                        begin=shard * length,
                        path=path,
                        offset_bytes=shard * length * by_code(tensor.dtype).bytes,
                    ),
                )
