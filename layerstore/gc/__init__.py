"""Remove commits by retention rules, and objects that nothing needs; drop and undrop commits."""

from layerstore.gc.collect import (
    GcOutcome,
    GcRequest,
    check_confirmed,
    chosen,
    execute_gc,
    has_work,
    notes_of,
    plan_gc,
)
from layerstore.gc.drop import (
    Dropped,
    DroppedCommit,
    damaged_records,
    dropped,
    execute_drop,
    give_up,
    plan_drop,
    undrop,
)
from layerstore.gc.mark import commit_named, concluding, readable_pins, stranger
from layerstore.gc.retention import NOT_PUSHED, NOT_REQUESTED, CommitFate, Facts
from layerstore.gc.sweep import Gone
