"""Promises of our own grammar: each layer named exactly once, in any order, by patterns that mean what they say."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import InvalidInput, NotFound
from layerstore.policy.recipe import Choice, Spot
from layerstore.policy.recipe.document import Scalar
from layerstore.policy.recipe.patterns import gathered, read_pattern
from tests.policy.recipes import FILE, llama, plan, refused, steps

SPOT = Spot(file=FILE, line=1, column=1)


def test_a_recipe_says_where_each_layer_comes_from() -> None:
    """The base supplies what is not a layer, entries and rest supply every layer, in the model's order."""
    found = plan(
        """
        base: sft@1200
        layers:
          model.layers.[even]: base
          model.layers.[odd]: 1100
          lm_head: "@900"
          model.embed_tokens: other~1@700
        rest: best
        """,
        llama(4),
    )

    assert (found.base.run, found.base.back, found.base.step) == ("sft", 0, 1200)
    assert [(name, choice.run, choice.back, choice.step) for name, choice in found.layers.items()] == [
        ("model.embed_tokens", "other", 1, 700),
        ("model.layers.0", None, 0, None),
        ("model.layers.1", None, 0, 1100),
        ("model.layers.2", None, 0, None),
        ("model.layers.3", None, 0, 1100),
        ("model.norm", "best", 0, None),
        ("lm_head", None, 0, 900),
    ]
    assert [choice.is_base for choice in found.layers.values()] == [False, True, False, True, False, False, False]
    assert found.notes == ()


def test_each_choice_knows_where_it_was_made() -> None:
    """What only the store can find out is told with the place in the recipe, class and hint unchanged."""
    found = plan("base: 1200\nlayers:\n  'model.*': 1100\n  lm_head:  base\n", llama())

    assert str(found.base.spot) == f"{FILE}:1:7"
    assert str(found.layers["model.norm"].spot) == f"{FILE}:3:14"
    assert str(found.layers["lm_head"].spot) == f"{FILE}:4:13"
    with pytest.raises(NotFound) as caught, found.layers["model.norm"].spot.located():
        raise NotFound("run 'sft' has no step 1100", hint="layerstore ingest checkpoint-1100", step=1100)
    assert str(caught.value) == f"{FILE}:3:14: run 'sft' has no step 1100"
    assert (caught.value.hint, caught.value.facts) == ("layerstore ingest checkpoint-1100", {"step": 1100})


@pytest.mark.parametrize(
    ("written", "run", "back", "step", "reference"),
    [
        ("1100", None, 0, 1100, "sft~2@1100"),
        ('"@1100"', None, 0, 1100, "sft~2@1100"),
        ("base", None, 0, None, "sft~2"),
        ("other@5", "other", 0, 5, "other@5"),
        ("other~1@5", "other", 1, 5, "other~1@5"),
        ("base@5", "base", 0, 5, "base@5"),
        ("my pin", "my pin", 0, None, "my pin"),
    ],
)
def test_sources_are_steps_references_or_the_base(
    written: str, run: str | None, back: int, step: int | None, reference: str
) -> None:
    """A bare step is one of the base's own run and attempt; everything else is a reference as on the command line."""
    choice = plan(f"base: sft~2@1200\nrest: {written}\n", llama(1)).layers["lm_head"]

    assert (choice.run, choice.back, choice.step) == (run, back, step)
    assert reference == choice.reference(run="sft", back=2)


