"""The ring between engine and disk: what is taken never overlaps, and nobody waits for ever."""

import threading
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerstore.live.pool import Pool, PoolClosed

SIZE = 64
WAIT_SECONDS_MAX = 30

steps = st.lists(st.one_of(st.integers(1, SIZE), st.just(0)), max_size=60)
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
    pool = Pool(SIZE, pinned=False)
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


@given(steps)
def test_an_empty_ring_has_room_for_anything(sizes: list[int]) -> None:
    """However it was used before, all of it can be taken in one piece."""
    pool = Pool(SIZE, pinned=False)
    for size in filter(None, sizes):
        pool.take(size)
        pool.give_back()

    assert len(pool.take(SIZE)) == SIZE


def test_it_begins_again_where_the_oldest_was_given_back() -> None:
    """A piece is never cut in two: what does not fit at the end goes to the beginning."""
    pool = Pool(SIZE, pinned=False)
    first, second = pool.take(30), pool.take(20)
    assert not fits(pool, 15)
    pool.give_back()

    third = pool.take(15)

    assert [begin_of(piece) for piece in (first, second, third)] == [0, 30, 0]
    assert not fits(pool, 15)  # a full ring and an empty one must not look alike
    assert begin_of(pool.take(14)) == 15


def test_a_taker_waits_for_what_is_given_back() -> None:
    """It gets its piece as soon as there is room, and not before."""
    pool = Pool(SIZE, pinned=False)
    pool.take(SIZE)
    found: list[torch.Tensor] = []
    taker = threading.Thread(target=lambda: found.append(pool.take(SIZE)))
    taker.start()
    taker.join(0.05)
    assert taker.is_alive()

    pool.give_back()

    taker.join(WAIT_SECONDS_MAX)
    assert [len(piece) for piece in found] == [SIZE]


def test_closing_wakes_a_taker() -> None:
    """It is told that nobody will make room any more, and so is who comes later."""
    pool = Pool(SIZE, pinned=False)
    pool.take(SIZE)
    found: list[BaseException] = []

    def take() -> None:
        try:
            pool.take(1)
        except PoolClosed as exc:
            found.append(exc)

    taker = threading.Thread(target=take)
    taker.start()
    pool.close()
    taker.join(WAIT_SECONDS_MAX)

    assert len(found) == 1
    with pytest.raises(PoolClosed):
        pool.take(1)


def test_two_threads_hand_on_every_byte() -> None:
    """What one thread writes, the other reads, in order, through a ring far smaller than all of it."""
    pool = Pool(SIZE, pinned=False)
    sizes = [1 + 7 * number % SIZE for number in range(500)]
    sent: deque[torch.Tensor] = deque()
    ready = threading.Semaphore(0)

    def write() -> None:
        for number, size in enumerate(sizes):
            sent.append(pool.take(size).fill_(number % 251))
            ready.release()

    writer = threading.Thread(target=write)
    writer.start()
    for number, size in enumerate(sizes):
        assert ready.acquire(timeout=WAIT_SECONDS_MAX)
        piece = sent.popleft()
        assert (len(piece), bool(piece.eq(number % 251).all())) == (size, True)
        pool.give_back()
    writer.join(WAIT_SECONDS_MAX)

    assert pool.used_bytes == 0
