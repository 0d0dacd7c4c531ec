"""LLMTailor's grammar means here what it means there, and what could be misread is refused."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.policy.recipe import ModelOutline, parse_recipe
from tests.policy.recipes import FILE, blocks, layer, llama, model, parameter, plan, refused, steps, version

PARITY = """\
slices:
  - {sources: [{model: run/checkpoint-200, layer_range: [0, 0]}]}
  - {sources: [{model: run/checkpoint-200, layer_range: [0, 1]}]}
  - {sources: [{model: run/checkpoint-100, layer_range: [1, 2]}]}
  - {sources: [{model: run/checkpoint-200, layer_range: [2, 3]}]}
  - {sources: [{model: run/checkpoint-100, layer_range: [3, 4]}]}
  - {sources: [{model: run/checkpoint-200, layer_range: [5, 5]}]}
  - {sources: [{model: run/checkpoint-100, layer_range: [6, 6]}]}
pre_weights:  [{name: model.embed_tokens.weight, model: run/checkpoint-100}]
post_weights:
  - {name: model.norm.weight, model: run/checkpoint-200}
  - {name: lm_head.weight, model: run/checkpoint-200}
merge_method: passthrough
"""


def one(step: int, start: int, stop: int, folder: str = "run") -> str:
    """Return one slice."""
    return f"  - {{sources: [{{model: {folder}/checkpoint-{step}, layer_range: [{start}, {stop}]}}]}}\n"


def recipe(*slices: str, more: str = "") -> str:
    """Return a recipe of *slices*."""
    return "slices:\n" + "".join(slices) + "merge_method: passthrough\n" + more


WHOLE = [one(200, 0, 0), one(200, 0, 4), one(200, 5, 5), one(200, 6, 6)]


# -- what it means -------------------------------------------------------------------------------------------------


def test_parity_of_an_untied_model() -> None:
    """Both index spaces: [0, 0] is the norm and [0, 1] block 0; L + 1 is the head and L + 2 the embedding."""
    found = plan(PARITY, llama(4))

    assert steps(found) == {
        "model.embed_tokens": 100,
        "model.layers.0": 200,
        "model.layers.1": 100,
        "model.layers.2": 200,
        "model.layers.3": 100,
        "model.norm": 200,
        "lm_head": 200,
    }
    assert (found.base.run, found.base.step, found.notes) == (None, 200, ())


def test_choices_stand_where_their_checkpoint_is_named() -> None:
    """A missing step is told with its slice's line and the folder to ingest, which also names the run."""
    found = plan(PARITY, llama(4))

    assert (found.base.path, found.layers["model.layers.3"].path) == ("run/checkpoint-200", "run/checkpoint-100")
    assert str(found.layers["model.layers.3"].spot) == f"{FILE}:6:24"
    assert str(found.layers["model.embed_tokens"].spot) == f"{FILE}:8:24"
    assert str(found.base.spot) == f"{FILE}:2:24"
    hints = {folder: parse_recipe(PARITY.replace("run/", folder), name=FILE) for folder in ("run/", "", "/a/my-run/./")}
    assert [each.run_hint for each in hints.values()] == ["run", None, "my-run"]


