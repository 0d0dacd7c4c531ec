"""Which layers are due at a save, and which a composite takes: choices without any disk."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points

from layerstore.errors import InvalidInput
from layerstore.nearest import did_you_mean, nearest
from layerstore.policy.drift import Drift
from layerstore.policy.due import Policy
from layerstore.policy.filter import Filter
from layerstore.policy.latest import Latest
from layerstore.policy.parity import Parity

ENTRY_POINTS = "layerstore.policies"
"""The group in which an installed package offers its own policies: a name, and what makes the policy when called."""

_HINT = "it is for compose alone: --policy exact"

EXACT = "exact"
"""Not a policy but a demand: every layer from this very step."""

_OWN: dict[str, type[Latest | Parity | Filter | Drift]] = {
    "latest": Latest,
    "full": Latest,
    "parity": Parity,
    "filter": Filter,
    "drift": Drift,
}


def _settings_of(name: str) -> list[str]:
    return [each.name for each in fields(_OWN[name]) if not each.name.startswith("_")]


_WITH_SETTINGS = [name for name in _OWN if _settings_of(name)]


def policy_named(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """
    Return the policy called *name*, one of ours or an installed one, with *settings*.

    Raises:
        InvalidInput: There is none, or it has no such setting.
    """
    settings = settings or {}
    make: Callable[..., object] | None = _OWN.get(name)
    if name in _OWN:
        _check_settings(name, settings, known=_settings_of(name))
    else:
        make = _installed(name)
    if make is None:
        if name == EXACT:
            raise InvalidInput("exact is no policy but a demand on a composite, without settings", hint=_HINT)
        known = sorted([EXACT, *names()])
        hint = did_you_mean(nearest(name, known), else_=f"policies: {', '.join(known)}")
        raise InvalidInput(f"there is no policy {name!r}", hint=hint)
    try:
        policy = make(**settings)
    except TypeError as exc:
        raise InvalidInput(f"policy {name!r} cannot be made: {exc}", hint="look at its settings") from exc
    return checked(policy)


def checked(policy: object) -> Policy:
    """Return *policy* if it is one."""
    if not isinstance(policy, Policy):
        raise InvalidInput(
            f"{type(policy).__name__} is no policy", hint="a policy has a name, parameters and a method due(save)"
        )
    return policy


def is_ours(policy: Policy) -> bool:
    """Whether *policy* is known to decide from what it is given alone."""
    return type(policy) in _OWN.values()


def names() -> list[str]:
    """Return the names of all policies, installed ones included."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def _check_settings(name: str, settings: Mapping[str, object], *, known: list[str]) -> None:
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise InvalidInput(
            f"policy {name!r} has no setting {unknown[0]!r}",
            hint=did_you_mean(nearest(unknown[0], known), else_=f"its settings: {', '.join(known)}")
            if known
            else f"settings are for {', '.join(_WITH_SETTINGS)}",
        )


def _installed(name: str) -> Callable[..., object] | None:
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            make: Callable[..., object] = entry.load()
        except Exception as exc:
            raise InvalidInput(f"policy {name!r} ({entry.value}) cannot be loaded: {exc}") from exc
        return make
    return None


__all__ = ["EXACT", "Drift", "Filter", "Latest", "Parity", "Policy", "checked", "is_ours", "names", "policy_named"]
