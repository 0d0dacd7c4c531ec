"""
The store: opens the rooms and hands out the verbs.

    store = layerstore.open("runs/store")
    commit = store.ingest("out/checkpoint-200", run="sft")
    store.compose("sft@200").write("resume")
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.export.hf import MAX_SHARD_SIZE
from layerstore.model import LayerEntry, Pin, Saving
from layerstore.ops import compose as compose_verb
from layerstore.ops import diff as diff_verb
from layerstore.ops import drop as drop_verb
from layerstore.ops import export as export_verb
from layerstore.ops import ingest as ingest_verb
from layerstore.ops import pins as pin_verb
from layerstore.ops import queries
from layerstore.ops import stats as stats_verb
from layerstore.ops import verify as verify_verb
from layerstore.ops.compose import Written
from layerstore.ops.composition import Composition, as_resolved, check_members, compose_by_policy, compose_exact
from layerstore.ops.diff import Diff
from layerstore.ops.drop import Dropped
from layerstore.ops.export import Exported, ExportPlan
from layerstore.ops.ingest import Ingested
from layerstore.ops.progress import Progress, Silent
from layerstore.ops.queries import CommitView, LayerLine, LogEntry, LogPage
from layerstore.ops.ranks import AdamStep
from layerstore.ops.recipes import compose_by_recipe, read_recipe
from layerstore.ops.refs import reference_to, references_to, resolve
from layerstore.ops.rooms import Rooms
from layerstore.ops.setup import make_store, open_rooms
from layerstore.ops.staleness import Staleness, check_staleness
from layerstore.ops.stats import Stats
from layerstore.ops.summary import summary
from layerstore.ops.tensors import Tensors, open_tensors
from layerstore.ops.verify import Verdict
from layerstore.policy import EXACT, Policy, checked, policy_named
from layerstore.storage.files import Files, Hook, no_hook
from layerstore.zero3.survey import Survey, survey

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Where one layer of a composite comes from."""

    run: str
    step: int
    version: str
    """The id of the layer's version."""


