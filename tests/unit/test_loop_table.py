"""The benchmark's computed table: sizes that are known, and averages that can be done by hand."""

from layerstore.policy import Filter, Latest, Parity
from tests.bench.loop_table import elements_of, models, steady_elements

LLAMA, QWEN = map(elements_of, models())


def test_models_have_the_published_numbers_of_parameters() -> None:
    """As the models' own cards count them."""
    assert sum(LLAMA.values()) == 8_030_261_248
    assert sum(QWEN.values()) == 7_615_616_512


def test_full_saves_take_everything_and_parity_takes_half() -> None:
    """Over a cycle of two, every layer is saved once."""
    total = sum(LLAMA.values())

    assert steady_elements(Latest(), LLAMA) == (total, total)
    assert steady_elements(Parity(), LLAMA)[0] == total / 2


def test_filter_takes_the_ends_and_a_tenth_of_the_rest() -> None:
    """Half of what waits comes at every fifth save, each layer equally often in a whole cycle."""
    for elements in (LLAMA, QWEN):
        first, last = "model.layers.0", f"model.layers.{len(elements) - 4}"
        always = 2 * elements[first] + 2 * elements[last] + elements["model.norm"]
        rest = sum(elements.values()) - always
        waiting = len(elements) - 5
        turn = -(-waiting // 2) / waiting

        average, _ = steady_elements(Filter(), elements)

        assert abs(average - (always + rest * turn / 5)) < 1
