"""``StoreReader``: torch.distributed.checkpoint loads from a store, including commits that DeepSpeed saved."""

import io
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from layerstore.arguments import checked
from layerstore.compose import load_versions, naming_damage
from layerstore.composite import Composite
from layerstore.distcp import Boxes, Named, names_of
from layerstore.dtypes import by_code
from layerstore.errors import Conflict, InvalidInput, LayoutMismatch
from layerstore.handover import Held
from layerstore.live.engine import bytes_of, revive_kept
from layerstore.policy import Policy
from layerstore.rank_options import AdamStep
from layerstore.store import Store, StrPath, as_store


@dataclass(frozen=True, slots=True)
class _OpenComposite:
    """A composite that is being loaded."""

    composite: Composite
    named: dict[str, Named]
    """The tensors and values of the composite, by key."""
    boxes: Boxes


class StoreReader(StorageReader):
    """
    Loads *ref* of *store*, a path or a URL: ``load(state, storage_reader=StoreReader("runs/store", "sft@100"))``.

    Each rank reads the parts of tensors that it needs, and checks all of them. For a commit that DeepSpeed saved, keys
    are as in ``get_state_dict``. *policy* chooses a version for each layer, as of *ref*; without a *policy*, layers
    from several saves are refused. With *exact*, the newest save up to *ref* that was kept bit for bit is used instead.

    Raises:
        Conflict: Layers are from several saves, and no *policy* was given.
        NotFound: The commit does not exist.
    """

    @checked
    def __init__(
        self,
        store: Store | StrPath,
        ref: str | None = None,
        *,
        policy: str | Policy | None = None,
        adam_step: AdamStep = "unify",
        exact: bool = False,
    ) -> None:
        self._store = as_store(store)
        self._policy = policy
        self._adam_step: AdamStep = adam_step
        self._exact = exact
        self._opened: _OpenComposite | None = None if ref is None else self._open(ref)

    @property
    def step(self) -> int:
        """The step of the commit."""
        return self._loaded.composite.step

    @property
    def composite(self) -> Composite:
        """The composite that is loaded."""
        return self._loaded.composite

    @property
    def _loaded(self) -> _OpenComposite:
        if self._opened is None:
            raise InvalidInput(
                "no commit was given", hint='StoreReader(store, "sft@100"), or load(…, checkpoint_id="sft@100")'
            )
        return self._opened

    def _open(self, ref: str) -> _OpenComposite:
        composite = self._store.compose(ref, policy=self._policy or "latest", exact=self._exact)
        if composite.mixture and self._policy is None:
            raise Conflict(
                f"{composite.name}: {composite.mixture}",
                hint='StoreReader(…, policy="latest") loads it anyway; policy="exact" never mixes saves',
            )
        for note in filter(None, (composite.mixture, composite.inexact)):
            warnings.warn(f"{composite.name}: {note}", stacklevel=4)
        composition, repo = composite.composition, self._store.repo
        with naming_damage(repo, composition):
            versions = load_versions(repo, composition)
            slices = composition.slices(repo, versions)
            named, notes = names_of(repo, composition, versions, slices, adam_step=self._adam_step)
            for note in notes:
                warnings.warn(f"{composite.name}: {note}", stacklevel=4)
        by_key = {key: entry for entry in named for key in entry.keys}
        return _OpenComposite(composite, by_key, Boxes(repo, versions, slices))

    # -- what DCP calls ----------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: object = None) -> None:
        """Open the commit *checkpoint_id*, if one is given."""
        if checkpoint_id is not None:
            self._opened = self._open(str(checkpoint_id))

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the metadata of all tensors, each as one chunk; ranks read the parts that they need."""
        named = self._loaded.named
        return Metadata(
            state_dict_metadata={key: _described(entry) for key, entry in named.items()},
            planner_data={key: entry.path for key, entry in named.items()},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Do nothing: no rank has a special role in reading."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return *plan*, with the commit that this rank has found."""
        return replace(plan, storage_data=self._loaded.composite.commit)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """
        Return *plans*.

        Raises:
            Conflict: The ranks found different commits: a save became visible while they looked.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise Conflict(
                "the ranks found different commits: a save became visible while they looked",
                hint=f'give the step, as in StoreReader(…, "{self._loaded.composite.name}")',
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """
        Read everything in *plan*.

        Raises:
            IntegrityError: An object is damaged or missing.
        """
        opened = self._loaded
        composition, repo = opened.composite.composition, self._store.repo
        landings = []
        with naming_damage(repo, composition):
            for item in plan.items:
                entry = opened.named[item.storage_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._saved(entry))
                elif entry.held is not None:
                    landings.append(_Landing.planned(opened.boxes, entry, entry.held, item, planner))
                else:
                    whole = self._revived(entry)
                    _Landing(item, planner, _narrowed(whole, item)).commit()
            opened.boxes.read()
        # Only now that everything is read and checked. Tensors read into the trainer's own memory are filled already.
        for landing in landings:
            landing.commit()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether *checkpoint_id* could be a reference to a commit."""
        return isinstance(checkpoint_id, str)

    # -- values ------------------------------------------------------------------------------------------------------

    def _revived(self, entry: Named) -> Any:
        return revive_kept(entry.value, self._store.repo.content_of)

    def _saved(self, entry: Named) -> io.BytesIO:
        """Return a value in DCP's format, rebuilt from known classes: no stored code is run."""
        buffer = io.BytesIO()
        torch.save(self._revived(entry), buffer)
        buffer.seek(0)
        return buffer


@dataclass(frozen=True, slots=True)
class _Landing:
    """A tensor that is read, and then given to the trainer."""

    item: ReadItem
    planner: LoadPlanner
    source: torch.Tensor
    """The memory that the tensor is read into: the trainer's own if possible."""

    @classmethod
    def planned(cls, boxes: Boxes, entry: Named, held: Held, item: ReadItem, planner: LoadPlanner) -> "_Landing":
        """Plan to read the box that *item* needs."""
        assert entry.dtype is not None, "layers hold tensors"
        target = planner.resolve_tensor(item).detach()
        dtype = getattr(torch, by_code(entry.dtype).torch_name)
        # Read directly into the trainer's memory if it is on the host with the same layout; otherwise `commit` copies.
        is_direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        source = target if is_direct else torch.empty(tuple(item.lengths), dtype=dtype)
        if source.numel():
            boxes.add(
                held,
                bytes_of(source.reshape(-1)),
                dtype=entry.dtype,
                shape=entry.shape,
                offsets=item.storage_offsets,
                sizes=item.lengths,
            )
        return cls(item, planner, source)

    def commit(self) -> None:
        """Give the tensor to the trainer."""
        target = self.planner.resolve_tensor(self.item).detach()
        if target.shape != self.source.shape:
            raise LayoutMismatch(
                f"{self.item.dest_index.fqn!r} is {tuple(target.shape)} here, {tuple(self.source.shape)} in the store"
            )
        if target.data_ptr() != self.source.data_ptr():
            target.copy_(self.source)
        self.planner.commit_tensor(self.item, target)


def _narrowed(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _described(entry: Named) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.dtype is None:
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(entry.shape)), sizes=torch.Size(entry.shape))
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, by_code(entry.dtype).torch_name)),
        size=torch.Size(entry.shape),
        chunks=[whole],
    )