class Composite:
    """The answer to a query: a version for each layer and a base for all else. Nothing is written yet."""

    def __init__(self, rooms: Rooms, composition: Composition) -> None:
        self._rooms = rooms
        self._composition = composition

    @property
    def run(self) -> str:
        """The base's run."""
        return self._composition.base.run

    @property
    def step(self) -> int:
        """The base's step."""
        return self._composition.base.step

    @property
    def commit(self) -> str:
        """The base's id."""
        return self._composition.commit

    @property
    def policy(self) -> str:
        """The policy that chose the layers."""
        return self._composition.policy

    @property
    def world_size(self) -> int:
        """How many ranks the base was saved by."""
        return self._composition.base.world_size

    @property
    def name(self) -> str:
        """The reference that means the base and no other commit: ``RUN~1@STEP`` if its attempt was left."""
        return reference_to(self._rooms, self._composition.base)

    def names_of(self, saves: Iterable[Saving]) -> list[str]:
        """Return such a reference for each of *saves*."""
        return references_to(self._rooms, saves)

    @property
    def layers(self) -> dict[str, LayerChoice]:
        """Every layer, in the model's order, and where it comes from."""
        return {entry.layer: _choice(entry) for entry in self._composition.layers}

    @property
    def staleness(self) -> Staleness:
        """How old each layer is, seen from the base."""
        return self._composition.staleness

    @property
    def older_than_due(self) -> tuple[str, ...]:
        """Layers that were due where they are taken from, and were not written there: an older version stands in."""
        return self._composition.older_than_due

    @property
    def recipe_notes(self) -> tuple[str, ...]:
        """What the recipe leaves to defaults, and what of it has no meaning here."""
        return self._composition.notes

    def summary(self) -> dict[str, object]:
        """Return all of this for programs, as it is written to ``layerstore.json`` beside the shards."""
        return summary(self._composition)

    def check(self, *, max_staleness: int | None = None) -> None:
        """
        Make sure that the layers fit together, and that none is more than *max_staleness* steps older than the base.

        Raises:
            LayoutMismatch: A layer is not of the base's parameters, shapes, types, ties or optimizer state.
            Conflict: A layer is too old.
        """
        if max_staleness is not None:
            check_staleness(self._composition.base, self.staleness, steps_max=max_staleness)
        check_members(self._rooms, self._composition)

    def pin(self, name: str) -> Pin:
        """Keep this composite under *name*: it outlives the commits that it was made from."""
        self.check()
        return pin_verb.pin(self._rooms, name, as_resolved(self._composition))

    def ls(self) -> list[LayerLine]:
        """Return every layer with its sizes."""
        return [queries.layer_line(self._rooms, entry) for entry in self._composition.layers]

    def notes(self, *, world_size: int | None = None, adam_step: AdamStep = "unify") -> tuple[str, ...]:
        """Return, in plain sentences, what would not carry over; raises as ``write`` would."""
        return compose_verb.notes_of(self._rooms, self._composition, world_size=world_size, adam_step=adam_step)

    def write(
        self,
        out: StrPath,
        *,
        world_size: int | None = None,
        adam_step: AdamStep = "unify",
        verify: bool = True,
        durable: bool = True,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Written:
        """
        Write ZeRO-3 shards to the folder *out*, which appears whole or not at all.

        They are for *world_size* ranks, by default as many as saved the base; what cannot go along to another
        number is in the result's ``notes``. The optimizer's step counters are the base's, or with *adam_step*
        ``per-layer`` each layer's own, where a param group per layer allows that.
        Every byte read is verified unless *verify* is False; a power cut cannot tear the folder
        unless *durable* is False; a folder that is there is only replaced with *force*.
        """
        return compose_verb.execute_compose(
            self._rooms,
            self._composition,
            Path(out),
            world_size=world_size,
            adam_step=adam_step,
            verify=verify,
            durable=durable,
            force=force,
            progress=progress or Silent(),
        )

    def tensors(self, kind: str = "master", *, state: str | None = None, verify: bool = True) -> Tensors:
        """
        Return the tensors of one *kind* as read-only arrays by name, mapped from the objects where they lie together.

        *kind* is ``master``, ``optimizer``, ``weights`` or ``buffers``; of weights there are only those that do not
        follow from their master. *state* is one of the optimizer's, such as ``exp_avg``; without it all are there,
        as ``exp_avg/NAME``. Nothing of a tensor is read before it is asked for, and then verified first.
        """
        versions = (self._rooms.version_of(entry) for entry in self._composition.layers)
        return open_tensors(self._rooms.objects, versions, kind=kind, state=state, verify=verify)

    def plan_export(self, *, dtype: str | None = None, max_shard_size: int | str = MAX_SHARD_SIZE) -> ExportPlan:
        """Return what `export` would write; nothing is written."""
        return export_verb.plan_export(self._rooms, self._composition, dtype=dtype, max_shard_size=max_shard_size)

    def export(
        self,
        out: StrPath,
        *,
        dtype: str | None = None,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        verify: bool = True,
        durable: bool = True,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Exported:
        """
        Write the weights to the folder *out* as Transformers' ``from_pretrained`` loads them.

        *dtype* is ``bf16``, ``fp16`` or ``fp32``, by default the one that each parameter is trained in.
        No file has more than *max_shard_size* of tensors, bytes or a text such as ``"2GiB"``, unless one tensor has.
        The optimizer's objects are not touched. The rest is as for `write`.
        """
        return export_verb.execute_export(
            self._rooms,
            self.plan_export(dtype=dtype, max_shard_size=max_shard_size),
            Path(out),
            verify=verify,
            durable=durable,
            force=force,
            progress=progress or Silent(),
        )


def _choice(entry: LayerEntry) -> LayerChoice:
    return LayerChoice(run=entry.origin.run, step=entry.origin.step, version=entry.version.id)


class Store:
    """
    A store of checkpoints. Safe to share between threads; close it when done, or use it in a ``with``.

    A reference (*ref*) is ``RUN@STEP``, ``RUN`` (its newest step), ``RUN~1`` (the attempt before) or a pin's name;
    None means the newest step of the store's only run.
    """

    def __init__(self, path: StrPath, *, hook: Hook = no_hook) -> None:
        self._rooms = open_rooms(Path(path), Files(hook))

    @property
    def path(self) -> Path:
        """Where the store is, links resolved."""
        return self._rooms.layout.root

    @property
    def rooms(self) -> Rooms:
        """Its open rooms, for `layerstore.live`."""
        return self._rooms

    @property
    def id(self) -> str:
        """The store's own id."""
        return self._rooms.identity.store_id

    @property
    def runs(self) -> list[str]:
        """The runs that have commits."""
        return self._rooms.catalog.runs()

    def close(self) -> None:
        """Release what the store holds open; twice is harmless."""
        self._rooms.catalog.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ingest(
        self,
        checkpoint: StrPath,
        *,
        run: str | None = None,
        tag: str | None = None,
        replace: bool = False,
        layer_pattern: str | None = None,
        allowed_globals: Iterable[str] = (),
        follow: bool = False,
        policy: str | Policy = "full",
        rollback: bool = False,
        resumed_from: str | None = None,
        pin: str | None = None,
        progress: Progress | None = None,
    ) -> Ingested:
        """
        Store the ZeRO-3 *checkpoint*: a folder of DeepSpeed, the HF Trainer, Accelerate or Lightning.

        Once this returns the commit survives a power cut. The same content a second time writes nothing.
        Only the layers are stored that are due under *policy*; the commit inherits the others.
        *rollback* says that training went back to an earlier step, *resumed_from* to which commit or pinned composite.

        Raises:
            SourceCheckpoint: It is incomplete, damaged, still changing or untrusted.
            Conflict: Other content was saved for this run and step, and *replace* is False.
        """
        if pin is not None:
            pin_verb.check_pin_name(self._rooms, pin)
        plan = ingest_verb.plan_ingest(
            self._rooms,
            Path(checkpoint),
            run=run,
            tag=tag,
            replace=replace,
            layer_pattern=layer_pattern,
            allowed_globals=frozenset(allowed_globals),
            follow=follow,
            policy=policy_named(policy) if isinstance(policy, str) else checked(policy),
            rollback=rollback,
            resumed_from=resumed_from,
        )
        if pin is not None:
            pin_verb.check_pin_free(self._rooms, pin, run=plan.run, step=plan.step)
        ingested = ingest_verb.execute_ingest(self._rooms, plan, progress=progress or Silent())
        if pin is not None:
            self.pin(pin, f"{ingested.run}@{ingested.step}")
        return ingested

    def compose(
        self,
        ref: str | None = None,
        *,
        policy: str | Policy = "latest",
        recipe: StrPath | None = None,
        run: str | None = None,
    ) -> Composite:
        """
        Choose the layers of a composite on top of the commit *ref*; write it with ``.write(folder)``.

        *policy* is a name, or a policy with its settings: ``layerstore.Parity(fresh="odd")``, or an object of yours.
        A *recipe* is a YAML file, ours or LLMTailor's, that names the base and every layer's step;
        *run* is the run that it leaves open.
        """
        if recipe is not None:
            if ref is not None or policy != "latest":
                raise InvalidInput("a recipe names its base and its layers", hint="leave the reference and policy out")
            return Composite(
                self._rooms, compose_by_recipe(self._rooms, read_recipe(self._rooms, Path(recipe)), run=run)
            )
        if run is not None:
            raise InvalidInput("run= is for recipes", hint="name the run in the reference")
        resolved = resolve(self._rooms, ref)
        if policy == EXACT:
            return Composite(self._rooms, compose_exact(self._rooms, resolved))
        chosen = policy_named(policy) if isinstance(policy, str) else checked(policy)
        return Composite(self._rooms, compose_by_policy(self._rooms, resolved, chosen))

    def log(self, run: str | None = None, *, limit: int | None = None, before: str | None = None) -> list[LogEntry]:
        """
        Return the commits of *run*, or of every run by name, newest step first.

        At most *limit* of each run, and only what follows the commit *before*: a long history is read in pages.
        """
        return self.log_page(run, limit=limit, before=before).entries

    def log_page(
        self,
        run: str | None = None,
        *,
        limit: int | None = None,
        before: str | None = None,
        graph: bool = False,
    ) -> LogPage:
        """Return what `log` does, with how many commits follow, and with *graph* a drawing of all attempts."""
        return queries.log(self._rooms, run=run, limit=limit, before=before, graph=graph)

    def show(self, ref: str | None = None) -> CommitView:
        """Return everything about one commit."""
        return queries.show(self._rooms, resolve(self._rooms, ref))

    def ls(self, ref: str | None = None, *, layer: str | None = None) -> list[LayerLine]:
        """Return the layers of one commit with their sizes."""
        return queries.layer_lines(self._rooms, resolve(self._rooms, ref), layer=layer)

    def diff(self, a: str, b: str, *, stat: bool = False, progress: Progress | None = None) -> Diff:
        """
        Compare the commits *a* and *b*, of one run or of two, layer by layer and kind by kind.

        With *stat* also how far the masters moved; what is read for that is verified first.
        """
        sides = resolve(self._rooms, a), resolve(self._rooms, b)
        return diff_verb.diff(self._rooms, *sides, stat=stat, progress=progress or Silent())

    def names_of(self, saves: Iterable[Saving]) -> list[str]:
        """Return for each of *saves* the reference that means it and no other: ``RUN~1@STEP`` if it was left."""
        return references_to(self._rooms, saves)

    def stats(self, run: str | None = None, *, progress: Progress | None = None) -> Stats:
        """Count logical, unique and physical bytes: of the whole store, or of what *run* needs."""
        return stats_verb.stats(self._rooms, run=run, progress=progress or Silent())

    def pin(self, name: str, ref: str | None = None) -> Pin:
        """Give the commit *ref* the name *name*; a pin outlives the commit it was made from."""
        return pin_verb.pin(self._rooms, name, resolve(self._rooms, ref))

    def pins(self) -> list[Pin]:
        """Return all readable pins, by name."""
        return pin_verb.read_pins(self._rooms)[0]

    def damaged_pins(self) -> dict[str, LayerstoreError]:
        """Return the names of pins that cannot be read, and why."""
        return pin_verb.read_pins(self._rooms)[1]

    def delete_pin(self, name: str) -> None:
        """Delete the pin *name*; the commit stays."""
        self._rooms.prepare_writing()
        self._rooms.records.delete_pin(name)

    def drop(self, ref: str, *, last: bool = False, dry_run: bool = False) -> Dropped:
        """
        Hide the commit *ref* by a new record; ingesting its checkpoint again shows it again.

        Nothing is removed, and commits that inherited its layers keep them.
        The last commit of an attempt is only hidden with *last*; with *dry_run* nothing is written.
        """
        if dry_run:
            return drop_verb.plan_drop(self._rooms, ref, last=last).outcome
        return drop_verb.execute_drop(self._rooms, ref, last=last)

    def verify(self, ref: str | None = None, *, read_data: bool = False, progress: Progress | None = None) -> Verdict:
        """Check the whole store, or what *ref* needs; *read_data* also re-hashes every object."""
        only = None if ref is None else resolve(self._rooms, ref)
        return verify_verb.verify(self._rooms, only=only, read_data=read_data, progress=progress or Silent())

    def reindex(self) -> int:
        """Make the index afresh from the commit records; return how many it covers."""
        rooms = self._rooms
        rooms.prepare_writing()
        with rooms.lock_index():
            return rooms.catalog.rebuild()


def init(path: StrPath) -> Store:
    """Make the folder *path* a store and open it; raises AlreadyExists where there is one."""
    make_store(Path(path), Files())
    return Store(path)


def find_checkpoints(*folders: StrPath) -> Survey:
    """Return every ZeRO-3 checkpoint below *folders* in the order of their steps; ingest each by folder and tag."""
    return survey(map(Path, folders))


def open_store(path: StrPath) -> Store:
    """Open the store at *path*; raises NoStore where there is none."""
    return Store(path)
