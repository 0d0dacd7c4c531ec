"""Pins: a user's names for commits. Each pin holds the whole record, so it outlives the commit."""

from layerstore.errors import AlreadyExists, Conflict, IntegrityError, InvalidInput, LayerstoreError
from layerstore.history import Resolved, reference_to
from layerstore.layers import check_name, typed
from layerstore.model import CommitId, CommitRecord, Observed, Pin
from layerstore.publish.transaction import Transaction
from layerstore.storage import Repository


def check_pin_name(repo: Repository, name: str) -> None:
    """Raise InvalidInput or Conflict if *name* can never be a pin's name."""
    check_name(name, what="the pin's name")
    if repo.records.names(name):
        raise Conflict(f"{name!r} is the name of a run; runs and pins share their names", hint="choose another name")


def check_pin_free(repo: Repository, name: str, *, run: str, step: int) -> None:
    """Raise if *name* could not become a pin of ``RUN@STEP``, which is about to be saved."""
    if name == run:
        raise InvalidInput(f"{name!r} cannot name both the run and a pin", hint="choose another --pin or --run")
    if name in repo.records.pin_names():
        old = repo.records.read_pin(name).record
        if (old.run, old.step) != (run, step):
            raise _taken(repo, name, old)


def check_pin_means(repo: Repository, name: str, commit: CommitId) -> None:
    """Raise AlreadyExists if the pin *name*, about to be made for *commit*, already exists for another commit."""
    if name in repo.records.pin_names():
        old = repo.records.read_pin(name)
        if old.base != commit:
            raise _taken(repo, name, old.record)


def _taken(repo: Repository, name: str, old: CommitRecord) -> AlreadyExists:
    return AlreadyExists(
        f"pin {name!r} already refers to {reference_to(repo, old)}",
        hint=f"layerstore pin --delete {typed(name)}, or choose another name",
    )


def make_pin(repo: Repository, name: str, resolved: Resolved) -> Pin:
    """Pin *resolved* as *name*."""
    repo.prepare_saving()
    check_pin_name(repo, name)
    new = Pin(
        name=name,
        record=resolved.record,
        base=CommitId(resolved.commit),
        observed=Observed(time_ns=resolved.time_ns, bytes_new=0, bytes_reused=0),
    )
    if name in repo.records.pin_names():
        try:
            old = repo.records.read_pin(name)
        except IntegrityError as exc:
            raise IntegrityError(str(exc), hint=f"layerstore pin --delete {typed(name)} removes it") from exc
        if (old.record, old.base) == (new.record, new.base):
            return old
        raise _taken(repo, name, old.record)
    # Two hosts that make the same pin at once both get this far, but only one can link it.
    with Transaction(repo) as tx:
        tx.pin(new)
    return new


def delete_pin(repo: Repository, name: str) -> bool | None:
    """Delete the pin *name*; return whether its commit is visible, None if the pin could not be read."""
    repo.prepare_saving()
    shows = shows_pinned(repo, name)  # before the pin is deleted: nothing else records its commit
    repo.records.delete_pin(name)
    return shows


def shows_pinned(repo: Repository, name: str) -> bool | None:
    """Whether the commit that the pin *name* was made from is visible; None if the pin cannot be read."""
    try:
        pin = repo.records.read_pin(name)
        view = repo.catalog.find(pin.record.run)
        return view is not None and any(row.id == pin.base for row in view.visible)
    except LayerstoreError:
        return None  # a damaged pin can still be deleted
