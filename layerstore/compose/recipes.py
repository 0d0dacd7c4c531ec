"""
Look a recipe up in the store: which commits its steps mean, and which version of each layer they have.

Errors begin with the place in the recipe and end with what to do about it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.compose.choose import Composition
from layerstore.errors import IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.history import Resolved, locate, only_run, resolve
from layerstore.layers import typed
from layerstore.limits import RECIPE_BYTES_MAX
from layerstore.model import CommitRecord, LayerEntry
from layerstore.storage import RecordName, RecordRow, Repository

if TYPE_CHECKING:
    from layerstore.policy.recipe import Choice, Recipe


def _read_recipe(repo: Repository, path: Path) -> "Recipe":
    from layerstore.policy.recipe import parse_recipe, read_text  # imports yaml, which nothing else needs

    try:
        content = repo.files.read(path.resolve(), size_bytes_max=RECIPE_BYTES_MAX)
    except (IntegrityError, StorageIO) as exc:
        raise InvalidInput(f"the recipe cannot be read: {exc}", hint="name a YAML file with --recipe") from exc
    return parse_recipe(read_text(content, name=str(path)), name=str(path))


def compose_by_recipe(repo: Repository, path: Path, *, run: str | None) -> Composition:
    """
    Take each layer from where the recipe in the file *path* says; *run* is used where the recipe names no run.

    Raises:
        InvalidInput: It is no recipe, or does not fit the model of its base.
        NotFound: A step that it names is not in the store.
    """
    from layerstore.policy.recipe import ModelOutline, outline_of

    recipe = _read_recipe(repo, path)
    name = _open_run(repo, recipe, run)
    with _explained(recipe.base, name):
        base = resolve(repo, recipe.base.reference(run=name))
    record = base.record
    outline = ModelOutline(
        names=tuple(entry.layer for entry in record.layers),
        look=lambda: (outline_of(repo.version_of(entry)) for entry in record.layers),
    )
    plan = recipe.plan(outline)
    taken = {layer: choice for layer, choice in plan.layers.items() if not choice.is_base}
    back = recipe.base.back
    if base.pin is not None and any(choice.run is None for choice in taken.values()):
        with recipe.base.spot.located():
            back = _back_of(repo, record)
    sources = _Sources(repo, {layer: of.reference(run=record.run, back=back) for layer, of in taken.items()})
    layers = {entry.layer: entry for entry in record.layers}
    notes = [*plan.notes]
    if recipe.base.run is None and run is None and recipe.run_hint not in {None, name}:
        notes.append(f"the recipe speaks of run {recipe.run_hint!r}, which is not in the store: {name!r} is meant")
    for layer, choice in taken.items():
        with _explained(choice, record.run):
            layers[layer], is_older = sources.entry(layer)
        if is_older:
            notes.append(
                f"{choice.spot}: {layer} was not saved at {sources.references[layer]}, which has its version of step "
                f"{layers[layer].origin.step}"
            )
    return Composition(
        base=record,
        commit=base.commit,
        time_ns=base.time_ns,
        policy="recipe",
        parameters={"recipe": recipe.name, "grammar": recipe.grammar},
        layers=tuple(layers[layer] for layer in plan.layers),
        notes=tuple(notes),
        chosen_from=sources.chosen_from,
    )


class _Sources:
    """The commits that layers are taken from."""

    def __init__(self, repo: Repository, references: Mapping[str, str]) -> None:
        self.references = references
        """By layer."""
        self._repo = repo
        self._pins = frozenset(repo.records.pin_names())
        self._found: dict[str, tuple[RecordRow | Resolved, dict[str, LayerEntry]]] = {}

    def entry(self, layer: str) -> tuple[LayerEntry, bool]:
        """Return the version of *layer*, and whether an earlier save than the named one wrote it."""
        reference = self.references[layer]
        if reference not in self._found:
            self._found[reference] = self._look(reference)
        source, entries = self._found[reference]
        if layer not in entries:
            raise NotFound(
                f"{reference} has no layer {layer!r}", hint="take this layer from a save of the same model", layer=layer
            )
        return entries[layer], not isinstance(source, Resolved) and not entries[layer].saved_by(source)

    @property
    def chosen_from(self) -> tuple[tuple[RecordName, tuple[LayerEntry, ...]], ...]:
        """The records whose rows gave layers, and which."""
        rows = ((source, entries) for source, entries in self._found.values() if not isinstance(source, Resolved))
        return tuple((source.name, tuple(entries.values())) for source, entries in rows)

    def _look(self, reference: str) -> tuple[RecordRow | Resolved, dict[str, LayerEntry]]:
        source = locate(self._repo, reference, pins=self._pins)
        if isinstance(source, Resolved):
            return source, {entry.layer: entry for entry in source.record.layers}
        wanted = [layer for layer, of in self.references.items() if of == reference]
        return source, source.entries(wanted)


def _open_run(repo: Repository, recipe: "Recipe", run: str | None) -> str:
    """Return the run of steps without one: the base's, else *run*, else the recipe's own word, else the only run."""
    if recipe.base.run is not None:
        return recipe.base.run
    if run is not None:
        return run
    if recipe.run_hint is not None and repo.records.names(recipe.run_hint):
        return recipe.run_hint
    with recipe.base.spot.located():
        try:
            return only_run(repo)
        except InvalidInput as exc:
            _explain_open_run(recipe, exc)
            raise


def _explain_open_run(recipe: "Recipe", problem: InvalidInput) -> None:
    """Say in *problem* where in the recipe the missing run can be written."""
    step = recipe.base.step
    if recipe.base.path is None:
        problem.message = f"base {step} is a step of which run? {problem.message}"
        problem.hint = f"write base: RUN@{step}, or pass --run RUN"
        return
    found = "names no run" if recipe.run_hint is None else f"would be of run {recipe.run_hint!r}, which is not here"
    problem.message = f"{recipe.base.path} {found}; {problem.message}"
    problem.hint = f"pass --run RUN, or write RUN/checkpoint-{step} and the like wherever the recipe says model:"


def _back_of(repo: Repository, record: CommitRecord) -> int:
    """Return how many attempts before the newest the attempt of *record* is."""
    attempts = repo.catalog.view(record.run).attempts
    if record.attempt not in attempts:
        raise NotFound(
            f"attempt {record.attempt} of {record.run}, which the base is of, has no visible commit",
            hint=f"name every step's run: {record.run}@STEP",
        )
    return len(attempts) - 1 - attempts.index(record.attempt)


@contextmanager
def _explained(choice: "Choice", run: str) -> Iterator[None]:
    """Begin errors with the place in the recipe, and say how to ingest a step that is missing."""
    try:
        with choice.spot.located():
            yield
    except NotFound as exc:
        if choice.path is not None:
            exc.hint = f"layerstore ingest {typed(str(choice.path))} --run {typed(choice.run or run)}"
        elif choice.step is not None and "layer" not in exc.facts:
            exc.hint = f"layerstore ingest FOLDER/checkpoint-{choice.step} --run {typed(choice.run or run)}; {exc.hint}"
        raise
