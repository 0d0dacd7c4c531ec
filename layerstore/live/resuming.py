"""
Resume: fill an engine or a module from the store, without writing shards to disk.

DeepSpeed's own loader does the work, fed from memory, so that persistent parameters, half-precision copies and
everything else that depends on the masters come out right. A module's tensors are its masters, so they are filled
directly. A policy chooses the version of each layer.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from layerstore.arguments import checked
from layerstore.compose import naming_damage
from layerstore.composite import Composite
from layerstore.errors import Conflict, IntegrityError, InvalidInput, NotFound
from layerstore.layers import check_name, parse_reference
from layerstore.live.attachable import Attachable, Loading, trained_and_levels
from layerstore.live.binding import wait_for_saves
from layerstore.live.engine import set_random_state
from layerstore.live.levels import open_levels
from layerstore.live.log import LOG
from layerstore.live.ranks import DIFFERENT_COMMITS_HINT, Exchange, log_nothing_yet, runs_here
from layerstore.policy import Policy
from layerstore.rank_options import AdamStep
from layerstore.storage import RunView
from layerstore.store import Store, StrPath, as_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The result of `resume`."""

    run: str
    step: int
    """The step of the base commit, as the trainer counts."""
    global_steps: int
    """DeepSpeed's own counter, like the next two fields; for a module, this is the step, and the next two are 0."""
    global_samples: int
    skipped_steps: int
    client_state: dict[str, Any]
    """The *client_state* that was passed to ``save``."""
    layers: dict[str, int]
    """The step at which each layer's version was saved."""
    random_state_restored: bool
    notes: tuple[str, ...]
    """Notes on layers older than the base or not kept bit for bit; then on everything that did not carry over."""


@checked
def resume(
    engine: object,
    optimizer: object = None,
    store: Store | StrPath | Iterable[StrPath] | None = None,
    *,
    run: str,
    step: int | Literal["latest"] = "latest",
    policy: str | Policy = "latest",
    adam_step: AdamStep = "unify",
    like: str | None = None,
    exact: bool = False,
    must_exist: bool = False,
) -> Resumed | None:
    """
    Fill *engine* from run *run* of *store*, at the engine's own world size: ``resume(engine, store, run="sft")``.

    ``resume(model, optimizer, store, run="sft")`` fills a module and its optimizer, on any mesh, whichever trainer
    saved the commit. ``run="sft~1"`` resumes the attempt before the newest.

    Return None, and log a line, at the first launch, when the run has no commit or the path has no store. If *store* is
    a list, nearest first, the newest step in any of its stores is resumed, and read from the nearest store that has it.
    Every rank calls this. A saver that is attached afterwards continues the newest attempt if the resumed step was that
    attempt's newest; otherwise the saver opens the next attempt. *policy* chooses the version of each layer, as of
    *step*; with *exact*, the newest save up to *step* that was kept bit for bit is used instead. If DeepSpeed continues
    a commit saved by FSDP2, DeepSpeed's own state comes from the commit *like*, by default the newest earlier commit
    that DeepSpeed saved; its counters are advanced by the updates since.

    Raises:
        NotFound: The step does not exist; or, with *must_exist*, the run has no commit or the path no store.
        Conflict: *run* is the name of a pin.
        LayoutMismatch: The layers do not fit this engine.
        InvalidInput: Gradients are being accumulated for an update that is still to come.
    """
    trained, levels = trained_and_levels("resume", engine, optimizer, store)
    first_level = levels.first
    attempt, run = run, run if "@" in run else run.partition("~")[0]
    trained.settle()  # first: the requested step may not have reached the store yet
    with closing(Exchange()) as exchange:
        opened = open_levels(exchange, levels, run).store
        with exchange.raise_on_all():
            check_run(opened, run)
            if opened is None and must_exist:
                as_store(first_level)  # raises
            if opened is not None:
                wait_for_saves(opened.id, run)
        if opened is None:
            if exchange.rank == 0:
                log_nothing_yet(first_level, run)
            return None
        composite, commits = exchange.agree_on(
            partial(_composite, opened, run, attempt, step=step, policy=policy, exact=exact, must_exist=must_exist),
            _commit_of,
            may_be_late=opened.repo.aside.is_on_network,
        )
        if isinstance(composite, NotFound):
            raise composite
        if set(commits) != {commits[0]}:
            raise IntegrityError("the ranks resume from different commits", hint=DIFFERENT_COMMITS_HINT)
        if composite is None:
            if exchange.rank == 0:
                log_nothing_yet(opened, run, refusal="; resume(…, must_exist=True) raises instead")
            return None
        composition = composite.composition
        # Every rank reads and checks its part before any engine changes: a failed resume leaves all engines unchanged.
        with exchange.raise_on_all(), naming_damage(opened.repo, composition, resumes=True):
            loading = trained.read(exchange, opened, composition, adam_step=adam_step, like=like)
        trained.fill(loading.fill, exchange)
        if exchange.rank == 0 and step == "latest" and attempt == run:
            _warn_of_further(opened.repo.catalog.view(run), composite.step)
    return _resumed(trained, composite, loading)


