"""
Choose what makes up a composite: a version of each layer, and the base commit, which supplies everything else.

A composition is pure data. A policy decides which save each layer comes from (for recipes see ``recipes``).
This module also checks that the chosen versions fit together.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from layerstore.compose.exactness import earlier_exact, inexact
from layerstore.errors import Conflict, IntegrityError, LayoutMismatch, NotFound
from layerstore.history import (
    Resolved,
    SaveHistory,
    Staleness,
    named_by,
    others_in,
    references_to,
    saved_at,
)
from layerstore.layers import typed
from layerstore.model import (
    BlobRef,
    Buffer,
    CommitId,
    CommitRecord,
    Kind,
    LayerEntry,
    LayerVersion,
    Parameter,
    PolicyUse,
    Saving,
)
from layerstore.numbers import can_convert
from layerstore.policy import EXACT, Latest, Policy, anchored, replay_policy
from layerstore.precision import flagged, stated
from layerstore.slices import Slices
from layerstore.storage import RecordName, Repository, RunView
from layerstore.tree import Tree
from layerstore.zero3 import LayerSource
from layerstore.zero3.trees import undivided

_SUMMARY_SCHEMA = 1
_AGE_FIELDS = ("layer", "run", "attempt", "step", "steps", "saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The averages that replace the base's masters."""

    saves: tuple[tuple[Saving, float], ...]
    """The saves that are averaged, with their weights."""
    layers: dict[str, tuple[tuple[LayerEntry, float], ...]]
    """The versions of each averaged layer with their weights; layers with only the base's own version are left out."""

    def __str__(self) -> str:
        names = [f"{save.run}@{save.step}" for save, _ in self.saves]
        if len(names) == 1:
            return f"masters of {names[0]}"
        ends = f"{names[0]} and {names[1]}" if len(names) == 2 else f"{len(names)} saves, {names[0]} to {names[-1]}"
        return f"the mean of {ends}"


