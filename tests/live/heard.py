"""What ranks have told, put together."""

from __future__ import annotations

from tests.forked import Event, Launch


def losses(launch: Launch, name: str = "") -> dict[int, str]:
    """Return the losses that *launch* told, by step."""
    return {event["step"]: event["loss"] for event in launch.events("loss") if event["name"] == name}


def due(launch: Launch, name: str = "") -> dict[int, list[str]]:
    """Return the layers that were due at each save of *launch*, on which all ranks agree."""
    found: dict[int, list[str]] = {}
    for event in launch.events("saved"):
        if event["name"] == name:
            assert found.setdefault(event["step"], event["due"]) == event["due"]
    return found


def one(launch: Launch, kind: str, **facts: object) -> Event:
    """Return the event of *kind* that the first rank told with *facts*."""
    wanted = {"rank": 0, **facts}
    (found,) = [event for event in launch.events(kind) if wanted.items() <= event.items()]
    return found
