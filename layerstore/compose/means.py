"""
Averages: a composite whose masters are the mean of several saves' masters.

Everything else is the base's: its moments, buffers, frozen weights and files. A version that several of the saves share
is read once, and counts once for each such save.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from layerstore.compose.choose import Composition, Mean
from layerstore.errors import InvalidInput, LayoutMismatch
from layerstore.history import Resolved, references_to, resolve, saves_below
from layerstore.model import BlobRef, LayerEntry, Saving
from layerstore.storage import RecordName, Repository

_LAST = re.compile(r"last:(?P<count>[1-9]\d{0,5})")
_WEIGHT = re.compile(r"\d{1,9}(\.\d{1,9})?")

# An exponential average ends where a save would weigh less than this fraction of the newest save's weight.
_EMA_LEAST = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    save: Saving
    name: RecordName | None
    """None for a pin."""
    entries: Mapping[str, LayerEntry]
    weight: float


def base_of_mean(text: str) -> str | None:
    """Return the default base of the mean *text*, as a reference; None stands for the newest save of the only run."""
    return None if _is_last(text) else _weighted(text)[-1][0]


def average(
    repo: Repository, composition: Composition, *, of: str | None, ema: float | None, layers: str | None
) -> Composition:
    """
    Return *composition* with the mean of some saves as its masters.

    *of* is the *saves* of `Store.average`; *ema* and *layers* are the same as in that method.
    """
    if of is None and ema is None:
        raise InvalidInput("which saves are averaged?", hint="--mean last:10, --mean A,B:2 or --ema 0.9")
    if ema is not None and not 0 < ema < 1:
        raise InvalidInput(f"ema {ema} is not between 0 and 1", hint="0.9: a save weighs 0.9 times as much as the next")
    if of is None or _is_last(of):
        saves = _last_saves(repo, composition, of, ema)
    elif ema is not None:
        raise InvalidInput(
            f"ema weighs the last saves, and {of!r} names others", hint="last:N with an ema, or weights: A,B:2"
        )
    else:
        saves = [_named(resolve(repo, reference), weight) for reference, weight in _weighted(of)]
    own = {entry.layer: entry for entry in composition.base.layers}
    names = list(own)
    if layers is not None:
        from layerstore.policy.recipe import pattern_of  # imports yaml, which nothing else needs

        names = pattern_of(layers, name="the layers to average").layers(names)
    for save in saves:
        _check_layers(repo, composition, save, names, are_all=layers is None)
    means: dict[str, tuple[tuple[LayerEntry, float], ...]] = {}
    for layer in names:
        parts: dict[BlobRef, tuple[LayerEntry, float]] = {}
        for save in saves:
            entry = save.entries[layer]
            parts[entry.version] = entry, parts.get(entry.version, (entry, 0.0))[1] + save.weight
        # If all saves share the base's version, that version is the mean: it is copied instead of computed.
        if parts.keys() != {own[layer].version}:
            means[layer] = tuple(parts.values())
    if not means:
        return composition  # each layer to average has only the base's version
    used = ((save.name, tuple(save.entries[layer] for layer in means)) for save in saves if save.name is not None)
    return replace(
        composition,
        policy="average",
        parameters={
            "saves": of or "last",
            **({} if ema is None else {"ema": ema}),
            **({} if layers is None else {"layers": layers}),
        },
        mean=Mean(saves=tuple((each.save, each.weight) for each in saves), layers=means),
        chosen_from=(*composition.chosen_from, *used),
    )


def _check_layers(repo: Repository, composition: Composition, save: _Save, names: list[str], *, are_all: bool) -> None:
    """Raise LayoutMismatch if *save* lacks one of *names* or, if they *are_all* of the base's, has another layer."""
    odd = sorted(set(names) ^ save.entries.keys() if are_all else set(names) - save.entries.keys())
    if odd:
        theirs, ours = references_to(repo, [save.save, composition.base])
        has_it, lacks_it = (theirs, ours) if odd[0] in save.entries else (ours, theirs)
        raise LayoutMismatch(
            f"{has_it} has a layer {odd[0]!r} and {lacks_it} has none: they cannot be averaged",
            hint="choose saves of one model, or with --mean-layers the layers that both have",
        )


def _is_last(text: str) -> bool:
    """Whether *text* is ``last:N``; raises InvalidInput for a malformed ``last:N``."""
    if _LAST.fullmatch(text) is None and (text.strip() == "last" or text.strip().startswith("last:")):
        raise InvalidInput(f"{text!r} does not say how many saves", hint="last:10, say, for the newest ten")
    return _LAST.fullmatch(text) is not None


def _last_saves(repo: Repository, composition: Composition, of: str | None, ema: float | None) -> list[_Save]:
    """Return the newest saves up to the base, oldest first."""
    last = None if of is None else _LAST.fullmatch(of)
    decay = 1.0 if ema is None else ema
    count = int(last["count"]) if last is not None else 1 + int(math.log(_EMA_LEAST) / math.log(decay))
    base, view = composition.base, repo.catalog.find(composition.base.run)
    saves = [_Save(save=base, name=None, entries={entry.layer: entry for entry in base.layers}, weight=1.0)]
    names = list(saves[0].entries)
    older = [] if view is None else islice(saves_below(view, attempt=base.attempt, step=base.step), count - 1)
    for row in older:
        saves.append(_Save(save=row, name=row.name, entries=row.entries(names), weight=decay ** len(saves)))
    if last is not None and len(saves) < count:
        [called] = references_to(repo, [base])
        below = (
            f"{len(saves) - 1} save{'s' if len(saves) != 2 else ''} before it"
            if len(saves) > 1
            else "no save before it"
        )
        raise InvalidInput(
            f"{called} has {below}: there are no {count} to average",
            hint=f"at most last:{len(saves)}, or list saves: A,B:2",
        )
    return saves[::-1]


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
    weighted = []
    for part in text.split(","):
        reference, colon, weight = part.strip().partition(":")
        if not reference or (colon and (not _WEIGHT.fullmatch(weight) or not float(weight))):
            raise InvalidInput(
                f"{part!r} is not a save with a weight", hint="references with weights above 0: sft@800,sft@900:2.5"
            )
        weighted.append((reference, float(weight or 1)))
    return weighted
