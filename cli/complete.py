"""
The words that may come next on a command line, for a shell that asks.

What an argument or option takes is what its metavar in the help says: REF, RUN, PIN, P, STEP, or ``one|of|these``.
The store is only looked at: its folders have the names of runs, steps and pins, so no record, no index and no library
is needed. A step that was dropped is therefore offered until a collection has taken it.
Whatever goes wrong, there is just nothing to offer: a shell in the middle of a line is no place for errors.
"""

import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from layerstore.cli.shells import Shell

if TYPE_CHECKING:
    from typer._click import Command, Parameter

# More than somebody reads; the newest first.
_STEPS_MAX = 200

# What shells do something about.
_ACTED_UPON = frozenset(" \"'\\$`&|;<>()[]{}*?!#^%")

_CHOICES = re.compile(r"[\w-]+(\|[\w-]+)+")
_REFERENCE = re.compile(r"(?P<run>[^@~]+)@(?P<step>\d*)")


def answer_shell() -> int:
    """Print what may come next, one a line, to the shell that has asked through the environment."""
    line = os.environ.get("_LAYERSTORE_LINE", "")
    try:
        found = completions(line)
        done = _done_with(line, breaks=os.environ.get("_LAYERSTORE_BREAKS", ""))
        sys.stdout.write("".join(f"{word[done:]}\n" for word in found))
        sys.stdout.flush()
    except Exception:  # noqa: BLE001  # see above: the command itself will say what is wrong
        return 1
    return 0


def completions(line: str) -> list[str]:
    """Return what the last word of *line* may become."""
    from layerstore.cli.app import COMMANDS, app, command_line, store_in

    words, last = _words(line)
    group = typer.main.get_command(app)  # without its commands: importing them all takes longer than a shell may wait
    store = Path(os.path.expanduser(store_in(words) or os.environ.get("LAYERSTORE_STORE") or ".layerstore"))  # noqa: PTH111
    name, before, after = _command(group, words)
    if name is None:
        return _fitting(last, group, before, store, rest=COMMANDS)
    if name not in COMMANDS:
        return []
    return _fitting(last, command_line(name).commands[name], after, store)


