"""The host buffer, and the copies that go through it to the writer, also when copying or writing fails."""

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerstore.live.engine import Captured
from layerstore.live.saver.snapshot import Copier, CopyFailed, Pool, PoolClosed, Snapshot
from layerstore.zero3 import SliceSource

MEMORY = Path("memory")
SIZE = 100
WAIT_SECONDS_MAX = 30


class Broken(Copier):
    """Copies that fail: all of them when they begin, or only where they are awaited."""

    def __init__(self, *, late: bool) -> None:
        """Fail at once, or *late*."""
        self._late = late

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Fail, or return what does."""
        if not self._late:
            raise RuntimeError("made up")

        def fail() -> None:
            raise RuntimeError("made up")

        return fail


def part(offset: int, *, name: str = "weight") -> SliceSource:
    """Return a slice of the memory."""
    return SliceSource(name=name, state="", dtype="U8", elements=SIZE, path=MEMORY, offset_bytes=offset)


def snapshot_of(data: torch.Tensor, offsets: list[int]) -> Snapshot:
    """Return a snapshot of the slices of *data* at *offsets*."""
    memory = SimpleNamespace(bytes_of=lambda path: data)
    captured = cast(Captured, SimpleNamespace(memory=lambda path: memory, changed=str))
    return Snapshot(captured, [part(offset) for offset in offsets])


def in_time(action: Callable[[], Any]) -> None:
    """Do *action* in a thread of its own, which must come to an end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS_MAX)
    assert not thread.is_alive()


def test_slices_arrive_through_a_smaller_ring() -> None:
    """In pieces as large as the ring, in order, each given back when the next is asked for."""
    data = torch.arange(3 * SIZE, dtype=torch.uint8)
    snapshot, pool = snapshot_of(data, [0, SIZE, 2 * SIZE]), Pool(64, pinned=False)
    filling = threading.Thread(target=snapshot.fill, args=(pool, Copier()))
    filling.start()

    found = b"".join(bytes(piece) for at in range(3) for piece in snapshot.chunks(MEMORY, at * SIZE, SIZE))

    filling.join(WAIT_SECONDS_MAX)
    assert found == bytes(data.tolist())
    assert snapshot.copied.is_set()
    assert pool.used_bytes == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_copy_is_an_error_and_nobody_waits(*, late: bool) -> None:
    """The writer hears why; throwing away the rest ends, and the ring is free for the next save."""
    snapshot, pool = snapshot_of(torch.zeros(2 * SIZE, dtype=torch.uint8), [0, SIZE]), Pool(1024, pinned=False)
    snapshot.fill(pool, Broken(late=late))

    with pytest.raises(CopyFailed if not late else RuntimeError) as raised:
        list(snapshot.chunks(MEMORY, 0, SIZE))

    assert "made up" in f"{raised.value} {raised.value.__cause__}"
    in_time(snapshot.discard)
    assert pool.used_bytes == 0


def test_throwing_away_frees_a_copier_that_waits() -> None:
    """A writer that has given up does not hold the update that waits for the copies."""
    snapshot, pool = snapshot_of(torch.zeros(5 * SIZE, dtype=torch.uint8), [0, SIZE, 2 * SIZE]), Pool(64, pinned=False)
    filling = threading.Thread(target=snapshot.fill, args=(pool, Copier()), daemon=True)
    filling.start()

    in_time(snapshot.discard)

    filling.join(WAIT_SECONDS_MAX)
    assert snapshot.copied.is_set()
    in_time(snapshot.discard)  # twice is harmless


# -- the host buffer --------------------------------------------------------------------------------------------------

RING = 64

steps = st.lists(st.one_of(st.integers(1, RING), st.just(0)), max_size=60)
"""Sizes to take; 0 gives one back."""


def begin_of(taken: torch.Tensor) -> int:
    """Return where in the ring *taken* begins."""
    return int(taken.storage_offset())


def fits(pool: Pool, size: int) -> bool:
    """Whether *size* can be taken at once."""
    return pool._free_at(size) is not None


@given(steps)
def test_what_is_taken_never_overlaps_and_keeps_its_bytes(sizes: list[int]) -> None:
    """Whatever is taken and given back in turn: each piece holds what was written to it until it is given back."""
    pool = Pool(RING, pinned=False)
    taken: deque[tuple[int, torch.Tensor]] = deque()
    for mark, size in enumerate(sizes):
        while taken and (not size or not fits(pool, size)):
            pool.give_back()
            known, piece = taken.popleft()
            assert piece.eq(known % 251).all()
            if not size:
                break
        if size:
            piece = pool.take(size)
            assert len(piece) == size
            taken.append((mark, piece.fill_(mark % 251)))
        assert pool.used_bytes == sum(len(piece) for _, piece in taken)
        assert all(piece.eq(known % 251).all() for known, piece in taken)


def test_it_begins_again_where_the_oldest_was_given_back() -> None:
    """A piece is never cut in two: what does not fit at the end goes to the beginning."""
    pool = Pool(RING, pinned=False)
    first, second = pool.take(30), pool.take(20)
    assert not fits(pool, 15)
    pool.give_back()

    third = pool.take(15)

    assert [begin_of(piece) for piece in (first, second, third)] == [0, 30, 0]
    assert not fits(pool, 15)  # a full ring and an empty one must not look alike
    assert begin_of(pool.take(14)) == 15


def test_a_taker_waits_for_what_is_given_back() -> None:
    """It gets its piece as soon as there is room, and not before."""
    pool = Pool(RING, pinned=False)
    pool.take(RING)
    found: list[torch.Tensor] = []
    taker = threading.Thread(target=lambda: found.append(pool.take(RING)))
    taker.start()
    taker.join(0.05)
    assert taker.is_alive()

    pool.give_back()

    taker.join(WAIT_SECONDS_MAX)
    assert [len(piece) for piece in found] == [RING]


def test_a_closed_ring_ends_both_sides() -> None:
    """After an exception in the training program nobody waits: no copier for free memory, and no writer for pieces."""
    snapshot, pool = snapshot_of(torch.zeros(2 * SIZE, dtype=torch.uint8), [0, SIZE]), Pool(RING, pinned=False)
    filling = threading.Thread(target=snapshot.fill, args=(pool, Copier()), daemon=True)
    filling.start()

    pool.close()

    filling.join(WAIT_SECONDS_MAX)
    assert snapshot.copied.is_set()
    with pytest.raises(PoolClosed):
        pool.take(1)
    with pytest.raises(CopyFailed):
        list(snapshot.chunks(MEMORY, 0, SIZE))
    in_time(snapshot.discard)
