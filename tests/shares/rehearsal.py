"""Shares of many processes, done one after another in this one; questions and answers are pickled on their way."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from layerstore import Store
from layerstore.shares import Answer, Shares, Work


class Rehearsal(Shares):
    """*count* processes; use it in a ``with``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked_for: list[str] = []
        """The names of the works."""
        self._held = ExitStack()

    def __enter__(self) -> "Rehearsal":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @contextmanager
    def scatter_work(self, repo: Any, work: Work[Answer], parts: Sequence[Any]) -> Iterator[Callable[[], list[Answer]]]:
        """Do *work* on *parts* when the answers are waited for; what it holds is released by the next question."""
        assert len(parts) == self.count - 1
        self._held.close()
        self.asked_for.append(work.__name__)
        sent = pickle.dumps((work, list(parts)))

        def answers() -> list[Answer]:
            heard_work, heard_parts = pickle.loads(sent)
            seen = self._held.enter_context(Store(repo.name)).repo
            return [self._answer(heard_work, seen, part) for part in heard_parts]

        yield answers

    def _answer(self, work: Work[Answer], repo: object, part: object) -> Answer:
        try:
            answer: Answer = pickle.loads(pickle.dumps(self._held.enter_context(work(repo, part))))
        except Exception as exc:
            raise pickle.loads(pickle.dumps(exc)) from exc
        return answer
