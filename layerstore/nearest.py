"""Suggestions for a mistyped name."""

from collections.abc import Iterable
from typing import TypeVar

from layerstore.errors import NotFound

T = TypeVar("T")

_SHOWN_MAX = 3


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """
    Return those of *known* that resemble *word*, most similar first.

    >>> nearest("partiy", ["drift", "filter", "parity"])
    ['parity']
    """
    from difflib import get_close_matches  # only needed for error messages

    names = list(dict.fromkeys(known))
    # In reverse: of two names that differ only in case, the first one stays.
    by_folded = {name.casefold(): name for name in reversed(names)}
    return [by_folded[name] for name in get_close_matches(word.casefold(), by_folded, n=_SHOWN_MAX)]


def did_you_mean(names: Iterable[str], *, else_: str = "") -> str:
    """
    Return *names* as a question, followed by *else_*, which is always included.

    >>> did_you_mean(["sft@2", "sft@4"], else_="layerstore log sft lists the steps")
    'did you mean sft@2 or sft@4? layerstore log sft lists the steps'
    >>> did_you_mean([], else_="runs here: sft")
    'runs here: sft'
    """
    candidates = list(names)
    question = f"did you mean {' or '.join(candidates)}?" if candidates else ""
    return " ".join(filter(None, [question, else_]))


class ByName(dict[str, T]):
    """A dict of named things: a lookup of a missing name raises `NotFound`, which is a `KeyError`."""

    def __missing__(self, name: str) -> T:
        raise unknown("layer", name, self)


def unknown(what: str, name: object, known: Iterable[str]) -> NotFound:
    """Return the error for a *name* that is not *known*; its hint lists the nearest names, or the first ones."""
    names = list(known)
    near = nearest(str(name), names)
    first = f"{', '.join(names[:_SHOWN_MAX])}{', …' if len(names) > _SHOWN_MAX else ''}"
    return NotFound(
        f"there is no {what} {str(name)!r} here", hint=did_you_mean(near) or (f"here are {first}" if names else None)
    )