def _resumed(trained: Attachable, composite: Composite, loading: Loading) -> Resumed:
    """Restore the random state; return the result of `resume`."""
    trained.warn(composite.name, *loading.notes)
    is_restored = loading.random_state is not None and set_random_state(loading.random_state)
    updates, samples, skipped = loading.counters
    return Resumed(
        run=composite.run,
        step=composite.step,
        global_steps=updates,
        global_samples=samples,
        skipped_steps=skipped,
        client_state=loading.client_state,
        layers={layer: choice.step for layer, choice in composite.layers.items()},
        random_state_restored=is_restored and composite.world_size == trained.engine.world_size,
        notes=loading.notes,
    )


def check_run(store: Store | None, run: str) -> None:
    """
    Make sure that *run* can be the name of a run; *store* is None if it does not exist yet.

    Raises:
        InvalidInput: *run* is a reference to a step, or not a name at all.
        Conflict: *run* is the name of a pin.
    """
    reference = parse_reference(run) if {"@", "~"} & set(run) else None
    if reference is not None:
        step = "" if reference.step is None else f", step={reference.step}"
        raise InvalidInput(
            f"{run!r} is not a run but a reference",
            hint=f'write run="{run.partition("@")[0] if step else reference.name}"{step}; '
            "layerstore.transformers.checkpoint accepts references",
        )
    check_name(run, what="the run's name")
    if store is not None and run in store.repo.records.pin_names() and not store.repo.records.names(run):
        raise Conflict(
            f"{run!r} is a pin; runs and pins share their names",
            hint="give the name of a run; layerstore.transformers.checkpoint accepts a pin",
        )


def _warn_of_further(view: RunView, step: int) -> None:
    """Warn if the resumed attempt began from scratch, perhaps by mistake, and an earlier attempt got further."""
    attempts = view.attempts
    if view.fork_of(attempts[-1]) is not None:
        return
    for back, attempt in enumerate(reversed(attempts)):
        newest = view.of_attempt(attempt)[-1]
        if newest.step > step:
            LOG.warning(
                "attempt %d of %s began from scratch, but attempt %d reached step %d: resume(…, run=%r) continues it",
                attempts[-1],
                view.run,
                attempt,
                newest.step,
                f"{view.run}~{back}",
            )
            return


def _composite(
    store: Store,
    run: str,
    attempt: str,
    *,
    step: int | Literal["latest"],
    policy: str | Policy,
    exact: bool,
    must_exist: bool,
) -> Composite | NotFound | None:
    store.repo.records.refresh()
    view = store.repo.catalog.find(run)
    if view is None or not view.rows:
        return NotFound(f"run {run!r} has no commit to resume from", hint=runs_here(store, run)) if must_exist else None
    try:
        return store.compose(attempt if step == "latest" else f"{attempt}@{step}", policy=policy, exact=exact)
    except NotFound as exc:
        return exc  # not raised: another host may already see the commit, so the ranks may look again


def _commit_of(composite: Composite | NotFound | None) -> str:
    """Return the text that ranks compare: the commit's id, or an empty string if there is no commit."""
    return composite.commit if isinstance(composite, Composite) else ""
