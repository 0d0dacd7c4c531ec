"""
All printing: answers on stdout; warnings, errors and progress on stderr.

Foreign text passes through `shown`, so that it cannot move the cursor or reorder a line.
"""

import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO, TypeVar

from layerstore.cli.commands import COMMANDS, about
from layerstore.layout import is_url
from layerstore.redact import redacted

T = TypeVar("T")

# Incremented when a field is removed or changes its meaning; new fields may be added at any time.
JSON_SCHEMA = 1

# In a file or a pipe, nothing is folded.
_WIDTH_OF_A_PIPE = 100_000

# Output for mails and bug reports is folded in a pipe too.
PASTED_WIDTH = 80

# The gap between columns.
_GAP = 2

# A name is broken only if it takes more than half of the terminal's width, and more than this many columns.
_WORD_WIDTH_MIN = 20

# Verdicts: green is fine, yellow is worth a look, red is removed or wrong. The colour only repeats the word.
_COLOURS = {"keep": 32, "ok": 32, "trim": 33, "note": 33, "remove": 31, "problem": 31}

# Prose is folded to the terminal's width, but never to less than this.
_PROSE_WIDTH_MIN = 20

# Control characters, bidirectional overrides, lone surrogates, line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

_SECONDS_PER_UNIT = (("day", 86400), ("h", 3600), ("min", 60))
_AGE_DAYS_MAX = 30


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    header: str
    align: Literal["left", "right"] = "left"
    folds: bool = False
    """Whether the column's cells may wrap between words if the terminal is narrow."""
    drops: int = 0
    """In a narrow terminal, columns with the highest number are left out first; a column with 0 is always shown."""


def shown(text: object) -> str:
    r"""
    Return *text* on one line, with everything escaped that a terminal would act on.

    >>> shown("run\x1b[2J\u202e")
    'run\\x1b[2J\\u202e'
    """
    return "".join(_escaped(sign) if unicodedata.category(sign) in _UNPRINTABLE else sign for sign in str(text))


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape", "surrogatepass").decode("ascii")


def age(time_ns: int, *, now_ns: int | None = None) -> str:
    """
    Return how long ago *time_ns* was, or its date if that is over a month ago or in the future.

    >>> age(0, now_ns=150 * 10**9), age(0, now_ns=86400 * 10**9), age(0, now_ns=2 * 86400 * 10**9)
    ('2 min ago', '1 day ago', '2 days ago')
    """
    seconds = ((time.time_ns() if now_ns is None else now_ns) - time_ns) // 10**9
    if -60 <= seconds < 60:
        return "just now"
    if not 0 <= seconds < _AGE_DAYS_MAX * 86400:
        return time.strftime("%Y-%m-%d", time.localtime(time_ns / 10**9))
    unit, length = next((unit, length) for unit, length in _SECONDS_PER_UNIT if seconds >= length)
    count = seconds // length
    return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"


