"""Promises of reading YAML: bounded, inert, each value the text that was written, each error with its place."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.limits import RECIPE_DEPTH_MAX
from layerstore.policy.recipe import parse_recipe, read_text
from layerstore.policy.recipe.document import ListNode, MapNode, Scalar, read_document
from tests.policy.recipes import FILE, llama, refused, steps


def read_map(text: str) -> dict[str, object]:
    """Return the texts of the mapping *text*."""
    document = read_document(text, name=FILE)
    assert isinstance(document, MapNode)
    return {key.text: value.text for key, value in document.entries if isinstance(value, Scalar)}


def test_values_stay_the_text_that_was_written() -> None:
    """Nothing becomes a truth value or an octal number; a key without a value is absent, the quoted word is a text."""
    document = read_document("a:\nb: ~\nc: null\nd: 'null'\n", name=FILE)

    assert isinstance(document, MapNode)
    assert [document.get(key) is None for key in "abcde"] == [True, True, True, False, True]
    assert read_map("a: on\nb: 0100\nc: 1:30\nd: 2026-11-21\ne: '1'\nf: 1_000\n") == {
        "a": "on",
        "b": "0100",
        "c": "1:30",
        "d": "2026-11-21",
        "e": "1",
        "f": "1_000",
    }


def test_every_node_knows_its_place() -> None:
    """Line and column are counted from 1, for keys, items and values, in either style."""
    document = read_document("# first\nkey:\n  - [x,  y]\n", name=FILE)

    assert isinstance(document, MapNode)
    ((key, outer),) = document.entries
    assert isinstance(outer, ListNode)
    (inner,) = outer.items
    assert isinstance(inner, ListNode)
    assert [str(node.spot) for node in (key, outer, inner, *inner.items)] == [
        f"{FILE}:2:1",
        f"{FILE}:3:3",
        f"{FILE}:3:5",
        f"{FILE}:3:6",
        f"{FILE}:3:10",
    ]


def test_a_single_value_may_be_repeated_by_alias() -> None:
    """An anchor spares typing a path again; errors name the place of the repetition."""
    text = "base: &newest 1200\nlayers: {'*': *newest}\n"

    assert set(steps(parse_recipe(text, name=FILE).plan(llama())).values()) == {1200}
    refused("base: 1\nrest: &word ''\nlayers: {lm_head: «*word}\n", match="'lm_head' is empty")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("«", "the recipe is empty"),
        ("«- base\n", "a recipe is a mapping"),
        ("base: 1\n«base: 2\n", "'base' appears a second time here, first in line 1"),
        ("base: 1\n«---\nbase: 2\n", "a second document begins here"),
        ("base: «!!python/object/apply:os.system [id]\n", "the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("base: &all [1]\nrest: «*all\n", "there is no anchor &all of a single value"),
        ("base: &me [«*me]\n", "there is no anchor &me of a single value"),
        ("base: &twice 1\nlayers: &twice {a: 1}\nrest: «*twice\n", "there is no anchor &twice of a single value"),
        ("«*norm: 1\nbase: 1\n", "there is no anchor &norm"),
        ("layers: {«[1, 2]: 3}\n", "a list or a mapping is not a key"),
        ("base: «@1100\n", "found character '@'"),
        ("base: [1\n«", "this is not YAML"),
        ("«\tbase: 1\n", "this is not YAML"),
        ("base: 1 # «\x00\n", "the character U+0000 is not allowed"),
        ("base: 1\nrest: «\x1b[2J\n", "the character U+001B is not allowed"),
    ],
)
def test_what_no_recipe_needs_is_refused_where_it_stands(text: str, match: str) -> None:
    """Slips of the pen, and all of YAML that could execute, unfold or mislead."""
    refused(text, match=match)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("base: @1100\n", "quote what begins with @"),
        ("*.norm: 1\n", "quote a pattern that begins with *"),
        ("*norm: 1\n", "quote a pattern that begins with *"),
        ("\tbase: 1\n", "spaces, not with tabs"),
        ("layers: {a.[0-3]: 1}\n", "quote text that has any of"),
    ],
)
def test_slips_that_are_likely_have_a_hint_of_their_own(text: str, hint: str) -> None:
    """What our grammar invites people to forget is told in its own words."""
    with pytest.raises(InvalidInput) as caught:
        parse_recipe(text, name=FILE)

    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("text", ['a: "\\UFFFFFFFF"\n', f"%YAML 1.{'9' * 5000}\n--- a\n"])
def test_numbers_that_the_parser_chokes_on_are_refused(text: str) -> None:
    """An escape or a version that no number can hold is an error of the recipe, not of ours."""
    with pytest.raises(InvalidInput, match=r"recipe\.yaml:1:\d+: this is not YAML: a number is out of range"):
        parse_recipe(text, name=FILE)


@pytest.mark.fault(76)
@pytest.mark.parametrize("opening", ["[", "- ", "? ", "{a: "])
def test_depth_is_bounded(opening: str) -> None:
    """What is nested without end is refused at the bound, long before Python's own stack ends."""
    with pytest.raises(InvalidInput, match=f"nested more than {RECIPE_DEPTH_MAX} deep"):
        parse_recipe(opening * 5000, name=FILE)