def _words(line: str) -> tuple[list[str], str]:
    """Return the whole words of *line* after the program's name, and the one that is being written."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation mark without its partner, in the last word most likely
        words = line.replace("'", "").replace('"', "").split()
    if not line or line[-1].isspace():
        words.append("")
    return words[1:-1], words[-1] if len(words) > 1 else ""


def _done_with(line: str, *, breaks: str) -> int:
    """Return how much of the last word the shell takes for words that are complete, since it breaks them there."""
    _, last = _words(line)
    # An @ itself stays in front of what is to be replaced: readline keeps it for names of hosts.
    ends = {"=": 1, ":": 1, "@": 0}
    return max(
        (last.rfind(sign) + behind for sign, behind in ends.items() if sign in breaks and sign in last), default=0
    )


def _command(group: "Command", words: list[str]) -> tuple[str | None, list[str], list[str]]:
    """Return the command among *words*, and those before and after it."""
    place = next(iter(_positions(group, words)), None)
    if place is None:
        return None, words, []
    return words[place], words[:place], words[place + 1 :]


def _positions(command: "Command", words: Sequence[str]) -> Iterator[int]:
    """Yield where in *words* the arguments of *command* are: what is neither an option nor its value."""
    waits = only_arguments = False
    for place, word in enumerate(words):
        if waits:
            waits = False
        elif only_arguments or not _is_option(word):
            yield place
        elif word == "--":
            only_arguments = True
        else:
            waits = _waiting(command, word) is not None


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _waiting(command: "Command", word: str) -> "Parameter | None":
    """Return the option that *word* is and whose value comes next, if so."""
    options = (param for param in command.params if word in param.opts)
    return next((option for option in options if not getattr(option, "is_flag", False)), None)


def _fitting(
    last: str,
    command: "Command",
    words: list[str],
    store: Path,
    *,
    rest: Iterable[str] = (),
) -> list[str]:
    """Return what *last* may become behind *words* of *command*; *rest* are the commands, where one may come."""
    waiting = _waiting(command, words[-1]) if words else None
    if waiting is not None:
        return _values(waiting, last, words, store)
    option, is_given, value = last.partition("=")
    if is_given and _is_option(option):
        named = _waiting(command, option)
        return [] if named is None else [f"{option}={found}" for found in _values(named, value, words, store)]
    if last.startswith("-") and "--" not in words:
        names = [max(param.opts, key=len) for param in command.params if param.param_type_name == "option"]
        return sorted(name for name in [*names, "--help"] if name.startswith(last))
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    place = sum(1 for _ in _positions(command, words))
    if arguments and (place < len(arguments) or arguments[-1].nargs == -1):
        return _values(arguments[min(place, len(arguments) - 1)], last, words, store)
    return [name for name in rest if name.startswith(last)]


# -- values --------------------------------------------------------------------------------------------------------


def _values(param: "Parameter", last: str, words: list[str], store: Path) -> list[str]:
    """Return what *param* may be, as far as *last* leaves it open."""
    metavar = (param.metavar or "").rstrip("…")
    if _CHOICES.fullmatch(metavar):
        return [choice for choice in metavar.split("|") if choice.startswith(last)]
    if metavar == "STEP":
        return _steps_of(_run_in(words) or _only_run(store), last, store)
    find = _BY_METAVAR.get(metavar)
    return [] if find is None else list(find(last, store))


def _references(last: str, store: Path) -> Iterator[str]:
    """Yield runs and pins; where only one run is left, or was named, its steps too."""
    reference = _REFERENCE.fullmatch(last)
    if reference is not None:
        yield from (f"{reference['run']}@{step}" for step in _steps_of(reference["run"], reference["step"], store))
        return
    runs = list(_runs(last, store))
    pins = list(_pins(last, store))
    yield from sorted([*runs, *pins])
    if len(runs) == 1 and not pins:
        yield from (f"{runs[0]}@{step}" for step in _steps_of(runs[0], "", store))


def _runs(last: str, store: Path) -> Iterator[str]:
    from layerstore.storage.layout import layout_at

    yield from (name for name in sorted(_names(layout_at(store).commits)) if name.startswith(last))


def _pins(last: str, store: Path) -> Iterator[str]:
    from layerstore.storage.layout import layout_at

    yield from (name for name in sorted(_names(layout_at(store).pins)) if name.startswith(last))


def _policies(last: str, store: Path) -> Iterator[str]:
    from layerstore.policy import EXACT, names

    yield from (name for name in sorted([EXACT, *names()]) if name.startswith(last))


def _steps_of(run: str | None, first_digits: str, store: Path) -> list[str]:
    """Return the newest steps of *run* that begin with *first_digits*, the newest first."""
    from layerstore.storage.layout import RECORD_NAME, layout_at

    if run is None:
        return []
    found = (RECORD_NAME.fullmatch(name) for name in _names(layout_at(store).run(run)))
    steps = {int(match["step"]) for match in found if match is not None and match["step"].startswith(first_digits)}
    return [str(step) for step in sorted(steps, reverse=True)[:_STEPS_MAX]]


def _run_in(words: list[str]) -> str | None:
    return next((after for before, after in itertools.pairwise(words) if before == "--run"), None)


def _only_run(store: Path) -> str | None:
    runs = list(_runs("", store))
    return runs[0] if len(runs) == 1 else None


def _names(folder: Path) -> list[str]:
    """Return the names in *folder* that may stand on a line of any shell as they are, without quotation marks."""
    try:
        found = os.listdir(folder)  # noqa: PTH208  # names are wanted, not paths
    except OSError:  # no such run, or no such store
        return []
    return [name for name in found if name.isprintable() and name[0] != "." and _ACTED_UPON.isdisjoint(name)]


_BY_METAVAR: dict[str, Callable[[str, Path], Iterator[str]]] = {
    "REF": _references,
    "A": _references,
    "B": _references,
    # Mostly a path, which shells complete themselves.
    "MODEL": lambda last, store: _references(last, store) if "@" in last else iter(()),
    "RUN": _runs,
    "R": _runs,
    "PIN": _pins,
    "P": _policies,
    "SHELL": lambda last, store: (shell for shell in Shell if shell.startswith(last)),
}