def counted(count: int, noun: str) -> str:
    """
    Return *count* with its noun.

    >>> counted(1, "commit"), counted(1200, "object"), counted(2, "loss")
    ('1 commit', '1,200 objects', '2 losses')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def some(names: Sequence[str], *, limit: int = 8) -> str:
    """
    Return the first *limit* of *names*, and how many more there are.

    >>> some(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def lost_in_words(layers: Sequence[str], *, everything: bool) -> str:
    """Return in words what a commit loses to damage."""
    return "all of it" if everything else f"{counted(len(layers), 'layer')}, {some(layers, limit=4)}"


# -- verbosity -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Output:
    """The output settings of this command."""

    is_quiet: bool = False
    """Whether only answers and errors are printed."""
    answers: bool = False
    """Whether the output answers a question, so that it is never silenced."""
    has_line: bool = False
    """Whether a progress line is on the terminal."""
    store: str | None = None
    """The store given on the command line, if any; suggested commands then get the same ``--store``."""


output = Output()


# -- stdout --------------------------------------------------------------------------------------------------------


def print_line(text: str = "") -> None:
    """Print a line; the caller must have passed foreign text through `shown`."""
    if output.answers or not output.is_quiet:
        _print(text, sys.stdout)


def print_note(text: str) -> None:
    """Print a note, such as what to do next; ``--quiet`` silences it."""
    if not output.is_quiet:
        _print(text, sys.stdout)


def print_paragraph(text: str, *, indent: int = 0, pipe_width: int = _WIDTH_OF_A_PIPE) -> None:
    """
    Print *text*, wrapped to the terminal's width, with lines after the first indented by *indent*.

    Without a terminal, wrap it to *pipe_width*. A verdict at the start of *text* is coloured.
    """
    for line in _folded(text, indent=indent, stream=sys.stdout, pipe_width=pipe_width):
        word = line.partition(" ")[0]
        print_line(painted(word) + line.removeprefix(word))


def _folded(text: str, *, indent: int, stream: TextIO | None, pipe_width: int = _WIDTH_OF_A_PIPE) -> list[str]:
    width = _width_of(stream, pipe_width=pipe_width)
    # Words stay whole, so that names, paths and commands can be copied.
    lines = textwrap.TextWrapper(
        max(width, _PROSE_WIDTH_MIN), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.wrap(text)


def _width_of(stream: TextIO | None, *, pipe_width: int = _WIDTH_OF_A_PIPE) -> int:
    is_cut = _is_terminal(stream) or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if is_cut else pipe_width


def print_json(fields: Mapping[str, object]) -> None:
    """Print *fields*, usually from ``json_fields``, as a single line for programs."""
    _print(json.dumps({"schema": JSON_SCHEMA, **fields}), sys.stdout)


def print_each(lines: Sequence[str], *, limit: int = 50) -> None:
    """Print the first *limit* of *lines*, and how many more there are."""
    for line in lines[:limit]:
        print_line(line)
    if len(lines) > limit:
        print_line(f"… and {len(lines) - limit:,} more; --json has them all")


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one pair per line."""
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        print_paragraph(f"{name:<{width}}{shown(value)}", indent=width)


def print_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], *, total: Sequence[str] | None = None
) -> None:
    """
    Print a table of *rows*, with a last line *total*.

    In a narrow terminal, some columns fold between words; if that is not enough, a note lists the columns left out.
    """
    lines = [[shown(cell) for cell in row] for row in (*rows, *([] if total is None else [total]))]
    headers = [column.header for column in columns]
    kept, widths = _fitted(columns, [headers, *lines], _width_of(sys.stdout))
    for line in (headers, *lines):
        is_bold = line is headers or (total is not None and line is lines[-1])
        _print_row([columns[index] for index in kept], [line[index] for index in kept], widths, is_bold=is_bold)
    left_out = [header for index, header in enumerate(headers) if index not in kept]
    if left_out:
        print_note(f"no room for {', '.join(left_out)}")


def _fitted(columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """Return the indexes of the columns that fit into *width*, and how wide each of them is."""
    widths = [max(_cells(line[index]) for line in lines) for index in range(len(columns))]
    words = [[word for line in lines for word in line[index].split()] for index in range(len(columns))]
    least = [
        min(max(map(_cells, words[index]), default=0), max(width // 2, _WORD_WIDTH_MIN))
        if column.folds
        else widths[index]
        for index, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while sum(least[index] + _GAP for index in kept) - _GAP > width:
        spare = [index for index in kept if columns[index].drops]
        if not spare:
            break  # the terminal wraps what remains
        kept.remove(max(spare, key=lambda index: columns[index].drops))
    excess = sum(widths[index] + _GAP for index in kept) - _GAP - width
    for index in sorted(kept, key=lambda index: least[index] - widths[index]):  # the column with most to spare first
        cut = max(0, min(excess, widths[index] - least[index]))
        widths[index] -= cut
        excess -= cut
    return kept, [widths[index] for index in kept]


def _print_row(columns: Sequence[Column], line: Sequence[str], widths: Sequence[int], *, is_bold: bool) -> None:
    cells = [
        _words_in(text, width) if column.folds else [text]
        for column, text, width in zip(columns, line, widths, strict=True)
    ]
    for number in range(max(map(len, cells))):
        parts = []
        for column, texts, width in zip(columns, cells, widths, strict=True):
            text = texts[number] if number < len(texts) else ""
            space = " " * (width - _cells(text))
            parts.append(f"{space}{text}" if column.align == "right" else f"{painted(text)}{space}")
        printed = (" " * _GAP).join(parts).rstrip()
        print_line(f"\x1b[1m{printed}\x1b[0m" if is_bold and _has_colour(sys.stdout) else printed)


def _words_in(text: str, width: int) -> list[str]:
    """
    Return *text* in lines of *width*, broken between words; a word is broken only if it is wider than a line.

    >>> _words_in("the newest of its run", 10), _words_in("model.layers.0", 10), _words_in("…/checkpoints", 13)
    (['the newest', 'of its run'], ['model.laye', 'rs.0'], ['…/checkpoints'])
    """
    lines = [""]
    for word in (piece for whole in text.split() for piece in _pieces(whole, width)):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _cells(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _pieces(word: str, width: int) -> Iterator[str]:
    """Yield *word* in pieces of at most *width* terminal columns, but at least one character each."""
    begin = 0
    for end in range(1, len(word) + 1):
        if _cells(word[begin:end]) > width and end - 1 > begin:
            yield word[begin : end - 1]
            begin = end - 1
    yield word[begin:]


def _cells(text: str) -> int:
    """
    Return how many columns of a terminal *text* takes.

    >>> _cells("sft@200"), _cells("模型")
    (7, 4)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in {"W", "F"} else 1
        for sign in text
    )


def painted(word: str) -> str:
    """Return *word* in colour if it is a verdict and stdout takes colours; otherwise unchanged."""
    return f"\x1b[{_COLOURS[word]}m{word}\x1b[0m" if word in _COLOURS and _has_colour(sys.stdout) else word


def print_rows(columns: Mapping[Column, Callable[[T], str]], items: Iterable[T]) -> None:
    """Print a table with a row for each of *items*, one cell from each column's function."""
    print_table(list(columns), ([cell(item) for cell in columns.values()] for item in items))


# -- stderr --------------------------------------------------------------------------------------------------------


_STORE_OPTION = re.compile(r"(?<!layerstore )--store(?![\w-])")
_COMMAND = re.compile(r"\blayerstore (?P<command>[a-z]+)\b")


def with_store(text: str) -> str:
    """
    Return *text* with ``--store`` added to the commands in it, if the running command was given a store.

    A store given by URL is in a bucket, so only commands that work on buckets get the option.
    """
    path = output.store
    if path is None or _STORE_OPTION.search(text):
        return text
    return _COMMAND.sub(lambda match: _command_with_store(match["command"], path) or match[0], text)


def _command_with_store(command: str, path: str) -> str | None:
    use = about(command).store if command in COMMANDS else None
    takes_it = use == "anywhere" if is_url(path) else use is not None
    return f"layerstore --store {shlex.quote(path)} {command}" if takes_it else None


def print_aside(text: str) -> None:
    """Print a line that is not part of the answer; ``--quiet`` silences it."""
    if not output.is_quiet:
        _print(shown(text), sys.stderr)


def print_warning(message: str) -> None:
    """Print one ``warning:`` line."""
    _complain("warning", message)


def print_progress(line: str) -> None:
    """Print a line of progress; on a terminal it is folded between words."""
    indent = len(line) - len(line.lstrip()) + 2
    for part in _folded(shown(line), indent=indent, stream=sys.stderr):
        _print(part, sys.stderr)


def draw(line: str) -> None:
    """Draw *line* over the previous one on a terminal; whatever is printed next overwrites *line*."""
    if sys.stderr is not None and (line or output.has_line):
        output.has_line = bool(line)
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{shown(line)[:width]:<{width}}\r")
        sys.stderr.flush()


def print_error(*, kind: str, code: int, message: str, hint: str | None, as_json: bool) -> None:
    """Print what went wrong: one or two lines for people, or one object for programs."""
    if as_json:
        error = {"kind": kind, "code": code, "message": redacted(message), "hint": hint and redacted(with_store(hint))}
        _print(json.dumps({"schema": JSON_SCHEMA, "error": error}), sys.stderr)
        return
    _complain("error", message)
    if hint is not None:
        _complain("hint", hint)


def _complain(label: str, message: str) -> None:
    colour = {"error": "1;31", "warning": "1;33", "hint": "1;36"}[label]
    head = f"\x1b[{colour}m{label}:\x1b[0m" if _has_colour(sys.stderr) else f"{label}:"
    text = f"{label}: {shown(redacted(with_store(message)))}"
    # A hint is usually a command to copy, so do not fold it.
    lines = [text] if label == "hint" else _folded(text, indent=2, stream=sys.stderr) or [text]
    _print("\n".join([head + lines[0].removeprefix(f"{label}:"), *lines[1:]]), sys.stderr)


def _print(text: str, stream: TextIO | None) -> None:
    draw("")
    if stream is not None:  # None if stderr was closed: print() would fall back to stdout
        print(text, file=stream)  # the only place that prints


def _has_colour(stream: TextIO | None) -> bool:
    """Whether *stream* takes colours, by the same rules as rich, which takes long to import."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return _is_terminal(stream) and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
