"""
Who saves which attempt: one job each, as long as they see each other's locks.

A courtesy, as every lock is. Where two jobs cannot see each other and save one attempt, what they commit stands side by
side, and a reference to a step that both have is ambiguous; nothing of it is lost.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from layerstore.errors import Locked, StorageIO
from layerstore.history.place import Place
from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """An attempt that nobody else saves."""

    place: Place
    lock: ExitStack
    """Holds it."""
    passed: tuple[Locked, ...]
    """Why attempts were passed over that were wished for before it."""
    doubt: StorageIO | None
    """Why nobody is kept from saving it too."""


def reserve(repo: Repository, run: str, placed: Callable[[Collection[int]], Place], *, held: int = 0) -> Reserved:
    """Hold the attempt of what *placed* gives for the attempts that others hold; one that is *held* is ours already."""
    taken: dict[int, Locked] = {}
    while True:
        place, lock, doubt = placed(taken.keys()), ExitStack(), None
        if place.attempt != held:
            try:
                lock.enter_context(repo.lock_attempt(run, place.attempt))
            except Locked as exc:
                taken[place.attempt] = exc
                continue
            except StorageIO as exc:
                doubt = exc
        return Reserved(place=place, lock=lock, passed=tuple(taken.values()), doubt=doubt)


def saved_now(repo: Repository, run: str, attempts: Iterable[int]) -> set[int]:
    """Return those of *attempts* that a job is saving, as far as can be seen."""
    found = set()
    for attempt in attempts:
        if not repo.files.exists(repo.layout.attempt_lock(run, attempt)):
            continue
        try:
            with repo.lock_attempt(run, attempt, at_once=True):
                pass
        except (Locked, StorageIO):
            found.add(attempt)
    return found
