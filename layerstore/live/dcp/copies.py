"""Copies of a state on the host, made while training continues: only an optimizer's step waits for them."""

import copy
import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerstore.errors import Unsupported
from layerstore.limits import MIB
from layerstore.threads import start

_AT_ONCE_BYTES = MIB
"""Tensors up to this size are copied at once: counters, and buffers, which the forward pass changes."""


class Copies:
    """Copies of the tensors of one state, storage by storage."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}
        """The copy of each storage, by address; `_kept` holds the storages, so that no address is reused."""
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Sources and targets that are still to be copied."""
        self._done = threading.Event()
        self._problem: BaseException | None = None
        self._kept: list[torch.UntypedStorage] = []

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return *state* as it is now; `copy_of` returns the copies of its tensors."""
        taken: dict[str, Any] = self._taken(state)
        if not self._pending:
            self._done.set()
            return taken
        is_cuda = any(source.device.type == "cuda" for source, _ in self._pending)
        computed = torch.cuda.current_stream().record_event() if is_cuda else None
        # Install the gate before the thread starts, so that no update can happen in between.
        gate = register_optimizer_step_pre_hook(lambda *_: self.wait())
        thread = threading.Thread(target=self._copy, args=(computed, gate), name="layerstore-copy", daemon=True)
        try:
            start(thread)
        except BaseException:
            gate.remove()  # otherwise the next update would wait for copies that nobody makes
            raise
        return taken

    def _taken(self, value: Any) -> Any:
        """Return a deep copy of *value*, except for its tensors, which are queued for copying."""
        if isinstance(value, torch.Tensor):
            self._add(value.to_local() if isinstance(value, DTensor) else value)
            return value
        if isinstance(value, dict):
            return {key: self._taken(item) for key, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in {list, tuple}:
            return type(value)(self._taken(item) for item in value)
        if hasattr(value, "local_shards"):  # a ShardedTensor
            for shard in value.local_shards():
                self._add(shard.tensor)
            return value
        return copy.deepcopy(value)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._copies or not storage.nbytes():
            return
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        target = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")
        self._copies[storage.data_ptr()] = target
        self._kept.append(storage)
        if storage.nbytes() <= _AT_ONCE_BYTES:
            target.copy_(source)
        else:
            self._pending.append((source, target))

    def _copy(self, computed: Any, gate: Any) -> None:
        """Copy the pending storages, in a thread; on a GPU, on a separate stream, after the event *computed*."""
        try:
            stream = torch.cuda.Stream() if computed is not None else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if stream is not None:
                    stream.wait_event(computed)
                for source, target in self._pending:
                    target.copy_(source, non_blocking=True)
                if stream is not None:
                    stream.synchronize()
        except BaseException as exc:  # noqa: BLE001  # raised by `copy_of`, in the thread that saves
            self._problem = exc
        finally:
            gate.remove()
            self._pending.clear()
            self._done.set()

    def wait(self) -> None:
        """Wait for the copies that remain."""
        self._done.wait()

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Return the copy of *tensor*.

        Raises:
            Unsupported: There is no copy: the planner made *tensor* itself, from tensors that training changes.
        """
        self.wait()
        if self._problem is not None:
            raise self._problem
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        copy_on_host = self._copies.get(storage.data_ptr())
        if copy_on_host is None:
            raise Unsupported(
                "the planner made new tensors of the model's, which training may have changed in the meantime",
                hint="use save() instead of async_save(), or a different planner",
            )
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(copy_on_host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