def test_bytes_that_are_no_text_are_refused_where_they_stand() -> None:
    """A recipe in another encoding is told by its first foreign byte."""
    with pytest.raises(InvalidInput, match=r"recipe\.yaml:2:4: the recipe is not UTF-8: byte 0xe9"):
        read_text(b"base: 1\n# x\xe9\n", name=FILE)
    assert read_text("base: é\n".encode(), name=FILE) == "base: é\n"


@pytest.mark.fault(76)
def test_nothing_is_executed(tmp_path: Path) -> None:
    """No tag reaches a constructor."""
    witness = tmp_path / "witness"
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"):
        with pytest.raises(InvalidInput, match="the tag"):
            parse_recipe(f"base: {tag} ['{witness}']\n", name=FILE)

    assert not os.path.lexists(witness)


PIECES = st.sampled_from(
    [
        *"[]{},:-?&*!|>'\"%@`#~\n\t ",
        *("\n  ", "\n- ", "<<: ", "\ufeff", "\u2028", "\x85", "---\n", "...", "\\U00110000"),
        *("base: ", "layers:", "rest: base", "slices:", "sources: ", "model: ", "layer_range: [0, 1]", "pre_weights: "),
        *(
            "merge_method: passthrough",
            "name: lm_head.weight",
            "checkpoint-100",
            "sft~1@200",
            "model.layers.[0-3]",
            "0x1f",
        ),
    ]
)


def problem_with(content: str | bytes) -> LayerstoreError | None:
    """Return the error that *content* ends in, None if it is a recipe."""
    try:
        text = content if isinstance(content, str) else read_text(content, name=FILE)
        parse_recipe(text, name=FILE).plan(llama())
    except LayerstoreError as exc:
        return exc
    return None


@pytest.mark.fault(76)
@given(
    st.one_of(
        st.text(),
        st.text(alphabet="[]{}:,-&*!#|>'\"\n ab1@"),
        st.lists(PIECES, max_size=40).map("".join),
        st.binary(max_size=200),
    )
)
@example("\ufeffbase: 1\nrest: base")
@example("base: \ud800\nrest: base")
@example("base: 1\nlayers: {'[0-]*': \"\\ud800\"}")
def test_anything_is_a_recipe_or_one_of_our_errors(content: str | bytes) -> None:
    """Whatever is read, there is a plan or a message in one line that begins with the file; never anything else."""
    problem = problem_with(content)

    if problem is not None:
        assert isinstance(problem, InvalidInput)
        assert str(problem).startswith(f"{FILE}:")
        assert str(problem).isprintable()
        assert problem.hint
