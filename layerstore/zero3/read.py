"""
DeepSpeed's files -> ``Checkpoint``: which bytes of which file are which slice of which parameter.

Nothing is guessed. Payloads are not read here, but for the buffers that ranks may share and the step counters.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from layerstore.errors import SourceCheckpoint
from layerstore.limits import RECORD_BYTES_MAX, STEP_MAX
from layerstore.model import Buffer, BufferContent, FlatContent, FragmentContent, RankState, TreeFile
from layerstore.tree import Tensor
from layerstore.zero3.checkpoint import Checkpoint
from layerstore.zero3.cut import cut_layers
from layerstore.zero3.discover import TRAINER_STATE, FoundCheckpoint, check_companions
from layerstore.zero3.gathered import read_gathered
from layerstore.zero3.members import buffers_of, check_names, frozen_of, optimizer_steps, parameters_of
from layerstore.zero3.ptfile import PtFile
from layerstore.zero3.ranks import (
    RankSource,
    agreed,
    check_flats,
    check_saved_as_named,
    check_states,
    param_shapes,
    read_ranks,
    storage_checks,
    world_size_of,
)
from layerstore.zero3.sourcefile import read_source_file
from layerstore.zero3.trees import replace_tensors, with_content


def read_checkpoint(
    found: FoundCheckpoint,
    *,
    layer_pattern: re.Pattern[str] | None = None,
    allowed_globals: frozenset[str] = frozenset(),
) -> Checkpoint:
    """
    Describe the checkpoint *found*.

    Raises:
        SourceCheckpoint: A file is damaged, incomplete or untrusted.
        LayoutMismatch: Its ranks do not fit each other, or a length does not fit its parameter.
        Unsupported: A setting kept state out of the files.
    """
    ranks = read_ranks(found.ranks, allowed_globals)
    world_size = world_size_of(ranks)
    check_saved_as_named(ranks)
    engine_step = agreed(ranks, "global_steps", lambda rank: rank.model["global_steps"].integer())
    groups = agreed(ranks, "param_shapes", param_shapes)
    check_flats(ranks, groups, world_size)
    check_states(ranks)
    steps = agreed(ranks, "the optimizer's count of updates", lambda rank: optimizer_steps(rank, len(groups)))
    check_names(ranks[0], groups)
    check_companions(found, world_size)
    agreed(ranks, "the frozen parameters", frozen_of)
    parameters = parameters_of(ranks[0], groups)
    buffers = buffers_of(ranks[0])
    gathered, files = read_gathered(found.others, parameters=parameters, buffers=buffers)
    return Checkpoint(
        found=found,
        step=_trainer_step(found, default=_checked_step(engine_step, ranks[0].model.path)),
        world_size=world_size,
        layers=cut_layers(
            ranks, groups, parameters, buffers, steps=steps, world_size=world_size, pattern=layer_pattern
        ),
        states=tuple(state_of(rank, found.folder, buffers) for rank in ranks),
        gathered=gathered,
        files=files,
        checks=tuple(storage_checks(ranks)),
        notes=(*found.notes, *_doubts(ranks[0], steps)),
    )


def _doubts(rank: RankSource, steps: list[int | None]) -> Iterator[str]:
    """Tell what may be wrong and may be right: an optimizer can be younger than its engine."""
    updates = rank.model["global_steps"].integer() - rank.model["skipped_steps"].integer()
    counted = sorted({step for step in steps if step is not None})
    # DeepSpeed up to 0.13.1 counted one more: it made a first, empty update of its own.
    if counted and not set(counted) <= {updates, updates + 1}:
        yield (
            f"the optimizer has counted {', '.join(map(str, counted))} updates, the engine {updates}: "
            f"are the files of {rank.model.path.parent} of one save?"
        )


def _trainer_step(found: FoundCheckpoint, *, default: int) -> int:
    """Return the trainer's own step where it left one: the engine's counter may have started elsewhere."""
    path = found.folder / TRAINER_STATE
    return step_of_trainer(path) if path in found.others else default


def step_of_trainer(path: Path) -> int:
    """Return the step in a ``trainer_state.json``; raises SourceCheckpoint where it has none."""
    try:
        step = json.loads(read_source_file(path, size_bytes_max=RECORD_BYTES_MAX))["global_step"]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise SourceCheckpoint(f"{path} does not tell the step: {exc}", hint="was the save interrupted?") from exc
    return _checked_step(step, path)


def _checked_step(step: object, path: PurePath) -> int:
    """Return *step* if it is one: a number that references, record names and index keys have room for."""
    if type(step) is not int or not 0 <= step < STEP_MAX:
        raise SourceCheckpoint(f"{path} has global_step {str(step)[:60]}, which is no step")
    return step


def state_of(rank: RankSource, folder: PurePath, buffers: Mapping[str, Buffer]) -> RankState:
    """Return the rank's trees with the layers' bytes left out."""
    contents: dict[int, object] = {
        id(flat.tensor): FlatContent(state=flat.state, group=flat.group) for flat in rank.flats
    }
    fragments = rank.model.get("frozen_param_fragments")
    for name, fragment in fragments.children() if fragments is not None else ():
        contents[id(fragment.value)] = FragmentContent(parameter=str(name))
    for name in buffers:
        contents[id(rank.model["module"][name].value)] = BufferContent(buffer=name)

    def replacement(tensor: Tensor) -> Tensor:
        content = contents.get(id(tensor))
        return tensor if content is None else with_content(tensor, content)

    def file(source: PtFile) -> TreeFile:
        path = source.path.relative_to(folder).as_posix()
        return TreeFile(path=path, tree=replace_tensors(source.tree, replacement))

    return RankState(
        rank=rank.rank, model=file(rank.model_file), optimizer=file(rank.optimizer_file), files=(), gathered=()
    )
