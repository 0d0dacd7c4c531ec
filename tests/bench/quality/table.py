"""
What the rows say: every arm's difference to the job that never failed, paired by task, seed and failure.

A difference is of the held-out loss at the last step, in nats a token; below zero is better than the control. The
interval covers the truth with 90 % over seeds, so it takes three seeds to say anything. Nothing is left out: where an
interval reaches over its bound, the line says "inconclusive".
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from tests.bench.published import DEEPSPEED_BYTES
from tests.bench.quality.arms import FULL, NOISE, RARE, arms
from tests.bench.quality.intervals import interval, root_mean_square
from tests.bench.quality.settings import TASKS, Settings
from tests.bench.rows import Row

BOUNDS = {"parity": 0.01, "filter": 0.02}
"""Fixed before the first run; drift's and everybody else's is a hundredth."""
BOUND = 0.01


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
        self.resumes = dict[tuple[str, Key], Row]()
        self.saves = dict[tuple[str, int, str, int], Row]()
        for row in rows:  # of two rows of one key the later one counts
            if row["kind"] == "base":
                self.base = row
            elif row["kind"] == "trunk":
                self.trunks[row["task"], row["seed"]] = row
            elif row["kind"] == "save":
                self.saves[row["task"], row["seed"], row["arm"], row["step"]] = row
            else:
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

    def noise(self, *, task: str, failure: int) -> float:
        """Return how far other batches alone move the loss."""
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


def by_seed(values: Iterable[tuple[int, float]]) -> list[float]:
    """Return the mean of each seed's values: what an interval over seeds is made of."""
    found = dict[int, list[float]]()
    for seed, value in values:
        found.setdefault(seed, []).append(value)
    return [mean(of) for of in found.values()]


def lines(settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the report on *rows*."""
    found = Findings(rows)
    if not found.trunks:
        yield "nothing was run yet"
        return
    yield from _head(settings, found)
    jobs = len(TASKS) * len({seed for _, seed in found.trunks})
    if len(found.keys(NOISE)) < jobs * len(settings.failures):
        yield "not all of it was run yet: the figures below are of what there is"
    named = [RARE, *(arm.name for arm in arms(settings))]
    names = [name for name in named if found.keys(name)]
    for task in TASKS:
        for failure in settings.failures:
            yield from _table(found, names, task=task, failure=failure)
    yield from _summary(settings, found, names)


def _head(settings: Settings, found: Findings) -> Iterator[str]:
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
    is_identical = "yes" if found.is_identical() else "NO"
    yield f"control identical to the last bit: {is_identical}, in {len(found.keys(FULL))} resumes"


def _table(found: Findings, names: Sequence[str], *, task: str, failure: int) -> Iterator[str]:
    if not any(found.keys(name, task=task, failure=failure) for name in names):
        return
    yield ""
    noise = found.noise(task=task, failure=failure)
    yield f"{task}, failure after step {failure}; other batches alone move the loss by {noise:.4f}"
    yield f"  {'':<22}{'loss':>10}{'90 %':>10}{'answers':>10}{'90 %':>8}{'oldest':>8}{'at once':>10}{'noise after':>13}"
    for name in names:
        keys = found.keys(name, task=task, failure=failure)
        if not keys:
            continue
        loss = interval(found.differences(name, keys))
        answers = interval(found.differences(name, keys, "accuracy"))
        resumed = [found.resumes[name, key] for key in keys]
        yield (
            f"  {name:<22}{loss.mean:>+10.4f}{loss.half_width:>10.4f}{answers.mean:>+10.1%}"
            f"{answers.half_width:>8.1%}{_oldest(resumed):>8}{_at_once(found, resumed):>10}"
            f"{_after(found, name, task, failure):>13}"
        )


def _oldest(resumed: Sequence[Row]) -> str:
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
    if name in (FULL, RARE, NOISE):
        return ""
    steps = found.steps_until_noise(name, task=task, failure=failure)
    return "not reached" if steps is None else str(steps)


def _summary(settings: Settings, found: Findings, names: Sequence[str]) -> Iterator[str]:
    """Yield one line for each arm over all tasks and failures."""
    yield ""
    yield "all tasks and failures; how many times fewer bytes than 12 a parameter at every save"
    yield f"  {'':<22}{'loss':>10}{'90 %':>10}{'bound':>8}  {'':<14}{'later saves':>12}{'all saves':>11}"
    for name in names:
        loss = interval(found.differences(name, found.keys(name)))
        bound = BOUNDS.get(name, BOUND)
        yield (
            f"  {name:<22}{loss.mean:>+10.4f}{loss.half_width:>10.4f}{bound:>8.2f}  {loss.verdict(bound):<14}"
            + _fewer(settings, found, name)
        )
    by_drift = f"drift, 1/{settings.fewer}"
    keys = set(found.keys(by_drift)) & set(found.keys(RARE))
    if keys:
        pairs = ((key.seed, found.difference(by_drift, key) - found.difference(RARE, key)) for key in keys)
        gain = interval(by_seed(pairs))
        words = "beats" if gain.high < 0 else "loses to" if gain.low > 0 else "is not told apart from"
        yield (
            f"  after equal work, {by_drift} {words} full saves of no more bytes: "
            f"{gain.mean:+.4f} ± {gain.half_width:.4f}"
        )


def _fewer(settings: Settings, found: Findings, name: str) -> str:
    if name == RARE:
        saves = settings.steps // settings.save_every
        taken = -(-saves // settings.fewer)
        later = f"{(saves - 1) / (taken - 1):.1f}x" if taken > 1 else "none"
        return f"{later:>12}{saves / taken:>10.1f}x"
    times = found.times_fewer(name)
    return "" if times is None else f"{times[0]:>11.1f}x{times[1]:>10.1f}x"
