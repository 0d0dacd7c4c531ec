"""
Averages: a composite whose masters are the mean of those of several saves.

Everything else is the base's: its moments, buffers, frozen weights and files. A version that several of the saves share
is read once, and counts once for each of them.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from layerstore.compose.choose import Composition, Mean, MeanSave
from layerstore.errors import InvalidInput, LayoutMismatch
from layerstore.history import Resolved, references_to, resolve, saves_below
from layerstore.model import BlobRef, LayerEntry, Saving
from layerstore.storage import RecordName, Repository

_LAST = re.compile(r"last:(?P<count>[1-9]\d{0,5})")
_WEIGHTED = re.compile(r"(?P<ref>.+?)(:(?P<weight>\d+(\.\d+)?))?")

# An exponential average ends where a save would weigh less than this part of the newest.
_EMA_LEAST = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """One of the saves."""

    save: Saving
    name: RecordName | None
    """None for a pin."""
    entries: Mapping[str, LayerEntry]
    weight: float


def base_of_mean(text: str) -> str | None:
    """Return the reference that a mean takes everything else from if none is given; None for the only run's newest."""
    return None if _LAST.fullmatch(text) else _weighted(text)[-1][0]


def average(
    repo: Repository, composition: Composition, *, of: str | None, ema: float | None, layers: str | None
) -> Composition:
    """
    Return *composition* with the mean of some saves as its masters.

    *of* is ``last:N`` or references with weights, ``A,B:2``; *ema* weighs the last saves; *layers* is a pattern.

    Raises:
        InvalidInput: They do not say which saves, or with which weights.
        NotFound: One of the saves is not in the store.
        LayoutMismatch: One of the saves lacks a layer.
    """
    if of is None and ema is None:
        raise InvalidInput("which saves are averaged?", hint="--mean last:10, --mean A,B:2 or --ema 0.9")
    saves = list(_saves(repo, composition, of=of, ema=ema))
    own = {entry.layer: entry for entry in composition.base.layers}
    names = list(own)
    if layers is not None:
        from layerstore.policy.recipe import pattern_of  # imports yaml, which nothing else needs

        names = pattern_of(layers, name="the layers to average").layers(names)
    found: dict[str, tuple[tuple[LayerEntry, float], ...]] = {}
    for save in saves:
        odd = sorted(set(names) - save.entries.keys() if layers is not None else set(names) ^ save.entries.keys())
        if odd:
            has_it, lacks_it = references_to(
                repo, [save.save, composition.base][:: 1 if odd[0] in save.entries else -1]
            )
            raise LayoutMismatch(
                f"{has_it} has a layer {odd[0]!r}, {lacks_it} has not: these have no mean",
                hint="name saves of one model, or the layers that both have with --mean-layers",
            )
    for layer in names:
        parts: dict[BlobRef, tuple[LayerEntry, float]] = {}
        for save in saves:
            entry = save.entries[layer]
            parts[entry.version] = entry, parts.get(entry.version, (entry, 0.0))[1] + save.weight
        if parts.keys() != {own[layer].version}:
            found[layer] = tuple(parts.values())
    used = ((save.name, tuple(save.entries[layer] for layer in found)) for save in saves if save.name is not None)
    return replace(
        composition,
        mean=Mean(
            saves=tuple(
                MeanSave(run=of.save.run, attempt=of.save.attempt, step=of.save.step, weight=of.weight) for of in saves
            ),
            layers=found,
        ),
        chosen_from=(*composition.chosen_from, *used),
    )


def _saves(repo: Repository, composition: Composition, *, of: str | None, ema: float | None) -> Iterator[_Save]:
    if ema is not None and not 0 < ema < 1:
        raise InvalidInput(
            f"--ema {ema} is no decay", hint="a number between 0 and 1: 0.9 weighs each save 0.9 x the next"
        )
    last = None if of is None else _LAST.fullmatch(of)
    if of is not None and last is None:
        if ema is not None:
            raise InvalidInput(
                f"--ema weighs the last saves, and --mean {of} names others",
                hint="--mean last:N --ema B, or give weights yourself: --mean A,B:2",
            )
        for reference, weight in _weighted(of):
            yield _named(resolve(repo, reference), weight)
        return
    decay = 1.0 if ema is None else ema
    count = int(last["count"]) if last is not None else 1 + int(math.log(_EMA_LEAST) / math.log(decay))
    base, view = composition.base, repo.catalog.find(composition.base.run)
    found = [_Save(save=base, name=None, entries={entry.layer: entry for entry in base.layers}, weight=1.0)]
    names = list(found[0].entries)
    older = [] if view is None else islice(saves_below(view, attempt=base.attempt, step=base.step), count - 1)
    for row in older:
        found.append(_Save(save=row, name=row.name, entries=row.entries(names), weight=decay ** len(found)))
    if last is not None and len(found) < count:
        [called] = references_to(repo, [base])
        raise InvalidInput(
            f"{called} is the newest of {len(found)} saves, not of {count}", hint=f"--mean last:{len(found)} takes all"
        )
    yield from reversed(found)


def _named(resolved: Resolved, weight: float) -> _Save:
    record = resolved.record
    name = None if resolved.pin is not None else RecordName(record.run, record.step, resolved.commit)
    return _Save(save=record, name=name, entries={entry.layer: entry for entry in record.layers}, weight=weight)


def _weighted(text: str) -> list[tuple[str, float]]:
    """
    Return the references of *text* with their weights.

    >>> _weighted("sft@800,sft@900:2")
    [('sft@800', 1.0), ('sft@900', 2.0)]
    """
    found = []
    for part in text.split(","):
        match = _WEIGHTED.fullmatch(part.strip())
        if match is None or float(match["weight"] or 1) == 0:
            raise InvalidInput(
                f"--mean {text!r} does not say which saves",
                hint="last:10, or references with weights: sft@800,sft@900:2",
            )
        found.append((match["ref"], float(match["weight"] or 1)))
    return found
