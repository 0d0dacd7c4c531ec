"""
A rank's state after further updates by another trainer: the base's state, with counters and settings advanced.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from layerstore.errors import LayoutMismatch
from layerstore.filenames import TRAINER_STATE
from layerstore.json_text import parse_json
from layerstore.states import RankState, SourceFile, TreeFile
from layerstore.tree import Tree, changed
from layerstore.zero3.trees import (
    STEP,
    TreeView,
    count_of,
    counter_like,
    inner_optimizer,
    members_of,
    sub_group_shapes,
    with_optimizer,
)

_SCHEDULER_COUNTS = ("last_epoch", "_step_count", "last_batch_iteration")
"""The counters of torch's and DeepSpeed's learning-rate schedulers."""

_STALE_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin.index.json")
_STALE_PREFIXES = ("pytorch_model",)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesSince:
    """What happened since the base."""

    updates: int
    """How many updates were made."""
    tag: str
    """The name of DeepSpeed's folder after the updates."""
    counts: Mapping[int, int]
    """By sub-group: how many updates it has had in all."""
    settings: Mapping[int, Mapping[str, Tree]]
    """By param group: its settings after the updates."""
    is_nothing: bool
    """Whether neither counts nor settings have changed."""


def since(
    state: RankState,
    counted: Mapping[str, int | None],
    settings: Mapping[str, Mapping[str, Tree]],
    *,
    later: str,
    earlier: str,
) -> UpdatesSince:
    """
    Return what happened between the commit *earlier*, which saved *state*, and the commit *later*.

    *counted* and *settings* are the update count and the settings of each parameter in *later*.

    Raises:
        LayoutMismatch: Parameters that share a counter or a setting differ in it; a count or a setting is missing; or
            *later* has fewer updates than *earlier*.
    """
    shapes, inner = sub_group_shapes(TreeView.of(state.model)), inner_optimizer(state)
    counts: dict[int, int] = {}
    updates: list[int] = []
    for group, names in enumerate(shapes):
        kept = inner["state"].get(group)
        before = None if kept is None else count_of(kept.mapping().get(STEP))
        if before is not None and names:
            count = _agreed({name: counted.get(name) for name in names}, "count of updates")
            if not isinstance(count, int):
                raise LayoutMismatch(f"{later} does not say how many updates {next(iter(names))!r} has had")
            counts[group] = count
            updates.append(counts[group] - before)
    if not updates:
        raise LayoutMismatch(f"the optimizer of {earlier} counts no updates: how far training went since is not known")
    if min(updates) < 0:
        raise LayoutMismatch(
            f"{later} is {-min(updates)} updates older than {earlier}", hint="choose an earlier DeepSpeed commit"
        )
    groups = inner["param_groups"].children()
    chosen: dict[int, Mapping[str, Tree]] = {}
    for number, sub_groups in members_of(state):
        members = [name for group in sub_groups for name in shapes[group]]
        kept_there = groups[number][1].mapping()
        known = [str(key) for key in kept_there if key != "params"]
        lost = next((name for name in members if not settings.get(name)), None)
        if lost is not None:
            raise LayoutMismatch(f"{later} lacks the settings of {lost!r}'s param group, such as the learning rate")
        chosen[number] = {
            key: _like(kept_there[key], _agreed({name: settings[name][key] for name in members}, key))
            for key in known
            if members and all(key in settings.get(name, {}) for name in members)
        }
    steps, tag = TreeView.of(state.model)["global_steps"].integer(), _tag(state)
    # DeepSpeed's own tag counts the steps; a tag that the script chose stays as it is.
    is_counted = tag == f"global_step{steps}"
    # The maximum, because a layer may have skipped updates that the engine counts.
    return UpdatesSince(
        updates=max(updates),
        tag=f"global_step{steps + max(updates)}" if is_counted else tag,
        counts=counts,
        settings=chosen,
        is_nothing=not any(updates)
        and all(
            groups[number][1].mapping()[key] == value
            for number, wanted in chosen.items()
            for key, value in wanted.items()
        ),
    )


