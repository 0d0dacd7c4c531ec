"""Which version of each layer a composite takes: choices over records, without any disk."""

from collections.abc import Callable

from layerstore.errors import InvalidInput
from layerstore.model import CommitRecord, LayerEntry
from layerstore.policy.exact import exact
from layerstore.policy.latest import latest

Selector = Callable[[CommitRecord], tuple[LayerEntry, ...]]

SELECTORS: dict[str, Selector] = {"exact": exact, "latest": latest}


def selector(name: str) -> Selector:
    """Return the policy called *name*."""
    try:
        return SELECTORS[name]
    except KeyError as exc:
        raise InvalidInput(f"there is no policy {name!r}", hint=f"policies: {', '.join(sorted(SELECTORS))}") from exc
