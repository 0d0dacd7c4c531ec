"""
The lazy copy: due layers move from the engine's memory to a host buffer while forward and backward run.

One thread copies, in the order in which the writing thread reads, so a slice of any size streams through a buffer of
any size. The saver delays the next update until nothing is left to copy.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from layerstore.errors import Unsupported
from layerstore.limits import MIB
from layerstore.live.engine import Captured
from layerstore.model import Kind
from layerstore.staging import Reader
from layerstore.zero3 import ObjectSource, SliceSource

if TYPE_CHECKING:
    import torch

# Large enough for a transfer at full speed, small enough that the writer starts soon.
COPY_BYTES = 4 * MIB

STALLED_SECONDS_MAX = 300.0
"""How long an update waits for a disk that accepts no bytes at all, before the save is given up."""


class PoolClosed(Exception):
    """The ring was closed: it will not be emptied."""


class DiskStalled(Exception):
    """The ring was not emptied for so long that training must not wait any longer."""


class Pool:
    """The host buffer: a ring of *size_bytes* bytes, filled by one thread and emptied by another in the same order."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        import torch

        self.size_bytes = size_bytes
        # Pages take memory only once they are touched, so the unused part of a buffer costs nothing.
        self._memory: torch.Tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._given: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """The bytes that are waiting for the disk."""
        with self._changed:
            return sum(end - begin for begin, end in self._given)

    def take(self, size_bytes: int) -> "torch.Tensor":
        """
        Return *size_bytes* of the ring once they are free.

        Raises:
            PoolClosed: The ring was closed while this waited.
            DiskStalled: Nothing was freed for `STALLED_SECONDS_MAX`.
        """
        assert 0 < size_bytes <= self.size_bytes
        with self._changed:
            while not self._is_closed:
                begin = self._free_at(size_bytes)
                if begin is not None:
                    self._given.append((begin, begin + size_bytes))
                    return self._memory[begin : begin + size_bytes]
                # Counted from the last piece that was freed: wait for a slow disk, but not for a dead one.
                if not self._changed.wait(STALLED_SECONDS_MAX):
                    raise DiskStalled(f"the disk accepted no data for {STALLED_SECONDS_MAX:g} s")
        raise PoolClosed

    def _free_at(self, size_bytes: int) -> int | None:
        """Return an offset with *size_bytes* contiguous free bytes; None if no gap is large enough yet."""
        if not self._given:
            return 0
        oldest, newest = self._given[0][0], self._given[-1][1]
        if newest > oldest:  # the used part is one stretch in the middle
            if self.size_bytes - newest >= size_bytes:
                return newest
            return 0 if oldest > size_bytes else None
        return newest if oldest - newest > size_bytes else None

    def give_back(self) -> None:
        """Free the bytes that were taken first (FIFO)."""
        with self._changed:
            self._given.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiters; `take` raises from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A piece of a slice; *ready* waits until it has been copied."""

    path: Path
    offset: int
    data: "torch.Tensor"
    ready: Callable[[], None]


class CopyFailed(Exception):
    """The engine's memory could not be copied; the cause is attached."""


