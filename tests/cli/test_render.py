"""How values are put into words."""

import re

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
    table = [render.Column("COMMIT"), render.Column("RUN", folds=True), render.Column("PINS", folds=True)]

    render.print_table(table, [["0123456789ab" * 3, "llama", pin]])

    lines = capsys.readouterr().out.splitlines()[1:]
    assert "".join(line[len("0123456789ab" * 3 + "  llama  ") :].strip() for line in lines) == pin


TABLE = [
    render.Column("RUN", folds=True),
    render.Column("STEP", "right"),
    render.Column("WHY", folds=True),
    render.Column("SAVED", drops=1),
    render.Column("SIZE", "right", drops=2),
]
ROW = ["pretraining-of-the-year", "1200000", "the newest of its run", "2 min ago", "112.5 GB"]


@pytest.mark.parametrize(
    ("columns", "headers"),
    [
        (160, ["RUN", "STEP", "WHY", "SAVED", "SIZE"]),
        (80, ["RUN", "STEP", "WHY", "SAVED", "SIZE"]),
        (60, ["RUN", "STEP", "WHY", "SAVED"]),
        (45, ["RUN", "STEP", "WHY"]),
    ],
)
def test_a_narrow_terminal_folds_between_words_and_leaves_out_the_least_important_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, headers: list[str]
) -> None:
    """What is left out is named; no word is broken."""
    monkeypatch.setenv("COLUMNS", str(columns))

    render.print_table(TABLE, [ROW])

    first, *lines = capsys.readouterr().out.splitlines()
    assert headers == first.split()
    assert max(map(len, lines)) <= columns
    assert {*" ".join(ROW[:3]).split()} <= {*" ".join(lines).split()}
    assert (len(headers) < len(TABLE)) == lines[-1].startswith("no room for ")


def test_verdicts_have_colours_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns stay aligned, since colours take no room."""
    rows = [["sft@2", "remove", "1.0 GB"], ["sft@4", "keep", ""]]
    columns = [render.Column("COMMIT"), render.Column(""), render.Column("FREES", "right")]

    render.print_table(columns, rows)
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    render.print_table(columns, rows)
    render.print_paragraph("problem  clock  differs")
    coloured = capsys.readouterr().out

    assert "\x1b" not in plain
    assert "\x1b[31mremove\x1b[0m" in coloured
    assert "\x1b[32mkeep\x1b[0m" in coloured
    assert "\x1b[31mproblem\x1b[0m  clock" in coloured
    assert plain in re.sub(r"\x1b\[\d+m", "", coloured)


def test_a_warning_folds_between_words_and_a_hint_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning is read; a hint is copied, and a line end in it would be copied too."""
    monkeypatch.setenv("COLUMNS", "40")
    render.print_warning("a word " * 10)
    render.print_error(kind="failure", code=1, message="short", hint="layerstore verify " * 5, as_json=False)

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
    render.print_table([render.Column("RUN")], [["sft"]], total=["total"])
    render.print_warning("look")

    printed = capsys.readouterr()
    assert [("\x1b" in text) for text in (printed.out, printed.err)] == [variable == "FORCE_COLOR"] * 2
