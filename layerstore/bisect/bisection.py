"""
A bisection: which save a history turned bad at, then which of its layers make it so.

Every verdict is a line of a log in its folder; the same bisection, begun again, goes on from there.
"""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from layerstore.bisect.judges import Judged
from layerstore.bisect.search import Contradiction, Verdict, bad_alone, bad_together, first_bad
from layerstore.bisect.trials import Trials
from layerstore.compose import Composition, compose_latest
from layerstore.errors import AlreadyExists, Conflict, InvalidInput, StorageIO
from layerstore.format import digest
from layerstore.history import Resolved, references_to, resolve, saves_below
from layerstore.json_fields import json_fields
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.storage import Files, Repository

LOG = "log.jsonl"
_LATER = 4
"""How many saves after the first bad one a layer is looked at that is not bad by itself there."""
_NAMES_MAX = 4

_Named = tuple[Resolved, str]
"""A save and its reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One question and its answer."""

    number: int
    """From 1."""
    key: str
    """Names the composite."""
    asked: str
    """What was judged, in words."""
    verdict: Verdict
    metric: float | None
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """What a bisection found."""

    good: str
    """The reference of the last good save."""
    bad: str
    """That of the first bad one."""
    skipped: tuple[str, ...]
    """Saves between the two that could not be judged."""
    layers: tuple[str, ...] | None
    """Layers of the first bad save that make the last good one bad; None if they were not found, or not asked for."""
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        skipped = f", or since one of the {len(self.skipped)} saves before it" if self.skipped else ""
        since = f"bad since {self.bad}{skipped}"
        if self.layers is None:
            return since
        if len(self.layers) == 1:
            return f"{since}; {self.layers[0]} alone suffices"
        *first, last = (
            self.layers if len(self.layers) <= _NAMES_MAX else [self.layers[0], f"{len(self.layers) - 1} more"]
        )
        return f"{since}; {', '.join(first)} and {last} suffice together"

    @property
    def bytes_written(self) -> int:
        """What all trials have written."""
        return sum(trial.bytes_written for trial in self.trials)


def bisect(
    repo: Repository,
    good: str,
    bad: str,
    judge: Callable[[Path], Judged],
    *,
    folder: Path,
    dtype: str | None,
    has_layers: bool,
    command: Sequence[str],
    tell: Callable[[Trial], None],
) -> Bisected:
    """
    Find the first bad save after *good* in the history of *bad* and, with *has_layers*, what makes it bad.

    Trials are written in *folder*, which keeps the log; *command* tells whose it is. *tell* hears of each new one.

    Raises:
        InvalidInput: *good* is not before *bad* in one history.
        Conflict: *good* is judged bad, or *bad* good, or one of them cannot be judged.
        AlreadyExists: *folder* holds something else.
    """
    row = _row(repo, resolve(repo, good), resolve(repo, bad), good, bad)
    names = references_to(repo, [each.record for each in row])
    head: dict[str, object] = {"good": row[0].commit, "bad": row[-1].commit, "dtype": dtype, "command": list(command)}
    log = _Log(repo.files, folder, head)
    court = _Court(repo, judge, log, Trials(repo, folder, dtype=dtype), tell)
    try:
        found = first_bad(len(row), lambda index: court.verdict(compose_latest(row[index]), names[index]))
    except Contradiction as exc:
        said = "good" if exc.index == 0 else "bad"
        raise Conflict(
            f"{names[exc.index]} is said to be {said}, and the command says {exc.found}",
            hint="choose another GOOD, or look at the command" if said == "good" else "choose another BAD",
        ) from exc
    later = min(found.bad + _LATER, len(row) - 1)
    layers = None
    if has_layers:
        layers = _layers(court, *((row[index], names[index]) for index in (found.good, found.bad, later)))
    court.trials.end()
    answer = Bisected(
        good=names[found.good],
        bad=names[found.bad],
        skipped=tuple(names[index] for index in found.skipped),
        layers=layers,
        trials=tuple(log.trials),
    )
    log.end(str(answer))
    return answer


def read_trials(folder: Path) -> tuple[dict[str, object], list[Trial], str]:
    """Return the log in *folder*: its head, the trials, and the answer if there is one; raises InvalidInput."""
    text = Files().read_if_there(folder / LOG, size_bytes_max=RECORD_BYTES_MAX)
    if text is None:
        raise InvalidInput(f"there is no bisection in {folder}", hint="layerstore bisect GOOD BAD -- COMMAND {}")
    head, *lines = text.decode(errors="replace").split("\n")
    try:
        # Each line was begun with a line feed, so one that a killed process left unfinished is a line of its own.
        found = [json.loads(line) for line in lines if line.endswith("}")]
        answer = next((line["answer"] for line in found if "answer" in line), "")
        return json.loads(head), [Trial(**line) for line in found if "answer" not in line], answer
    except (ValueError, TypeError) as exc:
        raise StorageIO(
            f"{folder / LOG} is no log of a bisection: {exc}", errno=None, filename=str(folder / LOG)
        ) from exc


