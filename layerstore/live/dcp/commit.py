"""Turn a DCP save into a commit: the coordinator decides what is due, and joins what all ranks have written."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from layerstore.distcp import PlannedSave, common_step
from layerstore.errors import Conflict, IntegrityError, Overtaken, SourceCheckpoint, Unsupported
from layerstore.history import NextCommit, view_read_again
from layerstore.ingest import layers_due
from layerstore.layers import typed
from layerstore.model import DCP, BlobRef, Commit, LayerEntry, PolicyUse, SourceLayout
from layerstore.parts import LayerPart, PackedObject
from layerstore.policy import Policy
from layerstore.precision import Keyframes, compact_counts
from layerstore.publish import Transaction, joined_losses
from layerstore.source import open_source
from layerstore.staging import Checksums, CompactLayers, SourceReader, Staging, can_refer, join_version
from layerstore.storage import ObjectWriter, Repository, RunView
from layerstore.tree import Tree
from layerstore.zero3.pt import Pickles, read_section
from layerstore.zero3.trees import STAGE_3, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The options of a save."""

    run: str
    step: int
    policy: Policy
    keyframes: Keyframes
    layer_pattern: str | None
    resumed_from: str | None


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written."""

    parts: tuple[LayerPart, ...]
    values: Mapping[str, bytes]
    """By key, in the format of ``torch.save``."""
    bytes_new: int
    bytes_reused: int


@dataclass(frozen=True)
class SaveInProgress:
    """A save that the coordinator has planned."""

    repo: Repository
    options: SaveOptions
    plan: PlannedSave

    @cached_property
    def place(self) -> NextCommit:
        """The save's position in the run, based on the run's newest commit when the save was planned."""
        return self._place_in(view_read_again(self.repo, self.options.run, self.options.step))

    def _place_in(self, view: RunView | None) -> NextCommit:
        """
        Return the save's position in the run as of *view*.

        Raises:
            Conflict: The run already has this step or a later step.
        """
        options = self.options
        run = typed(options.run)
        if options.resumed_from is None and view is not None and view.rows:
            tip = next(view.history(view.newest_attempt), None)
            if tip is not None and tip.step >= options.step:
                raise Conflict(
                    f"{run}@{options.step} is saved already"
                    if tip.step == options.step
                    else f"step {options.step} is before {run}@{tip.step}, the newest save of its run",
                    hint=f'give resumed_from="{options.run}@STEP", the commit that training continued from, or another '
                    "run=",
                )
        return NextCommit.at_step(
            self.repo, view, options.step, rivals=[], rollback=False, resumed_from=options.resumed_from
        )

    @cached_property
    def _decided(self) -> tuple[frozenset[str], dict[Tree, Tree]]:
        if getattr(self.options.policy, "measures", False):
            raise Unsupported(
                f"policy {self.options.policy.name} measures how far layers have moved, but DCP lets nobody read them",
                hint="use another policy, or save every layer",
            )
        return layers_due(self.repo, self.plan.layers, self.place, self.options.policy, run=self.options.run)

    @property
    def due(self) -> frozenset[str]:
        """The layers to store."""
        return self._decided[0]

    @cached_property
    def compact(self) -> dict[str, LayerEntry]:
        """The due layers that are stored compactly, each with the older version that it refers to."""
        keyframes, compact = self.options.keyframes, {}
        for layer in self.plan.layers:
            entry = self.place.inherited.get(layer.layer) if layer.layer in self.due else None
            if entry is None or keyframes.is_exact(entry.compact):
                continue
            version = self.repo.whole_version_of(entry)
            if version is not None and can_refer(layer, keyframes.precision, version):
                compact[layer.layer] = entry
        return compact

    def commit(self, written: Iterable[Written]) -> Commit:
        """
        Publish what all ranks have *written*.

        Raises:
            Overtaken: A collection has removed an object that a rank had written.
            Conflict: The run got other commits during the save.
        """
        shares = list(written)
        options, place = self.options, self.place
        values = {key: data for share in shares for key, data in share.values.items()}
        # The position was found without the lock, which must not be held during a whole save: check the position again.
        with self.repo.lock_run(options.run), Transaction(self.repo) as tx:
            view = view_read_again(self.repo, options.run, options.step)
            if self._place_in(view) != place:
                raise Conflict(
                    f"run {options.run!r} got other commits while step {options.step} was being saved",
                    hint="end the other job, then save again",
                )
            state, steps = self._state(tx, values)
            losses = joined_losses(part for share in shares for part in share.parts)
            record = place.record(
                run=options.run,
                step=options.step,
                layers=[replace(layer, optimizer_step=steps.get(layer.layer)) for layer in self.plan.layers],
                due=self.due,
                versions=dict(self._versions(tx.objects, shares)),
                states=(state,),
                world_size=self.plan.world_size,
                stage=STAGE_3,
                layout=SourceLayout(flavour=DCP, tag=DCP, layer_pattern=options.layer_pattern),
                policy=PolicyUse(
                    name=options.policy.name, parameters=options.policy.parameters, decisions=self._decided[1]
                ),
                precision=options.keyframes.precision.name,
                compact=compact_counts(place.inherited, {loss.layer for loss in losses}),
                flags=(DCP,),
            )
            for entry in record.layers:
                if entry.layer not in self.due:
                    tx.inherit(entry)
            # The ranks' own transactions have ended, so this one must claim what they wrote: touch it, and refer to it.
            named = [stored.ref for share in shares for part in share.parts for stored in part.named]
            for ref in tx.objects.unclaimed(named):
                raise Overtaken(
                    f"object {ref.id}, which a rank had written, is gone; nothing was saved", hint="save again"
                )
            own = tx.observed()
            observed = replace(
                own,
                bytes_new=own.bytes_new + sum(share.bytes_new for share in shares),
                bytes_reused=own.bytes_reused + sum(share.bytes_reused for share in shares),
                losses=losses,
            )
            return tx.commit(record, observed=observed).commit

    def _versions(self, writer: ObjectWriter, shares: Iterable[Written]) -> Iterator[tuple[str, BlobRef]]:
        by_layer: dict[str, list[LayerPart]] = {}
        for part in (part for share in shares for part in share.parts):
            by_layer.setdefault(part.layer, []).append(part)
        for layer in self.plan.layers:
            if layer.layer in self.due:
                parts = by_layer.get(layer.layer, [])
                objects = [stored for part in parts for stored in part.objects]
                _check_whole(layer.layer, objects, expected=len(layer.objects))
                yield (
                    layer.layer,
                    join_version(
                        writer,
                        layer,
                        objects,
                        [older for part in parts for older in part.references],
                        world_size=self.plan.world_size,
                    ),
                )

    def _state(self, tx: Transaction, values: Mapping[str, bytes]) -> tuple[BlobRef, dict[str, int | None]]:
        """Stage the state that belongs to no layer; return its blob, and each layer's update count."""
        contents = self.plan.contents
        with (
            closing(SourceReader()) as files,
            self.repo.files.temporary(self.repo.layout.tmp, b"".join(values.values())) as path,
        ):
            trees = dict(read_values(path, {key: len(data) for key, data in values.items()}))
            counts = {name: number_of(trees[key]) for name, key in contents.counters.items() if key in trees}
            steps = {
                layer.layer: common_step(counts.get(parameter.name) for parameter in layer.parameters)
                for layer in self.plan.layers
            }
            staging = Staging(tx.objects, files, source="the state", checksums=Checksums())
            return staging.whole_state(contents.state(self.plan.entries, trees).kept()), steps


