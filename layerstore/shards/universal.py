"""
The format ``universal``: a composite as DeepSpeed's Universal Checkpoint, which any number of ranks loads.

Each parameter has a folder with a file for its master and each of its moments, whole; see ``deepspeed.checkpoint``.
ZeRO-3 gives all param groups the settings of the first group it finds, so it gets only settings that all groups share.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import PurePosixPath

from layerstore.assemble import Archives, ExportPlan, Fill, OutputFile, export_notes, literal_file
from layerstore.compose import Composition, cautions
from layerstore.errors import LayoutMismatch, Unsupported
from layerstore.filenames import RANDOM_STATE, SUMMARY
from layerstore.hf import plan_beside
from layerstore.history import references_to
from layerstore.limits import PAGE_BYTES
from layerstore.model import Kind, Parameter
from layerstore.numbers import can_convert
from layerstore.rank_options import RankOptions
from layerstore.shards.ranks import buffer_notes, plan_optimizer, plan_ranks
from layerstore.shards.write import plan_model_states
from layerstore.slices import Piece, Slices
from layerstore.states import RankState
from layerstore.storage import Repository
from layerstore.tree import Storage, Tree, new_tensor
from layerstore.zero3.reshard import OptimizerState
from layerstore.zero3.trees import STEP, TreeView, inner_optimizer, is_dealt, outer_optimizer

LATEST_UNIVERSAL = "latest_universal"

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""The moments that DeepSpeed's loader requires; the loader supports no optimizer but Adam."""

_SHARDS = "--format shards --world-size N fits any number of ranks"
"""The hint about optimizers that DeepSpeed's loader cannot load."""

_MODEL_STATES = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_MODEL_STATES_OF_STAGES_1_AND_2 = "mp_rank_00_model_states.pt"

_OF_SLICES = frozenset({"optimizer_state_dict", "fp32_flat_groups", "ds_zero_partition_groups"})


def plan_universal(repo: Repository, composition: Composition) -> ExportPlan:
    """
    Plan the files of *composition*.

    Raises:
        LayoutMismatch: The layers do not fit together, or the optimizer is not one that DeepSpeed's loader knows.
        Unsupported: FSDP2 saved the base, or a parameter's name cannot be a folder name.
    """
    started = time.monotonic()
    base = composition.base
    if base.is_dcp:
        raise Unsupported(
            f"{base.run}@{base.step} was saved by FSDP2, and not by DeepSpeed",
            hint="use --format dcp for FSDP2; or --format zero3, which ds_to_universal converts",
        )
    # Plan for a single rank of stage 3, which holds every parameter whole, whatever stage and ranks saved the base.
    ranks = plan_ranks(repo, composition, RankOptions(world_size=1, as_zero3=True))
    slices, state = ranks.slices, ranks.state(0)
    base_state = repo.state(base.states[0])
    optimizer = plan_optimizer(repo, composition, ranks.versions, adam_step="unify")
    _check_adam(repo, composition, optimizer)
    tag = f"{base.layout.tag}_universal"
    folder = f"{tag}/zero"
    files = [plan_model_states(ranks, path=f"{tag}/{_MODEL_STATES}"), _optimizer_state(folder, state, optimizer)]
    step = _step(state)
    # Stage 3 looks for the file's own name, stages 1 and 2 for the link's.
    links = [(f"{tag}/{_MODEL_STATES_OF_STAGES_1_AND_2}", f"{tag}/{_MODEL_STATES}")]
    for parameter in slices.parameters.values():
        for name in (parameter.name, *parameter.aliases):
            if "/" in name or "\0" in name or name in {".", ".."}:
                raise Unsupported(f"a parameter is called {name!r}, which cannot be the name of a folder")
        own = list(_files_of(f"{folder}/{parameter.name}", parameter, slices, step))
        files += own
        links += (
            (f"{folder}/{alias}/{PurePosixPath(file.path).name}", file.path)
            for alias in parameter.aliases
            for file in own
        )
    notes = [
        *cautions(repo, composition),
        *buffer_notes(slices, 1),
        *export_notes(state, ranks.versions, slices),
    ]
    notes += [*optimizer.notes, *_notes(slices, optimizer)]
    if is_dealt(TreeView.of(base_state.model), outer_optimizer(base_state)):
        notes.append(
            "under round_robin_gradients, which the base was trained with, DeepSpeed loads this export into the wrong "
            "places: unset it, or compose --format shards --world-size N"
        )
    own_names = composition.own_parameters(ranks.versions)
    beside = [
        plan_beside(repo, file, slices, own=own_names)
        for file in state.files
        if not RANDOM_STATE.fullmatch(file.path) and not file.path.startswith(f"{base.layout.tag}/")
    ]
    summary = literal_file(SUMMARY, composition.summary_file(notes, format="universal", dtype="fp32"))
    return ExportPlan(
        composition=composition,
        format="universal",
        dtype="fp32",
        files=(*files, *beside, summary, literal_file(LATEST_UNIVERSAL, tag.encode())),
        links=tuple(links),
        notes=tuple(notes),
        seconds=time.monotonic() - started,
        signs=(LATEST_UNIVERSAL,),
        is_older_form=lambda path: path.parts[0].endswith("_universal"),
        loading='set "checkpoint": {"load_universal": true} in DeepSpeed\'s config, and load_checkpoint({folder})',
    )


