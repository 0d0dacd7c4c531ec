"""Without room for another thread nothing waits for ever: there are fewer threads, or memory has run out."""

import contextlib
import threading

import pytest

from layerstore.threads import Threads, start
from tests.faults.harness import in_child, limit_address_space

_MIB = 1 << 20


def _starts_one_in(kind: str) -> bool:
    """Give a first thread more and more room until it starts: a stack that was used once stays."""
    for kib in range(0, 64_000, 64):
        limit_address_space(kib << 10)
        with contextlib.suppress(MemoryError, RuntimeError):
            if kind == "pool":
                with Threads(1) as pool:
                    return pool.submit(int, 1).result() == 1
            thread = threading.Thread(target=int)
            start(thread)
            thread.join()
            return True
    return False


def _goes_on_with_one() -> list[int]:
    with Threads(4) as pool:
        pool.submit(int).result()
        limit_address_space(_MIB)
        return list(pool.map(abs, range(100)))


@pytest.mark.fault(117)
@pytest.mark.parametrize("kind", ["thread", "pool"])
def test_a_thread_without_room_is_refused(kind: str) -> None:
    """With any amount of memory: CPython itself waits for a thread that has room for its stack and nothing more."""
    assert in_child(_starts_one_in, kind, timeout_seconds=20).needed()


@pytest.mark.fault(117)
def test_a_pool_goes_on_with_the_threads_that_it_has() -> None:
    """All work is done, by fewer."""
    assert in_child(_goes_on_with_one).needed() == list(range(100))
