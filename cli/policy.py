"""
The options for policies and for retention, the same in every command that has them.

A policy's options are the fields of its class. Options that are not given are not passed on.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerstore.cli.help import POLICY_SETTINGS
from layerstore.cli.options import CommandFunction, OptionTable, with_options

if TYPE_CHECKING:
    from layerstore.policy import Keep

_RULES: OptionTable = {
    "keep_last": (int, "N", "Keep the newest N."),
    "keep_every": (int, "STEPS", "Keep every multiple of STEPS."),
    "keep_within": (str, "AGE", "Keep what is younger: 14d, 36h."),
    "keep_best": (str, "METRIC[:N][:min|max]", "Keep the N best by a metric, such as eval_loss:3 or x:1:max."),
    "drop_optimizer_older_than": (
        int,
        "STEPS",
        "Kept commits more than STEPS older than the newest lose their moments, not their weights.",
    ),
}
"""The retention rules of gc."""

with_rules = with_options("rules", _RULES, panel="What to keep")
"""Replaces a command's parameter *rules* with the options for the retention rules."""


def with_settings(command: CommandFunction) -> CommandFunction:
    """Replace a command's parameter *settings* with options for the settings of all policies."""
    from layerstore.policy import OURS
    from layerstore.setting import settings_of

    table: dict[str, tuple[Any, str, str]] = {}
    for policy in OURS:
        for name, setting in settings_of(policy).items():
            kind, metavar, text = table.get(name, (setting.kind, setting.metavar, ""))
            text += f" {policy.name}: {setting.help}. [default: {setting.default}]"
            table[name] = (kind if kind == setting.kind else str, metavar, text.lstrip())
    return with_options("settings", table, panel=POLICY_SETTINGS)(command)


def policy_choices() -> dict[str, str]:
    """Return the policies that a composite may have, each with a description of the layers that it takes."""
    from layerstore.policy import EXACT, LATEST, OURS

    latest, *others = OURS
    of_others = {policy.name: policy.composed for policy in others}
    return {LATEST: latest.composed, EXACT: "every layer from the very step of REF, or an error", **of_others}


def keep_of(rules: Mapping[str, Any]) -> "Keep":
    """Return the retention that *rules* describe."""
    from layerstore.policy import Keep

    return Keep(**{name.removeprefix("keep_"): value for name, value in rules.items()})


def policy_in_words(name: str, parameters: Mapping[str, object]) -> str:
    """
    Return a policy with its settings.

    >>> policy_in_words("parity", {"fresh": "even"}), policy_in_words("full", {})
    ('parity (fresh even)', 'full')
    """
    # Leave out limits that were not set.
    settings = ", ".join(f"{key} {value}" for key, value in parameters.items() if str(value) != "None")
    return f"{name} ({settings})" if settings else name
