"""
What a store should hold, in plain dictionaries: worked out from what was done to it, and never from its files.

Only the id of a commit is taken from the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from layerstore import Filter, Keep, Latest, Parity
from layerstore.policy import Policy, Save

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
Lineage = tuple[tuple[int, int], ...]
"""The attempts and steps at which an attempt, and those that it came from, left others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit."""

    run: str
    attempt: int
    lineage: Lineage
    step: int
    number: int
    """Of its save, from 0."""
    id: str
    content: Content
    """What it was saved from."""
    policy: str
    layers: Layers

    @property
    def has_moments(self) -> bool:
        """Whether it can be resumed from."""
        return all(layer.has_moments for layer in self.layers.values())

    @property
    def own(self) -> set[str]:
        """The layers that it has saved itself."""
        return {name for name, layer in self.layers.items() if layer.origin[:3] == (self.run, self.attempt, self.step)}


@dataclass(slots=True)
class Run:
    """What can be seen of a run."""

    commits: list[Commit] = field(default_factory=list)

    @property
    def attempts(self) -> list[int]:
        """Its attempts, oldest first."""
        return sorted({commit.attempt for commit in self.commits})

    @property
    def newest(self) -> int:
        """The attempt that goes on."""
        return max(self.attempts, default=0)

    def of_attempt(self, attempt: int) -> list[Commit]:
        """Return its own commits, by step."""
        return sorted((commit for commit in self.commits if commit.attempt == attempt), key=lambda commit: commit.step)

    def lineage_of(self, attempt: int) -> Lineage:
        """Return where *attempt* left others, as its commits say, or those of attempts that came from it."""
        forks: dict[int, tuple[int, int] | None] = {}
        for commit in sorted(self.commits, key=lambda commit: (commit.attempt, commit.step)):
            at = commit.attempt
            for left in commit.lineage:
                forks.setdefault(at, left)
                at = left[0]
            forks.setdefault(at, None)
        found = []
        fork = forks.get(attempt)
        while fork is not None:
            found.append(fork)
            fork = forks.get(fork[0])
        return tuple(found)

    def history(self, attempt: int, *, upto: int | None = None) -> list[Commit]:
        """Return what *attempt* came from, newest first."""
        found = [commit for commit in self.of_attempt(attempt) if upto is None or commit.step <= upto]
        for left, step in self.lineage_of(attempt):
            upto = step if upto is None else min(upto, step)
            found += [commit for commit in self.of_attempt(left) if commit.step <= upto]
        return sorted(found, key=lambda commit: (commit.step, commit.attempt), reverse=True)

    def reference(self, run: str, commit: Commit) -> str:
        """Return what means *commit* and no other."""
        back = len(self.attempts) - 1 - self.attempts.index(commit.attempt)
        return f"{run}~{back}@{commit.step}" if back else f"{run}@{commit.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A pin."""

    base: Commit
    layers: Layers


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


def due(policy: str, number: int) -> set[str]:
    """Return what is due at the save *number* of a run."""
    return set(LAYERS) if policy == "full" else set(POLICIES[policy].due(Save(number=number, layers=LAYERS, ages={})))


def half(odd: bool) -> set[str]:
    """Return one half of the layers: even blocks and the output side, or odd blocks and the input side."""
    return {"model.layers.1", "model.embed_tokens"} if odd else {"model.layers.0", "model.layers.2", *LAYERS[4:]}


@dataclass(slots=True)
class Model:
    """A store."""

    runs: dict[str, Run] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    trash: dict[str, Commit] = field(default_factory=dict)
    """By id: what was dropped or replaced."""
    hidden: dict[str, Commit] = field(default_factory=dict)
    """
    What may be in the trash without being listed there.

    Somebody was killed who was about to move it there, and another commit hides it until then; or it is visible again.
    """

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
        history = of.history(of.newest, upto=content.step)
        at = sorted((commit for commit in of.commits if commit.step == content.step), key=lambda each: -each.attempt)
        rival = next((commit for commit in at if commit in history), at[0] if at else None)
        if rival is None or rival.content == content:
            return rival  # without its moments, too
        return "conflict" if rival in history else None

    def planned(self, run: str, content: Content, policy: str, how: Saving) -> Commit:
        """Return the commit that a save makes, but for its id."""
        of, base = self.run(run), how.resumed_from
        attempt, lineage, number, inherited = of.newest, of.lineage_of(of.newest), 0, Layers()
        before = next(iter(of.history(of.newest, upto=content.step - 1)), None)
        if base is not None:
            inherited, attempt, lineage = base.layers, 1 + of.newest, ()
            if base.base.run == run and of.commits:
                number, lineage = base.base.number + 1, ((base.base.attempt, base.base.step), *base.base.lineage)
        else:
            if before is not None:
                number, inherited = before.number + 1, before.layers
            if how.rollback:
                attempt, lineage = 1 + of.newest, () if before is None else ((of.newest, before.step), *lineage)
        attempt = max(attempt, 1)
        own = due(policy, number) | {
            layer for layer in LAYERS if layer not in inherited or not inherited[layer].has_moments
        }
        new = Layer(content, (run, attempt, content.step, number))
        layers = {layer: new if layer in own else inherited[layer] for layer in LAYERS}
        return Commit(
            run=run, attempt=attempt, lineage=lineage, step=content.step, number=number, id="", content=content,
            policy=policy, layers=layers,
        )  # fmt: skip

    def save(self, planned: Commit, commit: str) -> Commit | None:
        """Add what was *planned*, as *commit*; return what that replaces."""
        of = self.run(planned.run)
        place = planned.attempt, planned.step
        replaced = next((other for other in of.commits if (other.attempt, other.step) == place), None)
        if replaced is not None:
            of.commits.remove(replaced)
        of.commits.append(replace(planned, id=commit))
        return replaced

    # -- composing -----------------------------------------------------------------------------------------------

    def composed(self, commit: Commit, policy: str) -> Layers:
        """Return what a composite on top of *commit* has: each layer from its newest save at which it was due."""
        if policy == "full":
            return commit.layers
        saves = self.runs[commit.run].history(commit.attempt, upto=commit.step)
        saves = saves[saves.index(commit) :]
        newest = saves[-1].number + len(saves) - 1  # full checkpoints count by step order
        # The base supplies the half that it has saved by parity itself, else the even one.
        odd = _saved_by(commit, "parity") is not None and len(commit.own & half(True)) > len(commit.own & half(False))
        found = dict(commit.layers)
        waiting = set(LAYERS)
        for position, save in enumerate(saves):
            waiting -= {name for name in waiting if commit.layers[name].has_moments > save.layers[name].has_moments}
            found |= {name: save.layers[name] for name in waiting}
            chosen = half(bool((position + odd) % 2)) if policy == "parity" else due(policy, newest - position)
            recorded = _saved_by(save, policy)
            waiting -= chosen if recorded is None else recorded
        return found

    # -- removing ------------------------------------------------------------------------------------------------

    def forget(self, commit: Commit) -> None:
        """Show *commit* no more."""
        self.runs[commit.run].commits.remove(commit)

    def may_come_back(self, commit: Commit) -> bool:
        """Whether *commit*, which is in the trash, finds its place free, and its attempt as it was."""
        own = self.run(commit.run).of_attempt(commit.attempt)
        return all(other.step != commit.step and other.lineage == commit.lineage for other in own)

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


def _saved_by(commit: Commit, policy: str) -> set[str] | None:
    """Return what *commit* has saved under *policy*; None where it is full, or was saved under another one."""
    return commit.own if commit.policy == policy and commit.own != set(LAYERS) else None
