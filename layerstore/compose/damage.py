"""Damage in a composition: errors name the layer and what helps, or older versions take its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from layerstore.compose.choose import Composition, difference
from layerstore.errors import DAMAGED_HINT, Conflict, IntegrityError, LayerstoreError, NotFound
from layerstore.history import named_by, objects_of_state, references_to, saved_at, saves_below
from layerstore.layers import typed
from layerstore.model import BlobRef, LayerEntry
from layerstore.storage import RecordRow, Repository


@contextmanager
def losses_told(repo: Repository, composition: Composition, *, resumes: bool = False) -> Iterator[None]:
    """
    Name the layer in errors of the body, which reads the parts of *composition*; what *resumes* has no checkpoint.

    Raises:
        Conflict: A commit that it was chosen from was collected or dropped meanwhile.
        IntegrityError: Something is damaged or missing; the message names the layer.
    """
    try:
        yield
    except (IntegrityError, NotFound) as exc:
        base = composition.base
        if not all(repo.records.is_listed(name) for name, _ in composition.chosen_from):
            raise Conflict(
                f"a part of {base.run}@{base.step} was collected while it was read; nothing was written",
                hint=f"layerstore log {typed(base.run)} lists what is kept; repeat the command if it is there",
            ) from exc
        lost = exc.facts.get("object_id")
        if isinstance(exc, IntegrityError) and isinstance(lost, str):
            _locate(repo, composition, lost, exc, resumes=resumes)
        raise


def _locate(repo: Repository, composition: Composition, lost: str, exc: IntegrityError, *, resumes: bool) -> None:
    """Prefix *exc* with the layer that *lost* an object, and append the remedy."""
    base, entry = composition.base, next((each for each in composition.entries if _has(repo, each.version, lost)), None)
    [called] = of_base = references_to(repo, [base])
    if entry is not None:
        [called] = references_to(repo, [entry.origin])
    exc.locate(called if entry is None else f"{entry.layer} of {called}")
    if entry is not None and saved_at(repo, entry.origin) is None:
        [called] = of_base  # the layer has outlived the commit that saved it
    option = " --read-data" if exc.hint == DAMAGED_HINT else ""  # a missing object is found without reading
    # A pin's base may be gone; then there is no reference to narrow the command by.
    narrow = f" {typed(called)}" if saved_at(repo, base) is not None else ""
    verify = f"layerstore verify{narrow}{option}"
    earlier = _earlier_exact(repo, composition, entry) if composition.wants_exact else None
    if resumes:
        step = "…" if earlier is None else f"{earlier.step}, exact=True"
        repair = f"layerstore repair{option} --from COPY"
        intact = f"layerstore verify{option} names the newest intact one"
        exc.hint = f"resume(…, step={step}) takes an earlier step: {intact}; or {repair}"
        return
    if earlier is not None:
        [called] = references_to(repo, [earlier])
        older = f"compose {typed(called)} --exact takes an earlier exact save; "
    else:
        older = "" if entry is None or composition.wants_exact else "compose --without-damaged takes older versions; "
    exc.hint = f"{verify} says which composites still stand; {older}or {exc.hint}"


def _earlier_exact(repo: Repository, composition: Composition, lost: LayerEntry | None) -> RecordRow | None:
    """Return the newest exact save below the base that does not have the version that is *lost*, None if none is."""
    base = composition.base
    view = repo.catalog.find(base.run)
    try:
        for row in [] if view is None else saves_below(view, attempt=base.attempt, step=base.step):
            if row.is_exact and (
                lost is None or lost.version not in [of.version for of in row.entries([lost.layer]).values()]
            ):
                return row
    except LayerstoreError:
        pass  # a record below it is damaged, too: verify tells it
    return None


def _has(repo: Repository, version: BlobRef, lost: str) -> bool:
    try:
        return version.id == lost or any(ref.id == lost for ref in named_by(repo, version))
    except IntegrityError:
        return False  # the blob itself is lost, so its objects were never read


def without_damaged(repo: Repository, composition: Composition) -> Composition:
    """
    Replace each damaged layer by an older version: the newest sound one in the history below the base.

    Reads every byte of the chosen versions.

    Raises:
        IntegrityError: A layer has no sound version that fits, or something other than a layer is damaged.
    """
    base = composition.base
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
        called, instead = references_to(repo, [entry.origin, older.origin])
        notes.append(f"{entry.layer} of {called} is damaged: its version of {instead} is used")
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
        like = None
    seen = {damaged.version}
    for row in [] if view is None else saves_below(view, attempt=base.attempt, step=base.step):
        entry = row.entries([damaged.layer]).get(damaged.layer)
        if entry is None or entry.version in seen:
            continue
        seen.add(entry.version)
        if _problem(repo, entry) is None and (like is None or difference(like, repo.version_of(entry)) is None):
            repo.catalog.check(row.name, [entry])
            return entry
    return None
