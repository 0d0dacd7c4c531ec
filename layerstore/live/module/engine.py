"""Where layerstore meets a module and its optimizers: what they hold, which rank saves what, and when they update."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from layerstore.distcp import PlannedSave
from layerstore.errors import InvalidInput, LayoutMismatch, Unsupported
from layerstore.hashing import object_id
from layerstore.layers import unwrapped
from layerstore.live.binding import binding_of
from layerstore.live.engine import Captured
from layerstore.live.module.capture import Box, capture
from layerstore.zero3.trees import STEP

_MOMENTS_MAX = 2
"""How many states Adam keeps of each element, for the size of a buffer that is made before it keeps any."""


class ModuleEngine:
    """A module and the optimizers that train it."""

    own_keys: frozenset[str] = frozenset()
    """What the user keeps has a place of its own."""
    shard = None
    """Of ranks that hold the same, any may write it."""

    def __init__(self, model: object, optimizers: object) -> None:
        """
        Take *model* and its optimizer, or several in a list.

        Raises:
            InvalidInput: They are something else, or the optimizer trains what the model does not have.
            Unsupported: The model is wrapped in what is not supported.
        """
        self.model = _bare(model)
        self.optimizers = tuple(_within(optimizers))
        if not self.optimizers:
            raise InvalidInput("there is no optimizer in the list", hint="attach(model, optimizer, store, run=…)")
        self.binding = binding_of(self.model)
        self._updates = [_updates_of(each) for each in self.optimizers]
        self._holders: list[list[Box]] | None = None
        self.planned: tuple[object, PlannedSave] | None = None
        """Which rank writes what, and what that follows from."""
        names = self.names
        for group in self.groups():
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise InvalidInput(
                        "the optimizer trains a parameter that the model does not have",
                        hint="make the optimizer after fully_shard, which replaces parameters",
                    )

    # -- what they hold ----------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """Return all param groups."""
        return [group for each in self.optimizers for group in each.param_groups]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, tied ones under each name; the tensors themselves."""
        return {name: value for name, value in self._state().items() if isinstance(value, torch.Tensor)}

    def extras(self) -> dict[str, Any]:
        """Return what modules keep besides, by name."""
        return {name: value for name, value in self._state().items() if not isinstance(value, torch.Tensor)}

    def _state(self) -> dict[str, Any]:
        return {unwrapped(name): value for name, value in self.model.state_dict(keep_vars=True).items()}

    @property
    def names(self) -> dict[int, str]:
        """Return the name of each parameter, by its identity; of tied ones the first."""
        found: dict[int, str] = {}
        # Not from `named_parameters`, which has whole ones after an evaluation under FSDP2.
        for name, value in self._state().items():
            found.setdefault(id(value), name)
        return found

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return what the optimizers keep of *parameter*."""
        found = (each.state.get(parameter) for each in self.optimizers)
        return next((state for state in found if state), {})

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters that an optimizer updates, by name."""
        names = self.names
        return {names[id(each)]: each for group in self.groups() for each in group["params"] if each.requires_grad}

    # -- the ranks ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank among those that share the state."""
        return dist.get_rank() if _is_distributed() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks that share the state."""
        return dist.get_world_size() if _is_distributed() else 1

    def meet(self, gathered: Callable[[Sequence[int]], list[list[int]]], is_same: Callable[[str], bool]) -> None:
        """
        Learn which rank holds which part of each tensor. Collective.

        Raises:
            LayoutMismatch: The ranks have different models.
        """
        tensors = self.tensors()
        shapes = repr([(name, tuple(of.shape), str(of.dtype)) for name, of in tensors.items()])
        if not is_same(object_id(shapes.encode())):
            raise LayoutMismatch("the ranks have different models", hint="pipelines are not supported")
        boxes = [box_of(name, of) for name, of in tensors.items()]
        of_ranks = gathered([number for offsets, sizes in boxes for number in (*offsets, *sizes)])
        self._holders = [list(_parsed(numbers, tensors.values())) for numbers in of_ranks]

    @property
    def holders(self) -> list[list[Box]]:
        """For each rank, which part of each of `tensors` it holds."""
        assert self._holders is not None, "the ranks meet before they save"
        return self._holders

    # -- for a saver -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the module computes on."""
        return next((each.device for each in self.model.parameters()), torch.device("cpu"))

    @property
    def step(self) -> int:
        """The step of the commit that the module was filled from, and the updates since."""
        return self._updates[-1].count  # all optimizers update, one after the other

    def begin_at(self, step: int) -> None:
        """Count updates from *step* on."""
        for updates in self._updates:
            updates.count = step

    @property
    def is_at_boundary(self) -> bool:
        """Whether no gradient has been accumulated for an update that is still to come."""
        return not any(
            of.awaits_update(optimizer) for of, optimizer in zip(self._updates, self.optimizers, strict=True)
        )

    @property
    def ungated(self) -> str:
        """Say that updates can wait for copies."""
        return ""

    @property
    def state_bytes(self) -> int:
        """The bytes of this rank's masters and moments."""
        own = sum(local(each).nbytes for each in self.trained.values())
        return own * (1 + _MOMENTS_MAX)

    @property
    def scripts(self) -> list[Path]:
        """Nothing lies beside."""
        return []

    def capture(
        self, tag: str, client_state: Mapping[str, object], *, pattern: re.Pattern[str] | None, exclude_frozen: bool
    ) -> Captured:
        """Return this rank's state as it is now, grouped into layers by *pattern*."""
        del tag
        return capture(self, client_state, pattern=pattern, exclude_frozen=exclude_frozen)

    def check_whole(self) -> None:
        """Raise Conflict if the last load has failed half-way."""
        self.binding.check_whole()

    def before_update(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call *action* before each update of an optimizer; return a function that stops that."""
        handles = [each.register_step_pre_hook(lambda *_: action()) for each in self.optimizers]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop


@dataclass(slots=True)
class _Updates:
    """The updates of one optimizer, counted from when it was first seen."""

    count: int
    gradients: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By param group: address and count of changes of a gradient, as the last update has left it."""

    def note(self, optimizer: Optimizer) -> None:
        """Note that *optimizer* has updated."""
        self.count += 1
        self.gradients = {number: _mark(gradient) for number, gradient in _gradients(optimizer)}

    def awaits_update(self, optimizer: Optimizer) -> bool:
        """Whether there are gradients that no update has used."""
        return any(
            self.gradients.get(number) != _mark(gradient) and bool(local(gradient).any())
            for number, gradient in _gradients(optimizer)
        )


_UPDATES: "WeakKeyDictionary[Optimizer, _Updates]" = WeakKeyDictionary()


def _updates_of(optimizer: Optimizer) -> _Updates:
    known = _UPDATES.get(optimizer)
    if known is None:
        steps = (of[STEP] for of in optimizer.state.values() if STEP in of)
        known = _UPDATES[optimizer] = _Updates(count=int(float(next(steps, 0))))
        optimizer.register_step_post_hook(lambda found, *_: known.note(found))
    return known


def _gradients(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield one gradient of each param group: a backward pass changes all."""
    for number, group in enumerate(optimizer.param_groups):
        found = next((each.grad for each in group["params"] if each.grad is not None), None)
        if found is not None:
            yield number, found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of *tensor*, in its own memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bare(model: object) -> torch.nn.Module:
    """Return *model* without what distributes it."""
    if isinstance(model, DistributedDataParallel):
        return _bare(model.module)
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(f"{type(model).__name__} is not a module", hint="attach(model, optimizer, store, run=…)")
    kinds = {type(each).__name__ for each in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise Unsupported("the model is wrapped by FSDP1", hint="shard it with fully_shard, which is FSDP2")
    return model


def _within(given: Any) -> Iterator[Optimizer]:
    """Yield the optimizers of torch in a list, or in the wrappers of Accelerate and torchtitan."""
    several = given if isinstance(given, list | tuple) else getattr(given, "optimizers", None)
    inner = getattr(given, "optimizer", None)
    if several is not None:
        for each in several:
            yield from _within(each)
    elif isinstance(inner, Optimizer):
        yield inner
    elif isinstance(given, Optimizer):
        yield given
    else:
        raise InvalidInput(
            f"{type(given).__name__} is not an optimizer of torch", hint="attach(model, optimizer, store, run=…)"
        )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def box_of(name: str, tensor: torch.Tensor) -> Box:
    """Return which part of *tensor* this rank holds."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise Unsupported(f"{name} has partial sums on each rank", hint="redistribute it first")
    [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # what DCP asks, too
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _parsed(numbers: Sequence[int], tensors: Iterable[torch.Tensor]) -> Iterator[Box]:
    left = iter(numbers)
    for tensor in tensors:
        offsets = tuple(next(left) for _ in range(tensor.dim()))
        yield offsets, tuple(next(left) for _ in range(tensor.dim()))


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    held = local(gradient)
    return held.data_ptr(), held._version