@dataclass(frozen=True)
class Case:
    """A random recipe with the plan that its grammar means."""

    text: str
    outline: ModelOutline
    expected: dict[str, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a model of any size, a step for each layer, and a recipe that spells them in any way that is valid."""
    count = draw(st.integers(min_value=1, max_value=12))
    tied = draw(st.booleans())
    outline = llama(count, tied=tied)
    expected = {name: draw(st.sampled_from([100, 200, 300])) for name in outline.names}
    groups = {0: "model.norm"}
    groups |= {count + 1: "model.embed_tokens"} if tied else {count + 1: "lm_head", count + 2: "model.embed_tokens"}

    ranges, start = [], 0
    for stop in range(1, count + 1):
        step = expected[f"model.layers.{start}"]
        if stop == count or expected[f"model.layers.{stop}"] != step or draw(st.booleans()):
            ranges.append(one(step, start, stop))
            start = stop
    # Empty ranges may stand anywhere; the others keep their order.
    slices = list(ranges)
    for group, name in draw(st.permutations(sorted(groups.items()))):
        slices.insert(draw(st.integers(min_value=0, max_value=len(slices))), one(expected[name], group, group))
    return Case(recipe(*slices, more=_weights(draw, groups, expected)), outline, expected)


def _weights(draw: st.DrawFn, groups: dict[int, str], expected: dict[str, int]) -> str:
    if draw(st.booleans()):
        return ""
    lists: dict[str, list[str]] = {"pre_weights": [], "post_weights": []}
    for name in groups.values():  # LLMTailor takes any weight in either list
        entry = f"  - {{name: {name}.weight, model: run/checkpoint-{expected[name]}}}\n"
        lists[draw(st.sampled_from(sorted(lists)))].append(entry)
    return "".join(f"{key}:\n{''.join(entries)}" for key, entries in lists.items())


@given(cases())
def test_any_valid_recipe_means_what_its_grammar_says(case: Case) -> None:
    """Over random sizes, ties, cuts, orders and lists of weights: each layer has the step that was meant."""
    found = plan(case.text, case.outline)

    assert steps(found) == case.expected
    assert found.base.step == max(case.expected.values())


# -- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 3")
@pytest.mark.parametrize(
    ("ranges", "match"),
    [
        ("[0, 1] «[2, 4]", "[2, 4] is out of order: block 1 comes next"),
        ("[0, 1] «[1, 2]", "the ranges total 2 blocks and the model has 4: model.layers.[2-3] is missing"),
        ("[0, 2] «[2, 5]", "[2, 5] ends after block 4, but the model has 4: 0 to 3"),
        ("[0, 2] «[1, 4]", "[1, 4] is out of order: block 2 comes next"),
        ("«[2, 4] [0, 2]", "[2, 4] is out of order: block 0 comes next"),
        ("«[3, 1] [0, 4]", "[3, 1] is not a range"),
        ("«[0, 2, 4]", "layer_range has 3 numbers"),
        ("[0, «x]", "layer_range is 'x', not a whole number"),
        ("[0, «04]", "which YAML may read as octal"),
        ("«all", "layer_range is 'all', not a list"),
    ],
)
def test_ranges_cover_every_block_once_and_in_order(ranges: str, match: str) -> None:
    """A gap, an overlap, another order and a wrong total are each told at the range that shows them."""
    items = ranges.replace("] ", "]|").split("|")
    slices = [f"  - sources: [{{model: run/checkpoint-200, layer_range: {item}}}]\n" for item in items]

    refused(recipe(one(200, 0, 0), *slices, one(200, 5, 5), one(200, 6, 6)), match=match)


# -- auxiliary layers ----------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 3")
def test_every_auxiliary_layer_needs_a_slice() -> None:
    """There the composite's optimizer would lack the group; here the slice to add is told."""
    found = refused(
        "«" + recipe(one(200, 0, 4), one(200, 5, 5)), match="no slice takes the optimizer state of model.norm, "
    )

    assert "layer_range: [0, 0] and layer_range: [6, 6]" in str(found.hint)


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (1, "[1, 1] is not an auxiliary layer of this model"),
        (5, "[5, 5] takes lm_head, which line 4 took already"),
        (7, "[7, 7] is not an auxiliary layer of this model"),
    ],
)
def test_group_ids_mean_one_auxiliary_layer_each(group: int, match: str) -> None:
    """Half a block, an auxiliary layer taken twice and an id beyond the model's are refused at their range."""
    wrong = one(100, group, group).replace(f"[{group}", f"«[{group}")

    problem = refused(recipe(*WHOLE, wrong), match=match)

    assert group == 5 or "[0, 0] model.norm, [5, 5] lm_head" in str(problem.hint)


@pytest.mark.known_fault("llmtailor 5")
def test_a_head_of_its_own_in_a_tied_model_is_refused() -> None:
    """There, it became a second copy of the embedding, or a group that does not exist."""
    tied = llama(4, tied=True)
    slice_of_head = recipe(*WHOLE[:3], one(100, 6, 6).replace("[6", "«[6"))
    weights_of_head = recipe(*WHOLE[:3], more="post_weights: [{name: «lm_head.weight, model: run/checkpoint-200}]\n")

    refused(slice_of_head, tied, match="[6, 6] is not an auxiliary layer of this model")
    problem = refused(weights_of_head, tied, match="'lm_head.weight' is tied")
    assert problem.hint == "remove this entry; the tensor comes with model.embed_tokens"