class Snapshot(Reader):
    """One save's slices on their way from the engine to the writer, which reads them in the order of *slices*."""

    def __init__(self, captured: Captured, slices: list[SliceSource]) -> None:
        self.captured = captured
        self.slices = slices
        self._lazy = {(part.path, part.offset_bytes) for part in slices}
        self.size_bytes = sum(part.size_bytes for part in slices)
        self.copied = threading.Event()
        """Set once the engine's memory is no longer needed."""
        self.error: BaseException | None = None
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._is_over = False
        self._pool: Pool | None = None

    # -- the copying thread --------------------------------------------------------------------------------------

    def fill(self, pool: Pool, copy: "Copier") -> None:
        """Copy all slices to *pool*, which `chunks` empties."""
        self._pool = pool
        try:
            for part in self.slices:
                source = self.captured.memory(part.path).bytes_of(part.path)
                step = min(COPY_BYTES, pool.size_bytes)
                for start in range(0, part.size_bytes, step):
                    at = part.offset_bytes + start
                    data = pool.take(min(step, part.size_bytes - start))
                    try:
                        ready = copy.begin(data, source[at : at + len(data)])
                    except BaseException as exc:
                        # The reader gives pieces back in order, so it must get the failed piece, too.
                        self.error = exc
                        self._chunks.put(_Chunk(path=part.path, offset=at, data=data, ready=self._failed))
                        raise
                    if part is self.slices[-1] and start + step >= part.size_bytes:
                        ready = self._unless_changed(copy, ready)
                    self._chunks.put(_Chunk(path=part.path, offset=at, data=data, ready=ready))
            copy.finish()
        except PoolClosed:
            pass  # the saver ends at once: nobody reads the rest
        except BaseException as exc:  # noqa: BLE001  # raised where the slices are awaited
            self.error = exc
        finally:
            # In every case: the writer waits for the end of the queue, and the next update for the copies.
            self._chunks.put(None)
            self.copied.set()

    def _unless_changed(self, copy: "Copier", ready: Callable[[], None]) -> Callable[[], None]:
        """Return the last piece's *ready* or, if the trained state changed during the copy, a function that raises."""
        copy.finish()
        if changed := self.captured.changed():
            self.error = Unsupported(
                f"{changed} was changed between save() and the next update of its optimizer",
                hint="call saver.copied() first; once it returns, anything may change the trained state",
            )
            return self._failed
        return ready

    def _failed(self) -> NoReturn:
        raise CopyFailed("the training state could not be copied") from self.error

    # -- the writing thread --------------------------------------------------------------------------------------

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of the next slice, or of a tensor that does not pass through the ring."""
        if (path, offset) not in self._lazy:
            yield self.captured.memory(path).bytes_of(path)[offset : offset + size_bytes].cpu().numpy().data
            return
        end = offset + size_bytes
        while offset < end:
            chunk = self._next()
            if chunk is None:
                self._failed()
            assert self._pool is not None
            try:
                assert (chunk.path, chunk.offset) == (path, offset), "slices are read in the order of their copying"
                chunk.ready()
                yield chunk.data.numpy().data
            finally:
                # Only after the reader has used the chunk: the copying thread may overwrite its memory next.
                self._pool.give_back()
            offset += len(chunk.data)

    def discard(self) -> None:
        """Drop the rest, so that the copying thread does not wait for a writer that has given up."""
        while (chunk := self._next()) is not None:
            assert self._pool is not None
            with suppress(Exception):  # a failed copy no longer writes to that memory
                chunk.ready()
            self._pool.give_back()

    def _next(self) -> _Chunk | None:
        """Return the next chunk; always None once there are no more."""
        chunk = None if self._is_over else self._chunks.get()
        self._is_over = chunk is None
        return chunk


def changing(objects: Iterable[ObjectSource]) -> list[SliceSource]:
    """Return the slices of *objects* that the next update changes."""
    return [part for source in objects if source.kind in {Kind.MASTER, Kind.OPTIMIZER} for part in source.slices]


def changing_bytes(captured: Captured) -> int:
    """Return how many bytes a save of all layers copies."""
    objects = (source for layer in captured.share.layers for source in layer.objects)
    return sum(part.size_bytes for part in changing(objects))


class Copier:
    """Copies bytes from the engine's memory to the host's."""

    def follow(self) -> None:
        """Order the next copies after the work that the engine has begun."""

    def begin(self, target: "torch.Tensor", source: "torch.Tensor") -> Callable[[], None]:
        """Start to copy *source* to *target*; return a function that waits until the copy is done."""
        target.copy_(source)
        return lambda: None

    def finish(self) -> None:
        """Return once all copies have read the engine's memory."""


class CudaCopier(Copier):
    """Copies on its own stream, after the work that the engine had queued when the save began."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def follow(self) -> None:
        """Queue behind the stream that the engine computes on; the host does not wait."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def begin(self, target: "torch.Tensor", source: "torch.Tensor") -> Callable[[], None]:
        """Queue the copy; *target* is pinned."""
        import torch

        if source.device.type != "cuda":
            return super().begin(target, source)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._last = done
        wait: Callable[[], None] = done.synchronize
        return wait

    def finish(self) -> None:
        """Wait for the last copy."""
        if self._last is not None:
            self._last.synchronize()
