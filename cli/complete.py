"""
Shell completion with typer: for commands, options, and values from a fixed set of words.

On an error, nothing is offered; the command will report the error when it runs.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.shell_completion import CompletionItem

VARIABLE = "_LAYERSTORE_COMPLETE"

_CHOICES = re.compile(r"[\w-]+(\|[\w-]+)+")

# On the first call, zsh runs this file as the function's body; typer's script alone would only define another function.
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
    return f"{script.getvalue().strip()}{_AFTER.get(shell, '')}"


def answer_shell(command: "Command") -> int:
    """Print completions as typer's script reads them; this patches typer, so the process must not do anything else."""
    from typer.core import TyperArgument, TyperOption

    # Values on the line may stay strings: converting them would import pydantic, which takes longer than all the rest.
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


def choices(param: "Parameter", context: "Context", incomplete: str) -> "list[CompletionItem]":
    """Return the words that the metavar of *param* lists, as in ``one|of|these``; none for any other metavar."""
    metavar = (getattr(param, "metavar", None) or "").rstrip("…")
    words = metavar.split("|") if _CHOICES.fullmatch(metavar) else []
    return items(word for word in words if word.startswith(incomplete))
