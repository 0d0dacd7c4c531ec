"""``layerstore pin``: names for commits."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.policy import policy_in_words
from layerstore.cli.render import (
    Column,
    age,
    output,
    print_json,
    print_line,
    print_note,
    print_rows,
    print_warning,
    shown,
    with_store,
)
from layerstore.errors import InvalidInput
from layerstore.json_fields import json_fields
from layerstore.layers import is_name, typed
from layerstore.units import short_id

if TYPE_CHECKING:
    from layerstore import Store
    from layerstore.model import Pin

ABOUT = About("Save", store="anywhere", elsewhere=("tag",))


def pin(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The pin.")] = None,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="RUN@STEP, RUN, RUN~1 or another pin.")] = None,
    *,
    list_: Annotated[bool, typer.Option("--list", help="List all pins.")] = False,
    delete: Annotated[str | None, typer.Option(metavar="PIN", help="Delete this pin; a visible commit stays.")] = None,
    remote: Annotated[
        str | None, typer.Option(metavar="REMOTE", help="With --delete: the pin in this remote, by name or URL.")
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Give a commit a name of its own; without arguments, list all pins.

    A pin stays readable whatever happens to the commit that it was made from.
    SAVED is the time of the commit, not of the pin.
    For a pinned composite, MEANS is its base, and MIXED BY is the policy that chose its layers.

    \b
    Examples:
      layerstore pin best sft@200
      layerstore pin --list
      layerstore pin --delete best
      layerstore pin --delete best --remote origin
    """
    if remote is not None and delete is None:
        raise InvalidInput("--remote is for --delete", hint="layerstore push sends pins")
    if name is not None and ref is None and not list_ and delete is None:
        if not is_name(name):
            raise InvalidInput(
                f"pin takes NAME and REF: the NAME for {name!r} is missing", hint=f"layerstore pin NAME {typed(name)}"
            )
        raise InvalidInput(
            f"pin takes NAME and REF: the REF for {name!r} is missing",
            hint=f"layerstore pin {typed(name)} RUN@STEP; layerstore show {typed(name)} shows an existing pin",
        )
    chosen = [name is not None, list_, delete is not None]
    if not any(chosen):
        output.answers = True
    if sum(chosen) > 1:
        raise InvalidInput("pin takes NAME and REF, or --list, or --delete PIN", hint="layerstore pin --help")
    with opened(store) as opened_store:
        if delete is not None:
            mixed_by = (
                "" if remote else "".join(_mixed_by(other) for other in opened_store.pins() if other.name == delete)
            )
            _print_deleted(delete, opened_store.delete_pin(delete, remote=remote), mixed_by=mixed_by, as_json=as_json)
        elif name is not None and ref is not None:
            _check_order(opened_store, name, ref)
            _make(opened_store, name, ref, as_json=as_json)
        else:
            _print_pins(opened_store, as_json=as_json)


def _print_deleted(name: str, shows: bool | None, *, mixed_by: str, as_json: bool) -> None:
    if as_json:
        print_json({"deleted": name, "commit_visible": shows})
        return
    frees = "; the next gc removes what only this pin kept"
    if mixed_by:
        print_line(f"deleted the pin {shown(name)}, a mixture by {shown(mixed_by)}{frees}")
        return
    then = "" if shows is None else "; its commit stays" if shows else frees
    print_line(f"deleted the pin {shown(name)}{then}")


def _check_order(store: "Store", name: str, ref: str) -> None:
    """Raise InvalidInput if *name* and *ref* look swapped: *name* refers to a commit, *ref* could be a new pin's."""
    from layerstore.history import begins_id

    known = {*store.runs(), *(pin.name for pin in store.pins())}
    is_commits = name in known or not {"@", "~"}.isdisjoint(name)
    if is_commits and is_name(ref) and ref not in known and not begins_id(ref):
        raise InvalidInput(
            f"pin takes NAME, then REF: {name!r} is a commit's name; nothing was changed",
            hint=f"layerstore pin {typed(ref)} {typed(name)}",
        )


def _make(store: "Store", name: str, ref: str, *, as_json: bool) -> None:
    from layerstore.compose import cautions, compose_latest
    from layerstore.history import Resolved

    new_pin = store.pin(name, ref)
    if as_json:
        print_json(_fields(new_pin))
    else:
        for caution in cautions(store.repo, compose_latest(Resolved.of_pin(new_pin))):
            print_warning(caution)
        [name_of_base] = store.names_of([new_pin.record])
        base = f"{name_of_base} (commit {short_id(new_pin.base)})"
        mixed_by = _mixed_by(new_pin)
        print_line(f"{shown(new_pin.name)} is {f'a mixture by {shown(mixed_by)} on ' if mixed_by else ''}{shown(base)}")


def _print_pins(store: "Store", *, as_json: bool) -> None:
    pins, damaged = store.pins(), store.damaged_pins()
    for name, reason in damaged.items():
        print_warning(f"pin {name} is left out, it is damaged: {reason}")
    if as_json:
        lost = [{"pin": name, "reason": str(reason)} for name, reason in damaged.items()]
        print_json({"pins": [_fields(pin) for pin in pins], **({"damaged": lost} if lost else {})})
    elif pins:
        columns: dict[Column, Callable[[tuple[Pin, str]], str]] = {
            Column("PIN", folds=True): lambda row: row[0].name,
            Column("MEANS", folds=True): lambda row: row[1],
        }
        if any(map(_mixed_by, pins)):
            columns[Column("MIXED BY", folds=True)] = lambda row: _mixed_by(row[0])
        if not all(pin.record.is_exact for pin in pins):
            columns[Column("PRECISION", drops=4)] = lambda row: row[0].record.kept_precision
        columns[Column("COMMIT", drops=1)] = lambda row: short_id(row[0].base)
        columns[Column("SAVED", drops=2)] = lambda row: age(row[0].observed.time_ns)
        columns[Column("LAYERS", "right", drops=3)] = lambda row: f"{len(row[0].record.layers):,}"
        print_rows(columns, zip(pins, store.names_of(pin.record for pin in pins), strict=True))
    elif not damaged:
        print_note(with_store("no pins yet; next: layerstore pin NAME REF"))


def _mixed_by(pin: "Pin") -> str:
    """Return the policy that mixed the composite of *pin*; empty if the pin is of a commit."""
    from layerstore.history import Resolved

    policy = pin.record.policy
    return policy_in_words(policy.name, _settings(pin)) if Resolved.of_pin(pin).is_mixture else ""


def _settings(pin: "Pin") -> dict[str, str]:
    return {str(name): str(value) for name, value in pin.record.policy.parameters.items()}


def _fields(pin: "Pin") -> dict[str, object]:
    from layerstore.history import Resolved

    return json_fields(pin) | {"mixture": Resolved.of_pin(pin).is_mixture, "policy_parameters": _settings(pin)}
