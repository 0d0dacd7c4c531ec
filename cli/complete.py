"""
Shell completion of values; typer itself completes commands and options.

The metavar in the help says what an argument or option takes: REF, RUN, PIN, P, STEP, or ``one|of|these``; a command
may say that it takes less (`About.completes`). The names of runs, steps, pins and remotes are in the store's folders,
so no record, index or library is needed. Names of metrics are read from the newest commit of each run, those of layers
from the commit on the line. On errors nothing is offered; the command itself will report them.
"""

import contextlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.cli.commands import Asked, Offer
from layerstore.cli.options import nearest_store

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.shell_completion import CompletionItem

    from layerstore.layout import Layout

VARIABLE = "_LAYERSTORE_COMPLETE"

# More than anybody reads; newest first.
_STEPS_MAX = 200

# Runs whose newest commit is read.
_RUNS_MAX = 20

# Names with these characters would need quoting in some shell.
_SPECIAL = frozenset(" \"'\\$`&|;<>()[]{}*?!#^%")

_CHOICES = re.compile(r"[\w-]+(\|[\w-]+)+")
_REFERENCE = re.compile(r"(?P<run>[^@~]+)@(?P<step>\d*)")

# Additions to typer's scripts. bash would take sft@2 for two words and complete neither. zsh first calls the file
# itself as the function, and typer's would only define another one.
_BEFORE = {"bash": "COMP_WORDBREAKS=${COMP_WORDBREAKS//@}\n"}
_AFTER = {"zsh": '\nif [[ ${funcstack[1]} == _layerstore ]]; then _layerstore_completion "$@"; fi'}


class Shell(StrEnum):
    """A shell that can complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def script_for(shell: Shell, command: "Command") -> str:
    """Return the script that makes *shell* call us for completion."""
    with contextlib.redirect_stdout(io.StringIO()) as script:
        completed(command, f"source_{shell}")
    return f"{_BEFORE.get(shell, '')}{script.getvalue().strip()}{_AFTER.get(shell, '')}"


def answer_shell(command: "Command") -> int:
    """Print completions in the form of typer's script for this shell; for a process that does nothing else."""
    from typer.core import TyperArgument, TyperOption

    # The line's values may stay texts: converting them would import pydantic, which takes longer than everything else.
    for kind in (TyperArgument, TyperOption):
        kind.process_value = lambda self, ctx, value: value  # type: ignore[method-assign]
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return completed(command, os.environ[VARIABLE])
        except Exception:  # noqa: BLE001  # errors must not appear in the middle of a shell line
            return 1


def completed(command: "Command", instruction: str) -> int:
    """Make typer print a script (``source_bash``) or completions (``complete_bash``); return an exit code."""
    from typer.completion import get_completion_inspect_parameters, shell_complete

    get_completion_inspect_parameters()  # registers the shells with typer
    return shell_complete(command, {}, "layerstore", VARIABLE, instruction)


def items(words: Iterable[str]) -> "list[CompletionItem]":
    """Return *words* as typer's completion items."""
    from typer._click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words]


def values(param: "Parameter", own: Mapping[str, Offer], context: "Context", incomplete: str) -> "list[CompletionItem]":
    """
    Return completions of the value *incomplete* of *param*; none for paths, which shells complete better.

    *own* is what the command offers for a metavar, instead of what others do.
    """
    metavar = (getattr(param, "metavar", None) or "").rstrip("…")
    store = _store_of(context)
    if _CHOICES.fullmatch(metavar):
        words = metavar.split("|")
    else:
        metavar = metavar.partition("[:")[0]
        offered = own.get(metavar) or _OFFERED.get(metavar)
        words = offered(Asked(store, incomplete, context.params)) if offered else []
    return items([word for word in words if word.startswith(incomplete)])


def _store_of(context: "Context") -> Path:
    """Return the store that the line names, else the one in the environment, else the nearest."""
    named = context.params.get("store") or context.find_root().params.get("store")
    return Path(named).expanduser() if named else nearest_store()


# -- what a store holds --------------------------------------------------------------------------------------------


def _layout(asked: Asked) -> "Layout":
    from layerstore.layout import layout_at

    return layout_at(asked.store)


def _references(asked: Asked) -> list[str]:
    return _references_in(_layout(asked).commits, asked.incomplete, pins=_pins(asked))


def commits(asked: Asked) -> list[str]:
    """Return references, but no pins."""
    return _references_in(_layout(asked).commits, asked.incomplete)


def dropped_commits(asked: Asked) -> list[str]:
    """Return references to what is in the trash."""
    return _references_in(_layout(asked).dropped, asked.incomplete)


