"""
How far each layer has moved since it was last saved, for policies that decide by it.

It is measured from a fixed sample of the masters, chosen by place in the whole parameter, so it is the same for any
number of ranks. Each rank samples what it holds; one small all-gather adds up the sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.distance import movement_of
from layerstore.dtypes import by_code
from layerstore.ingest import is_still, sampled
from layerstore.live.engine import Captured
from layerstore.live.ranks import Exchange
from layerstore.model import Kind
from layerstore.zero3 import Share, slice_length, stretches

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Spots:
    """The sampled elements of one storage, and the layer of each."""

    places: "torch.Tensor"
    """Indices, on the storage's device after the first sample."""
    layers: "torch.Tensor"
    dtype: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The sampled elements of the masters at one moment."""

    share: Share
    values: "dict[Path, torch.Tensor]"


class MovementWatch:
    """One rank's sample of each layer as of its last save."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._spots: dict[Path, _Spots] = {}
        self._layers: tuple[str, ...] = ()
        self._counts: list[int] = []
        self._base: dict[Path, torch.Tensor] = {}
        self._known: set[str] = set()

    def sample(self, captured: Captured) -> Sample:
        """Sample the masters as they are now."""
        import torch

        self._look_at(captured.share)
        looked: dict[torch.device, dict[Path, torch.Tensor]] = {}
        for path, spots in self._spots.items():
            kind = getattr(torch, by_code(spots.dtype).torch_name)
            held = captured.memory(path).bytes_of(path).view(kind)
            spots.places = spots.places.to(held.device)  # where it stays
            looked.setdefault(held.device, {})[path] = held[spots.places].to(torch.float64)
        found: dict[Path, torch.Tensor] = {}
        for of in looked.values():
            # One transfer for all: each transfer waits for everything that the device has begun.
            values = torch.cat(list(of.values())).to("cpu")
            found |= zip(of, torch.split(values, [len(part) for part in of.values()]), strict=True)
        return Sample(captured.share, found)

    def movements(self, sample: Sample) -> dict[str, float]:
        """Return how far each layer has moved since its last save. Collective."""
        import torch

        dd, aa = (torch.zeros(len(self._layers), dtype=torch.float64) for _ in range(2))
        for path, now in sample.values.items():
            before = self._base.get(path)
            if before is None:
                continue
            of = self._spots[path].layers
            dd.index_add_(0, of, (now - before).square())
            aa.index_add_(0, of, before.square())
        totals = self._exchange.sums([*dd.tolist(), *aa.tolist()])
        count = len(self._layers)
        return {
            layer: movement_of(dd=totals[at], aa=totals[count + at], elements=self._counts[at])
            for at, layer in enumerate(self._layers)
            if layer in self._known and self._counts[at]
        } | {of.layer: 0.0 for of in sample.share.layers if of.layer in self._known and is_still(of.parameters)}

    def saved(self, sample: Sample, layers: frozenset[str]) -> None:
        """Measure *layers* from *sample* on."""
        for path, now in sample.values.items():
            before = self._base.get(path)
            if before is None:
                self._base[path] = now
                continue
            chosen = self._chosen(path, layers)
            before[chosen] = now[chosen]
        self._known |= layers

    def forget(self) -> None:
        """Forget all samples; each layer is measured again from its next save on."""
        self._base.clear()
        self._known.clear()

    def _chosen(self, path: Path, layers: frozenset[str]) -> "torch.Tensor":
        import torch

        wanted = torch.tensor([layer in layers for layer in self._layers])
        return wanted[self._spots[path].layers]

    def _look_at(self, share: Share) -> None:
        """Choose the elements once: an engine's masters stay in place."""
        layers = tuple(layer.layer for layer in share.layers)
        if layers == self._layers and all(path in self._spots for path in _masters(share)):
            return
        self._layers = layers
        self._counts = [
            sum(end - begin for of in layer.parameters if not of.frozen for begin, end in sampled(prod(of.shape)))
            for layer in share.layers
        ]
        self._spots = dict(_spots(share))
        self.forget()


def _masters(share: Share) -> set[Path]:
    return {part.path for layer in share.layers for of in layer.objects if of.kind is Kind.MASTER for part in of.slices}


def _spots(share: Share) -> Iterator[tuple[Path, _Spots]]:
    import torch

    places: dict[Path, list[int]] = {}
    layers: dict[Path, list[int]] = {}
    dtypes: dict[Path, str] = {}
    for at, layer in enumerate(share.layers):
        shapes = {parameter.name: parameter.shape for parameter in layer.parameters}
        for part in (part for of in layer.objects if of.kind is Kind.MASTER for part in of.slices):
            first = part.offset_bytes // by_code(part.dtype).bytes
            own = _own_places(shapes[part.name], share)
            places.setdefault(part.path, []).extend(first + place for place in own)
            layers.setdefault(part.path, []).extend([at] * len(own))
            dtypes[part.path] = part.dtype
    for path, found in places.items():  # some storages have no sampled element on this rank
        of = torch.tensor(layers[path], dtype=torch.long)
        yield path, _Spots(torch.tensor(found, dtype=torch.long), of, dtypes[path])


def _own_places(shape: Sequence[int], share: Share) -> list[int]:
    """Return which elements of this rank's slice of a parameter are sampled."""
    elements = prod(shape)
    length = slice_length(elements, share.world_size)
    return [
        part.start + step
        for begin, end in sampled(elements)
        if begin < (share.rank + 1) * length and end > share.rank * length
        for part in stretches(elements, share.world_size, begin=begin, end=end)
        if part.shard == share.rank
        for step in range(part.elements)
    ]
