"""How a saver saves: what a user chooses once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from layerstore.errors import InvalidInput
from layerstore.policy.keep import Keep
from layerstore.storage.timings import SaveTiming

Mode = Literal["async", "sync"]
Pressure = Literal["wait", "skip", "degrade"]
Frozen = Literal["once", "exclude"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``layerstore.attach``, which says what they mean."""

    mode: Mode
    host_buffer: int | str
    on_pressure: Pressure
    frozen: Frozen
    layer_pattern: str | None
    keep: Keep | None
    on_saved: Callable[[SaveTiming], None] | None

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("on_pressure", Pressure), ("frozen", Frozen)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise InvalidInput(f"{name} is {getattr(self, name)!r}", hint=f"choose one of: {choices}")
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise InvalidInput(f"keep is {self.keep!r}", hint="say layerstore.Keep(last=3), or None to keep all")

    @property
    def told(self) -> str:
        """What all ranks have to want alike."""
        return f"mode {self.mode}, on_pressure {self.on_pressure}, frozen {self.frozen}"