_NEVER_EXISTED = "this model never existed during training (docs/evidence.md says what that costs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A composite before it is written."""

    base: CommitRecord
    """Supplies everything that is not a layer."""
    commit: CommitId
    """The base's id."""
    time_ns: int
    """When the base was written."""
    policy: str
    parameters: dict[Tree, Tree]
    """The policy's settings."""
    layers: tuple[LayerEntry, ...]
    """The chosen version of every layer, in the model's order."""
    older_than_due: tuple[str, ...] = ()
    """Layers that were due at their chosen save but not written by it, so that an inherited version is used."""
    notes: tuple[str, ...] = ()
    """Remarks such as recipe settings left to defaults or without effect, and layers that are older than requested."""
    chosen_from: tuple[tuple[RecordName, tuple[LayerEntry, ...]], ...] = ()
    """The source records, with their layers as listed in the index; checked before anything is written."""
    mean: Mean | None = None
    """The averages to use as masters, if not the masters of *layers*."""
    wants_exact: bool = False
    """Whether only a save that was kept bit for bit is acceptable."""

    @property
    def staleness(self) -> Staleness:
        """How old each layer is, relative to the base."""
        return Staleness.of(self.base, self.layers)

    @property
    def mixture(self) -> str | None:
        """A warning if the layers are from several saves; None if they are from one."""
        if self.mean is not None:
            count, layers = len(self.mean.layers), len(self.layers)
            taken = "" if count == layers else f" in {count} of {layers} layers"
            return f"{self.mean}{taken}, everything else of step {self.base.step}: {_NEVER_EXISTED}"
        return _mixture_of(self.base, self.layers)

    def inexact(self, repo: Repository, *, moments: bool = True, is_live: bool = False) -> str | None:
        """Return the sentence of `layerstore.compose.exactness.inexact` about this composition, if any."""
        if not any(entry.compact for entry in self.entries):
            return None
        averaged = {} if self.mean is None else self.mean.layers
        return inexact(repo, self.layers, averaged, self.base_resolved, moments=moments, is_live=is_live)

    @property
    def entries(self) -> Iterator[LayerEntry]:
        """The chosen versions, and those that are averaged."""
        averaged = () if self.mean is None else self.mean.layers.values()
        return itertools.chain(self.layers, (entry for parts in averaged for entry, _ in parts))

    @property
    def older_layers(self) -> list[LayerEntry]:
        """The layers that the base itself did not save."""
        return [entry for entry in self.layers if not entry.saved_by(self.base)]

    def own_parameters(self, versions: Iterable[LayerVersion]) -> frozenset[str]:
        """
        Return the parameters whose masters are the base's own, bit for bit; *versions* has one for each layer.

        For other parameters, the base's gathered weights do not fit: they were rounded from different masters.
        """
        return frozenset(
            parameter.name
            for entry, version in zip(self.layers, versions, strict=True)
            if entry.saved_by(self.base) and not (self.mean and entry.layer in self.mean.layers)
            if not any(stored.is_coded for stored in version.objects if stored.kind is Kind.MASTER)
            for parameter in version.parameters
        )

    def slices(self, repo: Repository, versions: Iterable[LayerVersion]) -> Slices:
        """Return the locations of the layers' bytes; *versions* has one for each layer."""
        averaged = {} if self.mean is None else self.mean.layers
        means = {
            layer: [(repo.version_of(entry), weight) for entry, weight in parts] for layer, parts in averaged.items()
        }
        return Slices(versions, means=means)

    @property
    def base_resolved(self) -> Resolved:
        """The base, as a resolved reference."""
        return Resolved(record=self.base, commit=self.commit, pin=None, time_ns=self.time_ns)

    def as_resolved(self) -> Resolved:
        """Return the composition as a resolved commit: the base with the chosen layers."""
        policy = PolicyUse(name=self.policy, parameters=self.parameters, decisions={})
        record = replace(
            self.base,
            layers=self.layers,
            policy=policy,
            precision=stated(self.base.precision, self.layers),
            flags=flagged(self.base.flags, self.layers),
        )
        return replace(self.base_resolved, record=record)

    def summary_file(self, notes: Iterable[str], **facts: object) -> bytes:
        """Return the content of ``layerstore.json``, which marks a folder as ours: the summary, *facts* and notes."""
        own = {"mixture": self.mixture, "notes": [*self.notes, *notes]}
        fields = {"schema": _SUMMARY_SCHEMA, **self.summary(), **facts, **own}
        return json.dumps(fields, indent=2, ensure_ascii=False).encode() + b"\n"

    def summary(self) -> dict[str, object]:
        """Return the facts that ``--json`` prints and ``layerstore.json`` keeps."""
        staleness = self.staleness
        return {
            "run": self.base.run,
            "step": self.base.step,
            "attempt": self.base.attempt,
            "commit": self.commit,
            "policy": self.policy,
            "parameters": dict(self.parameters),
            "layers": {
                entry.layer: {
                    **{name: getattr(entry.origin, name) for name in ("run", "attempt", "step")},
                    "version": entry.version.id,
                }
                for entry in self.layers
            },
            "staleness": {
                "oldest": {name: getattr(staleness.oldest, name) for name in _AGE_FIELDS},
                "optimizer_steps": {str(step): count for step, count in staleness.optimizer_steps.items()},
                "layers": {age.layer: {"steps": age.steps, "saves": age.saves} for age in staleness.layers},
            },
            "older_than_due": list(self.older_than_due),
            "compact": list(dict.fromkeys(entry.layer for entry in self.entries if entry.compact)),
            **({} if self.mean is None else {"mean": self._mean_fields(self.mean)}),
        }

    @staticmethod
    def _mean_fields(mean: Mean) -> dict[str, object]:
        saves = [
            {"run": save.run, "attempt": save.attempt, "step": save.step, "weight": weight}
            for save, weight in mean.saves
        ]
        return {"saves": saves, "layers": list(mean.layers)}


def cautions(repo: Repository, composition: Composition, *, moments: bool = True, is_live: bool = False) -> list[str]:
    """Return what a user must know about the layers: if they are a mixture, or were not all kept bit for bit."""
    return [*filter(None, (composition.mixture, composition.inexact(repo, moments=moments, is_live=is_live)))]


