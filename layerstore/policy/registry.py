"""Policies by name: our own, and those of installed packages."""

from collections.abc import Callable, Mapping

from layerstore.errors import InvalidInput
from layerstore.nearest import did_you_mean, nearest
from layerstore.policy.drift import Drift
from layerstore.policy.due import Latest, OwnPolicy, Policy
from layerstore.policy.filter import Filter
from layerstore.policy.parity import Parity
from layerstore.setting import settings_of

ENTRY_POINTS = "layerstore.policies"
"""The entry point group of installed policies: a name, and a callable that makes the policy."""

EXACT = "exact"
"""Not a policy but a requirement for a composite: every layer from exactly this step."""

LATEST = "latest"
"""The name of ``full`` as a composite's policy."""

OURS: tuple[type[OwnPolicy], ...] = (Latest, Parity, Filter, Drift)
"""Our own policies, in the order of ``--help``."""

PREDICTABLE: tuple[Policy, ...] = tuple(policy() for policy in OURS if not getattr(policy, "measures", False))
"""Our policies that need no measurement: their choice is known for any history, or from the model alone."""

SELECTIVE: tuple[Policy, ...] = tuple(policy for policy in PREDICTABLE if policy != Latest())
"""The predictable policies whose composites may differ from the base commits; the report covers each of them."""

_BY_NAME: dict[str, type[OwnPolicy]] = {LATEST: Latest, **{policy.name: policy for policy in OURS}}


def policy_named(text: str, settings: Mapping[str, object] | None = None) -> Policy:
    """
    Make the policy *text*, ``name`` or ``name:key=value,…``, ours or installed; *settings* adds more settings.

    >>> policy_named("filter:every=10,aux=always").parameters["every"]
    10

    Raises:
        InvalidInput: There is no such policy, or it has no such setting.
    """
    name, _, listed = text.partition(":")
    in_text = dict(setting.partition("=")[::2] for setting in listed.split(",") if setting)
    values = dict(settings or {})
    for key in in_text.keys() & values.keys():
        raise InvalidInput(f"{key} was given twice, in --policy {text} and as --{key}", hint="leave one of them out")
    values |= in_text
    make: Callable[..., object] | None = _BY_NAME.get(name) or _installed(name)
    if make is None:
        raise _unknown(name)
    try:
        policy = make(**_read(name, make, values)) if values else make()
    except TypeError as exc:
        raise InvalidInput(f"policy {name!r} cannot be made: {exc}", hint="look at its settings") from exc
    return _checked(policy)


def _unknown(name: str) -> InvalidInput:
    if name == EXACT:
        return InvalidInput("exact is only for compose, and has no settings", hint="compose --policy exact")
    known = sorted([EXACT, *names()])
    hint = did_you_mean(nearest(name, known), else_=f"policies: {', '.join(known)}")
    return InvalidInput(f"unknown policy {name!r}", hint=hint)


def chosen_policy(given: object) -> Policy:
    """Return *given*, or make the policy from text like ``filter:every=10``; raise InvalidInput for anything else."""
    return policy_named(given) if isinstance(given, str) else _checked(given)


def is_ours(policy: Policy) -> bool:
    """Whether *policy* is one of ours, whose decisions depend only on their arguments."""
    return type(policy) in OURS


def names() -> list[str]:
    """Return the names of all policies, installed ones included."""
    from importlib.metadata import entry_points  # not at the top: it takes longer to import than all policies together

    return sorted({*_BY_NAME, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def _checked(policy: object) -> Policy:
    if not isinstance(policy, Policy):
        raise InvalidInput(
            f"{type(policy).__name__} is not a policy", hint="a policy has a name, parameters and a method due(save)"
        )
    return policy


def _read(name: str, make: object, given: Mapping[str, object]) -> dict[str, object]:
    """Return *given* with text parsed as the fields define; raise InvalidInput for a setting that *make* lacks."""
    ours = {own: settings_of(policy) for own, policy in _BY_NAME.items()}
    unknown = sorted(given.keys() - ours[name].keys()) if name in ours else []
    if unknown:
        having = ", ".join(own for own, settings in ours.items() if settings)
        else_ = f"its settings: {', '.join(ours[name])}" if ours[name] else f"settings are for {having}"
        raise InvalidInput(
            f"policy {name!r} has no setting {unknown[0]!r}",
            hint=did_you_mean(nearest(unknown[0], list(ours[name])), else_=else_),
        )
    # If an installed policy has no such field, a value is parsed like our own setting of the same name.
    known = {key: setting for settings in (*ours.values(), settings_of(make)) for key, setting in settings.items()}
    return {key: known[key].value(value) if key in known else value for key, value in given.items()}


def _installed(name: str) -> Callable[..., object] | None:
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            make: Callable[..., object] = entry.load()
        except Exception as exc:
            raise InvalidInput(f"policy {name!r} ({entry.value}) cannot be loaded: {exc}") from exc
        return make
    return None
