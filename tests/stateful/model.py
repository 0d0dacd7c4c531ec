"""
What a store should hold, in plain dictionaries: worked out from what was done to it, and never from its files.

Only this is taken from the store: the id of a commit, the number of its save, and whether it still has what an
attempt was resumed from, which nothing but a pin keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

from layerstore import Filter, Keep, Latest, Parity
from layerstore.policy import Policy
from layerstore.policy.due import Save

LAYERS = (
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.1",
    "model.layers.2",
    "model.norm",
    "lm_head",
)

POLICIES: dict[str, Policy] = {
    "full": Latest(),
    "parity": Parity(),
    "filter": Filter(first=1, last=1, every=2, share=Fraction(1, 2)),
}


@dataclass(frozen=True, slots=True, order=True)
class Content:
    """A checkpoint: equal ones have equal bytes."""

    step: int
    seed: int
    world_size: int = 2
    layout: str = "raw"


@dataclass(frozen=True, slots=True)
class Layer:
    """What a commit has of a layer."""

    content: Content
    origin: tuple[str, int, int, int]
    """Run, attempt, step and number of the save."""
    has_moments: bool = True


Layers = dict[str, Layer]
IsLost = Callable[[str, Layer], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit that can be seen."""

    run: str
    attempt: int
    step: int
    number: int
    id: str
    content: Content
    """What it was saved from."""
    layers: Layers

    @property
    def has_moments(self) -> bool:
        """Whether it can be resumed from."""
        return all(layer.has_moments for layer in self.layers.values())

    @property
    def is_full(self) -> bool:
        """Whether every layer of it is its own."""
        return all(layer.origin[:3] == (self.run, self.attempt, self.step) for layer in self.layers.values())

    @property
    def has_own(self) -> bool:
        """Whether any layer of it is its own: one that has fallen back may have none."""
        return any(layer.content == self.content for layer in self.layers.values())


