"""Policies by name: our own, and those of installed packages."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points

from layerstore.errors import InvalidInput
from layerstore.nearest import did_you_mean, nearest
from layerstore.policy.drift import Drift
from layerstore.policy.due import Latest, Policy
from layerstore.policy.filter import Filter
from layerstore.policy.parity import Parity

ENTRY_POINTS = "layerstore.policies"
"""The entry point group of installed policies: a name, and a callable that makes the policy."""

EXACT = "exact"
"""Not a policy but a requirement for a composite: every layer from exactly this step."""

_OWN: dict[str, type[Latest | Parity | Filter | Drift]] = {
    "latest": Latest,
    "full": Latest,
    "parity": Parity,
    "filter": Filter,
    "drift": Drift,
}


def policy_named(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """
    Make the policy called *name*, ours or an installed one, with *settings*.

    Raises:
        InvalidInput: There is no such policy, or it has no such setting.
    """
    settings = settings or {}
    make: Callable[..., object] | None = _OWN.get(name) or _installed(name)
    if name in _OWN:
        _check_settings(name, settings)
    if make is None:
        if name == EXACT:
            raise InvalidInput("exact is for compose alone, and has no settings", hint="compose --policy exact")
        known = sorted([EXACT, *names()])
        hint = did_you_mean(nearest(name, known), else_=f"policies: {', '.join(known)}")
        raise InvalidInput(f"there is no policy {name!r}", hint=hint)
    try:
        policy = make(**settings)
    except TypeError as exc:
        raise InvalidInput(f"policy {name!r} cannot be made: {exc}", hint="look at its settings") from exc
    return _checked(policy)


def chosen_policy(given: object) -> Policy:
    """Return *given* if it is a policy, or the policy that it names; raise InvalidInput if it is neither."""
    return policy_named(given) if isinstance(given, str) else _checked(given)


def is_ours(policy: Policy) -> bool:
    """Whether *policy* is one of ours, which decide only from their arguments."""
    return type(policy) in _OWN.values()


def names() -> list[str]:
    """Return the names of all policies, installed ones included."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def _checked(policy: object) -> Policy:
    if not isinstance(policy, Policy):
        raise InvalidInput(
            f"{type(policy).__name__} is no policy", hint="a policy has a name, parameters and a method due(save)"
        )
    return policy


def _check_settings(name: str, settings: Mapping[str, object]) -> None:
    known = {own: [each.name for each in fields(of) if not each.name.startswith("_")] for own, of in _OWN.items()}
    unknown = sorted(settings.keys() - set(known[name]))
    if unknown:
        having = ", ".join(own for own, settings_of in known.items() if settings_of)
        else_ = f"its settings: {', '.join(known[name])}" if known[name] else f"settings are for {having}"
        raise InvalidInput(
            f"policy {name!r} has no setting {unknown[0]!r}",
            hint=did_you_mean(nearest(unknown[0], known[name]), else_=else_),
        )


def _installed(name: str) -> Callable[..., object] | None:
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            make: Callable[..., object] = entry.load()
        except Exception as exc:
            raise InvalidInput(f"policy {name!r} ({entry.value}) cannot be loaded: {exc}") from exc
        return make
    return None
