"""
Shell completion of values; typer itself completes commands and options.

The metavar in the help says what an argument or option takes: REF, RUN, PIN, P, STEP, or ``one|of|these``. The names of
runs, steps and pins are in the store's folders, so no record, index or library is needed. A dropped step is therefore
offered until gc has removed it. Names of metrics are read from the newest commit of each run. On errors nothing is
offered; the command itself will report them.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.cli.options import nearest_store

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.shell_completion import CompletionItem

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


def values(param: "Parameter", context: "Context", incomplete: str) -> "list[CompletionItem]":
    """Return completions of the value *incomplete* of *param*; none for paths, which shells complete better."""
    metavar = (getattr(param, "metavar", None) or "").rstrip("…")
    store = _store_of(context)
    if metavar == "STEP":
        runs = [context.params["run"]] if context.params.get("run") else _runs(store)
        return items(_steps_of(runs[0], incomplete, store) if len(runs) == 1 else [])
    if _CHOICES.fullmatch(metavar):
        words = metavar.split("|")
    elif metavar in {"REF", "A", "B"} or (metavar == "MODEL" and "@" in incomplete):  # a model is usually a path
        words = _references(incomplete, store)
    else:
        offered = {"RUN": _runs, "R": _runs, "PIN": _pins, "P": _policies, "METRIC": _metrics}.get(
            metavar.partition("[")[0]
        )
        words = offered(store) if offered else []
    return items([word for word in words if word.startswith(incomplete)])


def _store_of(context: "Context") -> Path:
    """Return the store that the line names, else the one in the environment, else the nearest."""
    named = context.params.get("store") or context.find_root().params.get("store")
    return Path(named).expanduser() if named else nearest_store()


# -- what a store holds --------------------------------------------------------------------------------------------


def _references(incomplete: str, store: Path) -> list[str]:
    """Return runs and pins; once a single run matches, its steps too."""
    reference = _REFERENCE.fullmatch(incomplete)
    if reference is not None:
        return [f"{reference['run']}@{step}" for step in _steps_of(reference["run"], reference["step"], store)]
    found = sorted(name for name in [*_runs(store), *_pins(store)] if name.startswith(incomplete))
    only = found[0] if len(found) == 1 and found[0] in _runs(store) else None
    return found if only is None else [only, *(f"{only}@{step}" for step in _steps_of(only, "", store))]


def _runs(store: Path) -> list[str]:
    from layerstore.layout import layout_at

    return _names(layout_at(store).commits)


def _pins(store: Path) -> list[str]:
    from layerstore.layout import layout_at

    return _names(layout_at(store).pins)


def _policies(store: Path) -> list[str]:
    from layerstore.policy import EXACT, names

    return sorted([EXACT, *names()])


def _metrics(store: Path) -> list[str]:
    import layerstore
    from layerstore.history import metrics_if_sound

    with layerstore.open(store) as opened:
        catalog = opened.repo.catalog
        views = [catalog.view(run) for run in catalog.runs()[:_RUNS_MAX]]
        newest = [catalog.commit(view.visible[-1].name).record for view in views if view.visible]
        found = [metrics_if_sound(opened.repo, record) or () for record in newest]
        return sorted({name for names in found for name in names if _is_plain(name)})


def _steps_of(run: str, first_digits: str, store: Path) -> list[str]:
    """Return the newest steps of *run* that start with *first_digits*, newest first."""
    from layerstore.layout import RECORD_NAME, layout_at

    found = (RECORD_NAME.fullmatch(name) for name in _names(layout_at(store).run(run)))
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
