"""
What the rows say: every arm's difference to the job that never failed, paired by task, seed and failure.

A difference is of the held-out loss at the last step, in nats a token; below zero is better than the control. The
interval covers the truth with 90 % over seeds, so it takes two seeds at least to say anything. Nothing is left out:
where an interval reaches over its bound, the line says "inconclusive".
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from tests.bench.published import DEEPSPEED_BYTES
from tests.bench.quality import means, precision_trial, real_model, trial
from tests.bench.quality.arms import FULL, NOISE, NOT_TRAINED, RARE, arms, taken_once_in
from tests.bench.quality.intervals import Interval, interval, root_mean_square
from tests.bench.quality.settings import TASKS, Settings
from tests.bench.report import Table
from tests.bench.rows import Row

BOUNDS = {
    "parity": 0.01,
    "filter": 0.02,
    "moments8": 0.001,
    "delta8": 0.001,
    "delta4": 0.002,
    "delta4, v factored": 0.005,
}
"""Fixed before the first run, two-sided; drift's and everybody else's is a hundredth."""
BOUND = 0.01

FEWER = {"moments8": 1.9, "delta8": 3.7, "delta4": 7.0, "delta4, v factored": 10.0}
"""How many times fewer bytes than 12 a parameter a compact save has to take; fixed before the first run too."""

_KEYFRAMES = (10, 20, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a difference belongs to."""

    task: str
    seed: int
    failure: int


class Findings:
    """The rows of one experiment, by what they are about."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.base: Row | None = None
        self.trunks = dict[tuple[str, int], Row]()
        self._every_trunk = list[Row]()
        self.resumes = dict[tuple[str, Key], Row]()
        self.saves = dict[tuple[str, int, str, int], Row]()
        for row in rows:  # of two rows of one key the later one counts
            if row["kind"] == "base":
                self.base = row
            elif row["kind"] == "trunk":
                self.trunks[row["task"], row["seed"]] = row
                self._every_trunk.append(row)
            elif row["kind"] == "save":
                self.saves[row["task"], row["seed"], row["arm"], row["step"]] = row
            elif row["kind"] == "resume":
                key = Key(task=row["task"], seed=row["seed"], failure=row["failure"])
                self.resumes[row["arm"], key] = row

    def keys(self, arm: str, *, task: str | None = None, failure: int | None = None) -> list[Key]:
        """Return what *arm* was resumed for, where the trunk's end is known too."""
        return [
            key
            for name, key in self.resumes
            if name == arm
            and (key.task, key.seed) in self.trunks
            and task in (None, key.task)
            and failure in (None, key.failure)
        ]

    def difference(self, arm: str, key: Key, measure: str = "loss") -> float:
        """Return by how much *measure* is larger than the trunk's."""
        return float(self.resumes[arm, key][measure] - self.trunks[key.task, key.seed][measure])

    def differences(self, arm: str, keys: Iterable[Key], measure: str = "loss") -> list[float]:
        """Return one difference for every seed: the mean over the tasks and failures among *keys*."""
        return by_seed((key.seed, self.difference(arm, key, measure)) for key in keys)

    def noise(self, *, task: str | None = None, failure: int | None = None) -> float:
        """Return how far other batches alone move the loss, of a job."""
        return root_mean_square(
            [self.difference(NOISE, key) for key in self.keys(NOISE, task=task, failure=failure)] or [0.0]
        )

    def is_identical(self) -> bool:
        """Return whether every control ended with the trunk's masters, loss and answers."""
        return all(
            self.resumes[FULL, key][what] == self.trunks[key.task, key.seed][what]
            for key in self.keys(FULL)
            for what in ("masters", "loss", "accuracy")
        )

    def repeats(self) -> tuple[int, bool]:
        """Return how often a trunk was trained again, and whether each time it ended with the same bits."""
        ends = {(of["task"], of["seed"], of["masters"], of["loss"], of["accuracy"]) for of in self._every_trunk}
        return len(self._every_trunk) - len(self.trunks), len(ends) == len(self.trunks)

    def steps_until_noise(self, arm: str, *, task: str, failure: int) -> int | None:
        """Return after how many steps the mean difference stays within the noise; None if it does not get there."""
        keys, band = self.keys(arm, task=task, failure=failure), self.noise(task=task, failure=failure)
        rows = [(self.resumes[arm, key], self.trunks[key.task, key.seed]["losses"]) for key in keys]
        found = None
        for step in sorted(rows[0][0]["losses"], key=int, reverse=True) if rows else []:
            if abs(mean(row["losses"][step] - of_trunk[step] for row, of_trunk in rows)) > band:
                break
            found = int(step) - rows[0][0]["base"]
        return found

    def times_fewer(self, arm: str) -> tuple[float, float] | None:
        """
        Return how many times fewer bytes than 12 a parameter at every save: of all but the first, and of all.

        None if *arm* has no store of its own.
        """
        without, whole = list[float](), list[float]()
        for (task, seed), trunk in self.trunks.items():
            of = {key[3]: row["bytes"] for key, row in self.saves.items() if key[:3] == (task, seed, arm)}
            sizes = [of[step] for step in sorted(of)]
            full = DEEPSPEED_BYTES * trunk["parameters"]
            if sum(sizes[1:]):
                without.append(full * (len(sizes) - 1) / sum(sizes[1:]))
                whole.append(full * len(sizes) / sum(sizes))
        return (mean(without), mean(whole)) if without else None

    def compact_fewer(self, arm: str) -> float | None:
        """
        Return how many times fewer bytes than 12 a parameter the compact saves of *arm* take, without any exact one.

        None if there are none.
        """
        return self._times(arm, lambda exact, compact, saves: compact)

    def fewer_with_keyframes(self, arm: str, every: int | None) -> float | None:
        """Return that of a whole run whose every Nth save is exact; only the first, if *every* is None."""

        def a_save(exact: float, compact: float, saves: int) -> float:
            keyframes = 1 if every is None else math.ceil(saves / every)
            return (keyframes * exact + (saves - keyframes) * compact) / saves

        return self._times(arm, a_save)

    def _times(self, arm: str, a_save: Callable[[float, float, int], float]) -> float | None:
        found = list[float]()
        for (task, seed), trunk in self.trunks.items():
            of = [row for key, row in self.saves.items() if key[:3] == (task, seed, arm)]
            compact = [row["bytes"] for row in of if not row.get("is_exact", True)]
            exact = [row["bytes"] for row in of if row.get("is_exact", True)]
            if compact and exact:
                size = a_save(mean(exact), mean(compact), len(of))
                found.append(DEEPSPEED_BYTES * trunk["parameters"] / size)
        return mean(found) if found else None


