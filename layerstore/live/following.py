"""From a pointer to the composite that it means."""

from dataclasses import replace
from typing import cast

from layerstore.compose import Composition, compose_latest
from layerstore.errors import IntegrityError, NotFound
from layerstore.format.canonical import Plain
from layerstore.format.fields import from_plain, to_plain
from layerstore.history.attempt_locks import saved_now
from layerstore.history.references import Resolved, reference_to
from layerstore.model import LayerEntry
from layerstore.storage.runview import RunView
from layerstore.store import Store
from layerstore.tree import Tree
from layerstore.zero3 import Pointer


def pointer_to(store: Store, composition: Composition, *, pin: str | None) -> Pointer:
    """Return what leads to *composition*, on top of the pin *pin* if its base is kept by one."""
    base = composition.base
    is_mixture = pin is None and composition.policy != "latest"
    return Pointer(
        store=str(store.path),
        store_id=store.id,
        name=pin or reference_to(store.rooms, base),
        run=base.run,
        attempt=base.attempt,
        step=base.step,
        is_pin=pin is not None,
        policy=composition.policy,
        layers=[cast(Tree, to_plain(entry)) for entry in composition.layers] if is_mixture else None,
    )


def composition_of(store: Store, pointer: Pointer) -> Composition:
    """Return what *pointer* means; raises NotFound where *store* has it no longer."""
    composition = compose_latest(_resolved(store, pointer))
    if pointer.layers is None:
        return composition
    what = f"the pointer to {pointer.name}"
    if not isinstance(pointer.layers, list):
        raise IntegrityError(f"{what} is in a form that is not known", hint="make it again")
    layers = tuple(from_plain(LayerEntry, cast(Plain, each), what=what) for each in pointer.layers)
    return replace(composition, layers=layers, policy=pointer.policy)


def _newest_instead(store: Store, view: RunView | None, pointer: Pointer) -> str:
    """Say what there is where a pointer leads to nothing: as a rule the job was killed before that save was whole."""
    if saved_now(store.rooms, pointer.run, [pointer.attempt]):
        return f"a job still saves attempt {pointer.attempt}: that save is not complete yet, or it failed; try again"
    if view is None or not view.visible:
        return f"its save was not complete when the job ended, or it was removed; {pointer.run} has no other"
    newest = f"{pointer.run}@{next(view.history(view.attempts[-1])).step}"
    return (
        f"its save was not complete when the job ended, or it was removed; {newest} is there: "
        f'layerstore.transformers.checkpoint("{pointer.store}", "{newest}")'
    )


def _resolved(store: Store, pointer: Pointer) -> Resolved:
    rooms = store.rooms
    if pointer.is_pin:
        return Resolved.of_pin(rooms.records.read_pin(pointer.name))
    view = rooms.catalog.find(pointer.run)
    own = [] if view is None else view.of_attempt(pointer.attempt)
    row = next((row for row in own if row.step == pointer.step), None)
    if row is None:
        raise NotFound(
            f"the pointer means {pointer.name} (attempt {pointer.attempt}), which is not in the store",
            hint=_newest_instead(store, view, pointer),
        )
    return Resolved.of_commit(rooms.catalog.commit(row.name))
