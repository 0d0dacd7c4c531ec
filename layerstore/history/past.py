"""A run's saves as policies see them: newest first; below a fork, those of the earlier attempt."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from layerstore.errors import Conflict, IntegrityError, LayerstoreError
from layerstore.history.references import Resolved
from layerstore.model import Commit, CommitId, LayerEntry, Observed, Saving
from layerstore.policy import Policy
from layerstore.storage import RecordName, RecordRow, Repository, RunView, row_of
from layerstore.units import short_id


def saved_at(repo: Repository, save: Saving) -> RecordName | None:
    """Return the visible record of *save*; None if it was dropped, replaced or collected."""
    view = repo.catalog.find(save.run)
    rows = [] if view is None else view.of_attempt(save.attempt)
    return next((row.name for row in rows if row.step == save.step), None)


def has_shrunk(repo: Repository, view: RunView) -> bool:
    """Whether gc, which takes no lock against writers, has removed a commit of *view* since."""
    now = repo.catalog.find(view.run)
    return now is None or not now.rows.keys() >= view.rows.keys()


def view_read_again(repo: Repository, run: str, step: int) -> RunView | None:
    """Return the view of *run* after rereading the records at *step*: some may be damaged since they were indexed."""
    view = repo.catalog.find(run)
    if view is None:
        return None
    damaged: dict[RecordName, LayerstoreError] = {}
    for row in view.rows.values():
        if row.step == step:
            try:
                repo.records.read(row.name)
            except IntegrityError as exc:
                if repo.records.is_listed(row.name):  # else it was collected meanwhile
                    damaged[row.name] = exc
    rows = {key: row for key, row in view.rows.items() if row.name not in damaged}
    return replace(view, rows=rows, damaged=view.damaged | damaged) if damaged else view


def saves_below(view: RunView, *, attempt: int, step: int) -> Iterator[RecordRow]:
    """
    Yield the saves of *attempt*'s history below *step*, newest first.

    Raises:
        IntegrityError: A record below *step* is damaged; what it holds or hides might matter.
        Conflict: A step has two commits.
    """
    problems = {name.step: problem for name, problem in view.damaged.items() if name.step < step}
    if problems:
        raise problems[max(problems)]
    newer: RecordRow | None = None
    for row in view.history(attempt, step=step - 1):
        if newer is not None and (newer.step, newer.attempt) == (row.step, row.attempt):
            raise Conflict(
                f"{view.run}@{row.step} is ambiguous: this step has two commits: "
                f"{short_id(newer.id)}, {short_id(row.id)}",
                hint=f"layerstore drop {short_id(newer.id)} moves one of them to the trash",
            )
        yield row
        newer = row


class Past:
    """The saves up to a base, newest first and read lazily; the base is at position 0."""

    def __init__(self, repo: Repository, resolved: Resolved, *, view: RunView | None) -> None:
        """*view* is None if a pinned base has outlived its run."""
        self._repo = repo
        self._base = resolved
        self._view = view
        self._seen: list[RecordRow] = []

    def saves(self) -> Iterator[RecordRow]:
        """Yield them, numbered in step order, whatever order they were saved in."""
        record, view = self._base.record, self._view
        observed = Observed(time_ns=self._base.time_ns, bytes_new=0, bytes_reused=0)
        base = row_of(Commit(id=CommitId(self._base.commit), record=record, observed=observed))
        number = record.save_number if view is None else view.number_at(record.attempt, record.step, default=base)
        for row in [base] if view is None else self._with_older(base, view):
            self._seen.append(row)
            yield row._replace(save_number=number)
            number -= 1

    @staticmethod
    def _with_older(base: RecordRow, view: RunView) -> Iterator[RecordRow]:
        yield base
        yield from saves_below(view, attempt=base.attempt, step=base.step)

    def decided(self, position: int, policy: Policy) -> frozenset[str] | None:
        """Return what *policy* chose at the save of *position*; None if that was full, or under another policy."""
        row = self._seen[position]
        if row.is_full:
            return None
        record = self._base.record if position == 0 else self._repo.catalog.commit(row.name).record
        if record.policy.name != policy.name:
            return None
        return frozenset(entry.layer for entry in record.layers if entry.saved_by(record))

    def chosen(self, positions: Mapping[str, int]) -> list[tuple[RecordName | None, tuple[LayerEntry, ...]]]:
        """Return each layer's version at its position, by record; None stands for the base."""
        layers: dict[int, list[str]] = {}
        for layer, position in positions.items():
            layers.setdefault(position, []).append(layer)
        found: list[tuple[RecordName | None, tuple[LayerEntry, ...]]] = []
        for position, names in layers.items():
            if position == 0:
                found.append((None, tuple(entry for entry in self._base.record.layers if entry.layer in names)))
            else:
                row = self._seen[position]
                found.append((row.name, tuple(row.entries(names).values())))
        return found

    def is_older(self, entry: LayerEntry, position: int) -> bool:
        """Whether the save of *position* inherited the layer instead of saving it."""
        return not entry.saved_by(self._seen[position])
