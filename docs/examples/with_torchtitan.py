"""torchtitan's checkpoint manager with a store behind it; name its Config as `checkpoint` in yours."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchtitan.components.checkpoint import CheckpointManager

import layerstore
from layerstore.dcp import StoreReader, StoreWriter


class StoreCheckpoints(CheckpointManager):
    """Saves to a store, and loads the newest commit of its run, or a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As torchtitan's, and where the store is."""

        store: str
        run: str

    def __init__(self, config: Config, **others: Any) -> None:
        """Note where the store is."""
        super().__init__(config, **others)
        self.store, self.run = config.store, config.run

    def dcp_save(self, state_dict: Any, checkpoint_id: str, async_mode: str, *_: Any, **__: Any) -> Any:
        """Save to the store."""
        writer = StoreWriter(self.store, run=self.run, step=int(checkpoint_id.rpartition("step-")[2]))
        if async_mode == "disabled":
            return save(state_dict, storage_writer=writer)
        return async_save(state_dict, storage_writer=writer, process_group=self.pg)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load the run's newest commit, or *step*; without one, what torchtitan loads at the first launch."""
        try:
            with layerstore.open(self.store) as store:
                runs = store.runs()
        except layerstore.NoStore:
            runs = []  # the first launch
        if self.run not in runs:
            return bool(super()._load(step))
        states = self._states_to_load(model_only=False)
        load(states, storage_reader=StoreReader(self.store, self.run if step == -1 else f"{self.run}@{step}"))
        self.states["model"].load_state_dict(states)
        return True
