"""
The store: opens a repository and offers all operations. Each imports its implementation when it is called.

    store = layerstore.open("runs/store")
    commit = store.ingest("out/checkpoint-200", run="sft")
    store.compose("sft@200").write("resume")
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any

from layerstore.arguments import checked
from layerstore.disk import Files, Hook, no_hook
from layerstore.dtypes import DTypeName
from layerstore.errors import Conflict, InvalidInput, LayerstoreError, Unsupported
from layerstore.layers import typed
from layerstore.layout import folder_of, is_url, layout_at
from layerstore.model import Commit, CommitId, Pin, Saving, StrPath
from layerstore.precision import PrecisionName
from layerstore.progress import Progress, Silent
from layerstore.shares import ALONE, Shares
from layerstore.storage import Repository, make_store, open_repository
from layerstore.tables import Table

if TYPE_CHECKING:
    from layerstore.bisect import Bisected, Judged, Trial
    from layerstore.check import Diagnosis, Repaired, RestoredIdentity, Verdict
    from layerstore.composite import Composite
    from layerstore.delta import Applied
    from layerstore.gc import Dropped, DroppedCommit, GcOutcome
    from layerstore.history import Resolved
    from layerstore.ingest import Ingested
    from layerstore.inspect import CommitView, Diff, LayerLine, LogEntry, LogPage, ParametersDiff, RunLine, Stats
    from layerstore.policy import Keep, Policy
    from layerstore.publish import SaveTiming
    from layerstore.remote import Pulled, Pushed, Remote, Remotes
    from layerstore.zero3 import Survey


@checked
class Store:
    """
    A store of checkpoints. Safe to share between threads; close it when done, or use it in a ``with``.

    A reference (*ref*) is ``RUN@STEP``, ``RUN`` (the run's newest step), ``RUN~1`` (the run's previous attempt) or a
    pin's name; None refers to the newest step of the store's only run.
    """

    def __init__(self, path: StrPath, *, hook: Hook = no_hook, shares: Shares = ALONE) -> None:
        self._opened = replaced(_open(path, Files(hook)), shares=shares)

    @property
    def _repo(self) -> Repository:
        """The store's repository. Every operation reads this property, so none works on a closed store."""
        self._opened.check_open()
        return self._opened

    def __repr__(self) -> str:
        return f"<Store {self._opened.name}{', closed' if self._opened.closed.is_set() else ''}>"

    @property
    def path(self) -> Path:
        """The store's path, with links resolved."""
        return self._opened.layout.root

    @property
    def repo(self) -> Repository:
        """The store's repository, for `layerstore.live`."""
        return self._opened

    @property
    def id(self) -> str:
        """The store's own id."""
        return self._opened.identity.store_id

    def runs(self) -> list[str]:
        """Return the names of the runs that have commits."""
        return self._repo.catalog.runs()

    def overview(self) -> "Table[RunLine]":
        """
        Return a line for each run, most recently saved first: its newest save, and whether that save is whole.

        Only the record of each run's newest save is read, and no tensor; `verify` reads the bytes.
        """
        from layerstore.inspect import run_lines

        urls = self.remotes.urls().values()
        return Table(
            run_lines(self._repo, remotes=urls), if_empty="no runs yet: store.ingest(CHECKPOINT, run=RUN) makes one"
        )

    def close(self) -> None:
        """Release everything that the store holds open, and stop fetching; calling it twice is harmless."""
        self._opened.close()

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
        step: int | None = None,
        replace: bool = False,
        layer_pattern: str | None = None,
        allowed_globals: Iterable[str] = (),
        follow: bool = False,
        policy: "str | Policy" = "full",
        precision: PrecisionName = "exact",
        exact_every: int | None = 10,
        rollback: bool = False,
        resumed_from: str | None = None,
        pin: str | None = None,
        onto: str | None = None,
        trust_store: bool = False,
        progress: Progress | None = None,
    ) -> "Ingested":
        """
        Store the ZeRO *checkpoint*: a folder written by DeepSpeed, the HF Trainer, Accelerate or Lightning.

        Once this returns, the commit survives a power cut. Storing the same content again writes nothing. Only the
        layers that are due under *policy* are stored; the commit inherits the others. With a *precision* other than
        ``exact``, stored layers take fewer bytes, except every Nth version of a layer (*exact_every*), which is exact.
        Set *rollback* if training went back to an earlier step, *resumed_from* to the commit or pinned composite that
        it resumed from. Objects that the store already has are read, and replaced if damaged; with *trust_store*, only
        their size is checked.

        A ``torch.distributed.checkpoint`` folder is stored on its own; *step* sets its step if the folder does not
        state one. To return to DeepSpeed, store the folder *onto* a commit of the same model: that commit supplies
        what DeepSpeed needs besides weights and moments, and the new commit continues that commit's run.

        Raises:
            SourceCheckpoint: The checkpoint is incomplete, damaged, still changing or untrusted.
            Conflict: Other content was saved for this run and step, and *replace* is False.
            Overtaken: A collection removed something that was to be reused; repeating the call succeeds.
        """
        from layerstore.ingest import ingest
        from layerstore.ingest_options import IngestOptions
        from layerstore.policy import chosen_policy

        ingest_options = IngestOptions(
            run=run,
            tag=tag,
            step=step,
            replace=replace,
            layer_pattern=layer_pattern,
            allowed_globals=frozenset(allowed_globals),
            follow=follow,
            policy=chosen_policy(policy),
            precision=precision,
            exact_every=exact_every,
            rollback=rollback,
            resumed_from=resumed_from,
            pin=pin,
            onto=onto,
            trust_store=trust_store,
        )
        return ingest(self._repo, Path(checkpoint), ingest_options, progress=progress or Silent())

    def compose(
        self,
        ref: str | None = None,
        *,
        policy: "str | Policy" = "latest",
        recipe: StrPath | None = None,
        run: str | None = None,
        exact: bool = False,
        without_damaged: bool = False,
    ) -> "Composite":
        """
        Choose the layers of a composite on top of the commit *ref*; write it with ``.write(folder)``.

        *policy* is a name, optionally with settings (``filter:every=10``), a policy (``layerstore.Filter(every=10)``),
        or a policy object of your own class.
        A *recipe* is a YAML file, in our grammar or LLMTailor's, that states the base and every layer's step; *run*
        applies to the steps that the recipe states without a run. With *exact*, the base is the newest save up to *ref*
        that was kept bit for bit (the policy ``exact`` differs: it takes every layer from the step of *ref* itself).
        With *without_damaged*, every byte is read first, and a damaged layer is replaced by its newest sound version;
        ``recipe_notes`` lists the replaced layers.
        """
        from layerstore.compose import as_newest_exact, compose_by_policy, compose_by_recipe, compose_exact
        from layerstore.compose import without_damaged as avoid_damage
        from layerstore.composite import Composite
        from layerstore.history import newest_exact
        from layerstore.policy import EXACT, Latest, chosen_policy

        takes_others = recipe is not None or without_damaged
        if exact and (takes_others or not (policy == EXACT or isinstance(chosen_policy(policy), Latest))):
            raise InvalidInput(
                "an exact save takes no layer from others", hint="leave out the policy, the recipe and without_damaged"
            )
        if recipe is not None:
            if ref is not None or policy != "latest":
                raise InvalidInput("a recipe names its base and its layers", hint="leave the reference and policy out")
            composition = compose_by_recipe(self._repo, Path(recipe), run=run)
        elif run is not None:
            raise InvalidInput("run= is for recipes", hint="name the run in the reference")
        else:
            requested = self._resolved(ref)
            base = newest_exact(self._repo, requested) if exact else requested
            if policy == EXACT:
                if without_damaged:
                    raise InvalidInput("policy exact never mixes saves", hint="leave without_damaged out")
                composition = compose_exact(self._repo, base)
            else:
                composition = compose_by_policy(self._repo, base, chosen_policy(policy))
            if exact:
                composition = as_newest_exact(self._repo, composition, requested)
        return Composite(self._repo, avoid_damage(self._repo, composition) if without_damaged else composition)

    def average(
        self, saves: str | None = None, *, ref: str | None = None, ema: float | None = None, layers: str | None = None
    ) -> "Composite":
        """
        Return a composite whose masters are the mean over several *saves*; write it like any other.

        *saves* is ``last:10``, the newest ten up to the commit *ref*, or a list with optional weights:
        ``sft@800,sft@900:2``. With *ema*, a number below 1, each save weighs *ema* times as much as the next newer
        save; without *saves*, the mean goes back until a save would weigh less than a thousandth of the newest.
        *layers* is a pattern of the layers to average, such as ``model.layers.*``. Everything else, including moments,
        comes from *ref*: by default the last save in the list *saves* or, without a list, the only run's newest step.

        Raises:
            InvalidInput: The arguments do not determine which saves to average, or their weights.
            NotFound: One of the saves is not in the store.
            LayoutMismatch: One of the saves lacks a layer.
        """
        from layerstore.compose import average, base_of_mean, compose_latest
        from layerstore.composite import Composite

        base = self._resolved(base_of_mean(saves) if ref is None and saves is not None else ref)
        return Composite(self._repo, average(self._repo, compose_latest(base), of=saves, ema=ema, layers=layers))

    def bisect(
        self,
        good: str,
        bad: str,
        judge: Callable[[Path], "Judged"],
        *,
        name: str,
        folder: StrPath = "layerstore-bisect",
        dtype: DTypeName | None = None,
        steps_only: bool = False,
        on_trial: Callable[["Trial"], None] = lambda _: None,
    ) -> "Bisected":
        """
        Find the first bad save after *good* in the history of *bad* and, unless *steps_only*, the layers to blame.

        *judge* takes a folder as `Composite.export` writes it and returns a `Judged`. *folder* holds the trials and a
        log; repeating the call continues from that log. *name* identifies the judge. *on_trial* gets each new trial.

        Raises:
            InvalidInput: *good* is not before *bad* in one history.
            Conflict: *good* is judged bad, *bad* is judged good, or one of the two cannot be judged.
            AlreadyExists: *folder* holds something else.
            Locked: A bisection in *folder* is running in another process.
        """
        from layerstore.bisect import bisect

        return bisect(
            self._repo,
            good,
            bad,
            judge,
            name=name,
            folder=Path(folder),
            dtype=dtype,
            has_layers=not steps_only,
            on_trial=on_trial,
        )

    def log(
        self, run: str | None = None, *, limit: int | None = None, before: str | None = None, metrics: bool = False
    ) -> "Table[LogEntry]":
        """
        Return the commits of *run*, or of all runs in order of name, newest step first.

        At most *limit* commits per run are returned. With *before*, a commit's id or its prefix, the list starts after
        that commit, and has only commits of its run. With *metrics*, which takes longer, each commit includes the
        metrics of its step, from ``trainer_state.json`` or client_state.

        Raises:
            NotFound: There is no such run, or no such commit.
        """
        if_empty = (
            "no commits yet: store.ingest(CHECKPOINT, run=RUN) makes one" if before is None else "no older commit"
        )
        from layerstore.inspect import log_fields

        page = self.log_page(run, limit=limit, before=before, metrics=metrics)
        return Table(page.entries, if_empty=if_empty, fields=log_fields)

    def log_page(
        self,
        run: str | None = None,
        *,
        limit: int | None = None,
        before: str | None = None,
        graph: bool = False,
        metrics: bool = False,
    ) -> "LogPage":
        """
        Return what `log` returns, the number of commits that follow and, with *graph*, a drawing of all attempts.

        The drawing shows each attempt next to the attempt that it forked from, the newest attempt's history first.
        """
        from layerstore.inspect import read_log

        return read_log(self._repo, run=run, limit=limit, before=before, graph=graph, metrics=metrics)

    def timings(self, run: str) -> "Table[SaveTiming]":
        """Return the timings of the saves of *run* that were made during training, in order of attempt and step."""
        from layerstore.publish import read_timings

        timings = read_timings(self._repo, run)
        return Table(
            (timings[place] for place in sorted(timings)), if_empty="only saves made during training are timed"
        )

    def show(self, ref: str | None = None) -> "CommitView":
        """Return everything about one commit."""
        from layerstore.compose import compose_latest, naming_damage
        from layerstore.inspect import describe_commit

        resolved = self._resolved(ref)
        with naming_damage(self._repo, compose_latest(resolved)):
            return describe_commit(self._repo, resolved)

    def ls(self, ref: str | None = None, *, layer: str | None = None) -> "Table[LayerLine]":
        """Return the layers of one commit with their sizes, or only *layer*."""
        from layerstore.compose import compose_latest, naming_damage
        from layerstore.inspect import layer_lines

        resolved = self._resolved(ref)
        with naming_damage(self._repo, compose_latest(resolved)):
            return Table(layer_lines(self._repo, resolved.record.layers, layer=layer))

    def diff(self, a: str, b: str, *, stat: bool = False, progress: Progress | None = None) -> "Diff":
        """
        Compare the commits *a* and *b*, of one run or of two, layer by layer and kind by kind.

        With *stat*, also measure how far the masters moved; objects are verified before they are measured.

        Raises:
            IntegrityError: A version or, with *stat*, an object to measure is damaged or missing.
            LayoutMismatch: A version lists slices that do not fit its shapes.
        """
        from layerstore.inspect import compare

        sides = self._resolved(a), self._resolved(b)
        return compare(self._repo, *sides, stat=stat, progress=progress or Silent())

    def diff_layer(
        self, a: str, b: str, layer: str, *, sort: str = "name", progress: Progress | None = None
    ) -> "ParametersDiff":
        """
        Compare *layer* of the commits *a* and *b*, parameter by parameter: masters, and each state of the optimizer.

        Objects are verified before they are measured; none is read if both commits have the same version of the layer.
        *sort* orders parameters by ``name``, or largest first by ``elements``, ``master`` or an optimizer state.

        Raises:
            NotFound: Neither commit has the layer.
            InvalidInput: The layer's parameters have no column *sort*.
            IntegrityError: A version or an object to measure is damaged or missing.
            LayoutMismatch: A version lists slices that do not fit its shapes.
        """
        from layerstore.inspect import compare_layer

        sides = self._resolved(a), self._resolved(b)
        return compare_layer(self._repo, *sides, layer, sort=sort, progress=progress or Silent())

    def names_of(self, saves: Iterable[Saving]) -> list[str]:
        """Return the unambiguous reference of each of *saves*: ``RUN~1@STEP`` if its attempt was abandoned."""
        from layerstore.history import references_to

        return references_to(self._repo, saves)

    def stats(self, run: str | None = None, *, progress: Progress | None = None) -> "Stats":
        """Count logical, unique and physical bytes: of the whole store, or of what *run* needs."""
        from layerstore.inspect import count_bytes

        return count_bytes(self._repo, run=run, progress=progress or Silent())

    def report(
        self,
        out: StrPath | None = None,
        *,
        run: str | None = None,
        keep: "Keep | None" = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """
        Return the facts about the whole store or *run*; with *out*, also write them to that file as one HTML page.

        The facts are the fields of ``layerstore report --json``; each field of the shown saves is a list with an item
        for each save. Damaged parts of the store are left out and listed.

        For a long history, only some saves are shown, so the page stays below 1 MB. With *keep*, the page also shows
        what `gc` would do under the rules of *keep*. A file at *out* is replaced only if it is a report.

        Raises:
            AlreadyExists: Something other than a report is at *out*.
            NotFound: There is no such run.
            InvalidInput: No commit has the metric that *keep* uses.
            Unsupported: Even with one save of each run, the page would be too large.
        """
        from layerstore.inspect import make_report
        from layerstore.policy import chosen_keep

        path = None if out is None else Path(out)
        return make_report(self._repo, path, run=run, keep=chosen_keep(keep), progress=progress or Silent())[0]

    def pin(self, name: str, ref: str | None = None) -> Pin:
        """
        Pin the commit *ref* as *name*; a pin outlives the commit that it was made from.

        Raises:
            AlreadyExists: The pin exists and refers to something else.
            Conflict: A run has this name.
        """
        from layerstore.publish import make_pin

        return make_pin(self._repo, name, self._resolved(ref))

    def pins(self) -> Table[Pin]:
        """Return all readable pins, by name."""
        return Table(self._repo.records.readable_pins(), if_empty="no pins yet: store.pin(NAME, REF) makes one")

    def damaged_pins(self) -> dict[str, LayerstoreError]:
        """Return the unreadable pins by name, and why each is unreadable."""
        return {name: pin for name, pin in self._repo.records.pins() if not isinstance(pin, Pin)}

    def delete_pin(self, name: str, *, remote: str | None = None) -> bool | None:
        """
        Delete the pin *name*, readable or not, from this store or from *remote*, a name or a URL.

        If the pinned commit is visible, it stays. Returns whether it is visible; None if the pin could not be read.

        Raises:
            NotFound: There is no pin of that name.
        """
        from layerstore.publish import delete_pin

        if remote is not None:
            with self._remote(remote) as source:
                self._check_own(source, "nothing was deleted")
                return delete_pin(source.repo, name)
        return delete_pin(self._repo, name)

    def drop(self, ref: str, *, dry_run: bool = False) -> "Dropped":
        """
        Move the commit *ref* to the trash; `undrop` moves it back, until a collection finds it old enough to remove.

        Commits that inherited its layers keep them. With *dry_run*, nothing is written. The trash keeps a dropped
        commit for 7 days, in a bucket for one day.
        """
        [dropped] = self.drop_commits([ref], dry_run=dry_run)
        return dropped

    def drop_commits(
        self, refs: Iterable[str] = (), *, runs: Iterable[str] = (), dry_run: bool = False
    ) -> "Table[Dropped]":
        """
        Move the commits *refs*, and every commit of *runs*, to the trash, as `drop` does.

        If any is not found, none is moved. Each result describes the store after all of them have been moved.

        Raises:
            NotFound: There is no such commit or run; nothing was changed.
            InvalidInput: One of *refs* is a pin; nothing was changed.
            IntegrityError: A record of *runs* cannot be read; nothing was changed.
        """
        from layerstore.gc import execute_drop, plan_drop

        return Table((plan_drop if dry_run else execute_drop)(self._repo, refs, runs=runs), if_empty="none was named")

    def give_up(self, ref: str, *, dry_run: bool = False) -> tuple[str, ...]:
        """
        Move the unreadable records at the step of *ref* to the trash, unless *dry_run*; return their ids.

        They block `gc` until they are moved; the next `gc` then frees what only they need. A record whose file was
        merely renamed is not moved: restoring the file's name makes it sound again.
        """
        from layerstore.gc import damaged_records, give_up

        names = damaged_records(self._repo, ref) if dry_run else give_up(self._repo, ref)
        return tuple(name.id for name in names)

    def undrop(self, ref: str) -> Commit:
        """
        Make a dropped or replaced commit visible again; *ref* is ``RUN@STEP`` or its id.

        Raises:
            NotFound: The commit is not in the trash.
            Conflict: Another commit is visible at its step now, another attempt has the number of its attempt, or
                *ref* matches several commits in the trash.
            Overtaken: An object that the commit needs is gone.
            Locked: The store is in a bucket, and a collection of that bucket is running.
        """
        [commit] = self.undrop_commits([ref])
        return commit

    def undrop_commits(self, refs: Iterable[str] = (), *, runs: Iterable[str] = ()) -> "Table[Commit]":
        """
        Make the commits *refs*, and those of *runs* that are in the trash, visible again, as `undrop` does.

        If one of them cannot come back, none does. For *runs*, each step gets back the commit that was dropped last; if
        the step has a visible commit now, its dropped commits stay in the trash.

        Raises:
            NotFound: One of *refs* is not in the trash, or the trash holds no commit of one of *runs*.
            Conflict: Another commit is visible at the step of one of *refs* now, several of *refs* are at one step, or
                another attempt has taken the number of a commit's attempt.
            IntegrityError: A record of *runs* in the trash is damaged.
            Overtaken: An object that one of the commits needs is gone.
            Locked: As for `undrop`.
        """
        from layerstore.gc import undrop

        return Table(undrop(self._repo, refs, runs=runs), if_empty="none was named")

    def dropped(self, run: str | None = None) -> "Table[DroppedCommit]":
        """Return the commits in the trash, of *run* or of all, newest step first."""
        from layerstore.gc import dropped

        return Table(dropped(self._repo, run), if_empty="the trash holds no commit")

    def gc(
        self,
        keep: "Keep | None" = None,
        *,
        runs: Iterable[str] | None = None,
        grace_seconds: float | None = None,
        empty_trash: bool = False,
        remote: str | None = None,
        pushed_to: str | None = None,
        dry_run: bool = False,
        confirmed: "GcOutcome | None" = None,
        progress: Progress | None = None,
    ) -> "GcOutcome":
        """
        Remove the commits of *runs*, or of all runs, that *keep* does not select, and every object that nothing needs.

        Removed commits are gone for good, except in a bucket, whose trash keeps them for a day unless *grace_seconds*
        is 0; `drop` moves a commit to the trash instead. Without *keep*, every visible commit stays. Every pin, and the
        newest commit of each run, stays with everything that it needs. Safe while others use the store; with *dry_run*,
        nothing is removed. Objects younger than *grace_seconds* stay; change it only if nothing else writes to the
        store. Commits that were dropped or replaced a week ago leave the trash; with *empty_trash*, all commits in it
        do. With *confirmed*, a plan that somebody has approved, nothing beyond that plan is removed. With *pushed_to*,
        a remote's name or URL, a commit stays unless that remote has it and lists, at full size, every object that the
        commit needs. With *remote*, a name or a URL, that remote is collected instead: its objects are removed a day
        after the last commit that refers to them.

        Raises:
            IntegrityError: Something cannot be read, so the objects that it needs are unknown; or commits would be
                removed although a remaining commit lacks an object. Nothing was removed.
            Locked: Another collection is running.
            Conflict: More would be removed than the confirmed plan allows; nothing was removed.
        """
        from layerstore.gc import GcRequest, execute_gc, plan_gc
        from layerstore.policy import Keep, chosen_keep

        # A store that was opened by its URL is collected in its bucket.
        remote = remote or self._repo.remote
        request = GcRequest(
            keep=chosen_keep(keep) or Keep(),
            runs=runs,
            grace_seconds=grace_seconds,
            trash_seconds=0.0 if empty_trash else None,
            elsewhere=None if pushed_to is None else self._pushed_to(pushed_to),
            confirmed=confirmed,
        )
        if remote is not None:
            from layerstore.history import note_pushed
            from layerstore.remote import collect

            with self._remote(remote) as source:
                self._check_own(source, "nothing was removed")
                outcome = collect(source, request, dry_run=dry_run, progress=progress or Silent())
                # A store in a bucket keeps no list of what was pushed from it.
                if outcome.removed and not dry_run and self._repo.remote is None:
                    removed = [CommitId(fate.commit) for fate in outcome.removed]
                    note_pushed(self._repo, source.bucket.url, (), before=removed)
                return outcome
        if dry_run:
            return plan_gc(self._repo, request, progress=progress or Silent()).outcome
        return execute_gc(self._repo, request, progress=progress or Silent())

    def verify(
        self,
        ref: str | None = None,
        *,
        read_data: bool = False,
        read_data_subset: str | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> "Verdict":
        """
        Check the whole store, or what *ref* needs; *read_data* also re-hashes every object.

        If the store was opened by its URL, the bucket itself is checked.

        With *read_data_subset*, only some of the objects are read: ``10%`` is a random tenth, chosen by *seed*;
        ``3/10`` is the third tenth.
        """
        from layerstore.check import parse_sample, verify_store

        if read_data and read_data_subset is not None:
            raise InvalidInput("read_data and read_data_subset were both given", hint="leave one of the two out")
        repo = self._repo
        if repo.remote is not None:
            repo.records.refresh(anew=True)
            repo = replaced(repo, shares=ALONE)  # the other processes would check their own mirrors
        return verify_store(
            repo,
            only=None if ref is None else self._resolved(ref),
            read_data=read_data,
            sample=None if read_data_subset is None else parse_sample(read_data_subset, seed=seed),
            progress=progress or Silent(),
        )

    def repair(
        self,
        *,
        read_data: bool = False,
        sources: "Iterable[StrPath]" = (),
        remote: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> "Repaired":
        """
        Move damaged files to the trash, and fetch intact ones from *sources*, which are stores or remotes.

        Finds the damage that `verify` finds; with *read_data*, every damaged byte. With *dry_run*, nothing is written.
        With *remote*, a name or a URL, that remote is repaired from this store instead. A partial clone also uses its
        own remote as a source.

        Raises:
            InvalidInput: A source is not a store; or both *sources* and *remote* were given.
            Locked: A collection or another repair is running.
            Unsupported: The store is in a bucket.
        """
        from layerstore.check import Repaired, execute_repair, opened_sources, plan_repair

        option = " --read-data" if read_data else ""
        if self._repo.remote is not None:
            raise Unsupported(
                f"{self._repo.remote} is in a bucket: it is repaired from a store on a disk",
                hint=f"layerstore repair{option} --remote {typed(self._repo.remote)}, in a store that still has the "
                "lost data",
            )
        if remote is not None:
            from layerstore.remote import Bucket, heal, heal_identity

            if sources:
                raise InvalidInput(
                    "a remote is repaired from this store alone",
                    hint=f"layerstore repair{option} --remote {typed(remote)}, in a store that still has the lost data",
                )
            # Before all else, because the remote cannot be opened without a sound store.json.
            put_back = heal_identity(self._repo, Bucket(self.remotes.url(remote)), dry_run=dry_run)
            # A dry run did not write store.json, so the remote cannot be opened to check the rest.
            if put_back and dry_run:
                return Repaired(fetched=put_back)
            with self._remote(remote) as source:
                self._check_own(source, "nothing was changed")
                healed = heal(self._repo, source, read_data=read_data, dry_run=dry_run, progress=progress or Silent())
            return replaced(healed, fetched=(*put_back, *healed.fetched))
        repair = plan_repair if dry_run else execute_repair
        if self._repo.files.exists(self._repo.layout.partial):
            from layerstore.remote import partial_of

            sources = [*sources, *filter(None, [partial_of(self._repo)])]
        named = {str(source): partial(_open, self._place_of(source), Files()) for source in sources}
        with opened_sources(self._repo, named) as others:
            return repair(self._repo, others, read_data=read_data, progress=progress or Silent())

    @property
    def remotes(self) -> "Remotes":
        """The store's named remotes: ``store.remotes.add("origin", "s3://…")``."""
        from layerstore.remote import Remotes

        return Remotes(self._repo)

    def push(
        self,
        remote: str | None = None,
        *,
        refs: Iterable[str] | None = None,
        runs: Iterable[str] | None = None,
        move_pins: bool = False,
        on_made: Callable[[str], None] = lambda _: None,
        progress: Progress | None = None,
    ) -> "Pushed":
        """
        Send *refs*, by default all commits and pins of *runs* or of all runs, to *remote*, a name or a URL.

        Only what the remote lacks is sent, and a commit appears on the remote only after everything that it needs.
        After a kill, a repeated push sends only the rest. With *move_pins*, a pin that refers to a different commit on
        the remote is moved to the commit that it refers to in this store. If the remote has no store, a push makes one;
        *on_made* gets the remote's URL before anything is sent.

        Raises:
            Conflict: The remote belongs to another store.
            AlreadyExists: A pin refers to something else on the remote; everything else was sent.
            IntegrityError: Something to be sent is damaged or missing in this store; everything else was sent.
        """
        from layerstore.remote import Bucket, push

        # Resolved before the bucket is touched: a mistyped reference must not make a store in it.
        resolved = None if refs is None else [self._resolved(ref) for ref in refs]
        bucket = Bucket(self.remotes.url(remote), may_make=True, on_made=on_made)
        return push(self._repo, bucket, refs=resolved, runs=runs, moves_pins=move_pins, progress=progress or Silent())

    def follow(
        self,
        remote: str | None = None,
        *,
        refs: Iterable[str] | None = None,
        move_pins: bool = False,
        stop: Event | None = None,
        on_made: Callable[[str], None] = lambda _: None,
        progress: Progress | None = None,
    ) -> "Iterator[Pushed]":
        """
        Push as `push` does, and keep pushing what is new: yield what each push has sent, until *stop* is set.

        If the remote does not answer, warn and try again. If something cannot be sent, warn about it, and send
        everything else.

        Raises:
            StorageIO: The remote refuses the key, or is full.
        """
        from layerstore.remote import Bucket, follow

        named = None if refs is None else list(refs)
        return follow(
            self._repo,
            Bucket(self.remotes.url(remote), may_make=True, on_made=on_made),
            # Resolved again for each push: a run's name refers to its newest commit, which changes.
            refs=lambda: None if named is None else [self._resolved(ref) for ref in named],
            moves_pins=move_pins,
            stop=stop or Event(),
            progress=progress or Silent(),
        )

    def pull(
        self, remote: str | None = None, *, refs: Iterable[str] | None = None, progress: Progress | None = None
    ) -> "Pulled":
        """
        Fetch the commits and pins of *remote*, a name or a URL, that this store lacks, or only *refs*.

        All bytes are checked against their ids before a commit becomes visible. A commit that is in this store's trash
        is fetched only if it is one of *refs*.

        Raises:
            NoStore: There is no store at the remote.
            Conflict: The remote belongs to another store.
            AlreadyExists: A pin refers to something else in this store.
            IntegrityError: A commit arrived damaged; all others were fetched.
        """
        from layerstore.remote import pull

        with self._remote(remote) as source:
            return pull(self._repo, source, refs=refs, progress=progress or Silent())

    def check_remote(self, remote: str) -> str:
        """
        Return the URL of *remote*, a name or a URL, if this store can be pushed to it.

        Raises:
            Conflict: The remote belongs to another store.
            StorageIO: The remote does not answer, or refuses the key.
        """
        from layerstore.remote import Bucket, claim

        bucket = Bucket(self.remotes.url(remote), may_make=True)
        claim(bucket, self._repo.identity)
        return bucket.url

    def reindex(self) -> int:
        """Rebuild the index from the commit records; return how many records it covers."""
        repo = self._repo
        repo.prepare_writing()
        with repo.lock_index():
            return repo.catalog.rebuild()

    def _remote(self, name: str | None) -> "Remote":
        from layerstore.remote import Bucket, Remote

        return Remote(Bucket(self.remotes.url(name)), Files())

    def _place_of(self, source: StrPath) -> StrPath:
        """Return *source* if it is a path or URL, otherwise the URL of the remote of that name."""
        if is_url(str(source)) or Path(source).exists():
            return source
        return self.remotes.urls().get(str(source), source)

    def _check_own(self, remote: "Remote", outcome: str) -> None:
        """Raise Conflict if *remote* belongs to another store."""
        if (theirs := remote.repo.identity.store_id) != self.id:
            raise Conflict(
                f"{remote.url} is a remote of another store ({theirs}); {outcome}",
                hint="name a remote of this store, or repeat the command in a store that pushes to that remote",
            )

    def _pushed_to(self, remote: str) -> "Container[object]":
        from layerstore.remote import Bucket, kept_there

        return kept_there(self._repo, Bucket(self.remotes.url(remote)))

    def _resolved(self, ref: str | None) -> "Resolved":
        from layerstore.history import resolve

        return resolve(self._repo, ref)


@checked
def _open(path: StrPath, files: Files) -> Repository:
    """Return the repository of the store at *path*, a folder or the URL of a remote."""
    if isinstance(path, str) and is_url(path):
        from layerstore.remote import Bucket, Remote

        return Remote(Bucket(path), files).repo
    repo = open_repository(Path(path), files)
    if files.exists(repo.layout.partial):
        from layerstore.remote import completed

        return completed(repo)
    return repo


@checked
def init(path: StrPath) -> Store:
    """Make a store at *path*, a folder or the URL of a bucket, and open it; raises AlreadyExists if there is one."""
    if isinstance(path, str) and is_url(path):
        from layerstore.remote import Bucket, make_there

        make_there(Bucket(path, may_make=True))
    else:
        make_store(folder_of(path), Files())
    return Store(path)


@checked
def clone(
    url: str, path: StrPath, *, records: bool = False, shares: Shares = ALONE, progress: Progress | None = None
) -> Store:
    """
    Make a store at *path* with everything that the remote at *url* has, and open it; after a kill, repeat the call.

    With *records*, fetch only the records and the descriptions of layers; tensors are fetched when they are needed, and
    then kept.

    Raises:
        NoStore: There is no store at *url*.
        AlreadyExists: *path* is another store, or holds something else.
    """
    from layerstore.remote import Bucket, Remote
    from layerstore.remote import clone as cloned

    with Remote(Bucket(url), Files()) as remote:
        cloned(remote, Path(path), is_partial=records, shares=shares, progress=progress or Silent())
    return Store(path)


@checked
def restore_identity(path: StrPath, store_id: str, *, dry_run: bool = False) -> "RestoredIdentity | None":
    """
    Rewrite the damaged or missing ``store.json`` of the store at *path*; return None if it was sound.

    Raises:
        InvalidInput: *store_id* is not the id that most records of the store state.
    """
    from layerstore.check import restore_identity as restored_identity

    return restored_identity(layout_at(folder_of(path)), Files(), store_id, dry_run=dry_run)


@checked
def find_checkpoints(*folders: StrPath) -> "Survey":
    """Return all ZeRO checkpoints below *folders* in step order; pass each one's folder and tag to `Store.ingest`."""
    from layerstore.zero3 import checkpoints_below

    return checkpoints_below(map(Path, folders))


@checked
def apply(delta: StrPath, folder: StrPath) -> "Applied":
    """
    Turn the weights in *folder*, an export of the base of *delta*, into those of its target. No store is needed.

    Every tensor is compared with its checksum before and after. Tensors that already match the target are skipped, so
    after a kill, the same call finishes the work.

    Raises:
        LayoutMismatch: The folder does not hold the delta's base; nothing was changed.
    """
    from layerstore.delta import apply_delta

    return apply_delta(Path(delta), Path(folder))


@checked
def doctor(path: StrPath) -> "Diagnosis":
    """Check whether *path*, a store or a folder that may become one, can keep the promises of a store."""
    from layerstore.check import diagnose

    return diagnose(folder_of(path), Files())


def open_store(path: StrPath) -> Store:
    """Open the store at *path*; raises NoStore if there is none."""
    return Store(path)


def store_of(repo: Repository) -> Store:
    """Return a store that uses *repo*, which may read from somewhere other than its own path."""
    # Opening the path instead would ignore *repo*.
    store = Store.__new__(Store)
    store._opened = repo
    return store


def as_store(store: "Store | StrPath") -> Store:
    """Return *store*, opened if it is a path."""
    return store if isinstance(store, Store) else open_store(store)


__all__ = [
    "Store",
    "StrPath",
    "apply",
    "as_store",
    "clone",
    "doctor",
    "find_checkpoints",
    "init",
    "open_store",
    "restore_identity",
    "store_of",
]
