"""
A composite: the answer to a query, for users.

    composite = store.compose("sft", policy="parity")
    composite.write("resume")
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from layerstore.arguments import checked
from layerstore.arrays import TensorKind, Tensors, make_state_dict, open_tensors
from layerstore.assemble import Exported, Force, Writing
from layerstore.compose import Composition, check_splittable, load_versions, naming_damage
from layerstore.delta import is_delta
from layerstore.dtypes import DTypeName
from layerstore.errors import AlreadyExists, InvalidInput, Unsupported
from layerstore.formats import Format, FormatKeywords, Plan, chosen_format
from layerstore.history import Staleness, reference_to, references_to
from layerstore.inspect import LayerLine, layer_lines
from layerstore.json_fields import json_fields
from layerstore.model import Pin, Saving, StrPath
from layerstore.nearest import ByName
from layerstore.progress import Progress, Silent
from layerstore.publish import make_pin
from layerstore.shards import Written
from layerstore.storage import Repository
from layerstore.tables import Table, data_frame
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
    """The answer to a query: a version for each layer, and a commit, the base, for the rest. Nothing is written yet."""

    def __init__(self, repo: Repository, composition: Composition) -> None:
        self._opened = repo
        self._composition = composition

    @property
    def _repo(self) -> Repository:
        """The repository of the composite's store, which must still be open."""
        self._opened.check_open()
        return self._opened

    def __repr__(self) -> str:
        older = f"{len(self._composition.older_layers)} of {len(self._composition.layers)} layers from other saves"
        if self._composition.mean is not None:
            older = str(self._composition.mean)
        if compact := len({entry.layer for entry in self._composition.entries if entry.compact}):
            older += f", {compact} not bit for bit"
        return f"<Composite {self.run}@{self.step}: policy {self.policy}, {older}, world size {self.world_size}>"

    def to_pandas(self) -> "DataFrame":
        """Return a data frame with each layer's save and age, one row per layer; raises Unsupported without pandas."""
        return data_frame(map(json_fields, self.staleness.layers))

    @property
    def composition(self) -> Composition:
        """The composition itself, for `layerstore.live`."""
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
    def is_dcp(self) -> bool:
        """Whether ``torch.distributed.checkpoint`` saved the base, rather than DeepSpeed."""
        return self._composition.base.is_dcp

    @property
    def name(self) -> str:
        """The reference to the base: ``RUN@STEP``, or ``RUN~1@STEP`` if its attempt was abandoned."""
        return reference_to(self._repo, self._composition.base)

    def names_of(self, saves: Iterable[Saving]) -> list[str]:
        """Return the reference to each of *saves*, in the form of `name`."""
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
        """A warning that this model never existed; None unless several saves are mixed or averaged."""
        return self._composition.mixture

    @property
    def inexact(self) -> str | None:
        """A sentence on what was not kept bit for bit, and on the newest exact save; None if every layer is exact."""
        return self._composition.inexact(self._repo)

    @property
    def older_than_due(self) -> tuple[str, ...]:
        """Layers that were due at the chosen save but not written by it, so that an older version is used."""
        return self._composition.older_than_due

    @property
    def recipe_notes(self) -> tuple[str, ...]:
        """What the recipe omits or sets without effect, layers older than requested, and damaged layers replaced."""
        return self._composition.notes

    def summary(self) -> dict[str, object]:
        """Return the facts that programs find in the file ``layerstore.json`` next to the composite's shards."""
        return self._composition.summary()

    def check(self, *, max_staleness: int | None = None) -> None:
        """
        Check that the layers fit together, and that none is more than *max_staleness* steps older than the base.

        Raises:
            LayoutMismatch: A layer differs from the base in parameters, shapes, types, ties or optimizer state.
            Conflict: A layer is too old.
        """
        if max_staleness is not None and self._composition.mean is not None:
            raise InvalidInput("an average has saves of several ages", hint="leave max_staleness out")
        if max_staleness is not None:
            self.staleness.check(self._composition.base, steps_max=max_staleness)
        with naming_damage(self._repo, self._composition):
            load_versions(self._repo, self._composition)

    def pin(self, name: str) -> Pin:
        """Keep this composite as the pin *name*, which outlives the commits that the composite was made from."""
        self._check_stored("keep it with write() or export()")
        self.check()
        with naming_damage(self._repo, self._composition):
            # The same check as before a write: a pin that cannot be written out keeps bytes for nothing.
            check_splittable(self._repo, self._composition)
        return make_pin(self._repo, name, self._composition.as_resolved())

    def ls(self) -> Table[LayerLine]:
        """Return every layer with its sizes."""
        with naming_damage(self._repo, self._composition):
            return Table(layer_lines(self._repo, self._composition.layers))

    def _check_stored(self, hint: str) -> None:
        """Raise Unsupported if the masters are a mean, which no object stores."""
        if self._composition.mean is not None:
            raise Unsupported(f"{self._composition.mean}: no object of the store has its bytes", hint=hint)

    def plan(self, format: str | Format = "shards", **options: Unpack[FormatKeywords]) -> Plan:  # noqa: A002  # as the option is called
        """Return what `export` would write in *format*; its ``notes`` list what would not carry over."""
        with naming_damage(self._repo, self._composition):
            return chosen_format(format, options).plan(self._repo, self._composition)

    def write(
        self,
        out: StrPath,
        *,
        verify: bool = True,
        durable: bool = True,
        force: Force = False,
        progress: Progress | None = None,
        **options: Unpack[FormatKeywords],
    ) -> Written:
        """
        Write shards to resume from: `export` with *format* ``shards``.

        The shards have the base's ZeRO stage or, with *as_zero3*, stage 3. They are for *world_size* ranks, by default
        as many as saved the base; the result's ``notes`` list what does not carry over to another number of ranks. The
        optimizer's step counters are the base's or, with *adam_step* ``per-layer``, each layer's own, which is possible
        if each layer has its own param group. With *moments* ``fresh``, the optimizer starts over: its moments are zero
        and its counters 0.
        """
        how = Writing(verify=verify, durable=durable, force=force)
        written = self._export(chosen_format("shards", options), out, how, progress)
        assert isinstance(written, Written)
        return written

    def export(
        self,
        out: StrPath,
        *,
        format: str | Format = "hf",  # noqa: A002  # as the option is called
        verify: bool = True,
        durable: bool = True,
        force: Force = False,
        progress: Progress | None = None,
        **options: Unpack[FormatKeywords],
    ) -> Exported:
        """
        Write the folder *out* in *format*, which has its own *options*; the folder appears whole or not at all.

        - ``hf``: the weights, as Transformers' ``from_pretrained`` loads them. *dtype* is ``bf16``, ``fp16`` or
          ``fp32``, by default the type in which each parameter is trained; *max_shard_size*, in bytes or as text such
          as ``"2GiB"``, limits the tensors per file.
        - ``shards`` and ``zero3``: see `write`.
        - ``dcp``: a PyTorch distributed checkpoint, with the fp32 masters as the model, and the optimizer.
          ``torch.distributed.checkpoint.load`` reads it on any number of ranks; the keys are those that
          ``get_state_dict`` returns. *adam_step* is as in `write`.
        - ``universal``: DeepSpeed's Universal Checkpoint, which it loads on any number of ranks with
          ``"checkpoint": {"load_universal": true}``.
        - ``delta``: what changed in the weights *since* a commit, for a server that holds that commit's export in
          *dtype*. `layerstore.apply` applies it to that export, and so does SGLang's ``/pull_weights`` if *encoding* is
          ``xor``; ``sparse`` stores indices and values.

        Every byte read is verified unless *verify* is False; a power cut cannot tear the folder unless *durable* is
        False. A folder at *out* is replaced only with *force*, and a folder that layerstore did not write only with
        *force* ``foreign``.
        """
        how = Writing(verify=verify, durable=durable, force=force)
        return self._export(chosen_format(format, options), out, how, progress)

    def _export(self, into: Format, out: StrPath, how: Writing, progress: Progress | None) -> Exported:
        # A delta's index has the same file name as an export's: an export would take the delta for an older export.
        if into.name != "delta" and os.path.lexists(out) and is_delta(Path(out)):
            raise AlreadyExists(f"{out} is a delta, which only another delta replaces", hint="choose another -o")
        with naming_damage(self._repo, self._composition):
            return into.write(self._repo, self._composition, Path(out), how, progress or Silent())

    def tensors(self, kind: TensorKind = "master", *, state: str | None = None, verify: bool = True) -> Tensors:
        """
        Return the tensors of one *kind* by name, as read-only arrays: mapped if contiguous in one object.

        *kind* is ``master``, ``optimizer``, ``weights`` or ``buffers``; ``weights`` has only weights that cannot be
        derived from their master. *state* is an optimizer state, such as ``exp_avg``; without it, all states are
        included, as ``exp_avg/NAME``. A tensor is read only on access, and verified first.
        """
        self._check_stored("state_dict() has its weights")
        with naming_damage(self._repo, self._composition):
            versions = [self._repo.version_of(entry) for entry in self._composition.layers]
        return open_tensors(self._repo, versions, kind=kind, state=state, verify=verify)

    def state_dict(self, *, dtype: DTypeName | None = None, verify: bool = True) -> "dict[str, torch.Tensor]":
        """
        Return all weights and buffers as torch tensors in memory, for ``model.load_state_dict``.

        *dtype* is ``bf16``, ``fp16`` or ``fp32``, by default the type in which each parameter is trained; the values
        equal those that `export` writes, under the names in the trained model. Every tensor is a writable copy;
        tied names share one copy. Frozen parameters are missing if the checkpoint was saved without them.
        """
        with naming_damage(self._repo, self._composition):
            versions = load_versions(self._repo, self._composition)
            slices = self._composition.slices(self._repo, versions)
        return make_state_dict(self._repo, versions, slices, dtype=dtype, verify=verify)
