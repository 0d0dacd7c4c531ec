"""Describe what in a composition was not kept bit for bit, and find an earlier exact save."""

from collections.abc import Mapping, Sequence

from layerstore.coding import CODINGS
from layerstore.errors import LayerstoreError, NotFound
from layerstore.history import Resolved, newest_exact, reference_to, saves_below
from layerstore.model import CommitRecord, Kind, LayerEntry, LayerVersion, OwnVersion
from layerstore.storage import RecordRow, Repository


def inexact(
    repo: Repository,
    layers: Sequence[LayerEntry],
    averaged: Mapping[str, Sequence[tuple[LayerEntry, float]]],
    base: Resolved,
    *,
    moments: bool,
    is_live: bool,
) -> str | None:
    """
    Return a sentence about what in *layers* was not kept bit for bit, None if everything was.

    *averaged* has, by layer, the versions whose masters are averaged.
    Without *moments*, only masters count, since an export of weights has nothing else. The sentence states the newest
    exact save, and how to use it: with an option of the command or, if an engine *is_live*, of ``resume``.
    """
    bits: dict[Kind, int] = {}
    names = set()
    used = [(entry, {*Kind} - ({Kind.MASTER} if entry.layer in averaged else set())) for entry in layers] + [
        (entry, {Kind.MASTER}) for parts in averaged.values() for entry, _ in parts
    ]
    for entry, kinds in used:
        if not entry.compact:
            continue
        version = repo.version_of(entry)
        coded = _bits(version)
        of_use = coded.keys() & (kinds if moments else kinds - {Kind.OPTIMIZER})
        for kind in of_use:
            bits[kind] = min(coded[kind], bits.get(kind, coded[kind]))
        # An `OwnVersion` has one rank's slices, perhaps none of a small layer; `entry.compact` covers all ranks.
        if of_use or isinstance(version, OwnVersion):
            names.add(entry.layer)
    if not bits:
        return None
    extent = "" if len(names) == len(layers) else f" of {len(names)} of {len(layers)} layers"
    what = "this resume is" if moments else "these weights are"
    newest = _newest_exact(repo, base, is_live=is_live)
    return f"{_kept_in(bits, extent)}: {what} not bit for bit{newest}"


def _bits(version: LayerVersion) -> dict[Kind, int]:
    """Return the number of bits of each coded kind of *version*, taken from its coarsest tensor."""
    bits: dict[Kind, int] = {}
    for stored in version.objects:
        for tensor in stored.tensors:
            if tensor.coding:
                bits[stored.kind] = min(CODINGS[tensor.coding].bits, bits.get(stored.kind, 8))
    return bits


def _kept_in(bits: Mapping[Kind, int], some: str) -> str:
    """
    Describe in how many *bits* masters and moments were kept; *some* is the phrase for how many layers.

    >>> _kept_in({Kind.MASTER: 8, Kind.OPTIMIZER: 8}, "")
    'masters and moments were kept in 8 bits'
    >>> _kept_in({Kind.MASTER: 8, Kind.OPTIMIZER: 4}, " of 2 of 5 layers")
    'masters of 2 of 5 layers were kept in 8 bits and moments in 4'
    """
    names = {Kind.MASTER: "masters", Kind.OPTIMIZER: "moments"}
    (first, count), *others = sorted(bits.items())
    if not others:
        return f"{names[first]}{some} were kept in {count} bits"
    [(second, other)] = others
    if count == other:
        return f"{names[first]} and {names[second]}{some} were kept in {count} bits"
    return f"{names[first]}{some} were kept in {count} bits and {names[second]} in {other}"


def _newest_exact(repo: Repository, base: Resolved, *, is_live: bool) -> str:
    """Describe the newest exact save up to *base*, and how to use it."""
    try:
        name = reference_to(repo, newest_exact(repo, base).record)
    except NotFound:
        return "; no save up to it is exact"
    except LayerstoreError:
        return ""  # requesting that save raises, and explains
    return f"; the newest exact save is {name} (use {'resume(…, exact=True)' if is_live else '--exact'})"


def earlier_exact(repo: Repository, base: CommitRecord, lost: LayerEntry | None) -> RecordRow | None:
    """Return the newest exact save below *base* that does not use the *lost* version; None if there is none."""
    view = repo.catalog.find(base.run)
    try:
        for row in [] if view is None else saves_below(view, attempt=base.attempt, step=base.step):
            if row.is_exact and (
                lost is None or lost.version not in [entry.version for entry in row.entries([lost.layer]).values()]
            ):
                return row
    except LayerstoreError:
        pass  # an earlier record is damaged, too; verify reports it
    return None