def _mixture_of(base: CommitRecord, layers: tuple[LayerEntry, ...]) -> str | None:
    """Return a warning that this model never existed if *layers* are from several saves; None if they are from one."""
    others = others_in(base, layers)
    if others is None:
        return None
    count, are_older = others
    are = "is" if count == 1 else "are"
    return (
        f"{count} of {len(layers)} layers {are} {'older than' if are_older else 'not from'} step {base.step}: "
        f"{_NEVER_EXISTED}"
    )


def compose_latest(resolved: Resolved) -> Composition:
    """Take the commit's own layers; for a pinned composite, those chosen when it was pinned."""
    record = resolved.record
    is_chosen = resolved.pin is not None and record.policy.name != Latest.name
    return Composition(
        base=record,
        commit=resolved.commit,
        time_ns=resolved.time_ns,
        policy=record.policy.name if is_chosen else "latest",
        parameters=record.policy.parameters if is_chosen else {},
        layers=record.layers,
        chosen_from=() if resolved.pin is not None else ((RecordName(record.run, record.step, resolved.commit), ()),),
    )


def compose_exact(repo: Repository, resolved: Resolved) -> Composition:
    """
    Take every layer from exactly this step.

    Raises:
        LayoutMismatch: Some layers were not saved at this step; the message gives one of them.
    """
    composition = compose_latest(resolved)
    older = composition.older_layers
    if older:
        this, other = references_to(repo, [resolved.record, older[0].origin])
        raise LayoutMismatch(
            f"{len(older)} of {len(composition.layers)} layers were not saved at {this}: {older[0].layer} is from "
            f"{other}",
            hint="--policy latest takes each layer's newest version",
        )
    return replace(composition, policy=EXACT, parameters={})


def as_newest_exact(repo: Repository, composition: Composition, requested: Resolved) -> Composition:
    """Return *composition*, based on the newest exact save up to *requested*, with a note if that is another save."""
    composition = replace(composition, wants_exact=True)
    if requested.record.is_exact:
        return composition
    requested_name, base_name = references_to(repo, [requested.record, composition.base])
    steps = requested.record.step - composition.base.step
    before = f", {steps} step{'s' if steps > 1 else ''} before" if steps else ""
    note = f"{requested.pin or requested_name} was not kept bit for bit: using {base_name}{before}"
    return replace(composition, notes=(*composition.notes, note))


def compose_by_policy(
    repo: Repository, resolved: Resolved, policy: Policy, *, view: RunView | None = None
) -> Composition:
    """
    Take each layer from the newest save, up to the base, at which the layer was due under *policy*.

    *view* is a view of the run, by default the current one.
    """
    base, latest = resolved.record, compose_latest(resolved)
    if isinstance(policy, Latest):
        return latest
    past = SaveHistory(repo, resolved, view=repo.catalog.find(base.run) if view is None else view)
    saves = past.saves()
    newest = next(saves)
    # If *policy* itself saved the base, the layers that were due are those that the save wrote: the save number alone
    # does not show this (ADR 35).
    phased = anchored(policy, newest.save_number, past.decided(0, policy))
    picks = replay_policy(
        phased, itertools.chain([newest], saves), recorded=lambda position: past.decided(position, policy)
    )
    chosen = past.chosen({entry.layer: picks[entry.layer] for entry in base.layers})
    by_layer = {entry.layer: entry for _, entries in chosen for entry in entries}
    layers = tuple(by_layer[entry.layer] for entry in base.layers)
    return replace(
        latest,
        policy=policy.name,
        parameters=policy.parameters,
        layers=layers,
        chosen_from=tuple((name, entries) for name, entries in chosen if name is not None),
        older_than_due=tuple(entry.layer for entry in layers if past.is_older(entry, picks[entry.layer])),
    )


# -- whether the layers fit together -------------------------------------------------------------------------------


