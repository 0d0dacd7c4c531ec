"""Replace the damaged layers of a composition with older versions."""

from dataclasses import replace

from layerstore.compose.choose import Composition, difference
from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.history import objects_of_state, references_to, saves_below
from layerstore.model import LayerEntry
from layerstore.storage import Repository


def without_damaged(repo: Repository, composition: Composition) -> Composition:
    """
    Replace each damaged layer with its newest sound version in the history below the base.

    Reads every byte of the chosen versions.

    Raises:
        IntegrityError: A layer has no sound version that fits, or something other than a layer is damaged.
    """
    base = composition.base
    # First check the states, which no older version can replace.
    for state in base.states:
        for ref in (state, *objects_of_state(repo.state(state))):
            repo.objects.verify(ref)
    layers: list[LayerEntry] = []
    notes = []
    for entry in composition.layers:
        problem = _problem(repo, entry)
        if problem is None:
            layers.append(entry)
            continue
        older = _older(repo, composition, entry)
        if older is None:
            problem.locate(f"{entry.layer} of {base.run}@{base.step} has no older version that is sound and fits")
            raise problem
        damaged_name, older_name = references_to(repo, [entry.origin, older.origin])
        notes.append(f"{entry.layer} of {damaged_name} is damaged: its version of {older_name} is used")
        layers.append(older)
    return replace(composition, layers=tuple(layers), notes=(*composition.notes, *notes))


def _problem(repo: Repository, entry: LayerEntry) -> LayerstoreError | None:
    """Return what is wrong with the version of *entry*; None if every byte is intact."""
    try:
        for stored in repo.version_of(entry).named:
            repo.objects.verify(stored.ref)
    except IntegrityError as exc:
        return exc
    return None


def _older(repo: Repository, composition: Composition, damaged: LayerEntry) -> LayerEntry | None:
    """Return the layer's newest other version in the base's history that is sound and, as far as known, fits."""
    base = composition.base
    view = repo.catalog.find(base.run)
    try:
        like = repo.version_of(damaged)
    except IntegrityError:
        like = None  # not even its blob can be read: nothing to compare with
    seen = {damaged.version}
    for row in [] if view is None else saves_below(view, attempt=base.attempt, step=base.step):
        entry = row.entries([damaged.layer]).get(damaged.layer)
        if entry is None or entry.version in seen:
            continue
        # Saves that inherit a version list it again; it is read only once, since reading takes long.
        seen.add(entry.version)
        if _problem(repo, entry) is None and (like is None or difference(like, repo.version_of(entry)) is None):
            # The row comes from the index, so make sure that the record agrees.
            repo.catalog.check(row.name, [entry])
            return entry
    return None
