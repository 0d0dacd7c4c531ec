"""What every rank alone can tell alike of the layers: what they take, and whether they were updated."""

from math import prod

from layerstore.zero3 import Share


def sizes_of(share: Share) -> dict[str, int]:
    """Return what each layer takes on all ranks together: the same on every rank."""
    states = 1 + len({part.state for layer in share.layers for of in layer.objects for part in of.slices if part.state})
    return {
        layer.layer: sum(prod(of.shape) * (2 if of.frozen else 4 * states) for of in layer.parameters)
        for layer in share.layers
    }


def local_bytes(share: Share) -> dict[str, int]:
    """Return about what each layer takes of one rank's pool: the same on every rank."""
    return {layer: -(-size // share.world_size) for layer, size in sizes_of(share).items()}


def counted(share: Share) -> dict[str, bool]:
    """Return whether the optimizer has updated each layer."""
    return {layer.layer: layer.optimizer_step is not None for layer in share.layers}
