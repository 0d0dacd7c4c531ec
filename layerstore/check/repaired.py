"""Repair, its words: what one is asked for, and what it did or would do."""

from dataclasses import dataclass, field

from layerstore.model import Quarantined
from layerstore.check.damage import Cost
from layerstore.check.fall_back import FallBack
from layerstore.check.healing import Elsewhere
from layerstore.storage.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a repair is asked for."""

    read_data: bool = False
    """Whether every byte is looked at, else what a quick verify finds."""
    sources: tuple[Rooms, ...] = ()
    """Other stores that may have what is lost."""
    fall_back: bool = False
    """Whether hurt commits are to take older versions of what they have lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """A record, pin or object that is whole again."""

    kind: str
    path: str
    origin: str
    """Where the copy was."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reingest:
    """A save whose checkpoint would bring back what is lost."""

    reference: str
    """As its user calls it."""
    run: str | None
    """Under which it heals, the save's own; None where that has something else at its place: then any other does."""
    step: int
    policy: str | None
    """Under which it was saved, and left layers out; ``POLICY`` where it is not known which, None if it left none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinElsewhere:
    """A pin that is lost, as a copy of the store has it; nothing proves that ours meant the same."""

    name: str
    reference: str
    """What it means there, as RUN@STEP; of a mixture its base."""
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair did, or would do."""

    quarantine: str | None = None
    """Under which name the files are kept; None where there are none, or nothing was done yet."""
    quarantined: tuple[Quarantined, ...] = ()
    healed: tuple[Healed, ...] = ()
    fell_back: tuple[FallBack, ...] = ()
    cannot_fall_back: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Commits that have lost layers of which there is no older version that is whole and fits."""
    lost: tuple[Cost, ...] = ()
    """What commits and pins have lost for now; what has fallen back has lost nothing."""
    lost_records: tuple[str, ...] = ()
    """Commits and pins of whose record no copy was found."""
    reingest: tuple[Reingest, ...] = ()
    """Saves whose checkpoints would bring back what is lost: those that wrote it, whoever has inherited it."""
    held_back: tuple[str, ...] = ()
    """Commits and pins whose record is in quarantine: collections remove nothing until they are given up."""
    shown_again: tuple[str, ...] = ()
    """Commits that a lost record had hidden."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """Commits of our runs that only the other stores have, as far as we know: nothing is done about them."""
    pins_elsewhere: tuple[PinElsewhere, ...] = ()
    """Pins that are lost, as copies of the store have them: nothing is done about them."""
    newer: tuple[str, ...] = ()
    """What only a newer layerstore can read: it is left as it is."""
    reindexed: bool = False

    @property
    def has_done(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.quarantined or self.healed or self.fell_back or self.reindexed)

    @property
    def has_lost(self) -> bool:
        """Whether something is lost for now, and nobody has given it up."""
        return bool(self.lost or self.lost_records or self.held_back)
