"""
Measure how far each layer has moved since its last save, for policies that use it.

Movement is measured on a fixed sample of the masters, chosen by position in the whole parameter, so the result does not
depend on the number of ranks. Each rank samples the elements that it holds; one small all-gather adds up the sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.dtypes import by_code
from layerstore.ingest import is_still, sample_weight, sampled
from layerstore.live.engine import Captured
from layerstore.live.ranks import Exchange
from layerstore.model import Kind
from layerstore.numbers import SECOND_MOMENT, Movements, Weighted, movement_of, weighted_movements
from layerstore.zero3 import Share, SliceSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of the sampled elements at one moment, storage by storage."""

    share: Share
    masters: "torch.Tensor"
    squares: "torch.Tensor | None"
    """The second moments of the sampled elements; None unless the optimizer keeps them for all masters."""


@dataclass(slots=True)
class _Places:
    """The sampled elements of one storage."""

    part: SliceSource
    """A slice in that storage."""
    at: "torch.Tensor"
    """The positions of the elements; on the storage's device from the first sample on."""

    def taken(self, captured: Captured) -> "torch.Tensor":
        """Return the current values of the elements."""
        import torch

        dtype = getattr(torch, by_code(self.part.dtype).torch_name)
        held = captured.memory(self.part.path).bytes_of(self.part.path).view(dtype)
        self.at = self.at.to(held.device)
        return held[self.at].to(torch.float64)


