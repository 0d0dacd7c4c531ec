"""The callback for Transformers' Trainer; see `layerstore.transformers`."""

import io
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from layerstore.arguments import checked, show_fields
from layerstore.disk import Files
from layerstore.errors import InvalidInput, NoStore
from layerstore.filenames import TRAINER_STATE
from layerstore.layout import folder_of, is_url
from layerstore.live.attachable import Attachable, attachable
from layerstore.live.attaching import attach_with, check_places, options_for
from layerstore.live.deepspeed import StoreCheckpointEngine, engine_of, engines_are_made_with
from layerstore.live.levels import levels_of
from layerstore.live.log import LOG
from layerstore.live.resuming import check_run
from layerstore.live.saver import Saver, SaverKeywords, SaverOptions
from layerstore.live.scratch import put, scratch
from layerstore.live.trainer_fsdp import trainers_save_to_stores, trains_with_fsdp
from layerstore.storage import check_free
from layerstore.store import Store, StrPath, open_store


class LayerstoreCallback(TrainerCallback):
    """
    Makes a Trainer under DeepSpeed ZeRO or FSDP2 save to a store, on the Trainer's schedule, and resume from the store.

    Checkpoint folders hold pointers and the Trainer's own small files; ``save_total_limit``, ``load_best_model_at_end``
    and ``resume_from_checkpoint`` work as before. *options* are the options of ``layerstore.attach``, checked at once.

    With *every*, the state is also saved at each step that is a multiple of *every*, without a folder. This state is
    captured at the end of the step, before the Trainer logs and evaluates, so it lacks the results of both, such as the
    best metric.
    """

    @checked
    def __init__(
        self,
        store: Store | StrPath | Iterable[StrPath],
        *,
        run: str,
        every: int | None = None,
        **options: Unpack[SaverKeywords],
    ) -> None:
        if every is not None and every < 0:
            raise InvalidInput(f"every cannot be {every!r}", hint="every=50 also saves at every fiftieth step")
        self.saver: Saver | None = None
        """None unless the Trainer is training."""
        self._levels = levels_of(store)
        self._run = run
        self._every = every
        self._options = options_for(self._levels, options)
        _check_store(self._levels.first, run, self._options)
        self._count: _Count | None = None
        # When a Trainer resumes, it loads its checkpoint before on_train_begin, so pointers must work from now on.
        if find_spec("deepspeed") is not None:
            engines_are_made_with(StoreCheckpointEngine)
        trainers_save_to_stores()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach a saver to DeepSpeed's engine, or to the module that FSDP2 shards."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        trained = attachable(model, optimizer) if trains_with_fsdp() else attachable(engine_of(model, optimizer))
        self.saver = attach_with(self._options, trained, self._levels, run=self._run)
        self._count = _Count(state, lambda: trained.engine.step, resumed=self._resumed_step(trained))
        self.saver.step_of = self._count.step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the counters at the beginning of a step."""
        if self._count is not None:
            self._count.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save at every *every*-th step, unless the Trainer itself is about to save."""
        if self._every and self.saver is not None and state.global_step % self._every == 0 and not control.should_save:
            with scratch() as folder:
                self.saver.save(
                    step=self.saver.step_of(),
                    extra_files=_own_files(folder, state, control, kwargs) if state.is_world_process_zero else {},
                )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the saver."""
        if self.saver is not None:
            self.saver.close()
            self.saver = self._count = None

    def _resumed_step(self, trained: Attachable) -> int:
        """Return the step of this run that *trained* was resumed from; 0 if it was not."""
        loaded = trained.binding.composition
        return loaded.base.step if loaded is not None and loaded.base.run == self._run else 0


show_fields(LayerstoreCallback.__init__, SaverOptions)


def _check_store(store: Store | StrPath, run: str, options: SaverOptions) -> None:
    """Raise now any error about *store* that `attach` would raise only after model and data are set up."""
    if isinstance(store, Store):
        _check_names(store, run, options)
        return
    place = store if isinstance(store, str) and is_url(store) else folder_of(store)
    try:
        with open_store(place) as opened:
            _check_names(opened, run, options)
    except NoStore:
        _check_names(None, run, options)
        if not options.create:
            raise
        if isinstance(place, Path):
            check_free(place, Files())


def _check_names(store: Store | None, run: str, options: SaverOptions) -> None:
    check_run(store, run)
    check_places(store, options.places)


class _Count:
    """
    The step of a save.

    The Trainer counts a step only at the step's very end. A save on a signal may come between the engine's update and
    that count; the saved state then belongs to the next step, whatever the folder is called.
    """

    def __init__(self, state: TrainerState, updates: Callable[[], int], *, resumed: int) -> None:
        self._state = state
        self._updates = updates
        self._lead = max(resumed - int(state.global_step), 0)
        """How many steps the run is ahead of the Trainer's count, after a resume from such a save."""
        self.begin()

    def begin(self) -> None:
        """Remember the counters at the beginning of a step."""
        self._begun = int(self._state.global_step), self._updates()

    def step(self) -> int:
        """Return the step of the engine's current state."""
        step, updates = int(self._state.global_step), self._updates()
        is_ahead = step == self._begun[0] and updates > self._begun[1]
        if is_ahead:
            LOG.warning("the Trainer saves step %d during the next step: the commit is step %d", step, step + 1)
        return step + is_ahead + self._lead


def _own_files(folder: Path, state: TrainerState, control: TrainerControl, given: dict[str, Any]) -> dict[str, StrPath]:
    """Write the Trainer's own files, which it needs to resume, to *folder*; return their paths by name."""
    import torch
    from accelerate.utils import DeepSpeedSchedulerWrapper

    callbacks: Any = state.stateful_callbacks  # declared as a list, but is a dict of the callbacks' states
    callbacks["TrainerControl"] = control.state()
    path = folder / TRAINER_STATE
    state.save_to_json(str(path))
    files: dict[str, StrPath] = {path.name: path}
    scheduler = given.get("lr_scheduler")
    if scheduler is not None and not isinstance(scheduler, DeepSpeedSchedulerWrapper):
        data = io.BytesIO()
        torch.save(scheduler.state_dict(), data)
        files["scheduler.pt"] = put(folder / "scheduler.pt", data.getvalue())
    return files
