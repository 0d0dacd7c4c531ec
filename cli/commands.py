"""
The commands: each is a function in the file of the same name, which describes it further in ``ABOUT``.

A file is imported when its command runs, is suggested or explained: importing all would be too slow for completion.
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
    """What the file of a command says about it."""

    section: str
    """Its heading in ``--help``."""
    store: Literal["anywhere", "on a disk"] | None = "on a disk"
    """Which stores it works on; hints add ``--store`` to it. None: it takes no store."""
    answers: bool = False
    """Whether its output answers a question, so that ``--quiet`` does not silence it."""
    elsewhere: tuple[str, ...] = ()
    """What other tools call it."""


def about(command: str) -> About:
    """Return what *command* says about itself."""
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
