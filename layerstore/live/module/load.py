"""
Fill a module and its optimizers from a composite, whichever trainer saved it.

Everything is read into separate memory and checked before anything changes. Each rank reads only its own parts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layerstore.compose import Composition, cautions, load_versions
from layerstore.distcp import Boxes, Named, names_of, splits
from layerstore.dtypes import by_code, dtype_name
from layerstore.errors import InvalidInput, LayoutMismatch
from layerstore.handover import CLIENT_STATE, DcpState, Held, group_settings
from layerstore.layers import unwrapped
from layerstore.live.engine import bytes_of, read_random_state, revive_kept
from layerstore.live.module.capture import MODEL
from layerstore.live.module.engine import ModuleEngine
from layerstore.live.module.held import EXTRA_STATE, box_of, local
from layerstore.model import LayerVersion
from layerstore.rank_options import AdamStep
from layerstore.store import Store
from layerstore.tree import Tree
from layerstore.zero3.trees import ENGINE_KEYS, STEP

_OWN_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""Settings of a param group that stay the program's own, whatever was saved."""

_CLASS_SETTINGS = ("betas", "momentum")
"""Settings that distinguish classes of optimizers."""

_STEADY_SETTINGS = ("amsgrad", "dampening", "decoupled_weight_decay", "eps", "maximize", "nesterov", "weight_decay")
"""Settings that neither schedules nor optimizers change: if one differs, the program was changed."""

_MODEL_HINT = "resume into the model that was saved"


