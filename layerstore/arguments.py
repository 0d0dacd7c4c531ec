"""
Public methods refuse a wrong argument with a one-line error, before they do anything.

A method's annotations alone define what it accepts; editors and type checkers see the signature as written.
"""

import builtins
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from inspect import Parameter, Signature, isfunction, signature, unwrap
from reprlib import repr as short
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from layerstore.errors import InvalidInput
from layerstore.nearest import did_you_mean, nearest

Public = TypeVar("Public", bound=Callable[..., object])
Fields = TypeVar("Fields")

# numpy's numbers are accepted; text that looks like a number is not.
_METHODS = {bool: "__bool__", int: "__index__", float: "__float__"}
_WORDS = {
    NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    os.PathLike: "a path",
    Iterable: "a list",
    Callable: "a function",
}
_REFERENCE = 'as text: "RUN@STEP", "RUN" or a pin\'s name'
_HINTS = {
    **dict.fromkeys(("ref", "a", "b", "good", "bad", "since", "onto", "resumed_from"), _REFERENCE),
    "saves": 'as text: "last:10", "sft@800,sft@900:2"',
    "keep": "say layerstore.Keep(last=3), or None to keep all",
}
"""For each parameter name: the hint for the usual mistake with that parameter."""


def checked(public: Public) -> Public:
    """Wrap a function, or the public methods of a class, so that wrong arguments raise InvalidInput."""
    if not isinstance(public, type):
        checking: Public = _checked(public)
        return checking
    for name, method in vars(public).copy().items():
        if isfunction(method) and not name.startswith("_"):
            setattr(public, name, _checked(method))
    return public


def named_fields(cls: type[Fields]) -> type[Fields]:
    """Make the dataclass *cls* raise InvalidInput for unknown fields; *cls* itself must check the fields' values."""
    make = cls.__init__

    @wraps(make)
    def making(self: Fields, *positional: object, **named: object) -> None:
        _bound(make, self, *positional, **named)
        make(self, *positional, **named)

    cls.__init__ = making  # type: ignore[assignment]
    return cls


def _checked(function: Any) -> Any:
    @wraps(function)
    def checking(*positional: object, **named: object) -> object:
        check_arguments(function, *positional, **named)
        return function(*positional, **named)

    return checking


def show_fields(function: Callable[..., object], options: type) -> None:
    """Make the signature of *function*, which ends in ``**options``, show the fields of the dataclass *options*."""
    own_signature = signature(function)
    own = [parameter for parameter in own_signature.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    fields = signature(options).parameters.values()
    vars(unwrap(function))["__signature__"] = own_signature.replace(parameters=[*own, *fields])


def check_arguments(function: Any, *positional: object, **named: object) -> None:
    """Raise InvalidInput unless *function* takes these arguments."""
    accepted, kinds = _signature_and_kinds(function)
    bound = _bound(function, *positional, **named)
    for name in filter(kinds.__contains__, bound):
        is_many = accepted.parameters[name].kind is Parameter.VAR_POSITIONAL
        for value in bound[name] if is_many else (bound[name],):
            if not _fits(value, kinds[name]):
                raise _misfit(_callee(function), name, value, kinds[name])
    # Options with *keep* make a saver: they may have *exact_every* alone, as its save() may set a precision.
    if "keep" not in accepted.parameters:
        check_effect(bound)


def check_effect(given: Collection[str]) -> None:
    """Raise InvalidInput if one of *given*, the names of options, has no effect because another option is missing."""
    if "exact_every" in given and "precision" not in given:
        raise InvalidInput(
            "exact_every has no effect without a precision: every save is exact",
            hint="add a precision, such as delta8, or leave exact_every out",
        )


def _bound(function: Any, *positional: object, **named: object) -> dict[str, Any]:
    accepted, _ = _signature_and_kinds(function)
    try:
        return accepted.bind(*positional, **named).arguments
    except TypeError as exc:
        raise _unbound(_callee(function), accepted, named, exc) from None


def _callee(function: Any) -> str:
    name: str = function.__qualname__.lstrip("_").removesuffix(".__init__")
    return name


def check_fields(value: Any) -> None:
    """Raise InvalidInput unless the fields of *value*, a dataclass, are what their annotations say."""
    kinds = _kinds_of_fields(value.__class__)
    for name, kind in kinds.items():
        if not _fits(getattr(value, name), kind, in_words=True):
            raise _misfit(type(value).__name__, name, getattr(value, name), kind)


@cache
def _kinds_of_fields(cls: type) -> dict[str, Any]:
    kinds = get_type_hints(cls)
    return {field.name: kinds[field.name] for field in fields(cls)}


@cache  # filled on the first call, not on import: reading a signature takes longer than importing the function
def _signature_and_kinds(function: Any) -> tuple[Signature, dict[str, Any]]:
    return signature(function), _kinds(unwrap(function))


class _Names(dict[str, Any]):
    """The names in annotations. A type imported only for type checkers accepts any value: its own package checks."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, object)


def _kinds(function: Any) -> dict[str, Any]:
    """Return the type of each parameter of *function*, but not its return type, which may be slow to import."""
    parameters = signature(function).parameters.values()
    named = [
        parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    ]  # keyword options are checked where they are used
    of_parameters = {
        parameter.name: parameter.annotation for parameter in named if parameter.annotation is not parameter.empty
    }
    return get_type_hints(SimpleNamespace(__annotations__=of_parameters), {}, _Names(function.__globals__))


def _fits(value: object, kind: Any, *, in_words: bool = False) -> bool:
    """Whether *value* fits *kind*; with *in_words*, a Literal accepts only its own words."""
    origin, within = get_origin(kind) or kind, get_args(kind)
    if origin in {Union, UnionType}:
        return any(_fits(value, option, in_words=in_words) for option in within)
    if origin is Literal:
        # For an argument, any word is accepted: the package that knows the choices checks it, and its error lists them.
        return type(value) in set(map(type, within)) and (not in_words or value in within)
    if origin is Iterable:
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        return is_list and (not isinstance(value, Collection) or all(_fits(item, within[0]) for item in value))
    if origin in _METHODS:
        return hasattr(value, _METHODS[origin])
    return isinstance(value, origin)


def _misfit(where: str, name: str, value: object, kind: Any) -> InvalidInput:
    kinds = get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)
    words = [_in_words(option) for option in kinds]
    is_alone = isinstance(value, str) and any(get_origin(option) is Iterable for option in kinds)
    hint = f"{name}=[{value!r}]" if is_alone else _HINTS.get(name)
    return InvalidInput(f"{where}: {name} is {short(value)}, but must be {' or '.join(words)}", hint=hint)


def _in_words(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(origin) or f"a {origin.__name__}"


def _unbound(where: str, wanted: Signature, named: Mapping[str, object], problem: TypeError) -> InvalidInput:
    known = [name for name in wanted.parameters if name != "self" and not name.startswith("_")]
    meant = [near for name in named if name not in known for near in nearest(name, known)[:1]]
    return InvalidInput(
        f"{where}: {problem}", hint=did_you_mean(meant, else_=f"it takes {', '.join(known) or 'nothing'}")
    )
