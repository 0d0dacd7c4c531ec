"""
The options that describe a policy, the same for every command that has one.

An option that is not given is not passed on: each policy knows its own defaults, and which options it has.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.errors import InvalidInput
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from layerstore.policy import Policy

_OPTIONS: dict[str, tuple[type, str, str]] = {
    "fresh": (str, "even|odd", "parity: the half of the base; at ingest, of the run's first save."),
    "first": (int, "N", "filter: blocks always due at the start."),
    "last": (int, "N", "filter: blocks always due at the end."),
    "share": (str, "1/2", "filter: how much of the rest at each turn."),
    "every": (int, "N", "filter: a turn at every Nth save."),
    "aux": (str, "rotate|always", "filter: whether embeddings and heads take turns too."),
    "threshold": (float, "X", "drift: relative movement above which a layer is due."),
    "budget": (str, "SIZE", "drift: what a save may take, like 2GB."),
    "stalest": (int, "N", "drift: no layer older than N saves."),
}
"""All policies' settings: the type of each, its metavar and its help."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give *command* these options in the place of its parameter *settings*, which gets those that were given."""

    @functools.wraps(command)
    def run(**words: object) -> None:
        settings = {name: words.pop(name) for name in _OPTIONS}
        command(**words, settings={name: value for name, value in settings.items() if value is not None})

    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "settings":
            parameters.append(parameter)
            continue
        for name, (of, metavar, text) in _OPTIONS.items():
            option = Annotated[of | None, typer.Option(f"--{name}", metavar=metavar, help=text)]  # type: ignore[valid-type]  # made at run time
            parameters.append(parameter.replace(name=name, default=None, annotation=option))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


def described_policy(name: str, settings: Mapping[str, object]) -> "Policy":
    """Return the policy *name* with *settings*."""
    from layerstore.policy import policy_named

    readers = {"share": _fraction, "budget": size_in_bytes}
    given = {key: readers[key](str(value)) if key in readers else value for key, value in settings.items()}
    return policy_named(name, given)


def policy_from(text: str) -> "Policy":
    """
    Return the policy that *text* describes, with its settings, in one word.

    >>> policy_from("filter:every=10,aux=always").parameters["every"]
    10
    """
    name, _, settings = text.partition(":")
    given = dict(setting.partition("=")[::2] for setting in settings.split(",") if setting)
    try:
        return described_policy(name, {key: _OPTIONS.get(key, (str,))[0](value) for key, value in given.items()})
    except InvalidInput:
        raise
    except ValueError as exc:
        raise InvalidInput(f"--policy {text}: {exc}", hint="settings are like filter:every=10,share=1/3") from exc


def _fraction(text: str) -> object:
    from fractions import Fraction

    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as exc:
        raise InvalidInput(f"--share {text!r} is no share", hint="write it like 1/2 or 0.25") from exc


def policy_in_words(name: str, parameters: Mapping[str, object]) -> str:
    """
    Return a policy with its settings.

    >>> policy_in_words("parity", {"fresh": "even"}), policy_in_words("full", {})
    ('parity (fresh even)', 'full')
    """
    # A limit that was not set is none.
    settings = ", ".join(f"{key} {value}" for key, value in parameters.items() if str(value) != "None")
    return f"{name} ({settings})" if settings else name