def test_the_order_of_entries_means_nothing() -> None:
    """Because no layer may be named twice, no rule of precedence has to be remembered."""
    entries = ["  model.layers.[0-1]: 100", "  model.layers.[2-]: 200", "  '*norm': 300", "  lm_head: 400"]
    plans = {
        tuple(steps(plan("\n".join(["base: 500", "layers:", *order, "rest: base"]), llama())).items())
        for order in itertools.permutations(entries)
    }

    assert len(plans) == 1


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        # Layers that are named not at all, twice, or by a name that no layer has.
        ("base: 1\n«layers: {model.norm: 1, lm_head: 1}\n", "no entry fits model.embed_tokens, model.layers.[0-3]"),
        ("base: 1\nlayers:\n  '*': 1\n  «lm_head: 2\n", "lm_head: 'lm_head' overlaps '*' in line 3"),
        (
            "base: 1\nlayers:\n  model.layers.[0-2]: 1\n  «model.layers.[2-3]: 1\nrest: base\n",
            "model.layers.2: 'model.layers.[2-3]' overlaps",
        ),
        ("base: 1\nlayers: {«head: 1}\nrest: base\n", "no layer of the model is called 'head'"),
        ("base: 1\nlayers: {«'model.layers.[0-4]': 1}\nrest: base\n", "names index 4, which no layer has"),
        ("base: 1\nlayers: {«'model.layers.[0,7]': 1}\nrest: base\n", "names index 7, which no layer has"),
        # Patterns.
        ("base: 1\nlayers: {«'x.[0:4]': 1}\n", "'0:4' in 'x.[0:4]' is not a range of numbers"),
        ("base: 1\nlayers: {«'x.[01]': 1}\n", "is not a range of numbers"),
        ("base: 1\nlayers: {«'x.[3-1]': 1}\n", "the range 3-1 in 'x.[3-1]' is empty"),
        ("base: 1\nlayers: {«'x.[0-3': 1}\n", "has an unmatched bracket"),
        ("base: 1\nlayers: {«'': 1}\n", "an empty name fits no layer"),
        # Sources.
        ("base: 1\nrest: «0100\n", "rest is '0100', which YAML may read as octal"),
        ("base: 1\nrest: «1234567890123456789\n", "not a whole number of at most 18 digits"),
        ("base: 1\nrest: «-5\n", "starts with '-'"),
        ("base: 1\nrest: «sft@\n", "is not a reference"),
        ("base: 1\nrest: «../sft@1\n", "is a path, not a reference"),
        ("base: 1\nlayers:\n  lm_head:«\nrest: base\n", "'lm_head' is empty"),
        ("base: 1\nlayers:\n  lm_head: «[1, 2]\n", "'lm_head' is a list, not a single value"),
        ("base: 1\nlayers:\n  lm_head:\n    «step: 1\n", "'lm_head' is a mapping, not a single value"),
        # The frame.
        ("base: «base\nrest: base\n", "the base cannot be 'base'"),
        ("«rest: base\n", "the recipe needs a value for 'base'"),
        ("«base: 1\n", "the recipe names no layers"),
        ("base: 1\nlayers:\n  «- lm_head\n", "layers is not a mapping"),
        ("base: 1\nrest: base\n«Layers: {}\n", "the recipe has no key 'Layers'"),
        ("«model: 1\n", "it has none of a recipe's top-level keys"),
        ("base: 1\n«slices: []\n", "'base' and 'slices' belong to different grammars"),
    ],
)
def test_what_is_wrong_is_told_where_it_stands(text: str, match: str) -> None:
    """Each error of the grammar names line and column, what was found, and what to do."""
    refused(text, match=match)


@pytest.mark.fault(77)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.layer.[0-3]", "did you mean model.layers.[0-3]?"),
        ("model.embed_token", "did you mean model.embed_tokens?"),
        ("lmhead", "did you mean lm_head?"),
        ("vision_tower", "layers of this model: model.embed_tokens, model.layers.[0-3], model.norm, lm_head"),
    ],
)
def test_a_name_that_fits_nothing_is_answered_with_names_that_do(name: str, hint: str) -> None:
    """A slip of the pen is answered by what was meant, anything else by what there is."""
    problem = refused(f"base: 1\nlayers: {{«'{name}': 1}}\nrest: base\n", match="no layer of the model is called")

    assert hint in str(problem.hint)