def _tag(state: RankState) -> str:
    return state.model.path.partition("/")[0]


def _agreed(values: Mapping[str, Any], what: str) -> Any:
    """Return the value that all parameters share; raise LayoutMismatch if they differ."""
    (first, value), *others = values.items()
    for name, other in others:
        if other != value:
            raise LayoutMismatch(
                f"{first!r} and {name!r} share a param group in the base, but the {what} is {value!r} and {other!r}"
            )
    return value


def advance(state: RankState, updates_since: UpdatesSince, files: Mapping[str, SourceFile]) -> RankState:
    """Return *state* after the updates in *updates_since*; *files* replace its own files at the same paths."""
    model, inner = TreeView.of(state.model), inner_optimizer(state)
    states: dict[Tree, Tree] = {
        group: changed(
            parameter_state.mapping(),
            {STEP: counter_like(parameter_state.mapping()[STEP], updates_since.counts[group])},
        )
        if group in updates_since.counts
        else parameter_state.value
        for group, parameter_state in inner["state"].children()
        if isinstance(group, int)
    }
    groups: list[Tree] = [
        changed(group.mapping(), dict(updates_since.settings[number].items()))
        if number in updates_since.settings
        else group.value
        for number, (_, group) in enumerate(inner["param_groups"].children())
    ]
    optimizer = with_optimizer(
        state, outer={}, inner={"state": changed(inner["state"].mapping(), states), "param_groups": groups}
    )
    tag = _tag(state)

    def moved(path: str) -> str:
        return updates_since.tag + path.removeprefix(tag) if path.startswith(f"{tag}/") else path

    return replace(
        state,
        model=TreeFile(
            path=moved(state.model.path), tree=changed(model.mapping(), dict(_counters(model, updates_since.updates)))
        ),
        optimizer=TreeFile(path=moved(state.optimizer.path), tree=optimizer),
        files=tuple(
            files.get(file.path) or replace(_trainer_counted(file, updates_since.updates), path=moved(file.path))
            for file in state.files
            if not is_stale(file.path)
        ),
        gathered=(),  # they held the base's weights
    )


def is_stale(path: str) -> bool:
    """Whether the file *path* holds whole weights, which no longer match the layers."""
    name = path.rpartition("/")[2]
    return name.endswith(_STALE_SUFFIXES) or name.startswith(_STALE_PREFIXES)


def _counters(model: TreeView, updates: int) -> Iterator[tuple[Tree, Tree]]:
    """Yield the engine's own counters, advanced: as many samples per step as before, one scheduler step per update."""
    before = model["global_steps"].integer()
    yield "global_steps", before + updates
    samples = model.get("global_samples")
    if samples is not None and isinstance(samples.value, int | float) and before:
        yield "global_samples", samples.value // before * (before + updates)
    scheduler = model.get("lr_scheduler")
    if scheduler is not None and isinstance(scheduler.value, dict):
        counts = {key: scheduler.value.get(key) for key in _SCHEDULER_COUNTS}
        yield (
            "lr_scheduler",
            changed(scheduler.value, {key: count + updates for key, count in counts.items() if isinstance(count, int)}),
        )


def _like(old: Tree, new: Tree) -> Tree:
    """Return *new* as the kind of sequence that *old* is: settings that DeepSpeed reads from JSON are lists."""
    if isinstance(old, list) and isinstance(new, tuple):
        return list(new)
    if isinstance(old, tuple) and isinstance(new, list):
        return tuple(new)
    return new


def _trainer_counted(file: SourceFile, updates: int) -> SourceFile:
    """Return *file*, with its step advanced if it is the Trainer's state."""
    if file.path == TRAINER_STATE and updates and isinstance(file.content, bytes):
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # not the Trainer's: kept as it is
            fields = parse_json(file.content)
            fields["global_step"] += updates
            return replace(file, content=json.dumps(fields, indent=2).encode() + b"\n")
    return file