def read_values(path: Path, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tree]]:
    """
    Yield values by key from the file *path*, where they are stored one after another; no code in them is run.

    Raises:
        Unsupported: A value is of a class that cannot be kept.
    """
    pickles, begin = Pickles(), 0
    with open_source(path) as source:
        for key, size_bytes in sizes.items():
            try:
                yield key, read_section(source, begin, size_bytes, pickles).tree
            except (IntegrityError, SourceCheckpoint, Unsupported) as exc:
                reason = exc.message.removeprefix(f"{path}: ")
                raise Unsupported(
                    f"{key!r} of the state cannot be kept: {reason}",
                    hint="leave it out, or build it from numbers, strings and tensors, in lists and dicts",
                ) from exc
            begin += size_bytes


def _check_whole(layer: str, objects: list[PackedObject], *, expected: int) -> None:
    if len(objects) != expected:
        raise IntegrityError(
            f"{len(objects)} of {expected} objects of {layer} were written; nothing was saved", hint="save again"
        )


def compact_layers(repo: Repository, keyframes: Keyframes, entries: Mapping[str, LayerEntry]) -> CompactLayers:
    """Return the compact layers of a rank, each with the version in *entries* that it refers to."""
    return CompactLayers(keyframes.precision, {layer: repo.version_of(entry) for layer, entry in entries.items()})
