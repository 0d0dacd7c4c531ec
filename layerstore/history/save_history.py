"""
The saves of a run up to a commit, newest first, and how long ago the layers of a composite were saved.

Up to its fork, an attempt shares the saves of the earlier attempt.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from layerstore.errors import Conflict, IntegrityError, LayerstoreError, NotFound
from layerstore.history.references import Resolved, reference_to
from layerstore.layers import typed
from layerstore.model import Commit, CommitId, CommitRecord, LayerEntry, Observed, Saving
from layerstore.policy import Policy
from layerstore.storage import RecordName, RecordRow, Repository, RunView, row_of
from layerstore.units import short_id


def saved_at(repo: Repository, save: Saving) -> RecordName | None:
    """Return the visible record of *save*; None if it was dropped, replaced or collected."""
    view = repo.catalog.find(save.run)
    rows = [] if view is None else view.of_attempt(save.attempt)
    return next((row.name for row in rows if row.step == save.step), None)


def has_shrunk(repo: Repository, view: RunView) -> bool:
    """Whether gc, which takes no lock against writers, has removed a commit of *view* since *view* was read."""
    present = repo.catalog.find(view.run)
    return present is None or not present.rows.keys() >= view.rows.keys()


def view_read_again(repo: Repository, run: str, step: int) -> RunView | None:
    """Return the view of *run* after rereading the records at *step*, which may have been damaged since indexing."""
    repo.records.refresh()
    view = repo.catalog.find(run)
    if view is None:
        return None
    damaged: dict[RecordName, LayerstoreError] = {}
    for row in view.rows.values():
        if row.step == step:
            try:
                repo.records.read(row.name)
            except IntegrityError as exc:
                if repo.records.is_listed(row.name):  # otherwise gc removed it in the meantime
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


def newest_exact(repo: Repository, resolved: Resolved) -> Resolved:
    """
    Return the newest save in the history of *resolved* that was kept bit for bit, which may be *resolved* itself.

    Raises:
        NotFound: No save was kept bit for bit.
        IntegrityError: A record in between is damaged; it might be that save.
        Conflict: A step has two commits.
    """
    record = resolved.record
    if record.is_exact:
        return resolved
    view = repo.catalog.find(record.run)
    rows = [] if view is None else [row for row in view.visible if row.id == resolved.commit]  # for a pin, its base
    older = () if view is None else saves_below(view, attempt=record.attempt, step=record.step)
    exact = next((row for row in chain(rows, older) if row.is_exact), None)
    if exact is None:
        name = resolved.pin or reference_to(repo, record)
        raise NotFound(
            f"no save up to {name} is exact: each has layers that were not kept bit for bit",
            hint=f"layerstore show {typed(name)} shows what they lost; without exact, that save is used as it is",
        )
    return Resolved.of_commit(repo.catalog.commit(exact.name))


class SaveHistory:
    """The saves up to a base, newest first and read lazily; the base is at position 0."""

    def __init__(self, repo: Repository, resolved: Resolved, *, view: RunView | None) -> None:
        """*view* is None if a pinned base has outlived its run."""
        self._repo = repo
        self._base = resolved
        self._view = view
        self._seen: list[RecordRow] = []

    def saves(self) -> Iterator[RecordRow]:
        """Yield the saves, numbered in step order, whatever order they were made in."""
        record, view = self._base.record, self._view
        observed = Observed(time_ns=self._base.time_ns, bytes_new=0, bytes_reused=0)
        base = row_of(Commit(id=CommitId(self._base.commit), record=record, observed=observed))
        number = record.save_number if view is None else view.number_at(record.attempt, record.step, default=base)
        older = () if view is None else saves_below(view, attempt=base.attempt, step=base.step)
        for row in chain([base], older):
            # Append before the yield: on receiving the save, the caller asks about it by its position.
            self._seen.append(row)
            yield row._replace(save_number=number)
            number -= 1

    def decided(self, position: int, policy: Policy) -> frozenset[str] | None:
        """Return what *policy* chose at the save at *position*; None if that save was full, or used another policy."""
        row = self._seen[position]
        if row.is_full:
            return None
        record = self._base.record if position == 0 else self._repo.catalog.commit(row.name).record
        if record.policy.name != policy.name:
            return None
        return frozenset(entry.layer for entry in record.layers if entry.saved_by(record))

    def chosen(self, positions: Mapping[str, int]) -> list[tuple[RecordName | None, tuple[LayerEntry, ...]]]:
        """Return each layer's version at its position, grouped by record; None stands for the base's record."""
        layers: dict[int, list[str]] = {}
        for layer, position in positions.items():
            layers.setdefault(position, []).append(layer)
        picked: list[tuple[RecordName | None, tuple[LayerEntry, ...]]] = []
        for position, names in layers.items():
            if position == 0:
                picked.append((None, tuple(entry for entry in self._base.record.layers if entry.layer in names)))
            else:
                row = self._seen[position]
                picked.append((row.name, tuple(row.entries(names).values())))
        return picked

    def is_older(self, entry: LayerEntry, position: int) -> bool:
        """Whether the save at *position* inherited the layer of *entry* instead of saving it."""
        return not entry.saved_by(self._seen[position])


# -- how old the layers of a composite are -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAge:
    """How much older than the base a layer is."""

    layer: str
    run: str
    attempt: int
    step: int
    """The step that saved it."""
    steps: int | None
    """Steps before the base; negative if newer, None if from another run."""
    saves: int | None
    """Likewise, saves before the base; None also if save numbers and steps disagree about the order."""
    optimizer_step: int | None
    """The optimizer's update count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How old the layers of a composite are."""

    layers: tuple[LayerAge, ...]
    """In the model's order."""

    @classmethod
    def of(cls, base: CommitRecord, layers: Sequence[LayerEntry]) -> Self:
        """Return the ages of *layers* relative to *base*."""
        return cls(layers=tuple(_age(base, entry) for entry in layers))

    def __repr__(self) -> str:
        oldest, ages = self.oldest, Counter(layer.step for layer in self.layers)
        steps = ", ".join(f"{count} of step {step}" for step, count in ages.items())
        return f"<Staleness: {len(self.layers)} layers, {steps}; oldest {oldest.layer}>"

    @property
    def oldest(self) -> LayerAge:
        """The trained layer that is most steps behind the base; an unknown age counts as the oldest."""
        return max(self.trained, key=lambda age: float("inf") if age.steps is None else age.steps)

    @property
    def optimizer_steps(self) -> dict[int, int]:
        """The optimizer's update counts, with the number of layers that have each."""
        counts = Counter(age.optimizer_step for age in self.layers if age.optimizer_step is not None)
        return dict(sorted(counts.items()))

    @property
    def trained(self) -> tuple[LayerAge, ...]:
        """The layers that the optimizer updates, or all if there are none; the others are the same at every save."""
        return tuple(age for age in self.layers if age.optimizer_step is not None) or self.layers

    @property
    def is_mixed(self) -> bool:
        """Whether trained layers of several saves are mixed."""
        return len({(age.run, age.attempt, age.step) for age in self.trained}) > 1

    def check(self, base: CommitRecord, *, steps_max: int) -> None:
        """Raise Conflict if a layer is more than *steps_max* steps older than *base*, or its age is unknown."""
        oldest = self.oldest
        if oldest.steps is not None and oldest.steps <= steps_max:
            return
        if oldest.steps is None:
            age = f"is from {oldest.run}@{oldest.step}, another run, so that its age is not known"
        else:
            age = f"is from step {oldest.step}, {_steps(oldest.steps)} before"
        raise Conflict(
            f"{oldest.layer} {age} {base.run}@{base.step}; layers may be at most {_steps(steps_max)} old",
            hint="allow more, or compose another step; --dry-run without --max-staleness shows every layer's age",
        )


def others_in(base: CommitRecord, layers: Sequence[LayerEntry]) -> tuple[int, bool] | None:
    """Return how many trained *layers* are not from *base*, and whether all of these are older; None if not mixed."""
    staleness = Staleness.of(base, layers)
    if not staleness.is_mixed:
        return None
    own = base.run, base.attempt, base.step
    others = [age for age in staleness.trained if (age.run, age.attempt, age.step) != own]
    return len(others), all(age.steps is not None and age.steps > 0 for age in others)


def _age(base: CommitRecord, entry: LayerEntry) -> LayerAge:
    origin = entry.origin
    is_own = origin.run == base.run
    steps = base.step - origin.step
    saves = base.save_number - origin.save_number
    return LayerAge(
        layer=entry.layer,
        run=origin.run,
        attempt=origin.attempt,
        step=origin.step,
        steps=steps if is_own else None,
        # The save number of a step that was filled in later does not show its age.
        saves=saves if is_own and _sign(saves) == _sign(steps) else None,
        optimizer_step=entry.optimizer_step,
    )


def _sign(count: int) -> int:
    return (count > 0) - (count < 0)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
