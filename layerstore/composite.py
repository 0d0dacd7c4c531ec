"""
A composite: the answer to a query, for users.

    composite = store.compose("sft", policy="parity")
    composite.write("resume")
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.arguments import checked
from layerstore.arrays import TensorKind, Tensors, make_state_dict, open_tensors
from layerstore.assemble import Exported, ExportPlan, Force, execute_export
from layerstore.compose import Composition, check_members, check_whole, compose_latest, losses_told
from layerstore.dcp import plan_dcp
from layerstore.delta import DeltaWritten, Encoding, is_delta, write_delta
from layerstore.dtypes import DTypeName
from layerstore.errors import AlreadyExists, InvalidInput, Unsupported
from layerstore.hf import MAX_SHARD_SIZE, plan_export
from layerstore.history import Staleness, check_staleness, reference_to, references_to, resolve
from layerstore.inspect import LayerLine, layer_lines
from layerstore.json_fields import json_fields
from layerstore.model import Pin, Saving, StrPath
from layerstore.nearest import ByName
from layerstore.progress import Progress, Silent
from layerstore.publish import make_pin
from layerstore.shards import AdamStep, Moments, Written, execute_compose, plan_ranks, plan_universal
from layerstore.storage import Repository
from layerstore.tables import Table, frame, html_table
from layerstore.units import utc

if TYPE_CHECKING:
    import torch
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Where one layer of a composite comes from."""

    run: str
    step: int
    version: str
    """The id of the layer's version."""


