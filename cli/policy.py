"""
The options that describe a policy, the same for every command that has one.

An option that is not given is not passed on: each policy knows its own defaults, and which options it has.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from layerstore.errors import InvalidInput
from layerstore.units import size_in_bytes

if TYPE_CHECKING:
    from layerstore.policy import Policy

Fresh = Annotated[
    str | None,
    typer.Option(
        "--fresh", metavar="even|odd", help="parity: the half of the base; at ingest, of the run's first save."
    ),
]
First = Annotated[int | None, typer.Option("--first", metavar="N", help="filter: blocks always due at the start.")]
Last = Annotated[int | None, typer.Option("--last", metavar="N", help="filter: blocks always due at the end.")]
Share = Annotated[str | None, typer.Option("--share", metavar="1/2", help="filter: how much of the rest at each turn.")]
Every = Annotated[int | None, typer.Option("--every", metavar="N", help="filter: a turn at every Nth save.")]
Aux = Annotated[
    str | None,
    typer.Option("--aux", metavar="rotate|always", help="filter: whether embeddings and heads take turns too."),
]

Threshold = Annotated[
    float | None, typer.Option("--threshold", metavar="X", help="drift: relative movement above which a layer is due.")
]
Budget = Annotated[str | None, typer.Option("--budget", metavar="SIZE", help="drift: what a save may take, like 2GB.")]
Stalest = Annotated[int | None, typer.Option("--stalest", metavar="N", help="drift: no layer older than N saves.")]


class Settings(NamedTuple):
    """What was given of all policies' settings; None where it was not."""

    fresh: str | None
    first: int | None
    last: int | None
    share: str | None
    every: int | None
    aux: str | None
    threshold: float | None
    budget: str | None
    stalest: int | None

    @property
    def given(self) -> dict[str, object]:
        """Those that were."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def described_policy(name: str, settings: Settings) -> "Policy":
    """Return the policy *name* with those of *settings* that were given."""
    from layerstore.policy import policy_named

    given = settings.given
    for key, read in (("share", _fraction), ("budget", size_in_bytes)):
        if key in given:
            given[key] = read(str(given[key]))
    return policy_named(name, given)


def policy_from(text: str) -> "Policy":
    """
    Return the policy that *text* describes, with its settings, in one word.

    >>> policy_from("filter:every=10,aux=always").parameters["every"]
    10
    """
    from layerstore.policy import policy_named

    name, _, settings = text.partition(":")
    given = dict(setting.partition("=")[::2] for setting in settings.split(",") if setting)
    readers: dict[str, Callable[[str], object]] = {"share": _fraction, "budget": size_in_bytes, "threshold": float}
    readers |= dict.fromkeys(("first", "last", "every", "stalest"), int)
    try:
        return policy_named(name, {key: readers.get(key, str)(value) for key, value in given.items()})
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