def _check_adam(repo: Repository, composition: Composition, optimizer: OptimizerState) -> None:
    """Raise unless every trained parameter has the moments that DeepSpeed's loader requires, and no others."""
    [called] = references_to(repo, [composition.base])
    for name in (name for group in optimizer.groups for name in group.parameters):
        states = optimizer.sliced.get(name, ())
        if states != _MOMENTS:
            raise LayoutMismatch(
                f"the optimizer of {called} keeps {', '.join(states) or 'no moments'} of {name!r}: DeepSpeed's loader "
                f"of universal checkpoints knows {' and '.join(_MOMENTS)}",
                hint=_SHARDS,
            )


def _notes(slices: Slices, optimizer: OptimizerState) -> Iterator[str]:
    """Yield notes on what DeepSpeed's loader does not load."""
    differing = sorted(set.union(*(set(group.settings) for group in optimizer.groups)) - _shared(optimizer).keys())
    if differing:
        yield (
            f"param groups differ in {', '.join(differing)}: ZeRO-3 would give all groups the first group's settings, "
            "so under ZeRO-3 the training script must set these; stages 1 and 2 load each group's own"
        )
    frozen = sum(not slices.shards(Kind.MASTER, name) for name in slices.parameters)
    kinds = [f"{frozen} frozen parameters"] * bool(frozen) + [f"{len(slices.buffers())} buffers"] * bool(
        slices.buffers()
    )
    if kinds:
        yield f"DeepSpeed's loader does not load {' and '.join(kinds)}: build the model with them"


def _shared(optimizer: OptimizerState) -> dict[str, Tree]:
    """Return the settings that all param groups have in common."""
    first, *others = (group.settings for group in optimizer.groups)
    return {key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)}


def _step(state: RankState) -> Tree:
    """Return the optimizer's counter in the optimizer's own form."""
    for _, kept in inner_optimizer(state)["state"].children():
        if STEP in kept.mapping():
            return kept.mapping()[STEP]
    raise LayoutMismatch("the base's optimizer counts no updates, which DeepSpeed's loader asks for", hint=_SHARDS)


def _optimizer_state(folder: str, state: RankState, optimizer: OptimizerState) -> OutputFile:
    """Plan the file of what all parameters share: the loss scale, the counter and the groups' settings."""
    outer = {key: value for key, value in outer_optimizer(state).mapping().items() if key not in _OF_SLICES}
    members: list[Tree] = list(range(len(optimizer.groups)))
    # Stage 3 loads optimizer_state_dict, with one group for all parameters; stages 1 and 2 load param_groups.
    for_stage_3: dict[Tree, Tree] = {"state": {0: {STEP: _step(state)}}}
    for_stage_3["param_groups"] = [dict([*_shared(optimizer).items(), ("params", members)])]
    groups: list[Tree] = [
        dict([*group.settings.items(), ("params", [number])]) for number, group in enumerate(optimizer.groups)
    ]
    version = TreeView.of(state.model).get("ds_version")
    tree: dict[Tree, Tree] = {
        **outer,
        "optimizer_state_dict": for_stage_3,
        "param_groups": groups,
        "ds_version": None if version is None else version.value,
    }
    return _file(f"{folder}/optimizer_state.pt", tree)


def _files_of(folder: str, parameter: Parameter, slices: Slices, step: Tree) -> Iterator[OutputFile]:
    """Plan the files of a parameter; a frozen parameter has only its weights."""
    name, shape = parameter.name, parameter.shape
    is_trained = slices.shards(Kind.MASTER, name) > 0
    kinds: Mapping[str, tuple[Kind, str]] = {"fp32": (Kind.MASTER if is_trained else Kind.WEIGHTS, "")}
    if is_trained:
        kinds = {**kinds, **{state: (Kind.OPTIMIZER, state) for state in _MOMENTS}}
    for key, (kind, state) in kinds.items():
        fill = partial(_filled, slices, kind=kind, name=name, state=state)
        # Quantized frozen weights stay as they are: DeepSpeed's loader does not read them.
        stored = slices.dtype(kind, name, state=state) if prod(shape) else "F32"
        dtype = "F32" if can_convert(stored, "F32") else stored
        yield _file(f"{folder}/{key}.pt", {"param": new_tensor(dtype, shape), "cat_dim": 0}, fill)
    if is_trained:
        yield _file(f"{folder}/step.pt", step)


def _filled(slices: Slices, storage: Storage, offset: int, *, kind: Kind, name: str, state: str) -> Iterator[Piece]:
    if storage.elements:
        yield from slices.pieces(kind, name, state=state, dtype=storage.dtype, offset=offset)


def _file(path: str, tree: Tree, fill: Fill | None = None) -> OutputFile:
    archive = Archives(path)
    archive.add(tree, fill, name=PurePosixPath(path).stem, alignment_bytes=PAGE_BYTES if fill else 64)
    return archive.output()
