"""How values are put into words."""

import pytest

from layerstore.cli import render


@pytest.mark.fault(71)
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


@pytest.mark.parametrize("columns", [30, 57, 80, 129])
def test_no_width_of_a_terminal_loses_a_letter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """However the columns of a table share the line: what is folded is all there."""
    monkeypatch.setenv("COLUMNS", str(columns))
    pin = "released-2026-11-candidate-of-the-week"
    table = [render.Column("COMMIT"), render.Column("RUN", folds=True), render.Column("PINS", folds=True, width_min=10)]

    render.say_table(table, [["0123456789ab" * 3, "llama", pin]])

    lines = capsys.readouterr().out.splitlines()[1:]
    assert "".join(line[len("0123456789ab" * 3 + "  llama  ") :].strip() for line in lines) == pin


def test_a_warning_folds_between_words_and_a_hint_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning is read; a hint is copied, and a line end in it would be copied too."""
    monkeypatch.setenv("COLUMNS", "40")
    render.say_warning("a word " * 10)
    render.say_error(kind="failure", code=1, message="short", hint="layerstore verify " * 5, as_json=False)

    *warning, error, hint = capsys.readouterr().err.splitlines()
    assert max(map(len, warning)) <= 40
    assert " ".join(" ".join(warning).split()) == ("warning: " + "a word " * 10).strip()
    assert error == "error: short"
    assert hint.strip() == "hint: " + ("layerstore verify " * 5).strip()


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR"])
def test_no_color_leaves_text_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Bold type goes with the colours, in tables as in errors."""
    monkeypatch.setenv(variable, "1")
    render.say_table([render.Column("RUN")], [["sft"]], total=["total"])
    render.say_warning("look")

    printed = capsys.readouterr()
    assert [("\x1b" in text) for text in (printed.out, printed.err)] == [variable == "FORCE_COLOR"] * 2
