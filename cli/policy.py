"""
The options that describe a policy, the same for every command that has one.

An option that is not given is not passed on: each policy knows its own defaults, and which options it has.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from layerstore.policy import Policy

_PANEL = "Policy"

Fresh = Annotated[
    str | None, typer.Option("--fresh", metavar="even|odd", help="parity: the half that the newest save supplies.")
]
First = Annotated[int | None, typer.Option("--first", metavar="N", help="filter: blocks always due at the start.")]
Last = Annotated[int | None, typer.Option("--last", metavar="N", help="filter: blocks always due at the end.")]
Share = Annotated[str | None, typer.Option("--share", metavar="1/2", help="filter: how much of the rest at each turn.")]
Every = Annotated[int | None, typer.Option("--every", metavar="N", help="filter: a turn at every Nth save.")]
Aux = Annotated[
    str | None,
    typer.Option("--aux", metavar="rotate|always", help="filter: whether embeddings and heads take turns too."),
]


def described_policy(name: str, settings: Mapping[str, object]) -> "Policy":
    """Return the policy *name* with those of *settings* that were given."""
    from layerstore.policy import policy_named

    given = {key: value for key, value in settings.items() if value is not None}
    if "share" in given:
        given["share"] = _fraction(str(given["share"]))
    return policy_named(name, given)


def _fraction(text: str) -> object:
    from fractions import Fraction

    from layerstore.errors import InvalidInput

    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as exc:
        raise InvalidInput(f"--share {text!r} is no share", hint="write it like 1/2 or 0.25") from exc