def test_frozen_auxiliary_layers_need_no_slice() -> None:
    """What is frozen has no optimizer state, so LLMTailor has no group for it: it comes from the base, and is told."""
    outline = model(layer("model.embed_tokens", frozen=True), *blocks(4), layer("model.norm"), layer("lm_head"))

    found = plan(recipe(*WHOLE[:3]), outline)

    assert found.layers["model.embed_tokens"].is_base
    assert found.notes == (f"{FILE}:1:1: the recipe does not name model.embed_tokens; taken from the base",)
    named = recipe(*WHOLE[:3], more="pre_weights: [{name: model.embed_tokens.weight, model: run/checkpoint-100}]\n")
    assert steps(plan(named, outline))["model.embed_tokens"] == 100
    weight, bias = "model.embed_tokens.weight", "model.embed_tokens.bias"
    half = version("model.embed_tokens", parameter(weight), parameter(bias, frozen=True))
    half_frozen = model(half, *blocks(4), layer("model.norm"), layer("lm_head"))
    refused("«" + recipe(*WHOLE[:3]), half_frozen, match="no slice takes the optimizer state of model.embed_tokens")


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 5")
@pytest.mark.parametrize(
    ("more", "match"),
    [
        (
            "post_weights: [{name: model.norm.weight, model: run/checkpoint-200},"
            " {name: «lm_head.weight, model: run/checkpoint-100}]\n",
            "the weights of lm_head come from step 100, but the rest of the layer from step 200 (recipe.yaml:4:24)",
        ),
        (
            "«post_weights: [{name: model.norm.weight, model: run/checkpoint-200}]\n",
            "post_weights leaves out the weights of lm_head",
        ),
        (
            "«pre_weights: [{name: model.norm.weight, model: run/checkpoint-200}]\n",
            "pre_weights leaves out the weights of model.embed_tokens",
        ),
        (
            "pre_weights: [{name: «model.embed.weight, model: run/checkpoint-200}]\n",
            "the model has no parameter 'model.embed.weight'",
        ),
        (
            "pre_weights: [{name: «model.layers.0.weight, model: run/checkpoint-200}]\n",
            "the model has no parameter 'model.layers.0.weight' outside its blocks",
        ),
        ("pre_weights: [{name: a, model: r/checkpoint-1, «step: 2}]\n", "an entry of pre_weights has no key 'step'"),
        ("pre_weights: «{name: a}\n", "pre_weights is a mapping, not a list"),
    ],
)
def test_weights_agree_with_the_slices(more: str, match: str) -> None:
    """A layer is whole: what is said of its weights is held against what is said of its optimizer state."""
    refused(recipe(*WHOLE, more=more), match=match)


@pytest.mark.parametrize("empty", ["", "pre_weights: []\npost_weights: ~\n"])
def test_a_default_that_would_have_split_a_layer_is_noted(empty: str) -> None:
    """Without lists LLMTailor takes weights from the first and last slice's checkpoint; here the layer stays whole."""
    slices = [one(200, 0, 0), one(200, 0, 4), one(300, 5, 5), one(100, 6, 6)]

    found = plan(recipe(*slices, more=empty), llama())

    assert steps(found)["lm_head"] == 300
    assert steps(found)["model.embed_tokens"] == 100
    assert found.notes == (
        f"{FILE}:5:24: model.embed_tokens comes whole from step 100; without pre_weights, "
        "LLMTailor would take its weights from step 200",
        f"{FILE}:2:24: model.norm comes whole from step 200; without post_weights, "
        "LLMTailor would take its weights from step 100",
        f"{FILE}:4:24: lm_head comes whole from step 300; without post_weights, "
        "LLMTailor would take its weights from step 100",
    )


# -- references to models ------------------------------------------------------------------------------------------


def spelled(written: str) -> str:
    """Return a recipe that has one of its checkpoints *written* so."""
    return recipe(*WHOLE).replace(
        "model: run/checkpoint-200, layer_range: [0, 4]", f"model: {written}, layer_range: [0, 4]"
    )


