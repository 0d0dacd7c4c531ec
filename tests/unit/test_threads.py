"""Without room for another thread nothing waits for ever: there are fewer threads, or memory has run out."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

from layerstore.threads import Threads, run_all, start
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


def test_an_error_is_raised_though_the_pool_was_shut_down() -> None:
    """What another thread's shutdown has cancelled never ends, and must not be waited for."""
    submitted, shut_down = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield from range(3)
        submitted.set()

    def fail(number: int) -> None:
        shut_down.wait(10)
        raise ValueError(number)

    def shut() -> None:
        submitted.wait(10)
        pool.shutdown(wait=False, cancel_futures=True)
        shut_down.set()

    pool = Threads(1)
    other = threading.Thread(target=shut)
    other.start()
    with pytest.raises(ValueError, match="0"):
        run_all(pool, fail, items())
    other.join()
