"""
Retention rules like those of backup tools: a commit stays if any rule keeps it.

The rules are pure: everything that they use is passed in.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Self

from layerstore.arguments import named_fields
from layerstore.errors import InvalidInput

Direction = Literal["min", "max"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DURATION = re.compile(r"(?P<count>[0-9]+(\.[0-9]+)?)(?P<unit>[smhdw])")


def duration(text: str) -> timedelta:
    """
    Parse a duration.

    >>> duration("14d"), duration("1.5h")
    (datetime.timedelta(days=14), datetime.timedelta(seconds=5400))
    """
    match = _DURATION.fullmatch(text)
    with contextlib.suppress(OverflowError):  # more than a timedelta can hold
        if match is not None:
            return timedelta(**{_UNITS[match["unit"]]: float(match["count"])})
    raise InvalidInput(f"{text!r} is not a duration", hint="a number and s, m, h, d or w, such as 36h or 14d")


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The commits with the best values of a metric that training measured at their step."""

    metric: str
    count: int = 1
    direction: Direction = "max"

    def __str__(self) -> str:
        return f"{self.metric}:{self.count}:{self.direction}"

    @property
    def reason(self) -> str:
        """The reason to show for a commit that this rule keeps."""
        return f"{'smallest' if self.direction == 'min' else 'largest'} {self.metric}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Parse ``METRIC[:N][:min|max]``; for the usual names, such as a loss or an accuracy, the direction is known.

        >>> Best.parse("eval_loss:3"), Best.parse("eval/accuracy")
        (Best(metric='eval_loss', count=3, direction='min'), Best(metric='eval/accuracy', count=1, direction='max'))

        Raises:
            InvalidInput: The form is wrong, or it is unknown whether small or large values of the metric are best.
        """
        match = _BEST_IN_FULL.fullmatch(text) or _BEST.fullmatch(text)
        if match is None:
            raise InvalidInput(
                f"{text!r} does not name the best commits",
                hint="METRIC[:N][:min|max], such as eval_loss:3:min; give all three if the metric's name has a colon",
            )
        metric, count = match["metric"], int(match["count"] or 1)
        direction = match["direction"] or _direction(metric)
        if direction is None:
            raise InvalidInput(
                f"is a small or a large {metric!r} best?", hint=f"{metric}:{count}:min, or {metric}:{count}:max"
            )
        return cls(metric=metric, count=count, direction="min" if direction == "min" else "max")


_SMALL = {
    "loss",
    "perplexity",
    "ppl",
    "nll",
    "bpb",
    "bpc",
    "ce",
    "kl",
    "mse",
    "rmse",
    "mae",
    "wer",
    "cer",
    "error",
    "fid",
}
_LARGE = {"accuracy", "acc", "f1", "score", "em", "bleu", "rouge", "rouge1", "rouge2", "rougel", "reward", "auc", "map"}
_LARGE |= {"mrr", "ndcg", "recall", "precision"}


def _direction(metric: str) -> Direction | None:
    """Return whether small or large is best, by the last word of the metric's name; None if that word is unknown."""
    word = re.split(r"[^a-z0-9]+", metric.lower())[-1]
    words = {word, word.removesuffix("s")} if not word.endswith("ss") else {word}
    if words & _SMALL or word.endswith("loss"):
        return "min"
    return "max" if words & _LARGE else None


_BEST = re.compile(r"(?P<metric>[^:]+)(:(?P<count>[1-9][0-9]{0,8}))?(:(?P<direction>min|max))?")
# In this form, a metric's name may contain a colon.
_BEST_IN_FULL = re.compile(r"(?P<metric>.+):(?P<count>[1-9][0-9]{0,8}):(?P<direction>min|max)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A visible commit, as the rules see it."""

    id: str
    step: int
    time_ns: int
    is_in_history: bool
    """Whether the commit is in the history of the run's newest attempt."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that training measured at the commit's step."""


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """
    Which commits of each run a collection keeps: those that any rule selects.

    A run's newest commit is always kept; without rules, all commits are.
    """

    last: int | None = None
    """Keep this number of the newest commits."""
    every: int | None = None
    """Keep commits whose step is a multiple of this number."""
    within: str | timedelta | None = None
    """Keep commits no older than this duration, such as ``14d``."""
    best: str | Best | None = None
    """Keep the best commits by ``METRIC[:N][:min|max]``, as training measured the metric at their steps."""

    drop_optimizer_older_than: int | None = None
    """Commits more than this many steps older than their run's newest lose their moments but keep their weights."""

    def __post_init__(self) -> None:
        numbers = {
            "keep last": self.last,
            "keep every": self.every,
            "drop_optimizer_older_than": self.drop_optimizer_older_than,
        }
        for name, value in numbers.items():
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInput(f"the rule {name} cannot be {value!r}", hint="a whole number, 1 or more")
        _ = self.age, self.best_of

    @property
    def age(self) -> timedelta | None:
        """The age up to which *within* keeps commits."""
        return duration(self.within) if isinstance(self.within, str) else self.within

    @property
    def best_of(self) -> Best | None:
        """The parsed *best*."""
        return Best.parse(self.best) if isinstance(self.best, str) else self.best

    @property
    def is_best_alone(self) -> bool:
        """Whether *best* is the only rule."""
        return self.best is not None and all(rule is None for rule in (self.last, self.every, self.within))

    @property
    def has_rules(self) -> bool:
        """Whether there is any rule."""
        return any(rule is not None for rule in (self.last, self.every, self.within, self.best))

    def reasons(self, candidates: Iterable[Candidate], *, now_ns: int) -> dict[str, tuple[str, ...]]:
        """Return, by id, the reasons to keep each of *candidates* (newest first); none if it may be removed."""
        candidates = list(candidates)
        history = [candidate for candidate in candidates if candidate.is_in_history]
        named: dict[str, list[str]] = {candidate.id: [] for candidate in candidates}
        for reason, chosen in self._chosen(candidates, history, now_ns):
            for candidate in chosen:
                named[candidate.id].append(reason)
        return {name: tuple(reasons) for name, reasons in named.items()}

    def _chosen(
        self, candidates: Sequence[Candidate], history: Sequence[Candidate], now_ns: int
    ) -> Iterable[tuple[str, Sequence[Candidate]]]:
        if not self.has_rules:
            yield "no rule was given", candidates
            return
        yield "newest", history[:1]
        if self.last is not None:
            yield f"last {self.last}", history[: self.last]
        if self.every is not None:
            yield f"every {self.every}", [candidate for candidate in history if candidate.step % self.every == 0]
        if self.age is not None:
            # Clocks disagree, so a time in the future counts as young.
            since_ns = now_ns - int(self.age.total_seconds() * 1e9)
            yield f"within {self.within}", [candidate for candidate in candidates if candidate.time_ns >= since_ns]
        best = self.best_of
        if best is not None:
            yield best.reason, _best(best, candidates)


def chosen_keep(given: object) -> Keep | None:
    """Return *given* if it is rules or None; raise InvalidInput if it is neither."""
    if given is None or isinstance(given, Keep):
        return given
    raise InvalidInput(f"keep cannot be {given!r}", hint="say layerstore.Keep(last=3), or None to keep all")


def _best(best: Best, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidates, preferring newer ones on ties; ignores non-finite values."""
    sign = 1 if best.direction == "min" else -1
    valued = [candidate for candidate in candidates if math.isfinite(candidate.metrics.get(best.metric, math.nan))]
    # Candidates come newest first, and the sort is stable: among equals, the newer comes first.
    return sorted(valued, key=lambda candidate: sign * candidate.metrics[best.metric])[: best.count]
