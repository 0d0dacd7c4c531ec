"""
The options for policies and for retention, the same in every command that has them.

Options that are not given are not passed on: each policy knows its own defaults, and which options it has.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerstore.cli.options import Table, with_options
from layerstore.errors import InvalidInput
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from layerstore.policy import Keep, Policy

_SETTINGS: Table = {
    "fresh": (str, "even|odd", "parity: the half of the base; at ingest, of the run's first save."),
    "first": (int, "N", "filter: blocks always due at the start."),
    "last": (int, "N", "filter: blocks always due at the end."),
    "share": (str, "1/2", "filter: how much of the rest at each turn."),
    "every": (int, "N", "filter: a turn at every Nth save."),
    "aux": (str, "rotate|always", "filter: whether embeddings and heads take turns too."),
    "threshold": (float, "X", "drift: movement above which a layer is due."),
    "budget": (str, "SIZE", "drift: what a save may take, like 2GB."),
    "stalest": (int, "N", "drift: no layer older than N saves."),
    "by": (str, "gradient|norm", "drift: what a movement is weighed by."),
}
"""The settings of all policies."""

_RULES: Table = {
    "keep_last": (int, "N", "Keep the newest N."),
    "keep_every": (int, "STEPS", "Keep every multiple of STEPS."),
    "keep_within": (str, "AGE", "Keep what is younger: 14d, 36h."),
    "keep_best": (str, "METRIC[:N][:min|max]", "Keep the N best by a metric of trainer_state.json."),
    "drop_optimizer_older_than": (
        int,
        "STEPS",
        "Kept commits so much older than the newest lose their moments, not their weights.",
    ),
}
"""The retention rules of gc."""

with_settings = with_options("settings", _SETTINGS)
"""Replaces a command's parameter *settings* by the settings of policies."""

with_rules = with_options("rules", _RULES)
"""Replaces a command's parameter *rules* by the retention rules."""


def described_policy(name: str, settings: Mapping[str, object]) -> "Policy":
    """Return the policy *name* with *settings*."""
    from layerstore.policy import policy_named

    readers = {"share": _fraction, "budget": size_in_bytes}
    given = {key: readers[key](str(value)) if key in readers else value for key, value in settings.items()}
    return policy_named(name, given)


def keep_of(rules: Mapping[str, Any]) -> "Keep":
    """Return the retention that *rules* describe."""
    from layerstore.policy import Keep

    return Keep(**{name.removeprefix("keep_"): value for name, value in rules.items()})


def policy_from(text: str) -> "Policy":
    """
    Parse a policy with its settings from *text*, a single word.

    >>> policy_from("filter:every=10,aux=always").parameters["every"]
    10
    """
    name, _, settings = text.partition(":")
    given = dict(setting.partition("=")[::2] for setting in settings.split(",") if setting)
    try:
        return described_policy(name, {key: _SETTINGS.get(key, (str,))[0](value) for key, value in given.items()})
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
    # Leave out limits that were not set.
    settings = ", ".join(f"{key} {value}" for key, value in parameters.items() if str(value) != "None")
    return f"{name} ({settings})" if settings else name