def _row(repo: Repository, first: Resolved, last: Resolved, good: str, bad: str) -> list[Resolved]:
    """Return the saves from *first* to *last*, which is in one history with it."""
    view = repo.catalog.find(last.record.run)
    older = [] if view is None else saves_below(view, attempt=last.record.attempt, step=last.record.step)
    found = [last]
    for row in older:
        found.append(Resolved.of_commit(repo.catalog.commit(row.name)))
        if found[-1].commit == first.commit:
            return found[::-1]
        if row.step < first.record.step:
            break
    raise InvalidInput(
        f"{good} is not before {bad} in one history", hint="GOOD, then BAD: an earlier and a later step of one attempt"
    )


def _layers(court: "_Court", last_good: _Named, first_bad: _Named, later: _Named) -> tuple[str, ...] | None:
    """Return the layers of the *first_bad* save that make the *last_good* one bad."""
    differing, judge = _contrast(court, last_good, first_bad)
    if not differing:
        return None
    # What goes wrong slowly is past the threshold by little at first, and other layers may turn the scale. Soon it is
    # past it by itself.
    alone = bad_alone(differing, judge) or (
        None if later == first_bad else bad_alone(*_contrast(court, last_good, later))
    )
    return alone or bad_together(tuple(differing), judge)


def _contrast(
    court: "_Court", last_good: _Named, bad_one: _Named
) -> tuple[list[str], Callable[[Collection[str]], Verdict]]:
    """Return the layers in which two saves differ, and what judges the good one with some of them from the bad one."""
    (good, good_name), (bad, bad_name) = last_good, bad_one
    theirs, ours = ({entry.layer: entry for entry in of.record.layers} for of in (bad, good))
    differing = [layer for layer in theirs if layer in ours and theirs[layer].version != ours[layer].version]

    def judge(chosen: Collection[str]) -> Verdict:
        layers = tuple(theirs[layer] if layer in chosen else ours[layer] for layer in theirs)
        composition = replace(compose_latest(bad), policy="bisect", layers=layers)
        return court.verdict(composition, f"{_some(chosen)} of {bad_name}, the rest of {good_name}")

    return (differing if theirs.keys() == ours.keys() else []), judge


def _some(layers: Collection[str]) -> str:
    return next(iter(layers)) if len(layers) == 1 else f"{len(layers)} layers"


@dataclass(slots=True)
class _Court:
    """Judges composites, each once."""

    repo: Repository
    judge: Callable[[Path], Judged]
    log: "_Log"
    trials: Trials
    tell: Callable[[Trial], None]

    def verdict(self, composition: Composition, asked: str) -> Verdict:
        key = digest(" ".join([composition.commit, *(entry.version.id for entry in composition.layers)]).encode()).hex()
        known = next((trial for trial in self.log.trials if trial.key == key), None)
        if known is not None:
            return known.verdict
        started = time.monotonic()
        written = self.trials.write(composition)
        judged = self.judge(self.trials.folder)
        trial = Trial(
            number=len(self.log.trials) + 1,
            key=key,
            asked=asked,
            verdict=judged.verdict,
            metric=judged.metric,
            bytes_written=written.bytes_written,
            seconds=time.monotonic() - started,
        )
        self.log.add(trial)
        self.trials.keep(judged.verdict)
        self.tell(trial)
        return judged.verdict


class _Log:
    """The verdicts so far."""

    def __init__(self, files: Files, folder: Path, head: dict[str, object]) -> None:
        """Read the log in *folder*, or begin it with *head*; raise AlreadyExists if another one's is there."""
        self._files = files
        self._path = folder / LOG
        self.trials: list[Trial] = []
        self._is_over = False
        if files.exists(self._path):
            known, trials, answer = read_trials(folder)
            if known == head:
                self.trials, self._is_over = trials, bool(answer)
                return
            if not answer:
                raise AlreadyExists(
                    f"{folder} holds another bisection, which has not ended; nothing was changed",
                    hint="choose another place with --dir, or remove that one",
                )
            files.unlink(self._path)
        elif files.names(folder):
            raise AlreadyExists(
                f"{folder} is there and holds no bisection; nothing was changed", hint="choose another place with --dir"
            )
        files.make_directories(folder)
        files.append(self._path, json.dumps(head).encode())

    def add(self, trial: Trial) -> None:
        """Add *trial*."""
        self.trials.append(trial)
        self._append(json_fields(trial))

    def end(self, answer: str) -> None:
        """Note the *answer*: another bisection may take this one's place now."""
        if not self._is_over:
            self._append({"answer": answer})

    def _append(self, line: dict[str, object]) -> None:
        self._files.append(self._path, b"\n" + json.dumps(line).encode())
