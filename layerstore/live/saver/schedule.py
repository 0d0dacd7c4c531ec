"""
Decide which layers are due at the next save, given the outcomes of the earlier ones.

Every rank has a schedule and feeds it the same facts, so all ranks decide alike without a message.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Self

from layerstore.history import NextCommit
from layerstore.model import PolicyUse
from layerstore.numbers import Movements
from layerstore.policy import Latest, Policy, Save, anchored, due_layers
from layerstore.precision import Keyframes
from layerstore.tree import Tree
from layerstore.zero3 import Share


@dataclass(slots=True)
class Schedule:
    """A saver's policy, and the facts that the policy decides by."""

    policy: Policy
    number: int
    """The number of the next save."""
    visible: dict[str, int] = field(default_factory=dict)
    """The number of each layer's newest visible save."""
    foreign: frozenset[str] = frozenset()
    """Layers inherited from another run, which need not be saved and have no age."""
    had_moments: dict[str, float] = field(default_factory=dict)
    """How many moments each layer had at its last save; infinite if it had some, but their number is unknown."""
    owed: set[str] = field(default_factory=set)
    """Layers not saved because a save was given up, skipped or made smaller; they are due at the next save."""
    pending: dict[int, frozenset[str]] = field(default_factory=dict)
    """The layers due in each save whose outcome is still unknown, by number."""
    compact: dict[int, frozenset[str]] = field(default_factory=dict)
    """The compact layers of each pending save, by the number of the save."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many of each layer's newest visible versions in a row are compact; absent if the next must be exact."""

    @classmethod
    def after(cls, place: NextCommit, policy: Policy, *, run: str, referable: Collection[str] = ()) -> Self:
        """Return the schedule of *run* from *place* on; differences can refer to the *referable* layers at *place*."""
        own = place.own_numbers(run)
        return cls(
            policy=policy,
            number=place.save_number,
            visible=own,
            foreign=frozenset(place.inherited.keys() - own.keys()),
            had_moments={layer: 0 if entry.optimizer_step is None else inf for layer, entry in place.inherited.items()},
            counts={layer: place.inherited[layer].compact for layer in referable},
        )

    def due(
        self,
        layers: tuple[str, ...],
        *,
        moments: Mapping[str, int],
        moved: Movements,
        sizes: Mapping[str, int],
    ) -> frozenset[str]:
        """Return the layers to save now: those that the policy chooses, that cannot be inherited, or that are owed."""
        last = self.last_saved()
        save = Save(
            number=self.number,
            layers=layers,
            ages={layer: self.number - last[layer] for layer in layers if layer in last},
            movements=moved.relative,
            weighted_movements=moved.weighted,
            sizes=sizes,
        )
        of_policy = due_layers(anchored(self.policy, 0), save)  # the phase is set by save 0, the history's first
        return of_policy | self._needed(layers, moments) | (self.owed & set(layers))

    def _needed(self, layers: Iterable[str], moments: Mapping[str, int]) -> frozenset[str]:
        """Return those of *layers* that a commit cannot inherit: never saved, or last saved with fewer moments."""
        known = self.last_saved().keys() | self.foreign
        return frozenset(
            layer for layer in layers if layer not in known or (moments[layer] > self.had_moments.get(layer, inf))
        )

    def begin_anew(self) -> None:
        """Record that no layer can be inherited from now on: every layer is due until it is saved."""
        self.visible, self.foreign, self.counts = {}, frozenset(), {}
        # Pending saves will be given up too, since none of them stores every layer.
        self.pending = dict.fromkeys(self.pending, frozenset())

    @property
    def open_for(self) -> int:
        """How many saves ago the oldest pending save began."""
        return self.number - min(self.pending, default=self.number)

    def last_saved(self) -> dict[str, int]:
        """Return the number of each layer's newest save, assuming that every pending one becomes visible."""
        numbers = dict(self.visible)
        for number, due in self.pending.items():
            numbers |= dict.fromkeys(due, number)
        return numbers

    def compact_now(self, due: frozenset[str], keyframes: Keyframes, moments: Mapping[str, int]) -> frozenset[str]:
        """Return those of *due* that need not be exact this time, assuming that pending saves become visible."""
        counts = dict(self.counts)
        for number, pending in self.pending.items():
            self._count(counts, pending, number)
        return frozenset(
            layer
            for layer in due
            if not keyframes.is_exact(counts.get(layer)) and (keyframes.precision.master or moments[layer])
        )

    def _count(self, counts: dict[str, int], due: Iterable[str], number: int) -> None:
        for layer in due:
            if layer not in self.compact[number]:
                counts[layer] = 0
            elif layer in counts:
                counts[layer] += 1

    def begin(self, due: frozenset[str], moments: Mapping[str, int], compact: frozenset[str] = frozenset()) -> int:
        """Record that a save of the layers *due*, some of them *compact*, has begun; return its number."""
        number = self.number
        self.pending[number], self.compact[number] = due, compact
        self.had_moments |= {layer: moments[layer] for layer in due}
        self.owed -= due
        self.number += 1
        return number

    def skip(self, due: frozenset[str]) -> int:
        """Record that a save of the layers *due* is skipped, so that they are owed; return its number."""
        self.owed |= due
        self.number += 1
        return self.number - 1

    def fewer(
        self, due: frozenset[str], sizes: Mapping[str, int], room: int, *, moments: Mapping[str, int]
    ) -> frozenset[str]:
        """
        Return the layers of *due* that fit into *room*, oldest first, at least one layer; the others are owed.

        Layers that cannot be inherited are always included, so a first save is full.
        """
        last = self.last_saved()
        chosen = set(self._needed(due, moments))
        room -= sum(sizes[layer] for layer in chosen)
        for layer in sorted(due - chosen, key=lambda layer: (last.get(layer, -1), layer)):
            # Take one layer even if it is too large: if no layer fits the buffer, none would ever be saved otherwise.
            if chosen and sizes[layer] > room:
                continue
            chosen.add(layer)
            room -= sizes[layer]
        self.owed |= due - chosen
        return frozenset(chosen)

    def resolve(self, outcomes: Mapping[int, bool]) -> None:
        """Record which saves became visible, and which were given up."""
        for number in sorted(self.pending.keys() & outcomes.keys()):
            due = self.pending.pop(number)
            if outcomes[number]:
                self.visible |= dict.fromkeys(due, number)
                self._count(self.counts, due, number)
            else:
                self.owed |= due
                # Exact next time: gc may remove this save's masters, and its references or values may be why it failed.
                self.counts.clear()
            del self.compact[number]


def policy_use(policy: Policy, share: Share, due: frozenset[str], moved: Movements) -> PolicyUse:
    """Return the record's entry on *policy*: which layers were due, and the movements that decided it."""
    decisions: dict[Tree, Tree] = {}
    if not isinstance(policy, Latest) or len(due) < len(share.layers):
        decisions["due"] = [layer.layer for layer in share.layers if layer.layer in due]
    return PolicyUse(name=policy.name, parameters=policy.parameters, decisions=decisions | moved.decisions())
