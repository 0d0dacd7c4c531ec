"""Capture a module and its optimizers as one rank's share of a commit: large tensors in place, the rest copied."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from layerstore.distcp import Item, PlannedSave, common_step, plan_save
from layerstore.dtypes import by_code, by_torch_name
from layerstore.errors import Unsupported
from layerstore.handover import CLIENT_STATE, DcpState, SavedValue
from layerstore.hashing import object_id
from layerstore.live.engine import Captured, Memory, inert, place_of
from layerstore.live.module.held import Box, ModuleState
from layerstore.model import Kind
from layerstore.states import RankState
from layerstore.tree import Tree
from layerstore.zero3 import LayerSource, ObjectSource, Share, SliceSource
from layerstore.zero3.trees import STAGE_3, STEP

MODEL, OPTIMIZER = "model", "optim"


def capture(
    engine: ModuleState,
    client_state: Mapping[str, object],
    *,
    step: int,
    pattern: re.Pattern[str] | None,
    exclude_frozen: bool,
) -> Captured:
    """
    Return the state of *engine* after *step* updates, as this rank's share of a save.

    Trained tensors and moments stay in place, to be copied before the next update; so do frozen weights, unless they
    have already changed. Buffers, counters and everything else may change at any time, so they are copied now.
    """
    state = _State(engine, exclude_frozen=exclude_frozen)
    plan = _plan(engine, state, pattern)
    tensors, values = Memory("tensors"), Memory("values")
    own: dict[str, list[ObjectSource]] = {}
    for layer, source in plan.by_rank[engine.rank]:
        own.setdefault(layer, []).append(_placed(source, state, tensors))
    layers = tuple(
        replace(
            layer,
            objects=tuple(own.get(layer.layer, ())),
            optimizer_step=_updates_of(layer, state, default=step),
        )
        for layer in plan.layers
    )
    kept = _kept_values(engine, state, plan, client_state, values)
    for storage in values.storages:
        values.settle(storage)
    return Captured(
        share=Share(
            rank=engine.rank,
            world_size=engine.world_size,
            stage=STAGE_3,
            layers=layers,
            state=kept,
            agreement=object_id(repr((state.signature, [layer.optimizer_step for layer in layers])).encode()),
        ),
        bytes_by_layer={
            layer.layer: sum(part.size_bytes for source in layer.objects for part in source.slices)
            for layer in plan.layers
        },
        moments={layer.layer: _moments_of(layer) for layer in plan.layers},
        is_dcp=True,
        undivided=", ".join(sorted({key.rpartition(".")[2] for key in plan.contents.outside})),
        model=tensors,
        optimizer=values,
        changed=state.changed,
    )


def _moments_of(layer: LayerSource) -> int:
    return sum(len(source.slices) for source in layer.objects if source.kind is Kind.OPTIMIZER)


def _updates_of(layer: LayerSource, state: "_State", *, default: int) -> int | None:
    """
    Return how often *layer* was updated; None if its parameters' counts differ, or if it has no optimizer state.

    If the optimizer keeps moments but no counts, return *default*.
    """
    counts = [state.steps[parameter.name] for parameter in layer.parameters if parameter.name in state.steps]
    return common_step(counts) if counts or not _moments_of(layer) else default


class _State:
    """The whole state, by the keys of ``get_state_dict``, flattened as DCP flattens it."""

    def __init__(self, engine: ModuleState, *, exclude_frozen: bool) -> None:
        names, trained = engine.names, engine.trained
        tensors = engine.tensors()
        frozen = {
            name
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and name not in trained
        }
        in_groups = {names[id(parameter)] for group in engine.groups() for parameter in group["params"]}
        if exclude_frozen:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        # Tied tensors are stored once, under the first of their names.
        first: dict[int, str] = {}
        for name, tensor in tensors.items():
            first.setdefault(id(tensor), name)
        states = _on_host({name: dict(engine.state_of(parameter)) for name, parameter in trained.items()})
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in engine.groups()
        ]
        of_optimizer = {"state": {name: state for name, state in states.items() if state}, "param_groups": groups}
        self.flat, self.paths = flatten_state_dict({MODEL: tensors, OPTIMIZER: of_optimizer})
        self._engine = engine
        self.aliases = {
            f"{MODEL}.{name}": f"{MODEL}.{first[id(tensor)]}"
            for name, tensor in tensors.items()
            if first[id(tensor)] != name
        }
        self.trained = {f"{MODEL}.{name}" for name in trained}
        still = (name for name in (frozen - in_groups) & tensors.keys() if engine.is_as_it_was(name, tensors[name]))
        self.frozen = {f"{MODEL}.{name}" for name in still}
        self.steps = {name: float(state[STEP]) for name, state in states.items() if STEP in state}
        self.keys = list(self.flat)
        self.signature = tuple((key, *_described(value)) for key, value in self.flat.items())
        self._watched: list[tuple[str, torch.Tensor, int]] = []

    def watch(self, key: str) -> None:
        """Watch the tensor *key*, which must not change until it is copied."""
        self._watched.append((key, self.flat[key], self.flat[key]._version))

    def changed(self) -> str:
        """Return the key of a watched tensor that has changed; empty if none has."""
        return next((key for key, tensor, version in self._watched if tensor._version != version), "")

    def is_alike(self, key: str) -> bool:
        """Whether ranks that hold the same part of the tensor *key* hold the same values in that part."""
        return self.paths[key][0] == OPTIMIZER or isinstance(self.flat[key], torch.nn.Parameter)

    def boxes(self, key: str) -> list[Box]:
        """Return the part of the tensor *key* that each rank holds."""
        value, path = self.flat[key], self.paths[key]
        if path[0] == MODEL:
            return self._engine.boxes(str(path[1]), tuple(value.shape))
        parameter = self.flat[f"{MODEL}.{path[2]}"]
        if value.shape == parameter.shape and _placement(value) == _placement(parameter):
            return self._engine.boxes(str(path[2]), tuple(parameter.shape))
        if _placement(value) is not None or _placement(parameter) is not None:
            raise Unsupported(
                f"the optimizer keeps {path[-1]!r} of {path[2]}, which is not split as the parameter is",
                hint="train on one rank, or with an optimizer that keeps a number for each element",
            )
        return [((0,) * value.dim(), tuple(value.shape))] * self._engine.world_size


def _described(value: Any) -> tuple[str, tuple[int, ...]]:
    return (str(value.dtype), tuple(value.shape)) if isinstance(value, torch.Tensor) else ("", ())


def _placement(value: torch.Tensor) -> object:
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _on_host(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copy scalars to the host, all scalars of a dtype at once, as each transfer waits for the device's work."""
    places_by_kind: dict[tuple[Any, Any], list[tuple[str, str]]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not value.dim() and value.device.type != "cpu":
                places_by_kind.setdefault((value.device, value.dtype), []).append((name, key))
    for places in places_by_kind.values():
        numbers = torch.stack([states[name][key] for name, key in places]).cpu()
        for (name, key), number in zip(places, numbers, strict=True):
            states[name][key] = number.clone()
    return states


def _plan(engine: ModuleState, state: _State, pattern: re.Pattern[str] | None) -> PlannedSave:
    """Return the plan of which rank writes what, the same on every rank; made again only if the tensors change."""
    known = state.signature, frozenset(state.trained), pattern
    if engine.planned is None or engine.planned[0] != known:
        plan = plan_save(
            _items(state, world_size=engine.world_size),
            state.paths,
            world_size=engine.world_size,
            pattern=pattern,
            aliases=state.aliases,
            trained=state.trained,
            of_optimizer={key for key, path in state.paths.items() if path[0] == OPTIMIZER},
        )
        engine.planned = known, plan
    return engine.planned[1]


def _items(state: _State, *, world_size: int) -> Iterator[Item]:
    """Yield every part of every tensor, with the rank that writes it: the least loaded rank that holds the part."""
    loads = [0] * world_size
    owners: dict[tuple[str, Box], int] = {}
    for number, (key, value) in enumerate(state.flat.items()):
        if not isinstance(value, torch.Tensor):
            yield Item(rank=0, number=number, key=key, dtype=None)
            continue
        dtype = by_torch_name(str(value.dtype).removeprefix("torch.")).code
        if not value.dim() and state.paths[key][0] == OPTIMIZER:
            yield Item(rank=0, number=number, key=key, dtype=dtype)
            continue
        holders: dict[Box, list[int]] = {}
        for rank, box in enumerate(state.boxes(key)):
            holders.setdefault(box, []).append(rank)
        parameter = str(state.paths[key][1 if state.paths[key][0] == MODEL else 2])
        for box, ranks in holders.items():
            # The rank that writes a parameter writes its moments, too. Buffers may differ: the first rank's are kept.
            least = min(ranks, key=loads.__getitem__) if state.is_alike(key) else ranks[0]
            owner = owners.setdefault((parameter, box), least)
            loads[owner] += prod(box[1]) * by_code(dtype).bytes
            yield Item(
                rank=owner,
                number=number,
                key=key,
                dtype=dtype,
                shape=tuple(value.shape),
                offsets=box[0],
                sizes=box[1],
            )


def _placed(source: ObjectSource, state: _State, memory: Memory) -> ObjectSource:
    """Return *source* with its slices pointing to the tensors in memory."""
    return replace(source, slices=tuple(_placed_slice(source.kind, part, state, memory) for part in source.slices))


def _placed_slice(kind: Kind, part: SliceSource, state: _State, memory: Memory) -> SliceSource:
    key = state.keys[int(part.path.name)]
    value = state.flat[key].detach()
    held = value.to_local() if isinstance(value, DTensor) else value
    if type(held) not in {torch.Tensor, torch.nn.Parameter}:
        raise Unsupported(f"{key} is a {type(held).__name__}, which cannot be saved", hint="keep plain tensors")
    held = held.contiguous()  # if this copies, the copy holds the current state
    path = place_of(memory.storage(held))
    if kind is Kind.WEIGHTS and key not in state.frozen:
        memory.keep_copy(path)
    elif not held.is_inference():  # torch does not count the changes of inference tensors
        state.watch(key)
    return replace(part, path=path, offset_bytes=int(held.storage_offset()) * held.element_size())


def _kept_values(
    engine: ModuleState, state: _State, plan: PlannedSave, client_state: Mapping[str, object], memory: Memory
) -> RankState:
    """Return the state outside of layers: each rank keeps its own client_state; the first rank keeps all the rest."""
    own: dict[str, SavedValue] = {}
    if client_state:
        tree = inert(dict(client_state), memory, where=CLIENT_STATE)
        own[CLIENT_STATE] = SavedValue(path=(CLIENT_STATE,), tree=tree)
    if engine.rank:
        return replace(DcpState(tensors={}, values=own, counters={}, outside=frozenset()).kept(), rank=engine.rank)
    for name, value in engine.extras().items():
        own[f"{MODEL}.{name}"] = SavedValue(path=(MODEL, name), tree=inert(value, memory, where=name))
    trees: dict[str, Tree] = {key: inert(state.flat[key], memory, where=key) for key in plan.contents.values}
    whole = plan.contents.state(plan.entries, trees)
    return replace(whole, values={**whole.values, **own}).kept()
