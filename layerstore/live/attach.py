"""``layerstore.attach``: check that the ranks want the same, and give the engine a saver."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from layerstore.arguments import checked
from layerstore.compose import Composition
from layerstore.errors import Conflict, InvalidInput, LayerstoreError, NotFound, Unsupported
from layerstore.layers import compile_pattern
from layerstore.layout import is_url
from layerstore.live.deepspeed import FOLDER, Engine, capture, checkpoint_engine_of, filled_with, place_resumed
from layerstore.live.engine import NotPlain
from layerstore.live.log import LOG
from layerstore.live.ranks import AttemptLock, Exchange, make_together, open_together
from layerstore.live.resume import check_run
from layerstore.live.saver import Durable, Frozen, Mode, Pressure, Saver, Settings
from layerstore.policy import Keep, Policy, chosen_policy
from layerstore.publish import SaveTiming
from layerstore.store import Store, StrPath, as_store


@checked
def attach(
    engine: object,
    store: Store | StrPath,
    *,
    run: str,
    policy: str | Policy = "latest",
    mode: Mode = "async",
    host_buffer: int | str = "auto",
    on_pressure: Pressure = "wait",
    keep: Keep | None = None,
    push: str | None = None,
    durable: Durable = "local",
    frozen: Frozen = "once",
    layer_pattern: str | None = None,
    on_saved: Callable[[SaveTiming], None] | None = None,
    on_failed: Callable[[SaveTiming], None] | None = None,
    create: bool = True,
) -> Saver:
    """
    Return a saver of *engine*, a DeepSpeed engine under ZeRO, into *store* as run *run*.

    Every rank calls it. *policy* says which layers are due at each save; see docs/guides/policies.md.
    With *mode* ``sync``, every ``save`` waits until it is durable. *host_buffer* limits the memory for copies on this
    host, in bytes or as ``"8GB"``. *on_pressure* says what to do when the disk does not keep up: ``wait`` for it,
    ``skip`` a save, or ``degrade`` it to as many layers as fit. *frozen* weights are written ``once``, or left out.
    *keep* says which commits of the run to keep: after each save, the others are collected in the background. *push* is
    a remote's name or URL: after each save, the run is pushed there in the background, and *keep* removes only what the
    remote has. With *durable* ``remote``, a save counts as safe only once the remote has it, and ``wait`` and ``sync``
    saves return then. *on_saved* is called on rank 0, in its training thread, with the timing of each save that became
    a commit, *on_failed* with that of each that came to nothing, which says why. If *store* is a path without a store,
    one is made there, unless *create* is False.

    On a run that has commits, this begins a new attempt, whose first save is full. To continue a run, call
    ``layerstore.resume`` first, or load through the engine before the first save. An engine whose saver was closed
    continues from that saver's newest commit; if an error ended its ``with`` block, a new attempt begins. If another
    job is saving the attempt to be continued, the next attempt begins, and a warning names that job. An engine has one
    saver at a time, which also gets the engine's own saves.

    Raises:
        InvalidInput: *engine* is not a DeepSpeed engine, or the ranks do not see the same store.
        NoStore: There is none, and *create* is False, or only some ranks see it.
        Conflict: *engine* already has a saver, or the ranks see different commits.
        Unsupported: It does not train under ZeRO, or keeps state where it cannot be saved.
    """
    settings = Settings(
        mode=mode,
        host_buffer=host_buffer,
        on_pressure=on_pressure,
        frozen=frozen,
        layer_pattern=layer_pattern,
        keep=keep,
        push=push,
        durable=durable,
        on_saved=on_saved,
        on_failed=on_failed,
        create=create,
    )
    known = Engine(engine)
    if known.ungated and mode == "async":
        settings = replace(settings, mode="sync")
        LOG.warning("saves are synchronous: %s", known.ungated)
    return _attached(known, store, settings, run=run, policy=chosen_policy(policy))


def _attached(engine: Engine, store: Store | StrPath, settings: Settings, *, run: str, policy: Policy) -> Saver:
    exchange = Exchange()
    try:
        opened, resumed = _agreed(exchange, store, engine, run=run, settings=settings, policy=policy)
        attempt = AttemptLock(exchange, opened.repo, run=run)
        with ExitStack() as unless_made:
            unless_made.callback(attempt.release)
            place = attempt.acquire(partial(place_resumed, composition=resumed))
            saver = Saver(engine, opened, exchange, settings, run=run, policy=policy, attempt=attempt, place=place)
            unless_made.pop_all()
    except BaseException:
        exchange.close()
        raise
    return saver


def _agreed(
    exchange: Exchange, store: Store | StrPath, engine: Engine, *, run: str, settings: Settings, policy: Policy
) -> tuple[Store, Composition | None]:
    """Return the store and what *engine* continues from; raise on every rank unless all want the same."""
    opened = open_together(exchange, store)
    with exchange.together():
        check_run(opened, run)
        if opened is None and not settings.create:
            as_store(store)  # raises
        attached = checkpoint_engine_of(engine).saver
        if attached is not None:
            raise Conflict(f"the engine has a saver for run {attached.run!r} already", hint="close that one first")
        check_push(opened, settings.push)
    with exchange.together():  # by itself: DeepSpeed's part of it may need all ranks
        _check_saves(engine, settings)
    wishes = exchange.texts(f"run {run}, {settings.of_all_ranks}, policy {policy.name} {policy.parameters}")
    for rank, other in enumerate(wishes):
        if other != wishes[0]:
            raise InvalidInput(f"the ranks want different things: rank 0 {wishes[0]}; rank {rank} {other}")
    if opened is None:
        opened = make_together(exchange, str(store))
    with exchange.together():
        resumed = filled_with(engine.engine, opened)
        opened.repo.prepare_writing()
        if settings.push is not None and engine.rank == 0:
            opened.check_remote(settings.push)
    stores = exchange.texts(f"{opened.id} at {opened.path}")
    for rank, other in enumerate(stores):
        if other.split()[0] != stores[0].split()[0]:
            raise InvalidInput(f"the ranks have different stores: rank 0 has {stores[0]}, rank {rank} has {other}")
    return opened, resumed


def check_push(store: Store | None, push: str | None) -> None:
    """Raise unless *push* is a remote of *store*, which has none but URLs if it is yet to be made."""
    if push is None:
        return
    if store is not None:
        store.remotes.url(push)
    elif is_url(push):
        from layerstore.remote import checked_url

        checked_url(push)
    else:
        raise NotFound(f"there is no remote {push!r}: the store is yet to be made", hint="push=URL names a bucket")


def _check_saves(engine: Engine, settings: Settings) -> None:
    """Raise what the first save would refuse of *engine*, which may be hours from now."""
    states = engine.states("first-save", {}, exclude_frozen=settings.frozen == "exclude")
    try:
        capture(states, rank=engine.rank, folder=FOLDER, pattern=compile_pattern(settings.layer_pattern))
    except NotPlain as exc:
        raise Unsupported(f"the engine cannot be saved: {exc}", hint="keep plain values and tensors there") from exc
    except LayerstoreError as exc:
        exc.locate("the engine cannot be saved")
        raise
