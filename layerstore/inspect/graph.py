"""Draw the attempts of a run and their forks."""

from collections.abc import Iterator
from dataclasses import dataclass

from layerstore.model import CommitId
from layerstore.storage import RecordRow, RunView


@dataclass(frozen=True, slots=True)
class GraphLine:
    """One line of a drawing of all attempts."""

    drawing: str
    row: RecordRow | None
    """The commit on this line; None between two unrelated attempts, or where a branch joins another."""


@dataclass(frozen=True, slots=True)
class _Branch:
    rows: list[RecordRow]
    """Newest first."""
    joins: CommitId | None
    """The commit on another branch that the oldest of *rows* continues from."""


def draw_graph(view: RunView) -> Iterator[GraphLine]:
    r"""
    Draw the visible commits of a run: the newest attempt's history on the left, abandoned attempts to its right.

        *      attempt 2, step 900
        | *    attempt 1, step 1000: abandoned
        |/
        *      attempt 1, step 800
    """
    beside: dict[CommitId | None, list[_Branch]] = {}
    for branch in _branches(view):
        beside.setdefault(branch.joins, []).append(branch)
    # No recursion: attempts may be nested deeper than Python's stack.
    pending: list[tuple[str, _Branch | RecordRow | None]] = [("", branch) for branch in reversed(beside.get(None, []))]
    is_first = True
    while pending:
        prefix, what = pending.pop()
        if not isinstance(what, _Branch):
            yield GraphLine(f"{prefix}|/" if what is None else f"{prefix}*", what)
            continue
        if what.joins is None and not is_first:
            yield GraphLine("", None)  # the attempts above and below are unrelated
        is_first = False
        for row in reversed(what.rows):
            pending.append((prefix, row))
            for other in reversed(beside.get(row.id, [])):
                pending += [(prefix, None), (f"{prefix}| ", other)]


def _branches(view: RunView) -> Iterator[_Branch]:
    """Yield for each attempt, newest first, the part of its history that no newer attempt shares."""
    taken: set[CommitId] = set()
    for attempt in reversed(view.attempts):
        rows = []
        joins = None
        for row in view.history(attempt):
            if row.id not in taken:
                rows.append(row)  # including saves below the attempt's own fork
            elif joins is None:
                joins = row.id
        taken.update(row.id for row in rows)
        if rows:
            yield _Branch(rows, joins)
