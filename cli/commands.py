"""
The commands: each is a function in the file of its name, which says the rest about itself as ``ABOUT``.

A file is imported when its command runs, is suggested or explained: importing all would be too slow for completion.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

COMMANDS = (
    *("init", "ingest", "pin"),
    *("runs", "log", "show", "ls", "diff", "stats", "report", "bisect"),
    *("compose", "apply", "undrop"),
    *("drop", "gc", "verify", "repair", "reindex", "migrate"),
    *("remote", "push", "pull", "clone"),
    *("doctor", "estimate", "demo"),
)
"""All commands, in the order of ``--help``."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A value that is being typed, for the shell to complete."""

    store: Path
    incomplete: str
    given: dict[str, Any]
    """The values on the line before it, by parameter."""


Offer: TypeAlias = Callable[[Asked], list[str]]
"""What completes a value."""


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
    completes: Mapping[str, Offer] = field(default_factory=dict)
    """What the shell completes, by metavar, where that is less than the metavar offers elsewhere."""


def about(command: str) -> About:
    """Return what *command* says about itself."""
    found: About = _file(command).ABOUT
    return found


def function_of(command: str) -> Callable[..., None]:
    """Return what *command* runs."""
    found: Callable[..., None] = getattr(_file(command), command)
    return found


def sections() -> dict[str, list[str]]:
    """Return the commands by what they are for."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        found.setdefault(about(command).section, []).append(command)
    return found


def _file(command: str) -> Any:
    return import_module(f"layerstore.cli.{command}")
