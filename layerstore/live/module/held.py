"""The state of a module and its optimizers, and which rank holds which part of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from layerstore.distcp import PlannedSave
from layerstore.errors import Conflict, InvalidInput, LayoutMismatch, Unsupported
from layerstore.hashing import object_id
from layerstore.layers import unwrapped

EXTRA_STATE = "_extra_state"
"""Torch's name for the state that modules keep in addition to parameters and buffers."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


class ModuleState:
    """The state of a module and the optimizers that train it, and which rank holds which part of it."""

    def __init__(self, model: object, optimizers: object) -> None:
        """
        Take *model* and its optimizer, or several in a list.

        Raises:
            InvalidInput: An argument has a wrong type, or the optimizer trains a parameter that is not in the model.
            Unsupported: The model has an unsupported wrapper.
        """
        self.model = _bare(model)
        self.optimizers = tuple(_within(optimizers))
        if not self.optimizers:
            raise InvalidInput("there is no optimizer in the list", hint="attach(model, optimizer, store, run=…)")
        self._boxes: dict[str, tuple[tuple[int, ...], list[Box]]] | None = None
        self._first_marks: dict[str, tuple[int, int]] = {}
        self.planned: tuple[object, PlannedSave] | None = None
        """The last plan of which rank writes what, preceded by the facts that it was made from."""
        names, seen = self.names, set[int]()
        for group in self.groups():
            for parameter in group["params"]:
                if id(parameter) in seen:
                    raise InvalidInput(f"two optimizers train {names[id(parameter)]!r}", hint="give it to one of them")
                seen.add(id(parameter))
                if id(parameter) not in names:
                    raise InvalidInput(
                        "the optimizer trains a parameter that the model does not have",
                        hint="make the optimizer after fully_shard, which replaces parameters",
                    )

    # -- the state ---------------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """Return all param groups."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, not copied; a tied tensor is under each of its names."""
        return {name: value for name, value in self._state().items() if not name.endswith(EXTRA_STATE)}

    def extras(self) -> dict[str, Any]:
        """Return the extra state of modules, by name; see ``Module.get_extra_state``."""
        return {name: value for name, value in self._state().items() if name.endswith(EXTRA_STATE)}

    def set_extra(self, name: str, value: Any) -> None:
        """Set the extra state *name* to *value*."""
        self.model.get_submodule(name.removesuffix(EXTRA_STATE).removesuffix(".")).set_extra_state(value)

    def _state(self) -> dict[str, Any]:
        return {unwrapped(name): value for name, value in self.model.state_dict(keep_vars=True).items()}

    @property
    def names(self) -> dict[int, str]:
        """Return the name of each parameter, by its identity; for tied parameters, the first name."""
        names: dict[int, str] = {}
        # Not from `named_parameters`, which under FSDP2 yields unsharded parameters after an evaluation.
        for name, value in self._state().items():
            names.setdefault(id(value), name)
        return names

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the optimizers' state of *parameter*."""
        states = (optimizer.state.get(parameter) for optimizer in self.optimizers)
        return next((state for state in states if state), {})

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters that an optimizer updates, by name, including parameters now frozen that have a state."""
        names = self.names
        return {
            names[id(parameter)]: parameter
            for group in self.groups()
            for parameter in group["params"]
            if parameter.requires_grad or self.state_of(parameter)
        }

    def is_as_it_was(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the frozen parameter *name* is unchanged since the first call for that name."""
        held = local(tensor)
        mark = held.data_ptr(), 0 if held.is_inference() else tensor._version
        return self._first_marks.setdefault(name, mark) == mark

    # -- the ranks ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this rank among the ranks that share the state."""
        return dist.get_rank() if _is_distributed() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks that share the state."""
        return dist.get_world_size() if _is_distributed() else 1

    def meet(self, gathered: Callable[[Sequence[int]], list[list[int]]], is_same: Callable[[str], bool]) -> None:
        """
        Let all ranks know which rank holds which part of each tensor. Collective.

        Raises:
            LayoutMismatch: The ranks have different models.
        """
        tensors = self.tensors()
        shapes = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()])
        if not is_same(object_id(shapes.encode())):
            raise LayoutMismatch("the ranks have different models", hint="pipelines are not supported")
        boxes = [box_of(name, tensor) for name, tensor in tensors.items()]
        numbers_by_rank = gathered([number for offsets, sizes in boxes for number in (*offsets, *sizes)])
        by_rank = [list(_parsed(numbers, tensors.values())) for numbers in numbers_by_rank]
        self._boxes = {
            name: (tuple(tensor.shape), [boxes[number] for boxes in by_rank])
            for number, (name, tensor) in enumerate(tensors.items())
        }

    def boxes(self, name: str, shape: tuple[int, ...]) -> list[Box]:
        """
        Return, by rank, the part of the model's tensor *name* that the rank holds.

        Raises:
            Conflict: The tensor did not exist, or had another shape, when the saver was attached.
        """
        assert self._boxes is not None, "meet is called before the first save"
        known, boxes = self._boxes.get(name, (None, []))
        if known != shape:
            raise Conflict(
                f"{name!r} is {list(shape)}, but was {'not there' if known is None else list(known)} when the saver "
                "was attached",
                hint="close the saver, and attach a new one",
            )
        return boxes

    @property
    def bytes_to_write(self) -> int:
        """The bytes of trained parameters that this rank writes; parameters on several ranks are divided evenly."""
        total = 0
        for name, parameter in self.trained.items():
            boxes = self.boxes(name, tuple(parameter.shape))
            total += local(parameter).nbytes // boxes.count(boxes[self.rank])
        return total


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of *tensor*, without a copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bare(model: object) -> torch.nn.Module:
    """Return *model* without the wrappers of DDP and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    if isinstance(inner, torch.nn.Module):  # wrapped by DDP or torch.compile
        return _bare(inner)
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(f"{type(model).__name__} is not a module", hint="attach(model, optimizer, store, run=…)")
    kinds = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise Unsupported("the model is wrapped by FSDP1", hint="shard it with fully_shard, which is FSDP2")
    return model


def _within(given: Any) -> Iterator[Optimizer]:
    """Yield torch's optimizers in *given*: an optimizer, a list, or a wrapper from Accelerate or torchtitan."""
    several = given if isinstance(given, list | tuple) else getattr(given, "optimizers", None)
    inner = getattr(given, "optimizer", None)
    if several is not None:
        for optimizer in several:
            yield from _within(optimizer)
    elif isinstance(inner, Optimizer):
        yield inner
    elif type(given).__name__ == "ZeroRedundancyOptimizer":
        raise Unsupported("ZeroRedundancyOptimizer keeps a different state on each rank", hint="shard with fully_shard")
    elif isinstance(given, Optimizer):
        yield given
    else:
        raise InvalidInput(
            f"{type(given).__name__} is not an optimizer of torch", hint="attach(model, optimizer, store, run=…)"
        )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def box_of(name: str, tensor: torch.Tensor) -> Box:
    """Return the part of *tensor* that this rank holds."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise Unsupported(f"{name} has partial sums on each rank", hint="redistribute it first")
    [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP calls it, too
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _parsed(numbers: Sequence[int], tensors: Iterable[torch.Tensor]) -> Iterator[Box]:
    left = iter(numbers)
    for tensor in tensors:
        offsets = tuple(next(left) for _ in range(tensor.dim()))
        yield offsets, tuple(next(left) for _ in range(tensor.dim()))
