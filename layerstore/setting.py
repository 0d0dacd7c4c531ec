"""
The description of a setting of a policy or an output format, in addition to the type and default of its field.

    every: Annotated[int, Setting("a turn at every Nth save", metavar="N")] = 5

The command line's options, the parsing of ``filter:every=10`` and the guide's table are made from such descriptions.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting; `settings_of` fills in what follows from the type and default of its field."""

    help: str
    metavar: str = ""
    """The placeholder for a value in ``--help``; for a Literal, its words by default."""
    read: Callable[[str], object] | None = None
    """Makes a value from text, or raises InvalidInput; needed if the field's type alone is not enough."""
    default: str = ""
    """The default in words, if the field's own default is missing or needs explanation."""
    kind: Any = str
    """What the command line takes: a number, one of a Literal's words, or text."""

    def value(self, given: object) -> object:
        """Return *given*, converted if it is text; text that is not a number is left for the policy's own check."""
        if not isinstance(given, str):
            return given
        if self.read is not None:
            return self.read(given)
        with suppress(ValueError):
            return self.kind(given) if self.kind in {int, float} else given
        return given


def settings_of(cls: object) -> dict[str, Setting]:
    """Return the settings of *cls*, by name; none if its fields declare none."""
    own = fields(cls) if isinstance(cls, type) and is_dataclass(cls) else ()
    return {field.name: _completed(field) for field in own if get_origin(field.type) is Annotated}


def _completed(field: Field[Any]) -> Setting:
    annotated, setting = get_args(field.type)
    assert isinstance(setting, Setting)
    kind = annotated if get_origin(annotated) is Literal else (get_args(annotated) or (annotated,))[0]  # without None
    return replace(
        setting,
        kind=str if setting.read else kind,
        metavar=setting.metavar or "|".join(get_args(kind)),
        default=setting.default or ("" if field.default is MISSING else str(field.default)),
    )
