"""``StoreWriter``: torch.distributed.checkpoint saves into a store."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from layerstore.arguments import checked
from layerstore.distcp import Item, Work, plan_save
from layerstore.dtypes import by_torch_name
from layerstore.errors import InvalidInput, NoStore, Unsupported
from layerstore.layers import check_name, compile_pattern
from layerstore.limits import IO_CHUNK_BYTES, STEP_MAX, WORKERS_MAX
from layerstore.live.dcp.commit import SaveInProgress, SaveOptions, Written, compact_layers, read_values
from layerstore.live.dcp.copies import Copies
from layerstore.live.engine import bytes_of
from layerstore.model import Commit, LayerEntry, StoredObject
from layerstore.parts import LayerPart
from layerstore.policy import Policy, chosen_policy
from layerstore.precision import PrecisionName, keyframes
from layerstore.publish import Transaction
from layerstore.staging import Checksums, CompactLayers, Reader, Staging, layer_part
from layerstore.store import Store, StrPath, init, open_store
from layerstore.threads import Threads, run_all
from layerstore.zero3 import ObjectSource


@dataclass(frozen=True, slots=True)
class _Instruction:
    """The coordinator's instruction to one rank."""

    work: Work
    """The objects to write; their slices refer to items of the rank's plan."""
    values: tuple[int, ...]
    """The numbers of the plan's items that are values, not tensors of layers."""
    compact: Mapping[str, LayerEntry]
    """The layers to store compactly, each with the version that it refers to."""


class StoreWriter(StorageWriter, AsyncStager):
    """
    Saves into run *run* of *store* as step *step*: ``save(state, storage_writer=StoreWriter("runs/store", …))``.

    Each rank writes its own objects while DCP passes it tensors; the commit becomes visible at the end, whole or not at
    all. Under *policy*, only the layers that are due are written, and the commit inherits the others. *precision*,
    *exact_every* and *layer_pattern* work as in ``layerstore ingest``. If training went back to an earlier commit, give
    that commit as *resumed_from*. If *store* is a path without a store, a store is made, unless *create* is False.

    With ``async_save``, tensors are copied to the host while training continues: the next step of any torch
    optimizer waits for the remaining copies. Before changing tensors in any other way, call `synchronize_staging`.

    Make a new writer for each save; after the save, the coordinator's writer has the commit in ``commit``.

    Raises:
        InvalidInput: *run* is not a valid name, or *step* is negative or too large.
        Conflict: The run already has this step or a later step.
    """

    @checked
    def __init__(
        self,
        store: Store | StrPath,
        *,
        run: str,
        step: int,
        policy: str | Policy = "full",
        precision: PrecisionName = "exact",
        exact_every: int | None = 10,
        layer_pattern: str | None = None,
        resumed_from: str | None = None,
        create: bool = True,
    ) -> None:
        if not 0 <= step < STEP_MAX:
            raise InvalidInput(f"step {step} is not a step", hint="a step is a whole number, 0 or more")
        self._options = SaveOptions(
            run=check_name(run, what="the run's name"),
            step=step,
            policy=chosen_policy(policy),
            keyframes=keyframes(precision, exact_every),
            layer_pattern=layer_pattern,
            resumed_from=resumed_from,
        )
        compile_pattern(layer_pattern)
        self._create = create
        self._path: StrPath = store.repo.name if isinstance(store, Store) else store
        self._opened = store if isinstance(store, Store) else None
        self._save: SaveInProgress | None = None
        self._copies: Copies | None = None
        self.commit: Commit | None = None

    # -- called by async_save ----------------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: training need not wait for the copies right away."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return *state_dict* as it is now; large tensors are copied while training continues."""
        self._copies = Copies()
        return self._copies.take(state_dict)

    def synchronize_staging(self) -> None:
        """Wait for the remaining copies."""
        if self._copies is not None:
            self._copies.wait()

    def close(self) -> None:
        """Release the copies."""
        if self._copies is not None:
            self._copies.wait()
            self._copies = None

    # -- called by DCP -----------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: object = None) -> None:
        """Begin a save."""
        if checkpoint_id is not None:
            raise InvalidInput(
                f"checkpoint_id={checkpoint_id!r} was given: run and step identify the commit", hint="leave it out"
            )

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Make the store, on the coordinator, if it does not exist."""
        if is_coordinator and self._create and self._opened is None:
            with suppress(NoStore):
                open_store(self._path).close()
                return
            init(self._path).close()

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = open_store(self._path)
        return self._opened

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return *plan*."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide which layers are due, and assign the objects to ranks."""
        if not all(plan.usable for plan in plans):
            raise Unsupported("the planner caches its plan, and sent none", hint="leave enable_plan_caching off")
        repo = self._store.repo
        repo.prepare_saving()
        paths: dict[str, Any] = {}
        for plan in plans:
            paths.update({key: path for key, path in (plan.planner_data or {}).items() if key not in paths})
        plan_of_all = plan_save(
            _items(plans), paths, world_size=len(plans), pattern=compile_pattern(self._options.layer_pattern)
        )
        if not plan_of_all.layers:
            raise InvalidInput("the state holds no tensors: there is nothing to keep")
        self._save = SaveInProgress(repo, self._options, plan_of_all)
        return [
            replace(plan, storage_data=self._instruction(self._save, rank, plan)) for rank, plan in enumerate(plans)
        ]

    @staticmethod
    def _instruction(save: SaveInProgress, rank: int, plan: SavePlan) -> _Instruction:
        work = tuple(item for item in save.plan.by_rank[rank] if item[0] in save.due)
        own = {layer for layer, _ in work}
        tensors = save.plan.contents.tensors
        return _Instruction(
            work=work,
            values=tuple(number for number, item in enumerate(plan.items) if item.index.fqn not in tensors),
            compact={layer: entry for layer, entry in save.compact.items() if layer in own},
        )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's objects."""
        instruction = plan.storage_data
        assert isinstance(instruction, _Instruction), "prepare_global_plan has made it"
        repo = self._store.repo
        values = {
            plan.items[number].index.fqn: self._saved(plan.items[number], planner) for number in instruction.values
        }
        with repo.files.temporary(repo.layout.tmp, b"".join(values.values())) as path:
            for _ in read_values(path, {key: len(data) for key, data in values.items()}):
                pass  # only read: a value that cannot be kept raises before anything is written
        compact = compact_layers(repo, self._options.keyframes, instruction.compact)
        # Written through the page cache: the caller of save waits, and the disk can catch up later.
        with Transaction(repo) as tx, Threads(WORKERS_MAX, thread_name_prefix="write") as pool:
            staging = Staging(
                tx.objects, _Reader(plan.items, planner, self._copies), source="the state", checksums=Checksums()
            )
            staged = run_all(pool, partial(_staged, staging, compact), instruction.work)
            tx.objects.publish()  # makes objects durable before the coordinator learns of them and writes the record
            written = Written(
                tuple(_parts(staging, compact, staged)), values, tx.objects.bytes_new, tx.objects.bytes_reused
            )
        self._copies = None
        results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        # DCP brings all ranks' results to the coordinator; each rank's first result carries what the commit needs.
        if results:
            results[0] = replace(results[0], storage_data=written)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _saved(self, item: WriteItem, planner: SavePlanner) -> bytes:
        """Return a value in the format of ``torch.save``."""
        value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            return value.getvalue()
        value = value.detach() if self._copies is None else self._copies.copy_of(value.detach())
        buffer = io.BytesIO()
        torch.save(value.cpu().clone(), buffer)  # cloned, because torch.save would write the whole storage of a view
        return buffer.getvalue()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the commit visible."""
        assert self._save is not None, "prepare_global_plan has made it"
        written = (result.storage_data for of_rank in results for result in of_rank)
        self.commit = self._save.commit(part for part in written if part is not None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return False: the run and the step identify the commit."""
        del checkpoint_id
        return False