class ModuleLoad:
    """One rank's part of a composite, read and checked, to fill a module with."""

    def __init__(
        self,
        engine: ModuleEngine,
        store: Store,
        composition: Composition,
        *,
        adam_step: AdamStep,
        weights: bool = True,
        optimizer: bool = True,
    ) -> None:
        """
        Read and check this rank's part of the weights, if *weights*, and of the optimizer's state, if *optimizer*.

        Trainers may load the two separately.

        Raises:
            InvalidInput: Gradients are being accumulated for an update that is still to come.
            LayoutMismatch: The composite belongs to a different model or optimizer.
            IntegrityError: Part of the composite is damaged.
        """
        if not engine.is_at_boundary:
            raise InvalidInput(
                "cannot resume: gradients are being accumulated for an update that is still to come",
                hint="resume before training, or after optimizer.step() and zero_grad()",
            )
        repo = store.repo
        self._engine, self._store, self._composition = engine, store, composition
        self._has_optimizer, self._trained = optimizer, engine.trained
        self._base = composition.base
        self._ref = f"{self._base.run}@{self._base.step}"
        versions = load_versions(repo, composition)
        slices = composition.slices(repo, versions)
        named, notes = names_of(repo, composition, versions, slices, adam_step=adam_step)
        self._boxes = Boxes(repo, versions, slices)
        self._held = {(entry.held.name, entry.held.state): entry for entry in named if entry.held is not None}
        self._values = {entry.keys[0]: entry.value for entry in named if entry.held is None}
        self._names = _saved_names(versions)
        first = repo.state(self._base.states[0])
        self._outside = DcpState.read(first).outside if self._base.is_dcp else frozenset[str]()
        self._weights = list(self._plan_weights()) if weights else []
        self._states = self._plan_states() if optimizer else {}
        self._groups = list(self._plan_groups()) if optimizer else []
        self.notes = (*cautions(repo, composition, is_live=True), *notes, *self._lacking(), *self._replaced())
        # Everything is planned before anything is read: a mismatch is found without reading.
        self._boxes.read()
        own = engine.rank if len(self._base.states) == engine.world_size == self._base.world_size else 0
        self._state = repo.state(self._base.states[own])
        self.client_state = self._client_state()
        extras = engine.extras() if weights else {}
        self._extras = {
            name: self._revived(self._values[key]) for name in extras if (key := f"{MODEL}.{name}") in self._values
        }
        is_own = self._base.world_size == engine.world_size
        self.random_state = read_random_state(self._state, repo.content_of, rank=engine.rank) if is_own else None

    # -- planning ----------------------------------------------------------------------------------------------------

    def _plan_weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each of this rank's tensors of the model, with the memory that its values are read into."""
        engine, seen, left = self._engine, set[int](), {**self._names}
        for name, tensor in engine.tensors().items():
            saved = left.pop(name, None)
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if saved is None or (saved, "") not in self._held:
                if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
                    continue  # frozen weights may be left out
                raise LayoutMismatch(f"{name!r} is in the model, but not in {self._ref}", hint=_MODEL_HINT)
            entry = self._held[saved, ""]
            if name in self._trained and _dtype(entry) != tensor.dtype:
                raise LayoutMismatch(
                    f"{name!r} is {dtype_name(entry.dtype or '')} in {self._ref}, and {tensor.dtype} in the model",
                    hint="train in the same precision: fp32 parameters, with a MixedPrecisionPolicy for the rest",
                )
            yield local(tensor), self._wanted(name, entry, tensor)
        tied = {self._names[name] for name in engine.tensors() if name in self._names}
        strange = sorted(name for name, saved in left.items() if saved not in tied | self._outside)
        if strange:
            raise LayoutMismatch(f"{strange[0]!r} is in {self._ref}, but not in the model", hint=_MODEL_HINT)

    def _wanted(self, name: str, entry: Named, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that will hold this rank's part of *entry*, which is split as *tensor* is."""
        if entry.shape != tuple(tensor.shape):
            raise LayoutMismatch(
                f"{name!r} is {list(entry.shape)} in {self._ref}, and {list(tensor.shape)} in the model",
                hint=_MODEL_HINT,
            )
        assert entry.held is not None, "tensors of layers are read"
        offsets, sizes = box_of(name, tensor)
        return self._read_later(entry, entry.held, offsets, sizes)

    def _read_later(self, entry: Named, held: Held, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(sizes, dtype=_dtype(entry))
        if made.numel():
            assert entry.dtype is not None, "tensors have a type"
            target = bytes_of(made.view(-1))
            self._boxes.add(held, target, dtype=entry.dtype, shape=entry.shape, offsets=offsets, sizes=sizes)
        return made

    def _plan_states(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of each parameter: memory into which moments will be read, and values."""
        states = {name: dict[str, Any]() for name in self._trained}
        trained = {self._names[name]: name for name in states if name in self._names}
        for (saved, state), entry in self._held.items():
            if state and saved in trained:
                name = trained[saved]
                states[name][state] = self._wanted(name, entry, self._trained[name])
            elif not state:
                assert entry.held is not None, "it is in self._held"
                for name, key in splits(saved) if saved in self._outside else ():
                    if name in states:
                        states[name][key] = self._read_later(entry, entry.held, (0,) * len(entry.shape), entry.shape)
        for key, value in self._values.items():
            for name, state in splits(key):
                if name in states and not key.endswith(EXTRA_STATE):
                    states[name][state] = self._revived(value)
        return states

    def _plan_groups(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of each param group."""
        names = self._engine.names
        settings = group_settings(self._trained, self._values)
        for group in self._engine.groups():
            in_group = (names[id(parameter)] for parameter in group["params"])
            members = [name for name in in_group if name in settings]
            first = settings[members[0]] if members else {}
            other = next((name for name in members if settings[name] != first), None)
            if other is not None:
                raise LayoutMismatch(
                    f"{members[0]!r} and {other!r} share a param group, but have different settings in {self._ref}",
                    hint="build the optimizer's param groups as they were",
                )
            odd = next((key for key in _CLASS_SETTINGS if first and (key in first) != (key in group)), None)
            if odd is not None:
                raise LayoutMismatch(
                    f"the optimizer has {'no ' if odd in first else ''}{odd!r}, unlike the optimizer of {self._ref}",
                    hint="resume into an optimizer of the class that was saved",
                )
            yield {key: self._revived(value) for key, value in first.items() if key not in _OWN_SETTINGS}

    def _lacking(self) -> Iterator[str]:
        """Yield notes on parameters whose state was not saved, and on saved moments that no optimizer here uses."""
        without = [name for name, state in self._states.items() if not state]
        if without and len(without) < len(self._states):
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            yield f"the optimizer starts over for {without[0]!r}{more}: no optimizer state was saved"
        elif without and any(entry.held is not None for entry in self._held.values()) and self._base.step:
            yield "the optimizer starts over: no optimizer state was saved"
        known = {self._names.get(name) for name in self._states}
        left = sorted({saved for saved, state in self._held if state and saved not in known})
        if left and self._has_optimizer:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            yield f"the moments of {left[0]!r}{more} are left out: no optimizer trains it here"

    def _replaced(self) -> Iterator[str]:
        """Yield notes on settings of the program's param groups that saved settings replace."""
        replaced: dict[str, list[str]] = {}
        for number, (group, saved) in enumerate(zip(self._engine.groups(), self._groups, strict=False)):
            for key in _STEADY_SETTINGS:
                if key in group and key in saved and group[key] != saved[key]:
                    text = f"{key} of param group {number} is {saved[key]}, as saved, not {group[key]}"
                    replaced.setdefault(key, []).append(text)
        for first, *others in replaced.values():
            yield f"{first}; likewise in {len(others)} more" if others else first

    # -- values ------------------------------------------------------------------------------------------------------

    def _revived(self, tree: Tree) -> Any:
        return revive_kept(tree, self._store.repo.content_of)

    @property
    def counters(self) -> tuple[int, int, int]:
        """The step; samples and skipped updates are not counted."""
        return self._base.step, 0, 0

    def _client_state(self) -> dict[str, Any]:
        """Return the user's client_state; in a commit that DeepSpeed saved, it is mixed with DeepSpeed's keys."""
        if self._base.is_dcp:
            kept = DcpState.read(self._state).values.get(CLIENT_STATE)
            return {} if kept is None else dict(self._revived(kept.tree))
        tree = self._state.model.tree
        assert isinstance(tree, Mapping), "DeepSpeed's state is a map"
        return {str(key): self._revived(value) for key, value in tree.items() if key not in ENGINE_KEYS}

    # -- filling -----------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Copy what was read into the module and its optimizers."""
        binding = self._engine.binding
        binding.begin_load()  # first: no save may follow the old commit while the module is half filled
        try:
            self._fill()
        except BaseException:
            binding.fail_load()
            raise
        if self._has_optimizer:  # the optimizer is loaded last; with weights alone, there is no commit to continue from
            binding.hold(self._store, self._composition)
            self._engine.begin_at(self._base.step)

    @torch.no_grad()
    def _fill(self) -> None:
        for target, source in self._weights:
            target.copy_(source)
        for name, value in self._extras.items():
            self._engine.set_extra(name, value)
        names, groups = self._engine.names, iter(self._groups)
        for optimizer in self._engine.optimizers if self._has_optimizer else ():
            for group in optimizer.param_groups:
                group.update(next(groups))
                counts_there = bool(group.get("fused") or group.get("capturable"))
                for parameter in group["params"]:
                    state = self._states.get(names[id(parameter)], {})
                    optimizer.state.pop(parameter, None)
                    if state:
                        optimizer.state[parameter] = {
                            key: _moved(key, value, parameter, counts_there=counts_there)
                            for key, value in state.items()
                        }


def _moved(key: str, value: Any, parameter: torch.Tensor, *, counts_there: bool) -> Any:
    """Return a *value* of the optimizer's state on the device, and with the layout, that the optimizer expects."""
    if not isinstance(value, torch.Tensor):
        return value
    own = local(parameter)
    if key == STEP and not value.dim():
        return value.to(own.device) if counts_there else value
    if value.shape != own.shape:
        return value.to(own.device)
    held = value if own.is_contiguous() and own.device == value.device else torch.empty_like(own, dtype=value.dtype)
    if held is not value:
        held.copy_(value)
    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _saved_names(versions: list[LayerVersion]) -> dict[str, str]:
    """Return, for each name of each tensor of the model, the name under which the tensor is saved."""
    saved_names: dict[str, str] = {}
    for version in versions:
        for parameter in version.parameters:
            saved_names |= {unwrapped(name): parameter.name for name in (parameter.name, *parameter.aliases)}
        saved_names |= {unwrapped(buffer.name): buffer.name for buffer in version.buffers}
    return saved_names


def _dtype(entry: Named) -> torch.dtype:
    assert entry.dtype is not None, "tensors have a type"
    dtype: torch.dtype = getattr(torch, by_code(entry.dtype).torch_name)
    return dtype
