"""How values are put into words."""

import doctest

import pytest

from layerstore.cli import render


def test_the_examples_in_the_docstrings_hold() -> None:
    """They are the specification of how sizes, ages and names look."""
    assert doctest.testmod(render).failed == 0


@pytest.mark.parametrize("text", ["a\nb", "a\x00b", "a\x9bb", "a\u2066b", "a\u2028b", "a\udc80b", "a\u200bb"])
def test_nothing_that_acts_on_a_terminal_gets_through(text: str) -> None:
    """Newlines, controls, bidirectional marks, invisible characters and lone surrogates are escaped."""
    assert render.shown(text).isascii()
    assert render.shown(text).isprintable()


def test_ordinary_text_is_left_alone() -> None:
    """Whatever script it is in."""
    assert render.shown("größe-模型 🙂") == "größe-模型 🙂"


def test_a_time_that_is_not_the_past_is_shown_as_a_date() -> None:
    """A clock that was wrong must not turn into a negative age."""
    now_ns = 1_700_000_000 * 10**9

    assert render.age(now_ns + 86400 * 10**9, now_ns=now_ns).startswith("2023-")
    assert render.age(0, now_ns=now_ns).startswith("19")
    assert render.age(now_ns, now_ns=now_ns) == "just now"
