"""
The commands: each is a function in the file of the same name; ``ABOUT`` in that file describes the command.

A file is imported when its command runs, or is suggested or explained: importing all would be too slow for completion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

COMMANDS = (
    *("init", "ingest", "pin"),
    *("runs", "log", "show", "ls", "diff", "stats", "report", "bisect"),
    *("compose", "undrop"),
    *("drop", "gc", "verify", "repair"),
    *("remote", "push", "pull", "clone"),
    *("doctor", "estimate", "demo"),
    *("apply", "reindex", "migrate"),
)
"""All commands, in the order of ``--help``."""


@dataclass(frozen=True, slots=True)
class About:
    """The description of a command, in the command's file."""

    section: str
    """The heading above the command in ``--help``."""
    store: Literal["anywhere", "on a disk"] | None = "on a disk"
    """Which stores the command works on, so that hints know when to add ``--store``. None: it takes no store."""
    answers: bool = False
    """Whether the output answers a question, so that ``--quiet`` does not silence it."""
    elsewhere: tuple[str, ...] = ()
    """What other tools call the command."""


def about(command: str) -> About:
    """Return the description of *command*."""
    description: About = _file(command).ABOUT
    return description


def function_of(command: str) -> Callable[..., None]:
    """Return the function that *command* runs."""
    function: Callable[..., None] = getattr(_file(command), command)
    return function


def sections() -> dict[str, list[str]]:
    """Return the commands by section."""
    by_section: dict[str, list[str]] = {}
    for command in COMMANDS:
        by_section.setdefault(about(command).section, []).append(command)
    return by_section


def _file(command: str) -> Any:
    return import_module(f"layerstore.cli.{command}")