@checked
class Composite:
    """The answer to a query: a version for each layer, and a base for everything else. Nothing is written yet."""

    def __init__(self, repo: Repository, composition: Composition) -> None:
        self._opened = repo
        self._composition = composition

    @property
    def _repo(self) -> Repository:
        """The repository of its store, which must still be open."""
        self._opened.check_open()
        return self._opened

    def __repr__(self) -> str:
        older = f"{len(self._composition.older_layers)} of {len(self._composition.layers)} layers from other saves"
        if self._composition.mean is not None:
            older = str(self._composition.mean)
        return f"<Composite {self.run}@{self.step}: policy {self.policy}, {older}, world size {self.world_size}>"

    def _repr_html_(self) -> str:
        return html_table(map(json_fields, self.staleness.layers), caption=repr(self))

    def to_pandas(self) -> "DataFrame":
        """Return a frame with a line for each layer, its save and its age; Unsupported if pandas is not installed."""
        return frame(map(json_fields, self.staleness.layers))

    @property
    def composition(self) -> Composition:
        """Its parts, for `layerstore.live`."""
        return self._composition

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
    def time(self) -> datetime:
        """When the base was committed, in UTC."""
        return utc(self._composition.time_ns)

    @property
    def policy(self) -> str:
        """The policy that chose the layers."""
        return self._composition.policy

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the base."""
        return self._composition.base.world_size

    @property
    def stage(self) -> int:
        """The ZeRO stage that the base was saved under."""
        return self._composition.base.stage

    @property
    def name(self) -> str:
        """The reference to the base: ``RUN@STEP``, or ``RUN~1@STEP`` if its attempt was abandoned."""
        return reference_to(self._repo, self._composition.base)

    def names_of(self, saves: Iterable[Saving]) -> list[str]:
        """Return the same kind of reference for each of *saves*."""
        return references_to(self._repo, saves)

    @property
    def layers(self) -> dict[str, LayerChoice]:
        """Every layer, in the model's order, and where it comes from."""
        return ByName(
            (entry.layer, LayerChoice(run=entry.origin.run, step=entry.origin.step, version=entry.version.id))
            for entry in self._composition.layers
        )

    @property
    def staleness(self) -> Staleness:
        """How old each layer is, seen from the base."""
        return self._composition.staleness

    @property
    def averaged(self) -> frozenset[str]:
        """The layers whose masters are an average of several saves."""
        mean = self._composition.mean
        return frozenset(() if mean is None else mean.layers)

    @property
    def mixture(self) -> str | None:
        """A sentence that says that this model never existed, if layers of several saves are mixed."""
        return self._composition.mixture

    @property
    def older_than_due(self) -> tuple[str, ...]:
        """Layers that were due at their chosen save but not written there, so that an older version is used."""
        return self._composition.older_than_due

    @property
    def recipe_notes(self) -> tuple[str, ...]:
        """What a recipe leaves to defaults, which of its settings have no effect, which layers are older than asked."""
        return self._composition.notes

    def summary(self) -> dict[str, object]:
        """Return all of this for programs, as in the file ``layerstore.json`` next to the shards."""
        return self._composition.summary()

    def check(self, *, max_staleness: int | None = None) -> None:
        """
        Make sure that the layers fit together, and that none is more than *max_staleness* steps older than the base.

        Raises:
            LayoutMismatch: A layer differs from the base in parameters, shapes, types, ties or optimizer state.
            Conflict: A layer is too old.
        """
        if max_staleness is not None and self._composition.mean is not None:
            raise InvalidInput("an average has saves of several ages", hint="leave the largest staleness out")
        if max_staleness is not None:
            check_staleness(self._composition.base, self.staleness, steps_max=max_staleness)
        with losses_told(self._repo, self._composition):
            check_members(self._repo, self._composition)

    def pin(self, name: str) -> Pin:
        """Keep this composite under *name*: it outlives the commits that it was made from."""
        self._check_stored("keep it with write() or export()")
        self.check()
        with losses_told(self._repo, self._composition):
            check_whole(self._repo, self._composition)
        return make_pin(self._repo, name, self._composition.as_resolved())

    def ls(self) -> Table[LayerLine]:
        """Return every layer with its sizes."""
        with losses_told(self._repo, self._composition):
            return Table(layer_lines(self._repo, self._composition.layers))

    def _check_stored(self, hint: str) -> None:
        """Raise Unsupported if its masters are a mean, whose bytes no object has."""
        if self._composition.mean is not None:
            raise Unsupported(f"{self._composition.mean}: an average is in no object of the store", hint=hint)

    def notes(
        self,
        *,
        world_size: int | None = None,
        as_zero3: bool = False,
        adam_step: AdamStep = "unify",
        moments: Moments = "base",
    ) -> tuple[str, ...]:
        """Return what would not carry over, in plain sentences; raises as ``write`` would."""
        with losses_told(self._repo, self._composition):
            return plan_ranks(
                self._repo,
                self._composition,
                world_size=world_size,
                as_zero3=as_zero3,
                adam_step=adam_step,
                moments=moments,
            ).notes

    def write(
        self,
        out: StrPath,
        *,
        world_size: int | None = None,
        as_zero3: bool = False,
        adam_step: AdamStep = "unify",
        moments: Moments = "base",
        verify: bool = True,
        durable: bool = True,
        force: Force = False,
        progress: Progress | None = None,
    ) -> Written:
        """
        Write shards to the folder *out*, which appears whole or not at all.

        They are of the ZeRO stage that the base was saved under or, with *as_zero3*, of stage 3. They are for
        *world_size* ranks, by default as many as saved the base; the result's ``notes`` say what does not carry over to
        another number. The optimizer's step counters are the base's or, with *adam_step* ``per-layer``,
        each layer's own, if a param group per layer allows that. With *moments* ``fresh``, the optimizer begins anew:
        its moments are zero and its counters 0. Every byte read is verified unless *verify* is False;
        a power cut cannot tear the folder unless *durable* is False. A checkpoint at *out* is replaced only with
        *force*, and one that layerstore did not write only if that is ``foreign``.
        """
        with losses_told(self._repo, self._composition):
            return execute_compose(
                self._repo,
                self._composition,
                Path(out),
                world_size=world_size,
                as_zero3=as_zero3,
                adam_step=adam_step,
                moments=moments,
                verify=verify,
                durable=durable,
                force=force,
                progress=progress or Silent(),
            )

    def tensors(self, kind: TensorKind = "master", *, state: str | None = None, verify: bool = True) -> Tensors:
        """
        Return the tensors of one *kind* as read-only arrays by name, mapped from the objects where they are contiguous.

        *kind* is ``master``, ``optimizer``, ``weights`` or ``buffers``; ``weights`` has only those that cannot be
        derived from their master. *state* is one of the optimizer's, such as ``exp_avg``; without it, all are included,
        as ``exp_avg/NAME``. A tensor is read only on access, and verified first.
        """
        self._check_stored("state_dict() has its weights")
        with losses_told(self._repo, self._composition):
            versions = [self._repo.version_of(entry) for entry in self._composition.layers]
        return open_tensors(self._repo.objects, versions, kind=kind, state=state, verify=verify)

    def state_dict(self, *, dtype: DTypeName | None = None, verify: bool = True) -> "dict[str, torch.Tensor]":
        """
        Return all weights and buffers as torch tensors in memory, for ``model.load_state_dict``.

        *dtype* is ``bf16``, ``fp16`` or ``fp32``, by default the type in which each parameter is trained; the numbers
        are those of `export`, under the names of the model that was trained. Every tensor is a copy that may be written
        to; tied names share one. Frozen parameters are missing if the checkpoint was saved without them.
        """
        with losses_told(self._repo, self._composition):
            versions = check_members(self._repo, self._composition)
            slices = self._composition.slices(self._repo, versions)
        return make_state_dict(self._repo, versions, slices, dtype=dtype, verify=verify)

    def plan_export(self, *, dtype: DTypeName | None = None, max_shard_size: int | str = MAX_SHARD_SIZE) -> ExportPlan:
        """Return what `export` would write, without writing it."""
        with losses_told(self._repo, self._composition):
            return plan_export(self._repo, self._composition, dtype=dtype, max_shard_size=max_shard_size)

    def export(
        self,
        out: StrPath,
        *,
        dtype: DTypeName | None = None,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        verify: bool = True,
        durable: bool = True,
        force: Force = False,
        progress: Progress | None = None,
    ) -> Exported:
        """
        Write the weights to the folder *out*, in the form that Transformers' ``from_pretrained`` loads.

        *dtype* is ``bf16``, ``fp16`` or ``fp32``, by default the type in which each parameter is trained.
        *max_shard_size*, in bytes or as text such as ``"2GiB"``, limits the tensors per file, except that a larger
        tensor gets its own file. The optimizer's objects are not touched. Everything else is as in `write`.
        """
        plan = self.plan_export(dtype=dtype, max_shard_size=max_shard_size)
        with losses_told(self._repo, self._composition):
            return self._export(plan, out, verify=verify, durable=durable, force=force, progress=progress)

    def _export(
        self, plan: ExportPlan, out: StrPath, *, verify: bool, durable: bool, force: Force, progress: Progress | None
    ) -> Exported:
        out = Path(out)
        if is_delta(out):
            raise AlreadyExists(f"{out} is a delta, and no export, so it is not replaced", hint="choose another -o")
        return execute_export(
            self._repo, plan, out, verify=verify, durable=durable, force=force, progress=progress or Silent()
        )

    def plan_dcp(self, *, adam_step: AdamStep = "unify") -> ExportPlan:
        """Return what `write_dcp` would write, without writing it."""
        with losses_told(self._repo, self._composition):
            return plan_dcp(self._repo, self._composition, adam_step=adam_step)

    def write_dcp(
        self,
        out: StrPath,
        *,
        adam_step: AdamStep = "unify",
        verify: bool = True,
        durable: bool = True,
        force: Force = False,
        progress: Progress | None = None,
    ) -> Exported:
        """
        Write a PyTorch distributed checkpoint to the folder *out*: the fp32 masters as the model, and the optimizer.

        ``torch.distributed.checkpoint.load`` reads it on any number of ranks, under the names of ``get_state_dict``.
        The optimizer's step counters are the base's or, with *adam_step* ``per-layer``, each layer's own. Everything
        else is as in `write`.
        """
        plan = self.plan_dcp(adam_step=adam_step)
        with losses_told(self._repo, self._composition):
            return self._export(plan, out, verify=verify, durable=durable, force=force, progress=progress)

    def plan_universal(self) -> ExportPlan:
        """Return what `write_universal` would write, without writing it."""
        with losses_told(self._repo, self._composition):
            return plan_universal(self._repo, self._composition)

    def write_universal(
        self,
        out: StrPath,
        *,
        verify: bool = True,
        durable: bool = True,
        force: Force = False,
        progress: Progress | None = None,
    ) -> Exported:
        """
        Write DeepSpeed's Universal Checkpoint to the folder *out*: each parameter's master and moments, whole.

        DeepSpeed loads it on any number of ranks with ``"checkpoint": {"load_universal": true}``. Everything else is as
        in `write`.
        """
        plan = self.plan_universal()
        with losses_told(self._repo, self._composition):
            return self._export(plan, out, verify=verify, durable=durable, force=force, progress=progress)

    def write_delta(
        self,
        out: StrPath,
        *,
        since: str,
        dtype: DTypeName | None = None,
        encoding: Encoding = "xor",
        verify: bool = True,
        force: Force = False,
        progress: Progress | None = None,
    ) -> DeltaWritten:
        """
        Write to the folder *out* what changed in the weights *since* a commit, for a server that holds its export.

        `layerstore.apply` puts it onto that export, as does SGLang's ``/pull_weights`` with *encoding* ``xor``;
        ``sparse`` has indices and values. Everything else is as in `export`.
        """
        base = compose_latest(resolve(self._repo, since))
        with losses_told(self._repo, self._composition):
            return write_delta(
                self._repo,
                self._composition,
                base,
                Path(out),
                dtype=dtype,
                encoding=encoding,
                verify=verify,
                force=force,
                progress=progress or Silent(),
            )