def _items(plans: Sequence[SavePlan]) -> Iterator[Item]:
    for rank, plan in enumerate(plans):
        for number, item in enumerate(plan.items):
            key, data = item.index.fqn, item.tensor_data
            if item.type is WriteItemType.BYTE_IO or data is None:
                yield Item(rank=rank, number=number, key=key, dtype=None)
            else:
                yield Item(
                    rank=rank,
                    number=number,
                    key=key,
                    dtype=by_torch_name(str(data.properties.dtype).removeprefix("torch.")).code,
                    shape=tuple(data.size),
                    offsets=tuple(data.chunk.offsets),
                    sizes=tuple(data.chunk.sizes),
                )


_Staged = tuple[str, StoredObject]
"""A layer, and one of its objects."""


def _staged(staging: Staging, compact: CompactLayers, work: tuple[str, ObjectSource]) -> _Staged:
    layer, source = work
    return layer, staging.planned(source, compact.plan(layer, source))


def _parts(staging: Staging, compact: CompactLayers, staged: Iterable[_Staged]) -> Iterator[LayerPart]:
    """Yield this rank's part of each layer."""
    by_layer: dict[str, list[StoredObject]] = {}
    for layer, stored in staged:
        by_layer.setdefault(layer, []).append(stored)
    for layer, objects in by_layer.items():
        yield layer_part(layer, objects, compact, staging)


class _Reader(Reader):
    """Reads the tensors of a plan, by item number; each is on the host only while it is read."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner, copies: Copies | None) -> None:
        self._items = items
        self._planner = planner
        self._copies = copies

    def _bytes(self, path: Path) -> memoryview:
        tensor = self._planner.resolve_data(self._items[int(path.name)])
        assert isinstance(tensor, torch.Tensor), "layers hold tensors"
        tensor = tensor.detach() if self._copies is None else self._copies.copy_of(tensor.detach())
        return bytes_of(tensor.to("cpu").contiguous().view(-1))

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of a tensor in order."""
        data = self._bytes(path)
        if len(data) < offset + size_bytes:
            raise InvalidInput(
                f"the planner gave {len(data)} bytes of a tensor that its plan has with at least {offset + size_bytes}",
                hint="a planner must not convert tensors after it has made its plan",
            )
        for start in range(offset, offset + size_bytes, IO_CHUNK_BYTES):
            yield data[start : min(start + IO_CHUNK_BYTES, offset + size_bytes)]
