"""A bisection: find the save at which a history turned bad, then the layers that make it bad."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from layerstore.assemble import ExportPlan, Writing, execute_export
from layerstore.bisect.judges import Judged
from layerstore.bisect.search import TrialVerdict, bad_together, first_bad, suspect
from layerstore.bisect.trial_log import OWN, Log, Question, Trial
from layerstore.compose import Composition, compose_latest, naming_damage
from layerstore.disk import lock
from layerstore.errors import AlreadyExists, Conflict, InvalidInput
from layerstore.filenames import SUMMARY
from layerstore.hashing import digest
from layerstore.hf import plan_export
from layerstore.history import Resolved, references_to, resolve, saves_below
from layerstore.layers import typed
from layerstore.progress import Silent
from layerstore.storage import Repository

_SAVES_LATER = 4
"""The search for layers to blame first takes layers from a later save: this many saves after the first bad one."""
_NAMES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """What a bisection found."""

    good: str
    """The reference of the last good save."""
    bad: str
    """The reference of the first bad save."""
    skipped: tuple[str, ...]
    """Saves between the two that could not be judged."""
    layers: tuple[str, ...] | None
    """Layers that make the last good save bad; empty if something else does; None if unknown or not asked for."""
    layers_from: str | None
    """The save that has these layers: the first bad one or one slightly later; None if layers were not asked for."""
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        count = len(self.skipped)
        skipped = f" (could not judge {count} save{'s' if count > 1 else ''} before it)" if count else ""
        since = f"bad since {self.bad}{skipped}"
        if self.layers_from is None:
            return since
        if self.layers is None:
            return f"{since}; which of its layers are to blame could not be determined"
        if not self.layers:
            return f"{since}; none of its layers makes {self.good} bad: look at the other files"
        as_of = "" if self.layers_from == self.bad else f" as of {self.layers_from}"
        if len(self.layers) == 1:
            return f"{since}; {self.layers[0]} alone suffices{as_of}"
        return f"{since}; {' and '.join([', '.join(self.layers[:-1]), self.layers[-1]])} suffice together{as_of}"

    @property
    def bytes_written(self) -> int:
        """The bytes that all trials have written."""
        return sum(trial.bytes_written for trial in self.trials)


def bisect(
    repo: Repository,
    good: str,
    bad: str,
    judge: Callable[[Path], Judged],
    *,
    name: str,
    folder: Path,
    dtype: str | None,
    has_layers: bool,
    on_trial: Callable[[Trial], None],
) -> Bisected:
    """Find the first bad save after *good* and, with *has_layers*, the layers to blame, as `Store.bisect` describes."""
    ends = [_plain(repo, text) for text in (good, bad)]
    _history(repo, ends[0], ends[1], good, bad)  # raises before anything is written
    question = Question(
        good=good,
        bad=bad,
        judge=name,
        dtype=dtype,
        has_layers=has_layers,
        good_commit=ends[0].commit,
        bad_commit=ends[1].commit,
    )
    folder = _prepared(repo, folder)
    with lock(folder / "lock", what=f"the bisection in {folder}", deadline_seconds=0):
        log = Log(repo.files, folder, question)
        # Use the commits from when the bisection began: the references may resolve to other commits now.
        ends = [resolve(repo, commit) for commit in (log.question.good_commit, log.question.bad_commit)]
        judging = _Judging(repo, judge, log, folder / "trial", dtype, on_trial)
        try:
            result = _searched(judging, _history(repo, ends[0], ends[1], good, bad), has_layers=has_layers)
        except Conflict:
            # One of the verdicts is wrong, and it is unknown which: the next bisection must judge everything again.
            log.discard()
            raise
        finally:
            repo.files.remove_tree(judging.folder)
        log.end(str(result))
        return result


def _plain(repo: Repository, text: str) -> Resolved:
    """Return the save that *text* refers to; raise InvalidInput for a mixture, since a mixture is in no history."""
    save = resolve(repo, text)
    if save.is_mixture:
        raise InvalidInput(f"{text} is a mixture of several saves", hint="name saves of one history: RUN@STEP")
    return save


def _prepared(repo: Repository, folder: Path) -> Path:
    """Make *folder* if needed, and return its path; raise if it holds anything but a bisection."""
    place, store = (Path.cwd() / folder).resolve(), repo.layout.root
    if store in (place, *place.parents) or place in store.parents:
        raise InvalidInput(f"{folder} is in the store, or holds it", hint="choose another folder with --dir")
    if repo.files.is_file(place):
        raise InvalidInput(f"{folder} is not a folder", hint="choose another folder with --dir")
    if not OWN.issuperset(repo.files.names(place)):
        raise AlreadyExists(
            f"{folder} exists and holds no bisection; nothing was changed", hint="choose another folder with --dir"
        )
    repo.files.make_directories(place)
    return place


def _history(repo: Repository, first: Resolved, last: Resolved, good: str, bad: str) -> list[Resolved]:
    """Return the saves from *first* to *last*, which must be in one history."""
    view = repo.catalog.find(last.record.run)
    older = [] if view is None else saves_below(view, attempt=last.record.attempt, step=last.record.step)
    saves = [last]
    for row in older:
        saves.append(Resolved.of_commit(repo.catalog.commit(row.name)))
        if saves[-1].commit == first.commit:
            return saves[::-1]
        if row.step < first.record.step:
            break
    raise InvalidInput(
        f"{good} is not before {bad} in one history", hint="GOOD, then BAD: an earlier and a later step of one attempt"
    )


def _searched(judging: "_Judging", row: list[Resolved], *, has_layers: bool) -> Bisected:
    """Find where the saves of *row* turn bad; according to the user, the first is good and the last is bad."""
    names = references_to(judging.repo, [save.record for save in row])

    def judge(index: int) -> TrialVerdict:
        return judging.verdict(compose_latest(row[index]), names[index])

    # Judge the good save before anything else, because a broken judge may call everything bad.
    if (verdict := judge(0)) != "good":
        raise Conflict(
            f"{names[0]} is said to be good, and the command says {verdict}",
            hint="choose another GOOD, or look at what the command prints: does it run? "
            f"layerstore compose {typed(names[0])} --format hf -o DIR makes a folder to try it with",
        )
    boundary = first_bad(len(row), judge)
    # If another save was found to be bad, the last one need not be judged.
    if boundary.bad == len(row) - 1 and (verdict := judge(boundary.bad)) != "bad":
        raise Conflict(
            f"{names[-1]} is said to be bad, and the command says {verdict}",
            hint="choose another BAD, or look at what the command prints",
        )
    layers, origin = None, None
    if has_layers:
        later = min(boundary.bad + _SAVES_LATER, len(row) - 1)
        contrasts = (
            _Contrast(judging, row[boundary.good], row[at], names[boundary.good], names[at])
            for at in (boundary.bad, later)
        )
        layers, is_later = _layers(*contrasts)
        origin = names[later if is_later else boundary.bad]
    return Bisected(
        good=names[boundary.good],
        bad=names[boundary.bad],
        skipped=tuple(names[index] for index in boundary.skipped),
        layers=layers,
        layers_from=origin,
        trials=tuple(judging.log.trials),
    )


# -- the layers ----------------------------------------------------------------------------------------------------


class _Contrast:
    """The last good save with some layers of a bad one."""

    def __init__(self, judging: "_Judging", good: Resolved, bad: Resolved, good_name: str, bad_name: str) -> None:
        self._judging = judging
        self._good, self._names = good, (good_name, bad_name)
        self._theirs, self._ours = ({entry.layer: entry for entry in save.record.layers} for save in (bad, good))
        self.is_possible = self._theirs.keys() == self._ours.keys()
        self.differing = tuple(
            layer
            for layer, entry in self._theirs.items()
            if self.is_possible and entry.version != self._ours[layer].version
        )

    def __call__(self, chosen: Collection[str]) -> TrialVerdict:
        layers = tuple(self._theirs[name] if name in chosen else entry for name, entry in self._ours.items())
        good, bad = self._names
        first = [layer for layer in self._ours if layer in chosen][:_NAMES_MAX]
        some = ", ".join(first) + (f" and {len(chosen) - len(first)} more" if len(chosen) > len(first) else "")
        composition = replace(compose_latest(self._good), policy="bisect", layers=layers)
        return self._judging.verdict(composition, f"{good} with {some} of {bad}")


def _layers(first: _Contrast, later: _Contrast) -> tuple[tuple[str, ...] | None, bool]:
    """Return the layers of a bad save that make the last good one bad, and whether they come from the *later* save."""
    if not first.is_possible:
        return None, False
    whole = first(first.differing) if first.differing else "good"
    if whole != "bad":
        return (() if whole == "good" else None), False
    # A slow fault may cross a threshold only with all layers; a few saves later, the layer to blame crosses it alone.
    blamed = suspect(first.differing, later) if later.is_possible else None
    if blamed is not None:
        if first((blamed,)) == "bad":
            return (blamed,), False
        others = [layer for layer in first.differing if layer != blamed]  # the saves may also differ by another fault
        if later((blamed,)) == "bad" and first(others) == "good":
            return (blamed,), True
    blamed = suspect(first.differing, first)
    if blamed is not None and first((blamed,)) == "bad":
        return (blamed,), False
    return bad_together(first.differing, first), False


@dataclass(slots=True)
class _Judging:
    """Judges each composite once, as a folder for ``from_pretrained``."""

    repo: Repository
    judge: Callable[[Path], Judged]
    log: Log
    folder: Path
    """Holds one composite at a time."""
    dtype: str | None
    on_trial: Callable[[Trial], None]

    def verdict(self, composition: Composition, asked: str) -> TrialVerdict:
        """Return the verdict on *composition*, which *asked* describes."""
        with naming_damage(self.repo, composition):
            plan = plan_export(self.repo, composition, dtype=self.dtype)
            key = _key_of_export(plan)
            # Equal weights are judged once, even if they come from another save or an interrupted search.
            known = next((trial for trial in self.log.trials if trial.key == key), None)
            if known is not None:
                return known.verdict
            started = time.monotonic()
            self.repo.files.remove_tree(self.folder)
            # Not durable: the folder is judged now, and the next trial removes it.
            written = execute_export(self.repo, plan, self.folder, Writing(durable=False), progress=Silent())
        judged = self.judge(self.folder)
        if getattr(judged, "verdict", None) not in get_args(TrialVerdict):
            raise InvalidInput(f"the judge returned {judged!r}", hint='return a Judged, such as Judged(verdict="bad")')
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
        self.on_trial(trial)
        return judged.verdict


def _key_of_export(plan: ExportPlan) -> str:
    """Return a key for what a judge would see: equal for equal folders, whichever saves they come from."""
    # Without the summary, since it states the save.
    seen = [(file.path, file.size_bytes, file.literals, file.pieces) for file in plan.files if file.path != SUMMARY]
    return digest(repr(sorted(seen, key=lambda planned: planned[0])).encode()).hex()
