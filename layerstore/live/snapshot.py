"""
The lazy copy: what is due goes from the engine's memory to the pool while training computes, until the next update.

One thread copies, in the order in which the writer reads. The gate holds the update until nothing is left to copy.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from layerstore.limits import MIB
from layerstore.live.capture import Captured
from layerstore.live.pool import Pool, PoolClosed
from layerstore.model import Kind
from layerstore.zero3 import ObjectSource, SliceSource

if TYPE_CHECKING:
    import torch

# Long enough for a full-speed transfer, short enough that the writer soon has something to do.
COPY_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Some bytes of a slice on their way; *ready* waits until they have arrived."""

    path: Path
    offset: int
    data: "torch.Tensor"
    ready: Callable[[], None]


class CopyFailed(Exception):
    """The engine's memory could not be copied; the cause says why."""


class Snapshot:
    """One save's slices, on their way from the engine to the writer; for one reader, in the order of *slices*."""

    def __init__(self, captured: Captured, slices: list[SliceSource]) -> None:
        self.captured = captured
        self.slices = slices
        self._lazy = {(part.path, part.offset_bytes) for part in slices}
        self.size_bytes = sum(part.size_bytes for part in slices)
        self.copied = threading.Event()
        """Set once nothing of the engine's memory is needed any more."""
        self.error: BaseException | None = None
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._is_over = False
        self._pool: Pool | None = None

    # -- the copying thread --------------------------------------------------------------------------------------

    def fill(self, pool: Pool, copy: "Copier") -> None:
        """Copy everything to *pool*, which `chunks` empties."""
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
                        # What was taken is given back by the reader, in order: it must hear of this piece, too.
                        self.error = exc
                        self._chunks.put(_Chunk(path=part.path, offset=at, data=data, ready=self._failed))
                        raise
                    self._chunks.put(_Chunk(path=part.path, offset=at, data=data, ready=ready))
            copy.finish()
        except PoolClosed:
            pass  # the saver ends at once: nobody waits for the rest
        except BaseException as exc:  # noqa: BLE001  # it is raised where the slices are awaited
            self.error = exc
        finally:
            self._chunks.put(None)
            self.copied.set()

    def _failed(self) -> NoReturn:
        raise CopyFailed("the engine's memory could not be copied") from self.error

    # -- the writing thread --------------------------------------------------------------------------------------

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of the next slice, or of what was copied when the save was made."""
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
                self._pool.give_back()
            offset += len(chunk.data)

    def discard(self) -> None:
        """Read what is left and throw it away: the copying thread must not wait for a writer that has given up."""
        while (chunk := self._next()) is not None:
            assert self._pool is not None
            with suppress(Exception):  # then nothing is on its way into that memory any more
                chunk.ready()
            self._pool.give_back()

    def _next(self) -> _Chunk | None:
        """Return the next chunk, None once there will be no more, however often that is asked."""
        chunk = None if self._is_over else self._chunks.get()
        self._is_over = chunk is None
        return chunk


def changing(objects: Iterable[ObjectSource]) -> list[SliceSource]:
    """Return the slices of *objects* that the next update changes."""
    return [part for of in objects if of.kind in {Kind.MASTER, Kind.OPTIMIZER} for part in of.slices]


class Copier:
    """How bytes get from the engine's memory to the host's."""

    def follow(self) -> None:
        """Let the copies that come see what the engine has begun by now."""

    def begin(self, target: "torch.Tensor", source: "torch.Tensor") -> Callable[[], None]:
        """Begin to copy *source* to *target*; return what waits until that is done."""
        target.copy_(source)
        return _done

    def finish(self) -> None:
        """Return once everything has left the engine's memory."""


def _done() -> None:
    """Wait for nothing."""


class CudaCopier(Copier):
    """Copies on a stream of its own, behind what the engine has begun when the save was made."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def follow(self) -> None:
        """Queue behind the streams that the engine computes on; nobody waits here."""
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
