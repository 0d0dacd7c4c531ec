"""
The output formats of composites, one class each. The fields of a class are the format's options.

Creating a format is cheap: the code that writes it is imported only when a composite is planned or written.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from layerstore.errors import InvalidInput
from layerstore.formats.dcp import Dcp
from layerstore.formats.delta import Delta
from layerstore.formats.format import Format, FormatKeywords, Plan
from layerstore.formats.hf import HuggingFace
from layerstore.formats.shards import Shards, Zero3
from layerstore.formats.universal import Universal
from layerstore.nearest import did_you_mean, nearest

FORMATS: tuple[type[Format], ...] = (Shards, Zero3, HuggingFace, Dcp, Universal, Delta)
"""All formats, in the order of ``--help``."""

_OF_ALL = ("verify", "durable", "force", "progress")
"""Options that `Composite.export` takes with every format."""


def chosen_format(name: "str | Format", options: Mapping[str, object]) -> Format:
    """Return the format *name* with its *options*; raises InvalidInput if the format or an option is unknown."""
    if not isinstance(name, str):
        if isinstance(name, type) or options:
            raise InvalidInput(
                "a format was given together with options, or as a class", hint='format="hf", dtype="bf16"'
            )
        return name
    chosen = next((known for known in FORMATS if known.name == name), None)
    if chosen is None:
        names = [known.name for known in FORMATS]
        raise InvalidInput(
            f"there is no format {name!r}",
            hint=did_you_mean(nearest(name, names), else_=f"formats: {', '.join(names)}"),
        )
    own = _options(chosen)
    for option in (option for option in options if option not in own):
        having = ", ".join(other.name for other in FORMATS if option in _options(other))
        else_ = f"it is an option of {having}" if having else f"its options: {', '.join(own) or 'none'}"
        hint = did_you_mean(nearest(option, [*own, *_OF_ALL]), else_=else_)
        raise InvalidInput(f"format {name} has no option {option}", hint=hint)
    make: Callable[..., Format] = chosen
    return make(**options)


def _options(spec: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(spec))