@pytest.mark.known_fault("llmtailor 15")
def test_layers_from_after_the_base_are_noted() -> None:
    """A layer that is newer than the counters around it is allowed, and told."""
    text = "base: sft@100\nlayers:\n  lm_head: {head}\nrest: base\n"

    assert plan(text.format(head="90"), llama()).notes == ()
    assert plan(text.format(head="other@200"), llama()).notes == ()
    for head in ("200", "sft@200"):
        (note,) = plan(text.format(head=head), llama()).notes
        assert note.startswith(f"{FILE}:3:12: newer than the base, step 100: lm_head;")


# -- patterns ------------------------------------------------------------------------------------------------------


def fits(pattern: str, name: str) -> bool:
    """Whether *pattern* means the layer *name*."""
    found = read_pattern(Scalar(text=pattern, is_null=False, spot=SPOT))
    try:
        return found.layers([name]) == [name]
    except InvalidInput:
        return False


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "xlm_head", False),
        ("*", "model.layers.3", True),
        ("*norm", "model.norm", True),
        ("model.*.3", "model.layers.3", True),
        ("model.layers.?", "model.layers.3", True),
        ("model.layers.?", "model.layers.13", False),
        ("model.layers.1[3]", "model.layers.13", False),
        ("*[3]", "model.layers.13", False),
        ("model.layers.[10-20]", "model.layers.2", False),
        ("model.layers.[even]", "model.layers.10", True),
        ("model.layers.[odd]", "model.layers.10", False),
        ("model.layers.[even, 11]", "model.layers.11", True),
        ("model.layers.[4-]", "model.layers.4", True),
        ("*.[0].*", "a.0.b", True),
        ("model.layers.[0-]", "model.layers.norm", False),
        ("(a|b)+", "(a|b)+", True),
    ],
)
def test_patterns_mean_what_they_say(pattern: str, name: str, expected: bool) -> None:
    """Signs stand for text, brackets for one whole number, everything else for itself."""
    assert expected == fits(pattern, name)


@pytest.mark.fault(76)
def test_a_pattern_takes_no_longer_than_its_length_times_the_names() -> None:
    """No pattern makes matching explode, as it would with an expression that backtracks."""
    assert not fits("*a" * 400 + "b", "a" * 2000)


INDICES = st.sets(st.integers(min_value=0, max_value=40), min_size=1)


@given(chosen=INDICES, count=st.integers(min_value=41, max_value=60))
def test_gathered_names_are_patterns_of_the_same_layers(chosen: set[int], count: int) -> None:
    """What messages show can be written into a recipe as it stands, and means those layers."""
    names = [f"model.layers.{index}" for index in range(count)]
    expected = [names[index] for index in sorted(chosen)]
    (shown,) = gathered(expected)

    assert expected == read_pattern(Scalar(text=shown, is_null=False, spot=SPOT)).layers(names)


@given(
    sources=st.lists(st.sampled_from(["base", "100", "200", "other@7"]), min_size=1, max_size=12),
    rest=st.sampled_from(["base", "100"]),
    data=st.data(),
)
def test_any_recipe_gives_the_layers_that_it_names(sources: list[str], rest: str, data: st.DataObject) -> None:
    """Over random assignments of blocks: each has its source, in whatever order and grouping it was written."""
    blocks = [f"model.layers.{index}" for index in range(len(sources))]
    by_source: dict[str, list[str]] = {}
    for block, source in zip(blocks, sources, strict=True):
        by_source.setdefault(source, []).append(block)
    entries = [f"  '{gathered(names)[0]}': {source}" for source, names in by_source.items()]
    text = "\n".join(["base: 300", "layers:", *data.draw(st.permutations(entries)), f"rest: {rest}"])

    found = plan(text, llama(len(sources)))

    def written(choice: Choice) -> str:
        return "base" if choice.is_base else choice.reference(run="").removeprefix("@")

    expected = dict.fromkeys(llama(len(sources)).names, rest) | dict(zip(blocks, sources, strict=True))
    assert expected == {name: written(choice) for name, choice in found.layers.items()}