@pytest.mark.parametrize(
    "written",
    [
        "run/checkpoint-200",
        "run/checkpoint-200/",
        "./run//checkpoint-200",
        '"run/checkpoint-200"',
        "{model: run/checkpoint-200}",
        "{model: run/checkpoint-200, lora: null}",
        "{model: {path: run/checkpoint-200}}",
        "{model: {path: run/checkpoint-200, revision: ~}}",
    ],
)
def test_checkpoints_may_be_spelled_in_many_ways(written: str) -> None:
    """A path, and the mapping that LLMTailor spells it out as."""
    assert set(steps(plan(spelled(written), llama())).values()) == {200}


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ("«run/final", "'run/final' is not a folder called checkpoint-N"),
        ("«meta-llama/Llama-3.1-8B", "is not a folder called checkpoint-N"),
        ("«run@a/checkpoint-200", "asks for a revision or an adapter"),
        ("{model: «run/checkpoint-200+lora}", "asks for a revision or an adapter"),
        ("{model: run/checkpoint-200, «lora: x}", "'lora' is not supported"),
        ("{model: {path: run/checkpoint-200, «revision: main}}", "'revision' is not supported"),
        ("{«path: run/checkpoint-200}", "model has no key 'path'"),
        ("«[a]", "model is a list"),
        ("«other/checkpoint-100", "checkpoint-100' is in a different folder from 'run/checkpoint-200' in line 2"),
    ],
)
def test_what_is_no_checkpoint_of_the_run_is_refused(written: str, match: str) -> None:
    """A hub's model, an adapter, a folder of another name, another run's checkpoint: each in its own words."""
    refused(spelled(written), match=match)


@pytest.mark.known_fault("llmtailor 13")
@pytest.mark.parametrize("folder", ["mail@home", "c++"])
def test_paths_with_at_and_plus_work_through_the_mapping(folder: str) -> None:
    """There too they are special in the short form; the error says how to spell them out."""
    spelled_out = PARITY
    for step in (100, 200):
        spelled_out = spelled_out.replace(
            f"run/checkpoint-{step}", f"{{model: {{path: '{folder}/checkpoint-{step}'}}}}"
        )

    assert steps(plan(PARITY, llama())) == steps(plan(spelled_out, llama()))
    problem = refused(PARITY.replace("run/", f"«{folder}/", 1), match="asks for a revision or an adapter")
    assert "model: {model: {path: …}}" in str(problem.hint)


# -- the frame -----------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 13")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "«models: [{model: run/checkpoint-100}]\nmerge_method: linear\n",
            "'models' merges weights and ignores the optimizer",
        ),
        ("«merge_method: passthrough\n", "the recipe needs a value for 'slices'"),
        ("slices: «[]\nmerge_method: passthrough\n", "slices is empty"),
        ("slices: [«x]\nmerge_method: passthrough\n", "a slice is 'x', not a mapping"),
        ("slices: [{sources: [{}, «{}]}]\nmerge_method: passthrough\n", "a slice of 2 sources"),
        (
            "slices: [{sources: [«{model: a/checkpoint-1}]}]\nmerge_method: passthrough\n",
            "a source needs a value for 'layer_range'",
        ),
        ("«slices: [{}]\n", "the recipe needs a value for 'merge_method'"),
        ("slices: [{}]\nmerge_method: «slerp\n", "merge_method 'slerp' computes new weights"),
        ("slices: [{}]\nmerge_method: passthrough\n«merge_methods: x\n", "the recipe has no key 'merge_methods'"),
    ],
)
def test_the_frame_is_checked_before_the_model(text: str, match: str) -> None:
    """Unknown keys, other bodies, other methods and missing parts are told where they stand."""
    refused(text, match=match)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("parameters: {«scale: 0.5}\n", "'scale' would change weights"),
        ("parameters: {«scale: [{filter: x, value: 1}]}\n", "'scale' would change weights"),
        ("base_model: «other/checkpoint-200\n", "is in a different folder"),
        ("tokenizer: {«tokens: {a: {}}}\n", "'tokens' would make new embeddings"),
        ("tokenizer: {«pad_to_multiple_of: 64}\n", "'pad_to_multiple_of' would make new embeddings"),
    ],
)
def test_what_would_change_tensors_is_refused(more: str, match: str) -> None:
    """A request that a checkpoint of whole layers cannot follow is never dropped in silence."""
    refused(recipe(*WHOLE, more=more), match=match)


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ("dtype: torch.bfloat16\nout_dtype: ~\n", "7:1: 'dtype'"),
        ("out_dtype: float32\n", "7:1: 'out_dtype'"),
        ("parameters: {scale: 1.0}\n", None),
        ("parameters: {weight: 0.5}\n", "7:14: 'weight'"),
        ("tokenizer: {source: base, tokens: {}}\n", "7:1: 'tokenizer'"),
        ("tokenizer_source: union\n", "7:1: 'tokenizer_source'"),
        ("chat_template: auto\n", "7:1: 'chat_template'"),
    ],
)
def test_what_has_no_meaning_here_is_noted(more: str, noted: str | None) -> None:
    """What can be ignored without harm is, and the plan says so."""
    notes = plan(recipe(*WHOLE, more=more), llama()).notes

    assert notes == (() if noted is None else (f"{FILE}:{noted} has no effect on a checkpoint of whole layers",))


