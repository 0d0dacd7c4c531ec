"""
One test for each fault of LLMTailor's that a recipe can bring about: what was silent or a crash there is told here.

The grammar's own tests go further; these say in one place which faults are known, and that they are gone.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import InvalidInput
from layerstore.policy.recipe import parse_recipe
from tests.unit.recipes import FILE, layer, llama, model, plan, refused, steps
from tests.unit.test_recipe_llmtailor import PARITY, PARITY_TIED, WHOLE, one, recipe


@pytest.mark.known_fault("llmtailor 1")
@given(st.data())
def test_layers_are_known_by_name_wherever_the_optimizer_has_them(data: st.DataObject) -> None:
    """There, groups listed blocks first gave a composite of wrong layers in silence."""
    outline = llama(4)
    shuffled = model(
        *(
            layer(
                one.name, parameters=data.draw(st.permutations([f"{one.name}.{part}" for part in ("a", "b", "weight")]))
            )
            for one in outline.layers
        )
    )

    assert steps(plan(PARITY, outline)) == steps(plan(PARITY, shuffled))


@pytest.mark.known_fault("llmtailor 3")
@pytest.mark.parametrize(
    ("slices", "match"),
    [
        (WHOLE[:-1], "no slice takes the optimizer state of model.embed_tokens"),
        ([one(200, 0, 0), one(200, 0, 3), *WHOLE[2:]], "the ranges total 3 blocks and the model has 4"),
        ([*WHOLE, one(100, 2, 3)], "which [0, 4] in line 3 took"),
        ([*WHOLE, one(100, 6, 6)], "takes model.embed_tokens, which line 5 took already"),
        ([one(200, 0, 0), one(200, 0, 5), *WHOLE[2:]], "ends after block 4, but the model has 4"),
    ],
)
def test_what_is_uncovered_doubled_or_too_much_is_refused(slices: list[str], match: str) -> None:
    """There, such a layer stayed empty in the file, or changed the number of layers."""
    with pytest.raises(InvalidInput, match=rf"^{FILE}:\d+:\d+: ") as caught:
        plan(recipe(*slices), llama(4))

    assert match in str(caught.value)


@pytest.mark.known_fault("llmtailor 5")
def test_auxiliary_entries_that_disagree_are_told_with_both_places() -> None:
    """There, weights and optimizer state of one layer came from different checkpoints without a word."""
    text = PARITY.replace(
        "name: model.embed_tokens.weight, model: run/checkpoint-100", "name: «{}, model: run/checkpoint-200"
    )
    text = text.replace("{}", "model.embed_tokens.weight")

    refused(
        text,
        match="the weights of model.embed_tokens are to come from step 200, "
        f"its optimizer state from step 100 ({FILE}:8:24)",
    )


@pytest.mark.known_fault("llmtailor 5")
def test_an_explicit_head_of_a_tied_model_is_told() -> None:
    """There, it became a second copy of the embedding, or a group that does not exist."""
    tied = llama(4, tied=True)
    slice_of_head = PARITY_TIED.replace("pre_weights:", one(100, 6, 6).replace("[6", "«[6") + "pre_weights:")
    weights_of_head = PARITY_TIED.replace(
        "post_weights: [", "post_weights: [{name: «lm_head.weight, model: run/checkpoint-100}, "
    )

    refused(slice_of_head, tied, match="here head and embedding are one layer, model.embed_tokens, with the group id 5")
    problem = refused(weights_of_head, tied, match="'lm_head.weight' is tied")
    assert problem.hint == "remove this entry; model.embed_tokens brings it along"


@pytest.mark.known_fault("llmtailor 13")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        (PARITY + "«layer_order: x\n", "the recipe has no key 'layer_order'"),
        (PARITY.replace("layer_range: [1, 2]", "layer_range: [1, 2], «layers: x"), "a source has no key 'layers'"),
        ("«models: [{model: run/checkpoint-100}]\nmerge_method: passthrough\n", "'models' merges weights"),
        ("«modules: {}\nmerge_method: passthrough\n", "'modules' merges weights"),
        ("«slices:\nmerge_method: passthrough\n", "the recipe has no slices"),
    ],
)
def test_unknown_keys_and_recipes_without_an_optimizer_are_refused(text: str, match: str) -> None:
    """There, unknown keys were ignored, and models: and modules: crashed."""
    refused(text, match=match)


@pytest.mark.known_fault("llmtailor 13")
@pytest.mark.parametrize("folder", ["mail@home", "c++", "a+b@c"])
def test_paths_with_at_and_plus_work_through_the_mapping(folder: str) -> None:
    """There too they are special in the short form; the error says how to spell them out."""
    short = PARITY.replace("run/", f"{folder}/")
    spelled_out = PARITY
    for step in (100, 200):
        spelled_out = spelled_out.replace(
            f"run/checkpoint-{step}", f"{{model: {{path: '{folder}/checkpoint-{step}'}}}}"
        )

    assert steps(plan(PARITY, llama())) == steps(plan(spelled_out, llama()))
    with pytest.raises(InvalidInput) as caught:
        parse_recipe(short, name=FILE)
    assert "model: {model: {path: …}}" in str(caught.value.hint)


@pytest.mark.known_fault("llmtailor 14")
def test_config_and_tokenizer_come_from_a_defined_checkpoint() -> None:
    """There, their donor was the first of an unordered set; here it is base_model, else the newest step."""
    slices = [one(100, 0, 0), one(300, 0, 2), one(200, 2, 4), one(100, 5, 5), one(200, 6, 6)]

    assert {plan(recipe(*slices), llama()).base.step for _ in range(5)} == {300}
    assert plan(recipe(*slices, more="base_model: run/checkpoint-100\n"), llama()).base.step == 100


@pytest.mark.known_fault("llmtailor 15")
def test_no_layer_comes_from_after_the_base_unseen() -> None:
    """There, newer code looked for layers up to nine steps after the failure."""
    slices = [one(100, 0, 0), one(109, 0, 4), one(100, 5, 5), one(100, 6, 6)]

    assert plan(recipe(*slices), llama()).base.step == 109
    (note,) = plan(recipe(*slices, more="base_model: run/checkpoint-100\n"), llama()).notes
    assert "from after the base, step 100: model.layers.[0-3]" in note
