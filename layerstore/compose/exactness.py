"""What a composition has that was not kept bit for bit, in one sentence; and all that a user has to know of it."""

from collections.abc import Mapping

from layerstore.coding import CODINGS
from layerstore.compose.choose import Composition
from layerstore.errors import LayerstoreError, NotFound
from layerstore.history import Resolved, newest_exact, reference_to
from layerstore.model import Kind, LayerVersion
from layerstore.storage import Repository


def cautions(repo: Repository, composition: Composition, *, moments: bool = True, is_live: bool = False) -> list[str]:
    """Return what a user has to know of its layers: that they are a mixture, and that they are `inexact`."""
    return [*filter(None, (composition.mixture, inexact(repo, composition, moments=moments, is_live=is_live)))]


def inexact(repo: Repository, composition: Composition, *, moments: bool = True, is_live: bool = False) -> str | None:
    """
    Return a sentence that says what was not kept bit for bit, None if everything was.

    Without *moments*, it is about the masters alone, which is all that an export of weights has. It names the newest
    exact save, and what takes it: an option of the command, or if an engine *is_live*, of ``resume``.
    """
    bits: dict[Kind, int] = {}
    layers = set()
    averaged = {} if composition.mean is None else composition.mean.layers
    used = [
        (entry, {*Kind} - ({Kind.MASTER} if entry.layer in averaged else set())) for entry in composition.layers
    ] + [(entry, {Kind.MASTER}) for parts in averaged.values() for entry, _ in parts]
    for entry, kinds in used:
        coded = _bits(repo.version_of(entry)) if entry.compact else {}
        for kind in coded.keys() & (kinds if moments else kinds - {Kind.OPTIMIZER}):
            bits[kind] = min(coded[kind], bits.get(kind, coded[kind]))
            layers.add(entry.layer)
    if not bits:
        return None
    some = "" if len(layers) == len(composition.layers) else f" of {len(layers)} of {len(composition.layers)} layers"
    what = "this resume is" if moments else "these weights are"
    newest = _newest_exact(repo, composition.base_resolved, is_live=is_live)
    return f"{_kept_in(bits, some)}: {what} not bit for bit{newest}"


def _bits(version: LayerVersion) -> dict[Kind, int]:
    """Return in how many bits each kind of *version* that is coded is kept: its coarsest tensor's."""
    bits: dict[Kind, int] = {}
    for stored in version.objects:
        for tensor in stored.tensors:
            if tensor.coding:
                bits[stored.kind] = min(CODINGS[tensor.coding].bits, bits.get(stored.kind, 8))
    return bits


def _kept_in(bits: Mapping[Kind, int], some: str) -> str:
    """
    Say in how many *bits* masters and moments were kept; *some* says of how many layers.

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
    """Say which save up to *base* is exact, and what takes it."""
    try:
        name = reference_to(repo, newest_exact(repo, base).record)
    except NotFound:
        return "; no save up to it is exact"
    except LayerstoreError:
        return ""  # whoever asks for it is told why it cannot be found
    return f"; the newest exact save is {name} ({'resume(…, exact=True)' if is_live else '--exact'} takes it)"
