"""What every system has to keep of an engine: the rank's parts of each parameter's master and moments, and counters."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Engine = Any  # deepspeed ships no types

MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")

_CHUNK = 1 << 20
"""Elements that are summed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """This rank's part of one parameter, of one kind."""

    key: str
    elements: int
    """Of the whole parameter."""
    start: int
    """Where the part begins in it."""
    tensor: "torch.Tensor"
    """A view into the engine's own memory."""


class State:
    """The state of one engine, on this rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def flats(self) -> "dict[str, torch.Tensor]":
        """Return the flat tensors that DeepSpeed works on: the fewest and largest that there are."""
        states = self.engine.optimizer.optimizer.state
        return {
            f"{kind}.{number}": flat.data if kind == MASTER else states[flat][kind]
            for number, flat in enumerate(self._flats())
            for kind in KINDS
        }

    def slices(self, flats: "dict[str, torch.Tensor] | None" = None) -> Iterator[Slice]:
        """Yield the part of every parameter, without padding: views into *flats*, or into the engine's own."""
        import torch.distributed as dist

        zero = self.engine.optimizer
        names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        flats = self.flats() if flats is None else flats
        for number, group in enumerate(zero.fp16_groups):
            for kind in KINDS:
                whole, offset = flats[f"{kind}.{number}"], 0
                for parameter in group:
                    length = parameter.partition_numel()
                    start = min(dist.get_rank() * length, parameter.ds_numel)
                    yield Slice(
                        key=f"{kind}/{names[id(parameter)]}",
                        elements=parameter.ds_numel,
                        start=start,
                        tensor=whole.narrow(0, offset, min(length, parameter.ds_numel - start)),
                    )
                    offset += length

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return the same as plain tensors."""
        return {part.key: part.tensor for part in self.slices()}

    def distributed(self, flats: "dict[str, torch.Tensor] | None" = None) -> "dict[str, DTensor]":
        """Return the same as distributed tensors, which PyTorch's own checkpoints can cut for any number of ranks."""
        import torch
        from torch.distributed.tensor import DTensor, Shard

        return {
            part.key: DTensor.from_local(
                part.tensor, self._mesh, [Shard(0)], run_check=False, shape=torch.Size([part.elements]), stride=(1,)
            )
            for part in self.slices(flats)
        }

    @cached_property
    def _mesh(self) -> "DeviceMesh":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (dist.get_world_size(),))

    def rest(self) -> dict[str, Any]:
        """Return what is not a tensor of a layer: counters and the scheduler."""
        states = self.engine.optimizer.optimizer.state
        return {
            "global_steps": self.engine.global_steps,
            "scheduler": self.engine.lr_scheduler.state_dict(),
            "rates": [group["lr"] for group in self.engine.optimizer.optimizer.param_groups],
            "optimizer_steps": [float(states[flat]["step"]) for flat in self._flats()],
        }

    def fill(self, rest: dict[str, Any]) -> None:
        """Finish a load that has filled the tensors: set the counters, and round the weights from the masters."""
        zero = self.engine.optimizer
        zero.checkpoint_event_prologue()
        for weights, masters in zip(zero.fp16_partitioned_groups_flat, self._flats(), strict=True):
            weights.data.copy_(masters.data)
        for weights, group in zip(zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups, strict=True):
            for partition, values in zip(group, zero.unflatten(weights, group), strict=True):
                partition.data = values.data
        zero.checkpoint_event_epilogue()
        for flat, steps in zip(self._flats(), rest["optimizer_steps"], strict=True):
            zero.optimizer.state[flat]["step"].fill_(steps)
        for group, rate in zip(zero.optimizer.param_groups, rest["rates"], strict=True):
            group["lr"] = rate
        self.engine.global_steps = rest["global_steps"]
        self.engine.lr_scheduler.load_state_dict(rest["scheduler"])

    def digests(self) -> dict[str, int]:
        """
        Return a sum over the bits of each tensor on all ranks.

        It is the same for any number of ranks, and another one if two words change places.
        """
        import torch
        import torch.distributed as dist

        parts = sorted(self.slices(), key=lambda part: part.key)
        sums = torch.stack([_sum(part) for part in parts])
        dist.all_reduce(sums)
        return dict(zip((part.key for part in parts), sums.tolist(), strict=True))

    def _flats(self) -> "list[torch.Tensor]":
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)


def _sum(part: Slice) -> "torch.Tensor":
    """Return the sum of the words of *part*, each times a number that its place in the whole parameter gives."""
    import torch

    words, total = part.tensor.detach().view(torch.int32), torch.zeros((), dtype=torch.int64)
    for begin in range(0, len(words), _CHUNK):
        piece = words[begin : begin + _CHUNK].long()
        first = part.start + begin
        places = torch.arange(first, first + len(piece), dtype=torch.int64)
        total += (piece * (2 * places + 1)).sum()
    return total