def by_seed(values: Iterable[tuple[int, float]]) -> list[float]:
    """Return the mean of each seed's values: what an interval over seeds is made of."""
    found = dict[int, list[float]]()
    for seed, value in values:
        found.setdefault(seed, []).append(value)
    return [mean(of) for of in found.values()]


def lines(settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the report on *rows*, for a terminal."""
    found = Findings(rows)
    if found.trunks:
        yield from about(settings, found)
        for table in tables(settings, found):
            yield from ["", *table.text()]
        yield from ["", *remarks(settings, found)]
    elif not rows:
        yield "nothing was run yet"
    for tried in (trial.table(rows), means.table(rows), precision_trial.table(rows), real_model.table(rows)):
        if tried is not None:
            yield from ["", *tried.text()]


def about(settings: Settings, found: Findings) -> Iterator[str]:
    """Yield what was trained, and whether all of it was."""
    if found.base is not None:
        yield (
            f"{found.base['parameters'] / 1e6:.2f} million parameters; base after {found.base['steps']} steps: "
            f"loss {found.base['loss']:.4f}, {found.base['accuracy']:.1%} of the questions"
        )
    for task in TASKS:
        trunks = [row for (name, _), row in found.trunks.items() if name == task]
        if trunks:
            yield (
                f"{task}, {len(trunks)} seeds, after {settings.steps} steps without a failure: loss "
                f"{mean(row['loss'] for row in trunks):.4f}, {mean(row['accuracy'] for row in trunks):.1%} of the "
                "questions"
            )
    is_identical = ("yes" if found.is_identical() else "NO") if found.keys(FULL) else "not known"
    yield f"control identical to the last bit: {is_identical}, in {len(found.keys(FULL))} resumes"
    again, are_same = found.repeats()
    if again:
        yield f"whole jobs trained again from their seeds: {again}, {'the same bits' if are_same else 'OTHER BITS'}"
    jobs = len(TASKS) * len({seed for _, seed in found.trunks})
    lacking = [arm.name for arm in arms(settings) if len(found.keys(arm.name)) < jobs * len(arm.failures(settings))]
    if lacking:
        yield f"not run yet, or not in all jobs: {'; '.join(lacking)}"


def tables(settings: Settings, found: Findings) -> list[Table]:
    """Return all arms over everything, and then each task and failure by itself."""
    named = [*NOT_TRAINED, *(arm.name for arm in arms(settings))]
    names = [name for name in named if found.keys(name)]
    each = [(task, failure) for task in TASKS for failure in settings.failures if found.keys(FULL, task=task)]
    kept = [name for name in names if found.compact_fewer(name) is not None]
    compact = [_compact(found, kept)] if kept else []
    return [_summary(settings, found, names), *compact, *(_table(found, names, task=of, failure=at) for of, at in each)]


def _summary(settings: Settings, found: Findings, names: Sequence[str]) -> Table:
    rows = list[tuple[str, ...]]()
    for name in names:
        loss = interval(found.differences(name, found.keys(name)))
        answers = interval(found.differences(name, found.keys(name), "accuracy"))
        bound = BOUNDS.get(name, BOUND)
        judged = (f"±{bound:g}", loss.verdict(bound))
        rows.append((name, *_shown(loss), *judged, *_shown(answers, "+.1%"), *_fewer(settings, found, name)))
    return Table(
        title="All tasks and failures; fewer bytes than 12 a parameter at every save",
        header=("", "Δ loss", "90 %", "bound", "", "Δ answers", "90 %", "later saves", "all saves"),
        lines=tuple(rows),
    )


def _compact(found: Findings, names: Sequence[str]) -> Table:
    rows = list[tuple[str, ...]]()
    for name in names:
        loss = interval(found.differences(name, found.keys(name)))
        bound, asked, times = BOUNDS.get(name, BOUND), FEWER.get(name), found.compact_fewer(name) or 0.0
        verdict = "" if asked is None else f" of {asked:g}x" if times >= asked else f" MISSED {asked:g}x"
        fewer = f"{times:.2f}x{verdict}"
        whole = (f"{found.fewer_with_keyframes(name, every) or 0.0:.2f}x" for every in _KEYFRAMES)
        rows.append((name, *_shown(loss, "+.5f"), f"±{bound:g}", loss.verdict(bound), fewer, *whole))
    return Table(
        title="Compact saves: fewer bytes than 12 a parameter in those alone, and over a whole run, if every Nth save "
        f"is exact; other batches alone move the loss by {found.noise():.4f}",
        header=("", "Δ loss", "90 %", "bound", "", "compact, of what was asked", "N = 10", "N = 20", "first only"),
        lines=tuple(rows),
    )


def _table(found: Findings, names: Sequence[str], *, task: str, failure: int) -> Table:
    rows = list[tuple[str, ...]]()
    for name in names:
        if keys := found.keys(name, task=task, failure=failure):
            resumed = [found.resumes[name, key] for key in keys]
            measures = [interval(found.differences(name, keys, measure)) for measure in ("loss", "accuracy")]
            shown = (*_shown(measures[0]), *_shown(measures[1], "+.1%"))
            after = _after(found, name, task, failure)
            rows.append((name, *shown, _oldest(resumed), _at_once(found, resumed), after))
    noise = found.noise(task=task, failure=failure)
    return Table(
        title=f"{task}, failure after step {failure}; other batches alone move the loss by {noise:.4f}",
        header=("", "Δ loss", "90 %", "Δ answers", "90 %", "oldest", "Δ at once", "in noise after"),
        lines=tuple(rows),
    )


def _shown(of: Interval, form: str = "+.4f") -> tuple[str, str]:
    return f"{of.mean:{form}}", "unknown" if math.isinf(of.half_width) else f"±{of.half_width:{form.removeprefix('+')}}"


def _oldest(resumed: Sequence[Row]) -> str:
    """Return the age of the oldest layer that any job resumed with, in steps."""
    ages = [age for row in resumed for age in row.get("ages", {}).values()]
    return str(max(ages)) if ages else ""


def _at_once(found: Findings, resumed: Sequence[Row]) -> str:
    """Return the mean difference right after the resume."""
    differences = [
        row["losses"][str(row["base"])] - found.trunks[row["task"], row["seed"]]["losses"][str(row["base"])]
        for row in resumed
        if row["losses"]
    ]
    return f"{mean(differences):+.4f}" if differences else ""


def _after(found: Findings, name: str, task: str, failure: int) -> str:
    if name in (FULL, NOISE, *NOT_TRAINED):
        return ""
    steps = found.steps_until_noise(name, task=task, failure=failure)
    return "not reached" if steps is None else f"{steps} steps"


def _fewer(settings: Settings, found: Findings, name: str) -> tuple[str, str]:
    if name in NOT_TRAINED:
        saves = settings.steps // settings.save_every
        taken = -(-saves // taken_once_in(settings, name))
        return f"{(saves - 1) / (taken - 1):.1f}x" if taken > 1 else "none", f"{saves / taken:.1f}x"
    times = found.times_fewer(name)
    return ("", "") if times is None else (f"{times[0]:.1f}x", f"{times[1]:.1f}x")


def remarks(settings: Settings, found: Findings) -> Iterator[str]:
    """Yield how drift compares with full saves that take no more bytes."""
    by_drift = f"drift, 1/{settings.fewer}"
    keys = set(found.keys(by_drift)) & set(found.keys(RARE))
    if keys:
        pairs = ((key.seed, found.difference(by_drift, key) - found.difference(RARE, key)) for key in keys)
        gain = interval(by_seed(pairs))
        words = "beats" if gain.high < 0 else "loses to" if gain.low > 0 else "is not told apart from"
        yield (
            f"after equal work, {by_drift} {words} full saves of no more bytes: "
            f"{gain.mean:+.4f} ± {gain.half_width:.4f}"
        )
