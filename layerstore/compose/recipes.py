"""
Resolve a recipe in the store: find the commits that its steps refer to, and their version of each layer.

Errors begin with the position in the recipe and end with a remedy.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.compose.choose import Composition
from layerstore.errors import IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.history import Resolved, locate, only_run, resolve
from layerstore.layers import typed
from layerstore.limits import RECIPE_BYTES_MAX
from layerstore.model import CommitRecord, LayerEntry
from layerstore.storage import RecordRow, Repository

if TYPE_CHECKING:
    from layerstore.policy.recipe import Choice, Recipe

Found = tuple[RecordRow | None, Mapping[str, LayerEntry]]
"""The row of the commit that a reference resolves to (None for a pin), and its entries for the wanted layers."""


def _read_recipe(repo: Repository, path: Path) -> "Recipe":
    from layerstore.policy.recipe import parse_recipe, read_text  # imports yaml, which nothing else needs

    try:
        # Links are resolved first: users may link to a recipe, but `read` follows no links.
        content = repo.files.read(path.resolve(), size_bytes_max=RECIPE_BYTES_MAX)
    except (IntegrityError, StorageIO) as exc:
        raise InvalidInput(f"the recipe cannot be read: {exc}", hint="name a YAML file with --recipe") from exc
    return parse_recipe(read_text(content, name=str(path)), name=str(path))


def compose_by_recipe(repo: Repository, path: Path, *, run: str | None) -> Composition:
    """
    Take each layer from the save given by the recipe in the file *path*; *run* is the default for steps without a run.

    Raises:
        InvalidInput: The file is not a recipe, or the recipe does not fit the model of its base.
        NotFound: A step of the recipe is not in the store.
    """
    from layerstore.policy.recipe import ModelOutline

    recipe = _read_recipe(repo, path)
    name = _open_run(repo, recipe, run)
    with _explained(recipe.base, name):
        base = resolve(repo, recipe.base.reference(run=name))
    record = base.record
    outline = ModelOutline(
        names=tuple(entry.layer for entry in record.layers),
        look=lambda: (repo.version_of(entry) for entry in record.layers),
    )
    plan = recipe.plan(outline)
    choices = {layer: choice for layer, choice in plan.layers.items() if not choice.is_base}
    back = recipe.base.back
    if base.pin is not None and any(choice.run is None for choice in choices.values()):
        with recipe.base.spot.located():
            # Steps without a run belong to the base's attempt, which a pin's name does not state.
            back = _back_of(repo, record)
    notes = [*plan.notes]
    if recipe.base.run is None and run is None and recipe.run_hint not in {None, name}:
        notes.append(f"run {recipe.run_hint!r} of the recipe is not in the store; using {name!r}")
    sources = _sources_of(repo, choices, notes, run=record.run, back=back)
    layers = {entry.layer: entry for entry in record.layers}
    for _, entries in sources:
        layers |= entries
    return Composition(
        base=record,
        commit=base.commit,
        time_ns=base.time_ns,
        policy="recipe",
        parameters={"recipe": recipe.name, "grammar": recipe.grammar},
        layers=tuple(layers[layer] for layer in plan.layers),
        notes=tuple(notes),
        chosen_from=tuple((row.name, tuple(entries.values())) for row, entries in sources if row is not None),
    )


def _sources_of(
    repo: Repository, choices: Mapping[str, "Choice"], notes: list[str], *, run: str, back: int
) -> list[Found]:
    """Look up the source of each layer in *choices*, each run and commit only once; note older layers in *notes*."""
    references = {layer: choice.reference(run=run, back=back) for layer, choice in choices.items()}
    pins, view_of = frozenset(repo.records.pin_names()), cache(repo.catalog.view)
    sources: dict[str, Found] = {}
    for layer, choice in choices.items():
        reference = references[layer]
        with _explained(choice, run):
            if reference not in sources:
                wanted = [other for other, its in references.items() if its == reference]
                source = locate(repo, reference, pins=pins, view_of=view_of)
                if isinstance(source, Resolved):
                    of_pin = {entry.layer: entry for entry in source.record.layers if entry.layer in wanted}
                    sources[reference] = None, of_pin
                else:
                    sources[reference] = source, source.entries(wanted)
            row, entries = sources[reference]
            if layer not in entries:
                raise NotFound(
                    f"{reference} has no layer {layer!r}",
                    hint="take this layer from a save of the same model",
                    layer=layer,
                )
        if row is not None and not entries[layer].saved_by(row):
            step = entries[layer].origin.step
            notes.append(f"{choice.spot}: {layer} was not saved at {reference}, which has its version of step {step}")
    return list(sources.values())


def _open_run(repo: Repository, recipe: "Recipe", run: str | None) -> str:
    """Return the default run of steps: the base's, else *run*, else the recipe's default, else the only run."""
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
            step, path = recipe.base.step, recipe.base.path
            if path is None:
                exc.message = f"base {step} is a step of which run? {exc.message}"
                exc.hint = f"write base: RUN@{step}, or pass --run RUN"
            else:
                hint = recipe.run_hint
                problem = "names no run" if hint is None else f"belongs to run {hint!r}, which is not in the store"
                exc.message = f"{path} {problem}; {exc.message}"
                exc.hint = (
                    f"pass --run RUN, or write RUN/checkpoint-{step} and the like wherever the recipe says model:"
                )
            raise


def _back_of(repo: Repository, record: CommitRecord) -> int:
    """Return how many attempts of the run are newer than that of *record*."""
    attempts = repo.catalog.view(record.run).attempts
    if record.attempt not in attempts:
        raise NotFound(
            f"attempt {record.attempt} of {record.run}, the base's own, has no visible commit",
            hint=f"name every step's run: {record.run}@STEP",
        )
    return len(attempts) - 1 - attempts.index(record.attempt)


@contextmanager
def _explained(choice: "Choice", run: str) -> Iterator[None]:
    """Prefix errors with the position in the recipe; for a missing step, hint how to ingest it."""
    try:
        with choice.spot.located():
            yield
    except NotFound as exc:
        if choice.path is not None:
            exc.hint = f"layerstore ingest {typed(str(choice.path))} --run {typed(choice.run or run)}"
        elif choice.step is not None and "layer" not in exc.facts:
            exc.hint = f"layerstore ingest FOLDER/checkpoint-{choice.step} --run {typed(choice.run or run)}; {exc.hint}"
        raise
