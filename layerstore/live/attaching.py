"""``layerstore.attach``: check that all ranks have the same settings, and attach a saver."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from layerstore.arguments import checked, show_fields
from layerstore.compose import Composition
from layerstore.errors import Conflict, InvalidInput, LayerstoreError, NotFound, Unsupported
from layerstore.layout import is_url
from layerstore.live.attachable import Attachable, trained_and_levels
from layerstore.live.engine import Engine, NotPlain
from layerstore.live.levels import Levels, OpenLevels, make_levels, open_levels
from layerstore.live.log import LOG
from layerstore.live.ranks import ONE_STORE_HINT, AttemptLock, Exchange, place_resumed
from layerstore.live.resuming import check_run
from layerstore.live.saver import Saver, SaverKeywords, SaverOptions
from layerstore.policy import chosen_policy
from layerstore.store import Store, StrPath, as_store


@checked
def attach(
    engine: object,
    optimizer: object = None,
    store: Store | StrPath | Iterable[StrPath] | None = None,
    *,
    run: str,
    **options: Unpack[SaverKeywords],
) -> Saver:
    """
    Return a saver that saves a DeepSpeed ZeRO engine to run *run* of *store*: ``attach(engine, store, run="sft")``.

    ``attach(model, optimizer, store, run="sft")`` saves a module that trains under FSDP2 (``fully_shard``), under DDP
    or on a single device; pass several optimizers as a list.

    Every rank calls it. The *options* are the fields of `SaverOptions`, such as ``policy="parity"``. If *store* is a
    path without a store, a store is made, unless *create* is False. If *store* is a list, each save goes to the first
    entry, and soon after to the others, as with *push*: ``["/dev/shm/sft", "s3://checkpoints/sft"]``.

    On a run that has commits, this begins a new attempt, whose first save is full. To continue a run, call
    ``layerstore.resume`` first, or load through the engine before the first save. An engine whose saver was closed
    continues from that saver's newest commit; if an error ended its ``with`` block, a new attempt begins. If another
    job is saving the attempt to be continued, the next attempt begins, and a warning names that job. An engine has one
    saver at a time, to which the engine's own saves go, too.

    Raises:
        InvalidInput: *engine* is not one of DeepSpeed's, or a module's optimizer is missing; or the ranks do not see
            the same store, or have different settings.
        NoStore: There is no store and *create* is False; or only some ranks see the store.
        Conflict: *engine* already has a saver, or the ranks see different commits.
        Unsupported: An engine does not train under ZeRO, or state is kept where it cannot be saved.
    """
    trained, levels = trained_and_levels("attach", engine, optimizer, store)
    return attach_with(options_for(levels, options), trained, levels, run=run)


def options_for(levels: Levels, options: SaverKeywords) -> SaverOptions:
    """Return *options*, checked; *push* is set to the levels after the first, if there are any."""
    if not levels.others:
        return SaverOptions(**options)
    if options.get("push") is not None:
        raise InvalidInput("push= is given together with a list of stores", hint="add the push target to the list")
    options["push"] = levels.others
    return SaverOptions(**options)


show_fields(attach, SaverOptions)  # for help(), editors, and argument checking


def attach_with(options: SaverOptions, trained: Attachable, levels: Levels, *, run: str) -> Saver:
    """Attach a saver, as `attach` does, with *options* that were checked when they were made."""
    engine = trained.engine
    if engine.ungated and options.mode == "async":
        options = replace(options, mode="sync")
        LOG.warning("saves are synchronous: %s", engine.ungated)
    exchange = Exchange()
    try:
        opened, resumed = _agreed(exchange, levels, trained, options, run=run)
        assert opened.store is not None, "it was made"
        if opened.near is not None and exchange.rank == 0:
            LOG.info("the ranks of each node save to %s first", levels.first)
        if exchange.rank == 0:
            _warn_of_exact_saves(options)
        attempt = AttemptLock(exchange, opened.store.repo, run=run)
        # If a later step fails, the earlier ones are undone: the engine trains on as if nothing had been attached.
        with ExitStack() as unless_made:
            unless_made.callback(attempt.release)
            place = attempt.acquire(partial(place_resumed, composition=resumed))
            uninstall = trained.install()
            unless_made.callback(uninstall)
            release = partial(_release, trained, uninstall)
            saver = Saver(
                engine,
                opened.store,
                exchange,
                options,
                run=run,
                attempt=attempt,
                place=place,
                release=release,
                near=opened.near,
                places=options.places[opened.depth :],
            )
            trained.binding.saver = saver
            unless_made.pop_all()
    except BaseException:
        exchange.close()
        raise
    return saver


def _warn_of_exact_saves(options: SaverOptions) -> None:
    """Warn if *keep* will at some point leave no exact save: the collection itself would report it only afterwards."""
    keep, every = options.keep, options.exact_every
    # With destinations, *keep* does not apply to the last one, so every exact save stays there.
    if options.precision == "exact" or options.places or keep is None or keep.last is None:
        return
    if keep.every is not None or keep.within is not None or keep.best is not None:
        return  # these rules may keep an exact save
    if every is None:
        LOG.warning(
            "Keep(last=%d) removes the first save, the only exact one: after that, no resume is bit for bit; pin "
            "that save to keep it",
            keep.last,
        )
    elif keep.last < every:
        LOG.warning(
            "Keep(last=%d) removes each exact save before the next exact one, as only one in %d versions of a layer is "
            "exact: at times no resume is bit for bit; raise last, or pin an exact save",
            keep.last,
            every,
        )


def _release(trained: Attachable, uninstall: Callable[[], None], attempt: int | None) -> None:
    uninstall()  # first, so that the engine is restored even if the store can no longer be read
    trained.binding.release(attempt)


def _agreed(
    exchange: Exchange, levels: Levels, trained: Attachable, options: SaverOptions, *, run: str
) -> tuple[OpenLevels, Composition | None]:
    """Return the store and the composition that *trained* continues; raise on all ranks if settings differ."""
    opened = open_levels(exchange, levels, run)
    store, places = opened.store, options.places[opened.depth :]
    with exchange.raise_on_all():
        check_run(store, run)
        if store is None and not options.create:
            as_store(levels.first)  # raises
        attached = trained.binding.saver
        if attached is not None:
            raise Conflict(f"a saver for run {attached.run!r} is attached already", hint="close that saver first")
        check_places(store, places)
    trained.meet(exchange)
    with exchange.raise_on_all():  # a separate block: all ranks must enter it, as DeepSpeed's code may be collective
        _check_saves(trained.engine, options)
    settings = exchange.texts(_same_on_all_ranks(options, run))
    for rank, other in enumerate(settings):
        if other != settings[0]:
            raise InvalidInput(
                f"the ranks have different settings: rank 0 has {settings[0]}; rank {rank} has {other}",
                hint="pass the same arguments on every rank",
            )
    # Only now, so that no store is made for a job whose ranks disagree, or whose engine cannot be saved.
    if store is None:
        opened = open_levels(exchange, levels, run, makes=True)
        store = opened.store
        assert store is not None, "it was made"
    with exchange.raise_on_all():
        resumed = trained.binding.composition_in(store)
        store.repo.prepare_saving()
        keep = options.keep
        if store.repo.remote is not None and keep is not None and keep.drop_optimizer_older_than is not None:
            raise Unsupported(
                "a remote's commits keep their moments", hint="leave drop_optimizer_older_than out, or save to a disk"
            )
        if exchange.rank == 0:
            make_levels(store, places)
    stores = exchange.texts(f"{store.id} at {store.repo.name}")
    for rank, other in enumerate(stores):
        if other.split()[0] != stores[0].split()[0]:
            raise InvalidInput(
                f"the ranks have different stores: rank 0 has {stores[0]}, rank {rank} has {other}",
                hint=ONE_STORE_HINT,
            )
    # Continue only if all ranks know the last commit: some may have failed to read it when the previous saver ended.
    know_it = exchange.sums([float(resumed is not None)]) == [exchange.size]
    return opened, resumed if know_it else None


def _same_on_all_ranks(options: SaverOptions, run: str) -> str:
    policy = chosen_policy(options.policy)
    return (
        f"run {run}, mode {options.mode}, on_pressure {options.on_pressure}, frozen {options.frozen}, "
        f"push {', '.join(options.places)}, durable {options.durable}, policy {policy.name} {policy.parameters}, "
        f"precision {options.precision}, exact_every {options.exact_every}"
    )


def check_places(store: Store | None, places: Sequence[str]) -> None:
    """Raise unless saves to *store* can be sent to *places*; a store that does not exist yet has no named remotes."""
    if places and store is not None and store.repo.remote is not None:
        raise InvalidInput(f"push= is for a store on a disk: {store.repo.remote} is a bucket", hint="leave push= out")
    for place in places:
        if Path(place).is_absolute():
            continue
        if store is not None:
            store.remotes.url(place)
        elif is_url(place):
            from layerstore.remote import checked_url

            checked_url(place)
        else:
            raise NotFound(f"there is no remote {place!r}: the store does not exist yet", hint="give the bucket's URL")


def _check_saves(engine: Engine, options: SaverOptions) -> None:
    """Raise now any error that the first save of *engine*, perhaps hours later, would raise."""
    policy = chosen_policy(options.policy)
    try:
        captured = engine.capture("first-save", {}, pattern=options.pattern, exclude_frozen=options.excludes_frozen)
        if getattr(policy, "measures", False) and any(layer.cut == "boxes" for layer in captured.share.layers):
            raise Unsupported(
                f"policy {policy.name} cannot measure the movement of layers that tensor parallelism has split",
                hint="use another policy, or save every layer",
            )
    except NotPlain as exc:
        raise Unsupported(f"this training cannot be saved: {exc}", hint="use plain values and tensors instead") from exc
    except LayerstoreError as exc:
        exc.locate("this training cannot be saved")
        raise
