"""The newest save of a saver: what comes next is of a later step, or the same once more."""

from layerstore.errors import Conflict
from layerstore.live.council import SAVES_MAX
from layerstore.live.log import LOG
from layerstore.live.results import Saved


class Newest:
    """What was saved last, or where the engine was filled from."""

    def __init__(self, after: int | None) -> None:
        self._lost: set[int] = set()
        self.begin_at(after, updates=0)

    def begin_at(self, after: int | None, *, updates: int) -> None:
        """Go on behind the step *after*, which the store has; None where there is none."""
        self._saved: Saved | None = None
        self._after = after
        self._updates = updates
        self._lost.clear()

    def note(self, saved: Saved, *, updates: int) -> None:
        """Note that *saved* has begun, after so many *updates*."""
        self._saved, self._after, self._updates = saved, saved.step, updates

    def note_lost(self, number: int) -> None:
        """Note that the save *number* came to nothing: it may be made again."""
        self._lost = {other for other in self._lost if other > number - SAVES_MAX} | {
            number
        }  # fates of older are known

    def is_lost(self, number: int) -> bool:
        """Whether the save *number* came to nothing."""
        return number in self._lost

    def same(self, step: int, *, updates: int, pin: str | None, is_told: bool) -> Saved | None:
        """
        Return what the last save began if this one is the same: trainers save twice at the end of training.

        With a *pin*, or where it *is_told* what else to keep, a warning says that the first save stays as it is.

        Raises:
            Conflict: *step* is not after the last one.
        """
        if self._after is None or step > self._after:
            return None
        if step < self._after or updates != self._updates:
            raise Conflict(
                f"step {step} is not after step {self._after}, which was saved last",
                hint="count steps on; to go back to an earlier step, resume from it",
            )
        if self._saved is not None and self._saved.number in self._lost:
            return None
        if pin is not None:
            LOG.warning("step %d was saved already, without a pin: layerstore pin %s", step, pin)
        if is_told:
            LOG.warning("step %d was saved already: what client_state and files it has, it keeps", step)
        return self._saved or Saved(step=step, number=-1, layers_due=(), skipped=True, blocked_seconds=0.0)
