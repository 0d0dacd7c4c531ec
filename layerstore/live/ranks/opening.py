"""Open the store on all ranks, or make it: at a first launch it does not exist, and no rank may act alone."""

from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import AlreadyExists, Conflict, NoStore
from layerstore.layout import is_url, layout_at
from layerstore.live.log import LOG
from layerstore.live.ranks.exchange import Exchange
from layerstore.nearest import did_you_mean, nearest
from layerstore.storage import check_free, hint_at_dropped
from layerstore.store import Store, StrPath, as_store, init

_RUNS_SHOWN_MAX = 10


def store_if_there(store: Store | StrPath) -> Store | None:
    """
    Return *store*, opened; None if it is a path or a URL without a store.

    Raises:
        NoStore: The bucket is missing.
        AlreadyExists: No store could be made at the path: it is a file, or a folder with other content.
        InvalidInput: No store could be made at the path: it is inside another store.
        IntegrityError: There was a store, but its ``store.json`` is lost.
    """
    try:
        return as_store(store)
    except NoStore as exc:
        if type(exc) is not NoStore:
            raise
    assert not isinstance(store, Store), "it is open"
    if not is_url(str(store)):
        files, path = Files(), Path(store)
        try:
            check_free(path, files)
        except AlreadyExists:
            if files.exists(layout_at(path).identity):  # another job has made it in the meantime
                return as_store(store)
            raise
    return None


def open_together(exchange: Exchange, store: Store | StrPath) -> Store | None:
    """
    Return *store*, opened on every rank; None if no rank finds a store.

    Raises:
        NoStore: Only some ranks find the store.
    """
    with exchange.raise_on_all():
        opened = store_if_there(store)
    # None only if no rank finds a store: a rank that fails to see the others' store must not make a second store.
    if not any(exchange.texts("" if opened is None else "there")):
        return None
    with exchange.raise_on_all():
        return opened or as_store(store)  # raises on the ranks that found no store


def make_together(exchange: Exchange, path: StrPath) -> Store:
    """Make *path* a store, on the first rank, and open it on every rank."""
    with exchange.raise_on_all():
        if exchange.rank == 0:
            _make(path)
            LOG.info("made a new store: %s", path)
    with exchange.raise_on_all():
        return _opened_late(path)


def _make(path: StrPath) -> None:
    try:
        init(path).close()
    except (AlreadyExists, Conflict):
        try:
            as_store(path).close()  # another job has made the store in the meantime
        except NoStore:
            pass  # the path has other content, as the first error says
        else:
            return
        raise


def _opened_late(path: StrPath) -> Store:
    """Open the store that another rank has just made; it may become visible late."""
    try:
        return as_store(path)
    except NoStore:
        if not is_url(str(path)) and any(Files().again(layout_at(Path(path)).identity)):
            return as_store(path)
        raise


def log_nothing_yet(store: Store | StrPath, run: str, *, refusal: str = "") -> None:
    """Log that training starts from scratch; warn if *store* has other runs, since *run* may be mistyped."""
    if not isinstance(store, Store):
        LOG.info("there is no store at %s yet: training starts from scratch", store)
    elif (hint := runs_here(store, run)) is None:
        LOG.info("%s has no commit yet: training starts from scratch", store.repo.name)
    else:
        LOG.warning("run %r has no commit yet: training starts from scratch; %s%s", run, hint, refusal)


def runs_here(store: Store, run: str) -> str | None:
    """
    Return the hint for a *run* missing from *store*: that it was dropped, a run with a similar name, or a list of runs.

    Return None if *store* has no other run.
    """
    if store.repo.records.in_trash(run):
        return hint_at_dropped(run)
    runs = store.runs()
    more = f" and {len(runs) - _RUNS_SHOWN_MAX} more" if len(runs) > _RUNS_SHOWN_MAX else ""
    here = f"runs here: {', '.join(runs[:_RUNS_SHOWN_MAX])}{more}"
    return did_you_mean(nearest(run, runs), else_=here) if runs else None