def load_versions(repo: Repository, composition: Composition, *, states: bool = True) -> list[LayerVersion]:
    """
    Return the chosen version of every layer; without *states*, optimizers may differ.

    Raises:
        LayoutMismatch: A version's parameters, buffers or optimizer states differ from the base's own version.
        IntegrityError: A record contradicts the index.
    """
    for name, entries in composition.chosen_from:
        if entries:
            repo.catalog.check(name, entries)
    versions = [repo.version_of(entry) for entry in composition.layers]
    own = {entry.layer: entry for entry in composition.base.layers}
    for number, entry in enumerate(composition.entries):
        bases = own[entry.layer]
        if bases.version == entry.version:
            continue
        # `entries` yields the layers first, then the averaged versions.
        version = versions[number] if number < len(versions) else repo.version_of(entry)
        try:
            # A mean uses only masters.
            problem = difference(repo.version_of(bases), version, states=states and number < len(versions))
        except IntegrityError:
            # The base's own version is damaged. A run has one model, so a version of the same run needs no comparison;
            # its lengths are checked when it is written.
            if entry.origin.run != bases.origin.run:
                raise
            problem = None
        if problem is not None:
            theirs, ours = references_to(repo, [entry.origin, composition.base])
            raise LayoutMismatch(
                f"{entry.layer} of {theirs} does not fit {ours}: {problem}",
                hint="take this layer from a save of the same model and optimizer",
            )
    return versions


def check_splittable(
    repo: Repository, composition: Composition, *, world_size: int | None = None, is_converted: bool = False
) -> None:
    """
    Refuse a composition that would split an optimizer state that cannot be split by layer.

    Raises:
        LayoutMismatch: The base has such a state, and a layer is from another save, or the world size or stage differs.
    """
    base, older = composition.base, composition.older_layers
    count = base.world_size if world_size is None else world_size
    if count == base.world_size and not older and not is_converted:
        return
    kept = "" if base.is_dcp else undivided(repo.state(base.states[0]))
    if kept:
        ours, *others = references_to(repo, [base, *(entry.origin for entry in older[:1])])
        wish = f"be mixed with layers of {others[0]}" if older else f"be composed for {count} ranks"
        if is_converted and not older:
            wish = "be composed as ZeRO-3"
        raise LayoutMismatch(
            f"{ours} cannot {wish}: its optimizer keeps {kept}, which cannot be split by layer",
            hint=f"use --policy exact at world size {base.world_size}, without --recipe",
        )


def difference(base: LayerVersion, other: LayerVersion, *, states: bool = True) -> str | None:
    """Describe why version *other* of a layer does not fit *base*; None if it fits. *states* also compares states."""
    if (problem := mismatch(base, other)) is not None:
        return problem
    for name, state in sorted(base.optimizer_states ^ other.optimizer_states) if states else ():
        has_it = "only the base has" if (name, state) in base.optimizer_states else "the base lacks"
        return f"{has_it} the optimizer state {state!r} of {name!r}"
    return None


def mismatch(base: LayerVersion, other: LayerVersion | LayerSource) -> str | None:
    """Describe why the parameters and buffers of *other* do not fit those of *base*; None if they fit."""
    ours, theirs = _by_name(base), _by_name(other)
    types, others = _types_of_masters(base), _types_of_masters(other)
    for name in sorted(ours.keys() ^ theirs.keys()):
        return f"{_kind(ours.get(name) or theirs[name])} {name!r} is {'missing' if name in ours else 'not in the base'}"
    for name, mine in ours.items():
        if not _are_alike(mine, theirs[name]) or types.get(name) != others.get(name):
            return f"{_kind(mine)} {name!r} is {_facts(theirs[name])}, in the base {_facts(mine)}"
    return None


def _are_alike(mine: Parameter | Buffer, theirs: Parameter | Buffer) -> bool:
    """
    Whether *mine* and *theirs* can replace each other, even between FSDP2 and DeepSpeed: their saves describe a model
    differently.

    FSDP2 trains fp32 parameters, DeepSpeed bf16 ones with fp32 masters. FSDP2 keeps buffers as it keeps frozen
    parameters, and DCP's own saves do not record which parameters are tied.
    """
    types = {mine.dtype, theirs.dtype}
    is_type_alike = len(types) == 1 or ("F32" in types and all(can_convert("F32", dtype) for dtype in types))
    trained = [isinstance(described, Parameter) and not described.frozen for described in (mine, theirs)]
    tied = [described.aliases if isinstance(described, Parameter) else () for described in (mine, theirs)]
    is_tied_alike = tied[0] == tied[1] or not all(tied)
    return mine.shape == theirs.shape and trained[0] == trained[1] and is_type_alike and is_tied_alike


