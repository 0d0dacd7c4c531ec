"""What a save was asked for: looked at on each rank, and what is wrong with it told to all before anybody begins."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from layerstore.live.files import FoundFile, find_or_say
from layerstore.live.seams import ENGINE_KEYS
from layerstore.publish.pins import check_pin_free, check_pin_name
from layerstore.storage.rooms import Rooms

_STEP_END = 10**18
"""Records are named with 18 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One rank's wish."""

    step: int
    client_state: dict[str, object]
    files: tuple[FoundFile, ...] = ()
    mistyped: str = ""
    """What of the client_state cannot be kept, in words."""
    problems: list[str] = field(default_factory=list)
    """What else is wrong."""


def asked(
    rooms: Rooms,
    *,
    run: str,
    step: object,
    engine_step: int,
    client_state: object,
    extra_files: object,
    pin: object,
) -> Asked:
    """Return what ``save`` was called with; nothing is raised, since the other ranks wait to hear from this one."""
    number, problems = (engine_step, []) if step is None else _whole(step, otherwise=engine_step)
    kept: dict[str, object] = {}
    mistyped = ""
    if isinstance(client_state, Mapping):
        kept = dict(client_state)
    elif client_state is not None:
        mistyped = f"client_state is a {type(client_state).__name__}, no dictionary"
    taken = sorted(ENGINE_KEYS & kept.keys())
    if taken:
        problems.append(f"client_state has the key {taken[0]!r}, under which the engine saves state of its own")
    files: tuple[FoundFile, ...] = ()
    if extra_files is None or isinstance(extra_files, Mapping):
        files, problem = find_or_say(extra_files or {})
        problems += [problem] if problem else []
    else:
        problems.append(f"extra_files is a {type(extra_files).__name__}; it maps names to paths")
    problems += _pin_problems(rooms, pin, run=run, step=number)
    return Asked(step=number, client_state=kept, files=files, mistyped=mistyped, problems=problems)


def _whole(step: object, *, otherwise: int) -> tuple[int, list[str]]:
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # whatever counts: numpy's numbers too
    except TypeError:
        return otherwise, [f"step= is {step!r}, no whole number"]
    if not 0 <= number < _STEP_END:
        return otherwise, [f"step= is {number}; steps are counted from 0, and have at most 18 digits"]
    return number, []


def _pin_problems(rooms: Rooms, name: object, *, run: str, step: int) -> list[str]:
    if name is not None and not isinstance(name, str):
        return [f"pin= is {name!r}, no name"]
    try:
        if name is not None:
            check_pin_name(rooms, name)
            check_pin_free(rooms, name, run=run, step=step)
    except Exception as exc:  # noqa: BLE001  # whatever a user has put there: the others wait to hear of it
        return [str(exc)]
    return []