class MovementWatch:
    """Keeps this rank's sample of each layer as of the layer's last save."""

    def __init__(self, exchange: Exchange) -> None:
        import torch

        self._exchange = exchange
        self._layers: tuple[str, ...] = ()
        self._counts: list[int] = []
        """The number of trained elements in each layer."""
        self._paths: set[tuple[Path, Path | None]] = set()
        """The storages of the masters, each with the storage of the second moments."""
        self._masters: list[_Places] = []
        self._squares: list[_Places] = []
        """In the order of `_masters`; empty if there are no second moments."""
        self._layer_of = torch.empty(0, dtype=torch.long)
        """The layer of each of this rank's sampled elements."""
        self._weights = torch.empty(0, dtype=torch.float64)
        """How many elements of the parameter each sampled element stands for."""
        self._base: torch.Tensor | None = None
        self._known: set[str] = set()

    def sample(self, captured: Captured) -> Sample:
        """Sample the masters and their second moments now."""
        import torch

        self._choose_elements(captured.share)
        masters, squares = ([places.taken(captured) for places in group] for group in (self._masters, self._squares))
        # A single transfer, since each transfer waits for all work that the device has begun.
        elements = torch.cat([*masters, *squares]).to("cpu") if masters else torch.empty(0, dtype=torch.float64)
        count = sum(map(len, masters))
        return Sample(captured.share, elements[:count], elements[count:] if len(squares) == len(masters) else None)

    def movements(self, sample: Sample) -> Movements:
        """Return how far each layer has moved since its last save. Collective."""
        import torch

        count = len(self._layers)
        differences, bases, moved, lengths = sums = torch.zeros(4, count, dtype=torch.float64)
        if self._base is not None:
            difference = sample.masters - self._base
            differences.index_add_(0, self._layer_of, self._weights * difference.square())
            bases.index_add_(0, self._layer_of, self._weights * self._base.square())
            if sample.squares is not None:
                roots = self._weights * sample.squares.sqrt()
                moved.index_add_(0, self._layer_of, roots * difference.abs())
                lengths.index_add_(0, self._layer_of, roots * self._base.abs())
        lacking = float(sample.squares is None)
        # Sums, not movements, are exchanged, so that each rank computes the same numbers and decides alike.
        *totals, are_lacking = self._exchange.sums([*sums.flatten().tolist(), lacking])
        differences_of, bases_of, moved_of, lengths_of = (totals[row * count : (row + 1) * count] for row in range(4))
        known = [at for at, layer in enumerate(self._layers) if layer in self._known and self._counts[at]]
        still = {
            layer.layer: 0.0
            for layer in sample.share.layers
            if layer.layer in self._known and is_still(layer.parameters)
        }
        relative = {
            self._layers[at]: movement_of(dd=differences_of[at], aa=bases_of[at], elements=self._counts[at])
            for at in known
        }
        weighted = {
            self._layers[at]: Weighted(moved=moved_of[at], lengths=lengths_of[at], elements=self._counts[at])
            for at in known
        }
        by_layer = {} if are_lacking else weighted_movements(weighted)
        return Movements(relative=relative | still, weighted=by_layer | still if by_layer else {})

    def saved(self, sample: Sample, layers: frozenset[str]) -> None:
        """Measure the next movements of *layers* from *sample*."""
        import torch

        if self._base is None:
            self._base = sample.masters  # for all layers, though `_known` lists only the saved ones
        else:
            wanted = torch.tensor([layer in layers for layer in self._layers])
            self._base = torch.where(wanted[self._layer_of], sample.masters, self._base)
        self._known |= layers

    def forget(self) -> None:
        """Measure every layer from its next save on."""
        self._base = None
        self._known.clear()

    def _choose_elements(self, share: Share) -> None:
        """Choose the elements; choose again only if storages change, as when the optimizer gets its first moments."""
        import torch

        layers = tuple(layer.layer for layer in share.layers)
        pairs = list(_masters(share))
        paths = {_paths(masters, squares) for _, masters, squares in pairs}
        if layers == self._layers and paths == self._paths:
            return
        self._layers, self._paths = layers, paths
        self._counts = [
            sum(prod(parameter.shape) for parameter in layer.parameters if not parameter.frozen)
            for layer in share.layers
        ]
        shapes = {parameter.name: parameter.shape for layer in share.layers for parameter in layer.parameters}
        pairs.sort(key=lambda pair: str(_paths(*pair[1:])))
        self._masters, self._squares, layer_of, weights = [], [], list[int](), list[float]()
        for _, members in groupby(pairs, key=lambda pair: _paths(*pair[1:])):
            at, at_squares = list[int](), list[int]()
            for number, masters, squares in members:
                own = _own_places(shapes[masters.name], masters)
                at += [_first(masters) + element for element in own]
                at_squares += [_first(squares) + element for element in own] if squares else []
                layer_of += [number] * len(own)
                weights += [sample_weight(prod(shapes[masters.name]))] * len(own)
            self._masters.append(_Places(masters, torch.tensor(at, dtype=torch.long)))
            if squares:
                self._squares.append(_Places(squares, torch.tensor(at_squares, dtype=torch.long)))
        self._layer_of = torch.tensor(layer_of, dtype=torch.long)
        self._weights = torch.tensor(weights, dtype=torch.float64)
        self.forget()


def _masters(share: Share) -> Iterator[tuple[int, SliceSource, SliceSource | None]]:
    """Yield the slices of the masters, each with the number of its layer and the slice of its second moments."""
    for at, layer in enumerate(share.layers):
        squares = {part.name: part for source in layer.objects for part in source.slices if part.state == SECOND_MOMENT}
        for source in layer.objects:
            if source.kind is Kind.MASTER:
                yield from ((at, part, squares.get(part.name)) for part in source.slices)


def _paths(masters: SliceSource, squares: SliceSource | None) -> tuple[Path, Path | None]:
    return masters.path, squares.path if squares else None


def _first(part: SliceSource) -> int:
    """Return the position of the first element of *part* in the storage."""
    return part.offset_bytes // by_code(part.dtype).bytes


def _own_places(shape: Sequence[int], part: SliceSource) -> list[int]:
    """Return the sampled elements of *part*, a slice of a parameter of *shape*, as positions in *part*."""
    first, last = part.begin, part.begin + part.elements
    runs = (range(max(begin, first), min(end, last)) for begin, end in sampled(prod(shape)))
    return [element - first for run in runs for element in run]
