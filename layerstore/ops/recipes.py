"""
A recipe held against the store: which commits its steps mean, and which version of each layer they have.

Errors begin with the place in the recipe, and end with what to do about it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.errors import IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.history.references import Resolved, locate, only_run, resolve
from layerstore.layers import typed
from layerstore.limits import RECIPE_BYTES_MAX
from layerstore.model import CommitRecord, LayerEntry
from layerstore.ops.composition import Composition
from layerstore.storage.manifest import RecordRow
from layerstore.storage.rooms import Rooms

if TYPE_CHECKING:
    from layerstore.policy.recipe import Choice, Recipe
    from layerstore.policy.recipe.plan import RecipePlan

RECIPE = "recipe"


def read_recipe(rooms: Rooms, path: Path) -> "Recipe":
    """Read the recipe in the file *path*; nothing of it is looked up yet."""
    from layerstore.policy.recipe import parse_recipe, read_text  # brings yaml along, which nothing else needs

    try:
        content = rooms.files.read(path.resolve(), size_bytes_max=RECIPE_BYTES_MAX)
    except (IntegrityError, StorageIO) as exc:
        raise InvalidInput(f"the recipe cannot be read: {exc}", hint="name a YAML file with --recipe") from exc
    return parse_recipe(read_text(content, name=str(path)), name=str(path))


def compose_by_recipe(rooms: Rooms, recipe: "Recipe", *, run: str | None) -> Composition:
    """
    Take each layer from where *recipe* says; *run* is the run that it leaves open.

    Raises:
        InvalidInput: The recipe does not fit the model of its base.
        NotFound: A step that it names is not in the store.
    """
    from layerstore.policy.recipe import ModelOutline, outline_of

    name = _open_run(rooms, recipe, run)
    with _explained(recipe.base, name):
        base = resolve(rooms, recipe.base.reference(run=name))
    record = base.record
    outline = ModelOutline(
        names=tuple(entry.layer for entry in record.layers),
        look=lambda: (outline_of(rooms.version_of(entry)) for entry in record.layers),
    )
    plan = recipe.plan(outline)
    back = recipe.base.back
    if base.pin is not None and any(choice.run is None and not choice.is_base for choice in plan.layers.values()):
        with recipe.base.spot.located():
            back = _back_of(rooms, record)
    own = {entry.layer: entry for entry in record.layers}
    sources = _Sources(rooms, {layer: choice.reference(run=record.run, back=back) for layer, choice in _taken(plan)})
    layers = []
    notes = [*plan.notes]
    if recipe.base.run is None and run is None and recipe.run_hint not in {None, name}:
        notes.append(f"the recipe speaks of run {recipe.run_hint!r}, which is not in the store: {name!r} is meant")
    for layer, choice in plan.layers.items():
        if choice.is_base:
            layers.append(own[layer])
            continue
        with _explained(choice, record.run):
            entry, is_older = sources.entry(layer)
        if is_older:
            notes.append(
                f"{choice.spot}: {layer} was not saved at {sources.references[layer]}, which has its version of step "
                f"{entry.origin.step}"
            )
        layers.append(entry)
    return Composition(
        base=record,
        commit=base.commit,
        time_ns=base.time_ns,
        policy=RECIPE,
        parameters={"recipe": recipe.name, "grammar": recipe.grammar},
        layers=tuple(layers),
        notes=tuple(notes),
    )


def _taken(plan: "RecipePlan") -> Iterator[tuple[str, "Choice"]]:
    """Yield the layers that are not the base's own."""
    return ((layer, choice) for layer, choice in plan.layers.items() if not choice.is_base)


class _Sources:
    """The commits that layers are taken from: of each record no more is built than those layers."""

    def __init__(self, rooms: Rooms, references: Mapping[str, str]) -> None:
        self.references = references
        """Of each layer."""
        self._rooms = rooms
        self._pins = frozenset(rooms.records.pin_names())
        self._found: dict[str, tuple[RecordRow | Resolved, dict[str, LayerEntry]]] = {}

    def entry(self, layer: str) -> tuple[LayerEntry, bool]:
        """Return the version of *layer*, and whether it is older than the commit that it was asked of."""
        reference = self.references[layer]
        if reference not in self._found:
            self._found[reference] = self._look(reference)
        source, entries = self._found[reference]
        if layer not in entries:
            raise NotFound(
                f"{reference} has no layer {layer!r}", hint="take this layer from a save of the same model", layer=layer
            )
        return entries[layer], not isinstance(source, Resolved) and not entries[layer].saved_by(source)

    def _look(self, reference: str) -> tuple[RecordRow | Resolved, dict[str, LayerEntry]]:
        source = locate(self._rooms, reference, pins=self._pins)
        if isinstance(source, Resolved):
            return source, {entry.layer: entry for entry in source.record.layers}
        wanted = [layer for layer, of in self.references.items() if of == reference]
        return source, self._rooms.catalog.entries(source.name, wanted)


def _open_run(rooms: Rooms, recipe: "Recipe", run: str | None) -> str:
    """Return the run that the recipe's bare steps mean: the user's word, else the recipe's own, else the only one."""
    if recipe.base.run is not None:
        return recipe.base.run
    if run is not None:
        return run
    if recipe.run_hint is not None and rooms.records.names(recipe.run_hint):
        return recipe.run_hint
    with recipe.base.spot.located():
        try:
            return only_run(rooms)
        except InvalidInput as exc:
            _explain_open_run(recipe, exc)
            raise


def _explain_open_run(recipe: "Recipe", problem: InvalidInput) -> None:
    """Say in *problem* what the recipe leaves open, and where in it the run can be written."""
    step = recipe.base.step
    if recipe.base.path is None:
        problem.message = f"base {step} is a step of which run? {problem.message}"
        problem.hint = f"write base: RUN@{step}, or pass --run RUN"
        return
    found = "names no run" if recipe.run_hint is None else f"would be of run {recipe.run_hint!r}, which is not here"
    problem.message = f"{recipe.base.path} {found}; {problem.message}"
    problem.hint = f"pass --run RUN, or write RUN/checkpoint-{step} and the like wherever the recipe says model:"


def _back_of(rooms: Rooms, record: CommitRecord) -> int:
    """Return how many attempts before the newest *record*'s own is."""
    attempts = rooms.catalog.view(record.run).attempts
    if record.attempt not in attempts:
        raise NotFound(
            f"attempt {record.attempt} of {record.run}, which the base is of, has no visible commit",
            hint=f"name every step's run: {record.run}@STEP",
        )
    return len(attempts) - 1 - attempts.index(record.attempt)


@contextmanager
def _explained(choice: "Choice", run: str) -> Iterator[None]:
    """Let errors begin with the recipe's place, and say how a step that is not there gets into the store."""
    try:
        with choice.spot.located():
            yield
    except NotFound as exc:
        if choice.path is not None:
            exc.hint = f"layerstore ingest {typed(str(choice.path))} --run {typed(choice.run or run)}"
        elif choice.step is not None and "layer" not in exc.facts:
            exc.hint = f"layerstore ingest FOLDER/checkpoint-{choice.step} --run {typed(choice.run or run)}; {exc.hint}"
        raise
