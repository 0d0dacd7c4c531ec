"""Every interleaving of writers and collections, in a model: no commit ever lacks what it names."""

import pytest

from tests.gc.model import ORDERS, lacks, shows_what_lacks, worlds


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("writers", "collections", "naps"), [(2, 1, 2), (1, 2, 1), (2, 2, 0)])
def test_no_interleaving_costs_a_commit_a_byte(
    writers: int, collections: int, naps: int, order: tuple[str, ...]
) -> None:
    """Whoever sleeps wherever: what was reported as saved stays whole, and no record is left that is not."""
    count = saved = 0
    for world in worlds(writers, collections, naps_max=naps, order=order):
        count += 1
        saved += any(actor.at == "saved" for actor in world[1])

        assert not lacks(world), world
        assert not shows_what_lacks(world), world

    assert count > 1_000 and saved, "the model has moved"