def test_settings_of_slices_are_noted_too() -> None:
    """A slice's own base model, residual weight and parameters mean nothing to passthrough."""
    odd = (
        "  - {sources: [{model: run/checkpoint-200, layer_range: [0, 4], parameters: {a: 1}}], "
        "residual_weight: 0.1, base_model: x, parameters: {b: 1}}\n"
    )

    assert len(plan(recipe(WHOLE[0], odd, *WHOLE[2:]), llama()).notes) == 4


# -- the base ------------------------------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 14", "llmtailor 15")
def test_the_base_is_base_model_else_the_newest_step() -> None:
    """Config, tokenizer, scheduler and counters come from one defined checkpoint."""
    text = recipe(one(100, 0, 0), one(300, 0, 4), one(200, 5, 5), one(200, 6, 6))
    chosen = plan(text + "base_model: run/checkpoint-200\n", llama())

    assert plan(text, llama()).base.step == 300
    assert chosen.base.step == 200
    assert str(chosen.base.spot) == f"{FILE}:7:13"
    (note,) = [note for note in chosen.notes if "newer than the base" in note]
    assert note.startswith(f"{FILE}:3:24: newer than the base, step 200: model.layers.[0-3];")


# -- which layer is which ------------------------------------------------------------------------------------------


GPT2 = model(
    layer("transformer.wte", ties=["lm_head.weight"]),
    layer("transformer.wpe"),
    *blocks(4, stack="transformer.h"),
    layer("transformer.ln_f", parameters=["transformer.ln_f.weight", "transformer.ln_f.bias"]),
)
NEOX = model(
    layer("gpt_neox.embed_in"),
    *blocks(4, stack="gpt_neox.layers"),
    layer("gpt_neox.final_layer_norm"),
    layer("embed_out"),
)
OPT = model(
    layer("model.decoder.embed_tokens", ties=["lm_head.weight"]),
    layer("model.decoder.embed_positions"),
    layer("model.decoder.final_layer_norm"),
    *blocks(4, stack="model.decoder.layers"),
)
HEAD_FIRST = model(*blocks(4), layer("model.norm"), layer("lm_head", ties=["model.embed_tokens.weight"]))
VALUE_HEAD = model(
    layer("model.embed_tokens"), *blocks(4), layer("model.norm"), layer("lm_head"), layer("v_head.summary")
)
GPT2_UNTIED = model(layer("transformer.wpe"), layer("transformer.wte"), *GPT2.layers[2:], layer("lm_head"))
UNNAMED = model(layer("input"), *blocks(4), layer("final"), layer("lm_head"))
ROTARY = model(
    layer("model.embed_tokens"), *blocks(4), version("model.rotary_emb"), layer("model.norm"), layer("lm_head")
)