@dataclass(slots=True)
class Run:
    """A run: what can be seen of it, and what is never forgotten."""

    commits: list[Commit] = field(default_factory=list)
    forks: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    """Of every attempt that ever was: the attempt and step that it left."""
    resumed: dict[int, tuple[Layers, int]] = field(default_factory=dict)
    """Of those that went on from a commit or composite: its layers, and the number of the first save after it."""

    @property
    def attempts(self) -> list[int]:
        """The attempts that can be seen, oldest first."""
        return sorted({commit.attempt for commit in self.commits})

    @property
    def newest(self) -> int:
        """The attempt that goes on."""
        return max(self.attempts or self.forks, default=0)

    def of_attempt(self, attempt: int) -> list[Commit]:
        """Return its own commits, by step."""
        return sorted((commit for commit in self.commits if commit.attempt == attempt), key=lambda commit: commit.step)

    def at(self, attempt: int, step: int) -> Commit | None:
        """Return the commit of *attempt* itself at *step*."""
        return next((commit for commit in self.of_attempt(attempt) if commit.step == step), None)

    def history(self, attempt: int, *, upto: int | None = None) -> list[Commit]:
        """Return what *attempt* came from, newest first."""
        own = [commit for commit in self.of_attempt(attempt) if upto is None or commit.step <= upto]
        fork = self.forks.get(attempt)
        below: list[Commit] = []
        if fork is not None:
            below = self.history(fork[0], upto=fork[1] if upto is None else min(upto, fork[1]))
        return sorted(own + below, key=lambda commit: (commit.step, commit.attempt), reverse=True)

    def reference(self, run: str, commit: Commit) -> str:
        """Return what means *commit* and no other."""
        back = len(self.attempts) - 1 - self.attempts.index(commit.attempt)
        return f"{run}~{back}@{commit.step}" if back else f"{run}@{commit.step}"

    def turn(self, commit: Commit) -> int:
        """Return the number that *commit* is counted by: full saves before a policy's in the order of their steps."""
        own = self.of_attempt(commit.attempt)
        chosen = min((other.number for other in own if not other.is_full), default=math.inf)
        full = [other for other in own if other.number < chosen]
        numbers = sorted(other.number for other in full)
        return numbers[full.index(commit)] if commit in full else commit.number

    def numbers_above(self, attempt: int, step: int) -> set[int]:
        """Return the numbers of the saves after *step* in *attempt*."""
        return {self.turn(other) for other in self.of_attempt(attempt) if other.step > step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A pin."""

    base: Commit
    layers: Layers


def due(policy: Policy, number: int, *, unseen: Iterable[int] = ()) -> set[str]:
    """Return what is due at the save *number*, and was at *unseen* ones, which came to nothing."""
    if isinstance(policy, Latest):
        return set(LAYERS)
    return {layer for at in (number, *unseen) for layer in policy.due(Save(number=at, layers=LAYERS, ages={}))}


def between(before: int, number: int, above: set[int]) -> list[int]:
    """Return the numbers between two saves that no save has."""
    return [missing for missing in range(before + 1, number) if missing not in above]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How something is saved."""

    replace: bool = False
    rollback: bool = False
    resumed_from: Pin | None = None

    @property
    def opens_attempt(self) -> bool:
        """Whether it begins another history."""
        return self.rollback or self.resumed_from is not None


@dataclass(slots=True)
class Past:
    """A save, as a composite looks back at it."""

    number: int
    layers: Layers
    above: set[int]
    """The numbers of later saves of its attempt."""
    unseen: list[int] = field(default_factory=list)
    """Those before it that came to nothing."""


@dataclass(slots=True)
class Model:
    """A store."""

    has: Callable[[str, Layer], bool]
    """Whether the store still has a layer that no commit may name any more."""
    runs: dict[str, Run] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)

    def run(self, name: str) -> Run:
        """Return the run *name*, which may not be there yet."""
        return self.runs.setdefault(name, Run())

    def commits(self) -> Iterator[Commit]:
        """Yield all that can be seen."""
        for run in self.runs.values():
            yield from run.commits

    def seen(self) -> set[tuple[str, int, int, str]]:
        """Return run, attempt, step and id of all that a log shows."""
        return {(commit.run, commit.attempt, commit.step, commit.id) for commit in self.commits()}

    def reference(self, commit: Commit) -> str:
        """Return what means *commit*."""
        return self.runs[commit.run].reference(commit.run, commit)

    # -- saving --------------------------------------------------------------------------------------------------

    def known(self, run: str, content: Content) -> Commit | str | None:
        """Return what a plain ingest of *content* finds saved already, ``"conflict"``, or nothing."""
        of = self.run(run)
        rival = of.at(of.newest, content.step)
        if rival is not None:
            return rival if rival.content == content else "conflict"  # without its moments, too
        for attempt in of.attempts:
            twin = of.at(attempt, content.step)
            if twin is None or twin.content != content or not twin.has_own:
                continue
            return twin if twin in of.history(of.newest, upto=content.step) else "conflict"
        return None

    def saved_layers(self, run: str, content: Content, policy: str, *, number: int, how: Saving) -> set[str]:
        """Return which layers a save stores."""
        before, inherited = self._before(run, content, how)
        wanted: set[int] | list[int] = []
        if before is not None and not how.opens_attempt:
            of = self.run(run)
            wanted = between(of.turn(before), number, of.numbers_above(of.newest, content.step))
        found = due(POLICIES[policy], number, unseen=wanted)
        return found | {layer for layer in LAYERS if layer not in inherited or not inherited[layer].has_moments}

    def save(self, run: str, content: Content, *, saved: Iterable[str], number: int, commit: str, how: Saving) -> None:
        """Add what was saved, of which *saved* are its own layers."""
        of = self.run(run)
        before, inherited = self._before(run, content, how)
        if how.opens_attempt or not of.forks:
            attempt = 1 + max(of.forks, default=0)
            if how.resumed_from is not None:
                base = how.resumed_from.base
                of.forks[attempt] = (base.attempt, base.step) if base.run == run else None
                of.resumed[attempt] = dict(how.resumed_from.layers), number
            else:
                of.forks[attempt] = (of.newest, before.step) if before is not None else None
        else:
            attempt = of.newest
            of.commits = [other for other in of.commits if (other.attempt, other.step) != (attempt, content.step)]
        own = dict.fromkeys(saved, Layer(content, (run, attempt, content.step, number)))
        layers = {layer: own[layer] if layer in own else inherited[layer] for layer in LAYERS}
        of.commits.append(
            Commit(
                run=run, attempt=attempt, step=content.step, number=number, id=commit, content=content, layers=layers
            )
        )

    def _before(self, run: str, content: Content, how: Saving) -> tuple[Commit | None, Layers]:
        """Return what lies before a new save, and what it inherits."""
        if how.resumed_from is not None:
            return None, how.resumed_from.layers
        of = self.run(run)
        before = next(iter(of.history(of.newest, upto=content.step - 1)), None)
        return before, {} if before is None else before.layers

    # -- composing -----------------------------------------------------------------------------------------------

    def composed(self, commit: Commit, policy: str) -> Layers:
        """Return what a composite on top of *commit* has: each layer from its newest save at which it was due."""
        if policy == "full":
            return commit.layers
        found = dict(commit.layers)
        for layer in LAYERS:
            for save in self._past(commit):
                there = save.layers.get(layer)
                if there is None or (commit.layers[layer].has_moments and not there.has_moments):
                    break
                found[layer] = there
                if layer in due(POLICIES[policy], save.number, unseen=save.unseen):
                    break
        return found

    def _past(self, commit: Commit) -> list[Past]:
        """Return the saves up to *commit*, newest first; before what an attempt was resumed from, nothing counts."""
        of = self.runs[commit.run]
        saves = [commit]
        for save in of.history(commit.attempt, upto=commit.step - 1):
            if save.attempt != saves[-1].attempt and saves[-1].attempt in of.resumed:
                break
            saves.append(save)
        found = [Past(of.turn(save), save.layers, of.numbers_above(save.attempt, save.step)) for save in saves]
        if saves[-1].attempt in of.resumed:
            layers, first = of.resumed[saves[-1].attempt]
            left = {name: layer for name, layer in layers.items() if self.has(name, layer)}
            found.append(Past(first - 1, left, set()))
        for newer, older in pairwise(found):
            newer.unseen = between(older.number, newer.number, newer.above)
        return found

    # -- repairing -----------------------------------------------------------------------------------------------

    def older(self, commit: Commit) -> list[Layers]:
        """Return what the saves before *commit* have of the layers, newest first."""
        return [past.layers for past in self._past(commit)[1:]]

    def fallen_back(
        self,
        commit: Commit,
        older: Iterable[Layers],
        *,
        told: Callable[[str, Layer], bool],
        lost: Callable[[str, Layer], bool],
    ) -> Layers | None:
        """
        Return what *commit* has once each layer of which it is *told* that it is lost is the newest older one.

        That is one which is not *lost* itself. None where there is none.
        """
        layers = dict(commit.layers)
        for name, layer in commit.layers.items():
            if told(name, layer):
                fitting = (
                    each[name]
                    for each in older
                    if name in each and each[name].has_moments == layer.has_moments and not lost(name, each[name])
                )
                found = next(fitting, None)
                if found is None:
                    return None
                layers[name] = found
        return layers

    def fall_back(self, commit: Commit, layers: Layers, new_id: str) -> Commit:
        """Let *commit* have these *layers*; return what it is now."""
        run = self.runs[commit.run]
        made = replace(commit, layers=layers, id=new_id)
        run.commits[run.commits.index(commit)] = made
        return made

    # -- removing ------------------------------------------------------------------------------------------------

    def hide(self, commit: Commit) -> None:
        """Drop *commit*, or forget what was removed."""
        self.runs[commit.run].commits.remove(commit)

    def trim(self, commit: Commit, new_id: str) -> None:
        """Let *commit* lose its moments."""
        run = self.runs[commit.run]
        layers = {name: replace(layer, has_moments=False) for name, layer in commit.layers.items()}
        run.commits[run.commits.index(commit)] = replace(commit, layers=layers, id=new_id)

    def collected(self, keep: Keep, runs: list[str] | None) -> tuple[list[Commit], list[Commit]]:
        """Return the commits that a collection removes, and those that lose their moments."""
        gone: list[Commit] = []
        trimmed: list[Commit] = []
        for name in runs if runs is not None else list(self.runs):
            run = self.runs[name]
            kept = self._kept(run, keep)
            gone += [commit for commit in run.commits if commit.id not in kept]
            history = run.history(run.newest)
            if keep.drop_optimizer_older_than is not None and history:
                old = history[0].step - keep.drop_optimizer_older_than
                trimmed += [
                    commit
                    for commit in run.commits
                    if commit.step < old
                    and commit.id in kept
                    and commit.has_moments
                    and commit.id not in self._pinned()
                ]
        return gone, trimmed

    def _pinned(self) -> set[str]:
        """Return the commits that a pin keeps as they stand."""
        return {
            pin.base.id
            for pin in self.pins.values()
            if any(commit.id == pin.base.id and commit.layers == pin.layers for commit in self.commits())
        }

    def _kept(self, run: Run, keep: Keep) -> set[str]:
        if not keep.has_rules:
            return {commit.id for commit in run.commits}
        history = run.history(run.newest)
        kept = [*history[:1], *history[: keep.last or 0]]
        kept += [commit for commit in history if keep.every and commit.step % keep.every == 0]
        tips = [run.of_attempt(attempt)[-1] for attempt in run.attempts]
        kept += [tip for tip in tips if tip.step > history[0].step]
        return {commit.id for commit in kept} | self._pinned()
