"""
Measure how far each layer has moved since its last save, for policies that use it.

The measure uses a fixed sample of the masters, chosen by position in the whole parameter, so it is the same for any
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
from layerstore.zero3 import Share, SliceSource, slice_length, stretches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """The sampled elements of the masters at one moment, storage by storage."""

    share: Share
    values: "torch.Tensor"


class MovementWatch:
    """One rank's sample of each layer as of its last save."""

    def __init__(self, exchange: Exchange) -> None:
        import torch

        self._exchange = exchange
        self._layers: tuple[str, ...] = ()
        self._counts: list[int] = []
        """The sampled elements of each layer on all ranks."""
        self._places: dict[Path, torch.Tensor] = {}
        """Where this rank's sampled elements are in each storage."""
        self._layer_of = torch.empty(0, dtype=torch.long)
        """The layer of each of this rank's sampled elements."""
        self._base: torch.Tensor | None = None
        self._known: set[str] = set()

    def sample(self, captured: Captured) -> Sample:
        """Sample the masters as they are now."""
        import torch

        self._look_at(captured.share)
        dtypes = {part.path: part.dtype for _, part in _masters(captured.share)}
        found: list[torch.Tensor] = []
        for path, places in self._places.items():
            held = captured.memory(path).bytes_of(path).view(getattr(torch, by_code(dtypes[path]).torch_name))
            self._places[path] = places.to(held.device)  # where it stays
            found.append(held[self._places[path]].to(torch.float64))
        # A single transfer, since each one waits for everything that the device has begun.
        return Sample(captured.share, torch.cat(found).to("cpu") if found else torch.empty(0, dtype=torch.float64))

    def movements(self, sample: Sample) -> dict[str, float]:
        """Return how far each layer has moved since its last save. Collective."""
        import torch

        count = len(self._layers)
        dd, aa = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
        if self._base is not None:
            dd.index_add_(0, self._layer_of, (sample.values - self._base).square())
            aa.index_add_(0, self._layer_of, self._base.square())
        totals = self._exchange.sums([*dd.tolist(), *aa.tolist()])
        return {
            layer: movement_of(dd=totals[at], aa=totals[count + at], elements=self._counts[at])
            for at, layer in enumerate(self._layers)
            if layer in self._known and self._counts[at]
        } | {of.layer: 0.0 for of in sample.share.layers if of.layer in self._known and is_still(of.parameters)}

    def saved(self, sample: Sample, layers: frozenset[str]) -> None:
        """Measure *layers* from *sample* on."""
        import torch

        if self._base is None:
            self._base = sample.values
        else:
            wanted = torch.tensor([layer in layers for layer in self._layers])
            self._base = torch.where(wanted[self._layer_of], sample.values, self._base)
        self._known |= layers

    def forget(self) -> None:
        """Measure every layer from its next save on."""
        self._base = None
        self._known.clear()

    def _look_at(self, share: Share) -> None:
        """Choose the elements once: an engine's masters stay in place."""
        import torch

        layers = tuple(layer.layer for layer in share.layers)
        if layers == self._layers and {part.path for _, part in _masters(share)} == self._places.keys():
            return
        self._layers = layers
        self._counts = [
            sum(end - begin for of in layer.parameters if not of.frozen for begin, end in sampled(prod(of.shape)))
            for layer in share.layers
        ]
        places: dict[Path, list[int]] = {}
        layer_of: dict[Path, list[int]] = {}
        shapes = {of.name: of.shape for layer in share.layers for of in layer.parameters}
        for at, part in _masters(share):
            first = part.offset_bytes // by_code(part.dtype).bytes
            own = _own_places(shapes[part.name], share)
            places.setdefault(part.path, []).extend(first + place for place in own)
            layer_of.setdefault(part.path, []).extend([at] * len(own))
        self._places = {path: torch.tensor(found, dtype=torch.long) for path, found in places.items()}
        self._layer_of = torch.tensor([at for path in places for at in layer_of[path]], dtype=torch.long)
        self.forget()


def _masters(share: Share) -> Iterator[tuple[int, SliceSource]]:
    """Yield the slices of the masters, each with the number of its layer."""
    for at, layer in enumerate(share.layers):
        yield from ((at, part) for of in layer.objects if of.kind is Kind.MASTER for part in of.slices)


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