@pytest.mark.known_fault("llmtailor 2")
@pytest.mark.parametrize(
    ("outline", "norm", "head", "embedding", "extras"),
    [
        (GPT2, "transformer.ln_f", None, "transformer.wte", {"transformer.wpe"}),
        (GPT2_UNTIED, "transformer.ln_f", "lm_head", "transformer.wte", {"transformer.wpe"}),
        (UNNAMED, "final", "lm_head", "input", set()),
        (NEOX, "gpt_neox.final_layer_norm", "embed_out", "gpt_neox.embed_in", set()),
        (OPT, "model.decoder.final_layer_norm", None, "model.decoder.embed_tokens", {"model.decoder.embed_positions"}),
        (HEAD_FIRST, "model.norm", None, "lm_head", set()),
        (VALUE_HEAD, "model.norm", "lm_head", "model.embed_tokens", {"v_head.summary"}),
        (ROTARY, "model.norm", "lm_head", "model.embed_tokens", {"model.rotary_emb"}),
    ],
)
def test_group_ids_find_their_layers_in_any_model(
    outline: ModelOutline, norm: str, head: str | None, embedding: str, extras: set[str]
) -> None:
    """Norm, head and embedding by name and order; what has no id comes from the base, and is told."""
    slices = [one(100, 0, 0), one(200, 0, 4)]
    slices += [one(400, 5, 5)] if head is None else [one(300, 5, 5), one(400, 6, 6)]

    found = plan(recipe(*slices), outline)

    assert steps(found)[norm] == 100
    assert steps(found)[embedding] == 400
    assert head is None or steps(found)[head] == 300
    assert extras == {name for name, choice in found.layers.items() if choice.is_base}
    assert all(any(name in note and "taken from the base" in note for note in found.notes) for name in extras)


def test_extra_layers_may_be_named_by_their_weights() -> None:
    """pre_weights can name what no group id means; the whole layer comes from there."""
    slices = [one(200, 0, 0), one(200, 0, 4), one(200, 5, 5)]
    entry = "{{name: {}, model: run/checkpoint-{}}}"
    wte, wpe = (entry.format(f"transformer.{name}.weight", step) for name, step in (("wte", 200), ("wpe", 100)))

    assert steps(plan(recipe(*slices, more=f"pre_weights: [{wte}, {wpe}]\n"), GPT2))["transformer.wpe"] == 100

    twice = model(
        *(layer("wpe", parameters=["wpe.a", "wpe.b"]) if one.layer == "transformer.wpe" else one for one in GPT2.layers)
    )
    parts = [wte, entry.format("wpe.a", 100), entry.format("wpe.b", 200).replace("wpe.b", "«wpe.b")]
    refused(
        recipe(*slices, more=f"pre_weights: [{', '.join(parts)}]\n"),
        twice,
        match="the weights of wpe come from step 200, but the rest of the layer from step 100",
    )


@pytest.mark.known_fault("llmtailor 1")
def test_layers_are_known_by_name_wherever_the_optimizer_has_them() -> None:
    """There, groups listed blocks first gave wrong layers in silence; a compiled model's wrapper changes nothing."""
    outline = model(
        layer("model.embed_tokens", parameters=["_orig_mod.model.embed_tokens.weight"]),
        *blocks(4),
        layer("model.norm", parameters=["_orig_mod.model.norm.weight"]),
        layer("lm_head", parameters=["_orig_mod.lm_head.weight"]),
    )

    assert steps(plan(PARITY, outline)) == steps(plan(PARITY, llama()))


def test_a_second_name_within_a_layer_ties_it_to_no_other() -> None:
    """The head of such a model has its own group id."""
    outline = model(
        layer("model.embed_tokens", ties=["model.embed_tokens.again"]),
        *blocks(4),
        layer("model.norm"),
        layer("lm_head"),
    )

    assert steps(plan(PARITY, outline)) == steps(plan(PARITY, llama()))


@pytest.mark.parametrize(
    ("outline", "match"),
    [
        (
            model(*blocks(2, stack="visual.blocks"), layer("model.embed_tokens"), *blocks(4), layer("model.norm")),
            "this model has 2 stacks of blocks: visual.blocks.[0-1], model.layers.[0-3]",
        ),
        (model(layer("a"), layer("b")), "this model has no blocks"),
        (
            model(layer("model.embed_tokens"), *blocks(4), layer("model.norm")),
            "takes one head, and this model has none",
        ),
        (
            model(layer("e"), *blocks(4), layer("norm_a"), layer("norm_b"), layer("lm_head")),
            "takes one norm, and this model has several candidates: norm_a, norm_b",
        ),
        (
            model(layer("e"), *blocks(4), layer("norm"), layer("head_a"), layer("head_b")),
            "takes one head, and this model has several candidates: head_a, head_b",
        ),
    ],
)
def test_models_that_the_grammar_cannot_speak_of_are_refused(outline: ModelOutline, match: str) -> None:
    """Never a guess: the message names the layers, and our own grammar as the way out."""
    problem = refused("«" + recipe(*WHOLE), outline, match=match)

    assert "base: and layers:" in str(problem.hint)
