"""
Which layers are due at the next save, by what became of the earlier ones.

Every rank keeps one, fed with the same facts: so all come to the same answer without asking each other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from layerstore.history.place import Place, own_numbers
from layerstore.policy import Policy
from layerstore.policy.due import Save, anchored, due_layers


@dataclass(slots=True)
class _Pending:
    """A save whose fate is not known yet."""

    number: int
    due: frozenset[str]


@dataclass(slots=True)
class Schedule:
    """The policy of a saver, and what it goes by."""

    policy: Policy
    number: int
    """Of the next save."""
    visible: dict[str, int] = field(default_factory=dict)
    """The number of the newest visible save of each layer."""
    foreign: frozenset[str] = frozenset()
    """Layers that were taken over from another run: they need not be saved, and their saves' numbers say nothing."""
    counted: dict[str, bool] = field(default_factory=dict)
    """Whether the optimizer had updated each layer when it was last saved."""
    owed: set[str] = field(default_factory=set)
    """Layers of saves that came to nothing."""
    pending: list[_Pending] = field(default_factory=list)

    @classmethod
    def after(cls, place: Place, policy: Policy, *, run: str) -> Self:
        """Return the schedule of saves of *run* that begin at *place*."""
        own = own_numbers(place, run)
        return cls(
            policy=policy,
            number=place.save_number,
            visible=own,
            foreign=frozenset(place.inherited.keys() - own.keys()),
            counted={layer: entry.optimizer_step is not None for layer, entry in place.inherited.items()},
        )

    def due(
        self,
        layers: tuple[str, ...],
        *,
        counted: Mapping[str, bool],
        movements: Mapping[str, float],
        sizes: Mapping[str, int],
    ) -> frozenset[str]:
        """Return what is to be saved now: all that was never saved, and what the policy says."""
        last = self.last_saved()
        save = Save(
            number=self.number,
            layers=layers,
            ages={layer: self.number - last[layer] for layer in layers if layer in last},
            movements=movements,
            sizes=sizes,
        )
        found = due_layers(anchored(self.policy, 0), save)
        return found | self._needed(layers, counted) | (self.owed & set(layers))

    def _needed(self, layers: Iterable[str], counted: Mapping[str, bool]) -> frozenset[str]:
        """Return those of *layers* without which there is no commit: nothing stands in for them."""
        known = self.last_saved().keys() | self.foreign
        return frozenset(
            layer for layer in layers if layer not in known or (counted[layer] and not self.counted.get(layer, True))
        )

    def begin_anew(self) -> None:
        """Note that nothing can be inherited any more: every layer is due until it was saved."""
        self.visible, self.foreign = {}, frozenset()
        for save in self.pending:
            save.due = frozenset()  # these come to nothing, too: none of them has every layer

    @property
    def open_for(self) -> int:
        """How many saves ago the oldest one began whose fate is not known."""
        return self.number - self.pending[0].number if self.pending else 0

    def last_saved(self) -> dict[str, int]:
        """Return the number of the newest save of each layer, as if every pending one became visible."""
        found = dict(self.visible)
        for save in self.pending:
            found |= dict.fromkeys(save.due, save.number)
        return found

    def begin(self, due: frozenset[str], counted: Mapping[str, bool]) -> int:
        """Note that a save of *due* has begun; return its number."""
        number = self.number
        self.pending.append(_Pending(number, due))
        self.counted |= {layer: counted[layer] for layer in due}
        self.owed -= due
        self.number += 1
        return number

    def skip(self, due: frozenset[str]) -> None:
        """Note that a save was left out; what was *due* then is due again."""
        self.owed |= due
        self.number += 1

    def fewer(
        self, due: frozenset[str], sizes: Mapping[str, int], room: int, *, counted: Mapping[str, bool]
    ) -> frozenset[str]:
        """
        Return those of *due* that fit into *room*, the oldest first, and at least one; the others stay due.

        What no commit can do without is among them, whatever fits: a first save is full.
        """
        last = self.last_saved()
        chosen = set(self._needed(due, counted))
        room -= sum(sizes[layer] for layer in chosen)
        for layer in sorted(due - chosen, key=lambda of: (last.get(of, -1), of)):
            if chosen and sizes[layer] > room:
                continue
            chosen.add(layer)
            room -= sizes[layer]
        self.owed |= due - chosen
        return frozenset(chosen)

    def resolve(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Note which saves became visible, and which came to nothing."""
        fate = dict(outcomes)
        for save in [save for save in self.pending if save.number in fate]:
            self.pending.remove(save)
            if fate[save.number]:
                self.visible |= dict.fromkeys(save.due, save.number)
            else:
                self.owed |= save.due