def _types_of_masters(layer: LayerVersion | LayerSource) -> dict[str, str]:
    if isinstance(layer, LayerSource):
        return {
            part.name: part.dtype for source in layer.objects if source.kind is Kind.MASTER for part in source.slices
        }
    return {part.name: part.dtype for stored in layer.objects if stored.kind is Kind.MASTER for part in stored.tensors}


def _by_name(version: LayerVersion | LayerSource) -> dict[str, Parameter | Buffer]:
    parameters = {item.name: item for item in version.parameters}
    return {**parameters, **{item.name: item for item in version.buffers}}


def _kind(item: Parameter | Buffer) -> str:
    return "parameter" if isinstance(item, Parameter) else "buffer"


def _facts(item: Parameter | Buffer) -> str:
    facts = f"{item.dtype} {'×'.join(map(str, item.shape)) or 'a scalar'}"
    if isinstance(item, Parameter) and item.frozen:
        facts += ", frozen"
    if isinstance(item, Parameter) and item.aliases:
        facts += f", tied with {', '.join(item.aliases)}"
    return facts


# -- damage ------------------------------------------------------------------------------------------------------------


@contextmanager
def naming_damage(repo: Repository, composition: Composition, *, resumes: bool = False) -> Iterator[None]:
    """
    Add the layer to errors of the block, which reads what *composition* needs; with *resumes*, hint at other steps.

    Raises:
        Conflict: A commit that layers were chosen from was collected or dropped in the meantime.
        IntegrityError: Something is damaged or missing; the message names the layer.
    """
    try:
        yield
    except (IntegrityError, NotFound) as exc:
        base = composition.base
        if not all(repo.records.is_listed(name) for name, _ in composition.chosen_from):
            raise Conflict(
                f"something that {base.run}@{base.step} needs was removed meanwhile; nothing was written",
                hint=f"layerstore log {typed(base.run)} lists the kept commits; repeat the command if it is listed",
            ) from exc
        lost = exc.facts.get("object_id")
        if isinstance(exc, IntegrityError) and isinstance(lost, str):
            _locate(repo, composition, lost, exc, resumes=resumes)
        raise


def _locate(repo: Repository, composition: Composition, lost: str, exc: IntegrityError, *, resumes: bool) -> None:
    """Prefix *exc* with the layer of the object *lost*, and put the remedy in its hint."""
    base, entry = (
        composition.base,
        next((candidate for candidate in composition.entries if _has(repo, candidate.version, lost)), None),
    )
    [called] = of_base = references_to(repo, [base])
    if entry is not None:
        [called] = references_to(repo, [entry.origin])
    exc.locate(called if entry is None else f"{entry.layer} of {called}")
    if entry is not None and saved_at(repo, entry.origin) is None:
        [called] = of_base  # the layer has outlived the commit that saved it
    option = "" if exc.facts.get("is_missing") else " --read-data"
    # A pin's base may be gone; then no reference can narrow the command.
    narrow = f" {typed(called)}" if saved_at(repo, base) is not None else ""
    verify = f"layerstore verify{narrow}{option}"
    earlier = earlier_exact(repo, base, entry) if composition.wants_exact else None
    if resumes:
        step = "…" if earlier is None else f"{earlier.step}, exact=True"
        repair = exc.hint if "remote" in exc.facts else f"layerstore repair{option} --from COPY"
        intact = f"layerstore verify{option} names the newest intact one"
        exc.hint = f"resume(…, step={step}) takes an earlier step: {intact}; or {repair}"
        return
    if earlier is not None:
        [called] = references_to(repo, [earlier])
        older = f"compose {typed(called)} --exact takes an earlier exact save; "
    else:
        older = "" if entry is None or composition.wants_exact else "compose --without-damaged takes older versions; "
    exc.hint = f"{verify} says which composites are still intact; {older}or {exc.hint}"


def _has(repo: Repository, version: BlobRef, lost: str) -> bool:
    try:
        return version.id == lost or any(ref.id == lost for ref in named_by(repo, version))
    except IntegrityError:
        return False  # the version blob itself is lost, so its objects were never read