def _references_in(commits: Path, incomplete: str, *, pins: Iterable[str] = ()) -> list[str]:
    """Return the runs in the folder *commits*, and *pins*; once a single run matches, its steps too."""
    reference = _REFERENCE.fullmatch(incomplete)
    if reference is not None:
        return [f"{reference['run']}@{step}" for step in _steps_of(commits / reference["run"], reference["step"])]
    runs = _names(commits)
    found = sorted(name for name in [*runs, *pins] if name.startswith(incomplete))
    only = found[0] if len(found) == 1 and found[0] in runs else None
    return found if only is None else [only, *(f"{only}@{step}" for step in _steps_of(commits / only, ""))]


def _model(asked: Asked) -> list[str]:
    """Return commits once a step is begun: a model is usually a path."""
    return commits(asked) if "@" in asked.incomplete else []


def _steps(asked: Asked) -> list[str]:
    """Return the steps of the run on the line, or of the only one."""
    runs = [asked.given["run"]] if asked.given.get("run") else _runs(asked)
    return _steps_of(_layout(asked).run(runs[0]), asked.incomplete) if len(runs) == 1 else []


def _runs(asked: Asked) -> list[str]:
    return _names(_layout(asked).commits)


def _pins(asked: Asked) -> list[str]:
    return _names(_layout(asked).pins)


def _remotes(asked: Asked) -> list[str]:
    try:
        found = json.loads(_layout(asked).remotes.read_text())
    except (OSError, ValueError):
        return []
    return sorted(name for name in found if _is_plain(name))


def _remotes_and_references(asked: Asked) -> list[str]:
    """Return remotes as the first word; references are here for a push, and there for a pull, but often in both."""
    return [*([] if asked.given.get("words") else _remotes(asked)), *_references(asked)]


def remote_to_remove(asked: Asked) -> list[str]:
    """Return the remotes, unless one is being added."""
    return _remotes(asked) if asked.given.get("action") == "remove" else []


def policies(_: Asked) -> list[str]:
    """Return the policies that decide at a save; ``exact`` chooses what is there already."""
    from layerstore.policy import names

    return sorted(names())


def _selections(asked: Asked) -> list[str]:
    from layerstore.policy import EXACT

    return sorted([EXACT, *policies(asked)])


def _layers(asked: Asked) -> list[str]:
    import layerstore
    from layerstore.history import resolve

    with layerstore.open(asked.store) as opened:
        record = resolve(opened.repo, asked.given.get("ref") or asked.given.get("a")).record
        return [entry.layer for entry in record.layers if _is_plain(entry.layer)]


def _metrics(asked: Asked) -> list[str]:
    import layerstore
    from layerstore.history import metrics_if_sound

    with layerstore.open(asked.store) as opened:
        catalog = opened.repo.catalog
        views = [catalog.view(run) for run in catalog.runs()[:_RUNS_MAX]]
        newest = [catalog.commit(view.visible[-1].name).record for view in views if view.visible]
        found = [metrics_if_sound(opened.repo, record) or () for record in newest]
        return sorted({name for names in found for name in names if _is_plain(name)})


def _steps_of(folder: Path, first_digits: str) -> list[str]:
    """Return the newest steps in a run's *folder* that start with *first_digits*, newest first."""
    from layerstore.layout import RECORD_NAME

    found = (RECORD_NAME.fullmatch(name) for name in _names(folder))
    steps = {int(match["step"]) for match in found if match is not None and match["step"].startswith(first_digits)}
    return [str(step) for step in sorted(steps, reverse=True)[:_STEPS_MAX]]


def _names(folder: Path) -> list[str]:
    """Return the names in *folder* that need no quoting, sorted."""
    try:
        found = os.listdir(folder)  # noqa: PTH208  # names, not paths
    except OSError:  # no such run, or no such store
        return []
    return [name for name in sorted(found) if name[0] != "." and _is_plain(name)]


def _is_plain(name: str) -> bool:
    return name.isprintable() and _SPECIAL.isdisjoint(name)


_OFFERED: dict[str, Offer] = {
    "REF": _references,
    "A": _references,
    "B": _references,
    "GOOD": commits,
    "BAD": commits,
    "MODEL": _model,
    "RUN": _runs,
    "R": _runs,
    "STEP": _steps,
    "PIN": _pins,
    "P": _selections,
    "METRIC": _metrics,
    "LAYER": _layers,
    "REMOTE": _remotes,
    "[REMOTE] [REF]...": _remotes_and_references,
}
"""What a metavar offers."""
