"""The history of a run: what an attempt came from, and how all of its attempts hang together."""

from collections.abc import Iterator
from dataclasses import dataclass

from layerstore.model import CommitId
from layerstore.storage import RecordRow, Repository, RunView


def history(repo: Repository, run: str, attempt: int | None = None, *, step: int | None = None) -> Iterator[RecordRow]:
    """
    Yield the visible commits of *attempt* of *run*, newest first, and below where it forked those it came from.

    None means the newest attempt; with *step* the history begins at that step or below. Two commits of one step and
    attempt are both yielded: what that means is for the caller to say. Nothing is yielded where nothing is visible.
    What stands in a row only finds records: whatever reaches a user is read from the record it names.

    Raises:
        NotFound: There is no such run.
    """
    view = repo.catalog.view(run)
    if attempt is None:
        attempt = view.attempts[-1] if view.attempts else 0
    return view.history(attempt, step=step)


@dataclass(frozen=True, slots=True)
class GraphLine:
    """One line of a drawing of all attempts."""

    drawing: str
    row: RecordRow | None
    """The commit on this line; None where two lines of descent meet, or one ends that another does not go on from."""


@dataclass(frozen=True, slots=True)
class _Branch:
    rows: list[RecordRow]
    """Newest first."""
    joins: CommitId | None
    """The commit that its oldest came from, on another branch."""


def draw_graph(view: RunView) -> Iterator[GraphLine]:
    r"""
    Draw the visible commits of a run: the newest attempt's history on the left, what was abandoned beside it.

        *      attempt 2, step 900
        | *    attempt 1, step 1000: abandoned
        |/
        *      attempt 1, step 800
    """
    beside: dict[CommitId | None, list[_Branch]] = {}
    for branch in _branches(view):
        beside.setdefault(branch.joins, []).append(branch)
    # Not a recursion: attempts may be nested deeper than Python's stack.
    pending: list[tuple[str, _Branch | RecordRow | None]] = [("", branch) for branch in reversed(beside.get(None, []))]
    is_first = True
    while pending:
        prefix, what = pending.pop()
        if not isinstance(what, _Branch):
            yield GraphLine(f"{prefix}|/" if what is None else f"{prefix}*", what)
            continue
        if what.joins is None and not is_first:
            yield GraphLine("", None)  # what lies below has nothing to do with what lies above
        is_first = False
        for row in reversed(what.rows):
            pending.append((prefix, row))
            for other in reversed(beside.get(row.id, [])):
                pending += [(prefix, None), (f"{prefix}| ", other)]


def _branches(view: RunView) -> Iterator[_Branch]:
    """Yield for each attempt, newest first, the part of its history that no newer one has."""
    taken: set[CommitId] = set()
    for attempt in reversed(view.attempts):
        rows = []
        joins = None
        for row in view.history(attempt):
            if row.id not in taken:
                rows.append(row)  # also what an attempt has saved below its own fork
            elif joins is None:
                joins = row.id
        taken.update(row.id for row in rows)
        if rows:
            yield _Branch(rows, joins)
