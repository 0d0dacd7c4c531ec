"""The history of commits: references, attempts, the position of a new save, staleness, what a record needs."""

from layerstore.history.metrics import METRICS, measured_by, metrics_if_sound
from layerstore.history.needs import (
    Needs,
    NumberedRefs,
    named_by,
    objects_of_state,
)
from layerstore.history.next_commit import NextCommit, reserve
from layerstore.history.pushed import PushedNotice, forget_pushed, note_pushed, pushed_to
from layerstore.history.references import (
    Resolved,
    ambiguous_id,
    begins_id,
    locate,
    only_run,
    reference_to,
    references_to,
    resolve,
)
from layerstore.history.save_history import (
    SaveHistory,
    Staleness,
    has_shrunk,
    newest_exact,
    others_in,
    saved_at,
    saves_below,
    view_read_again,
)
