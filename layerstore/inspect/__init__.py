"""Read-only views of a store, for people and for programs: log, show, ls, diff, stats, report and estimate."""

from layerstore.inspect.cost import Prices, Training
from layerstore.inspect.diff import (
    Diff,
    DiffSide,
    LayerDiff,
    ParameterDiff,
    ParametersDiff,
    StateDiff,
    compare,
    compare_layer,
)
from layerstore.inspect.estimate import estimate_saves
from layerstore.inspect.log import LogEntry, LogLine, LogPage, log_fields, read_log
from layerstore.inspect.model_shapes import Model, made_up, model_at, model_of_commit
from layerstore.inspect.report import make_report
from layerstore.inspect.runs import RunLine, run_lines
from layerstore.inspect.show import CommitView, LayerLine, describe_commit, layer_lines
from layerstore.inspect.stats import Stats, count_bytes, stats_fields
