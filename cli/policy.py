"""
The options for policies and for retention, the same in every command that has them.

Options that are not given are not passed on: each policy knows its own defaults, and which options it has.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from layerstore.cli.options import Table, one_of, with_options
from layerstore.errors import InvalidInput
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from layerstore.policy import Keep, Policy

_Fresh = Literal["even", "odd"]
_Aux = Literal["rotate", "always"]
_By = Literal["gradient", "norm"]

_SETTINGS: Table = {
    "fresh": (_Fresh, one_of(_Fresh), "parity: the half of the base; at ingest, of the first save. [default: even]"),
    "first": (int, "N", "filter: blocks always due at the start. [default: 2]"),
    "last": (int, "N", "filter: blocks always due at the end. [default: 2]"),
    "share": (str, "SHARE", "filter: how much of the rest at each turn. [default: 1/2]"),
    "every": (int, "N", "filter: a turn at every Nth save. [default: 5]"),
    "aux": (_Aux, one_of(_Aux), "filter: whether embeddings and heads take turns too. [default: rotate]"),
    "threshold": (float, "X", "drift: movement above which a layer is due. [default: 0.01]"),
    "budget": (str, "SIZE", "drift: what a save may take, like 2GB. [default: no limit]"),
    "stalest": (int, "N", "drift: no layer older than N saves. [default: 10]"),
    "by": (_By, one_of(_By), "drift: what a movement is weighed by. [default: gradient]"),
}
"""The settings of all policies."""

_RULES: Table = {
    "keep_last": (int, "N", "Keep the newest N."),
    "keep_every": (int, "STEPS", "Keep every multiple of STEPS."),
    "keep_within": (str, "AGE", "Keep what is younger: 14d, 36h."),
    "keep_best": (str, "METRIC[:N][:min|max]", "Keep the N best by a metric, such as eval_loss:3 or x:1:max."),
    "drop_optimizer_older_than": (
        int,
        "STEPS",
        "Kept commits so much older than the newest lose their moments, not their weights.",
    ),
}
"""The retention rules of gc."""

# Each policy takes its own, and only those.
_SETTINGS_PANEL = "Policy settings, also written as --policy filter:every=10,aux=always"

with_settings = with_options("settings", _SETTINGS, panel=_SETTINGS_PANEL)
"""Replaces a command's parameter *settings* by the settings of policies."""

with_rules = with_options("rules", _RULES, panel="What to keep")
"""Replaces a command's parameter *rules* by the retention rules."""


def described_policy(text: str, settings: Mapping[str, object]) -> "Policy":
    """
    Return the policy *text*, which may have settings of its own, with the *settings* that options gave.

    >>> described_policy("filter:every=10,aux=always", {"first": 1}).parameters["every"]
    10
    """
    from layerstore.policy import policy_named

    name, _, listed = text.partition(":")
    own = dict(setting.partition("=")[::2] for setting in listed.split(",") if setting)
    for key in own.keys() & settings.keys():
        raise InvalidInput(f"{key} was given twice, in --policy {text} and as --{key}", hint="leave one of them out")
    try:
        given = {**settings, **{key: _read(key, value) for key, value in own.items()}}
    except ValueError as exc:
        raise InvalidInput(f"--policy {text}: {exc}", hint="settings are like filter:every=10,share=1/3") from exc
    readers = {"share": _fraction, "budget": size_in_bytes}
    return policy_named(name, {key: readers[key](str(of)) if key in readers else of for key, of in given.items()})


def _read(setting: str, value: str) -> object:
    """Return the *value* of a setting as its option would read it; the policy checks words."""
    of = _SETTINGS.get(setting, (str,))[0]
    return of(value) if of in {int, float} else value


def keep_of(rules: Mapping[str, Any]) -> "Keep":
    """Return the retention that *rules* describe."""
    from layerstore.policy import Keep

    return Keep(**{name.removeprefix("keep_"): value for name, value in rules.items()})


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
