"""Every interleaving of writers and collections, in a model: no commit ever lacks what it names."""

from dataclasses import replace

import pytest

from tests.gc.model import ORDERS, WRONG, Scene, lacks, shows_what_lacks, worlds

SCENES = [
    Scene(writers=1, collections=1, naps_max=2),
    Scene(writers=1, collections=2, naps_max=1, one_after_another=True),
    Scene(writers=1, collections=1, naps_max=2, is_compact=True),
    Scene(writers=2, collections=1, naps_max=1, is_joint=True),
    pytest.param(Scene(writers=2, collections=1, naps_max=2, is_joint=True), marks=pytest.mark.full),
    pytest.param(
        Scene(writers=2, collections=2, naps_max=1, is_joint=True, one_after_another=True), marks=pytest.mark.full
    ),
    pytest.param(Scene(writers=2, collections=1, naps_max=1), marks=pytest.mark.full),
    pytest.param(Scene(writers=2, collections=1, naps_max=1, is_compact=True), marks=pytest.mark.full),
    pytest.param(
        Scene(writers=1, collections=2, naps_max=1, one_after_another=True, is_compact=True), marks=pytest.mark.full
    ),
    pytest.param(Scene(writers=1, collections=2), marks=pytest.mark.exhaustive),
    pytest.param(Scene(writers=2, collections=2), marks=pytest.mark.exhaustive),
    pytest.param(Scene(writers=1, collections=3, naps_max=2, one_after_another=True), marks=pytest.mark.exhaustive),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_no_interleaving_costs_a_commit_a_byte(scene: Scene, order: tuple[str, ...]) -> None:
    """Whoever sleeps, or is killed, wherever: what was saved stays whole, and no record is left that is not."""
    count = saved = 0
    for world in worlds(replace(scene, order=order)):
        count += 1
        saved += any(actor.at == "saved" for actor in world[1])

        assert not lacks(world), world
        assert not shows_what_lacks(world), world

    assert count > 1_000, "the model has moved"
    assert saved


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_model_finds_each_wrong_order(wrong: str) -> None:
    """Of what ranks do that save together, and of what a collection does with the parts of an idle session."""
    scene = Scene(writers=2, collections=1, naps_max=2, is_joint=True, wrong=wrong)

    assert any(lacks(world) for world in worlds(scene))
