"""The callback for the Trainer of Transformers; see `layerstore.transformers`."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from layerstore.live.attach import attach
from layerstore.live.dropin import StoreCheckpointEngine
from layerstore.live.saver import Saver
from layerstore.live.seams import engine_of, engines_are_made_with
from layerstore.store import Store, StrPath


class LayerstoreCallback(TrainerCallback):
    """
    Lets a Trainer under DeepSpeed ZeRO-3 save to a store and resume from it, on the schedule that it has anyway.

    Its folders hold pointers and the Trainer's own small files; ``save_total_limit``, ``load_best_model_at_end`` and
    ``resume_from_checkpoint`` work as before. *settings* are those of ``layerstore.attach``.

    With *every*, the state is also saved every so many steps without any folder. That is captured at the end of the
    step, before the Trainer logs and evaluates: what these change (the best metric, say) is not in it.
    """

    def __init__(self, store: Store | StrPath, *, run: str, every: int | None = None, **settings: Any) -> None:
        self.saver: Saver | None = None
        """While training goes on."""
        self._store = store
        self._run = run
        self._every = every
        self._settings = settings
        # A Trainer that resumes loads before it says that training begins: pointers must be known by then.
        engines_are_made_with(StoreCheckpointEngine)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the engine that the Trainer has made."""
        self.saver = attach(engine_of(kwargs["model"]), self._store, run=self._run, **self._settings)
        self.saver.step_of = lambda: int(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save where the Trainer's own schedule does not."""
        if self._every and self.saver is not None and state.global_step % self._every == 0 and not control.should_save:
            self.saver.save(step=int(state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for what is on its way, and let go of the engine."""
        if self.saver is not None:
            self.saver.close()
            self.saver = None
