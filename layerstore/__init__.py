"""layerstore: a layer-versioned, content-addressed checkpoint store for DeepSpeed ZeRO and FSDP2."""

from layerstore import errors
from layerstore.errors import (
    AlreadyExists,
    Conflict,
    IntegrityError,
    Internal,
    InvalidInput,
    JobLost,
    LayerstoreError,
    LayoutMismatch,
    Locked,
    NoStore,
    NotFound,
    Overtaken,
    SourceCheckpoint,
    StorageIO,
    Unsupported,
)

TYPE_CHECKING = False  # type checkers know this name; importing typing would take longer than the rest of this module
if TYPE_CHECKING:
    from layerstore.arrays import Tensors
    from layerstore.assemble import Exported, ExportPlan
    from layerstore.bisect import Bisected, Judged
    from layerstore.check import Diagnosis, Repaired, Verdict
    from layerstore.composite import Composite, LayerChoice
    from layerstore.delta import Applied, DeltaWritten
    from layerstore.gc import Dropped, DroppedCommit, GcOutcome
    from layerstore.history import Staleness
    from layerstore.ingest import Ingested
    from layerstore.inspect import CommitView, Diff, LayerLine, LogEntry, LogPage, ParametersDiff, RunLine, Stats
    from layerstore.live import Resumed, Saved, Saver, SaverOptions, Status, attach, resume
    from layerstore.model import Commit, Pin
    from layerstore.policy import Best, Drift, Filter, Keep, Latest, Parity, Policy, Save
    from layerstore.progress import Progress
    from layerstore.publish import SaveTiming
    from layerstore.remote import Pulled, Pushed, Remotes
    from layerstore.shards import Written
    from layerstore.store import Store, apply, clone, doctor, find_checkpoints, init
    from layerstore.store import open_store as open  # noqa: A004  # reads as layerstore.open(path)
    from layerstore.tables import Table
    from layerstore.zero3 import Survey

__all__ = [
    "AlreadyExists",
    "Applied",
    "Best",
    "Bisected",
    "Commit",
    "CommitView",
    "Composite",
    "Conflict",
    "DeltaWritten",
    "Diagnosis",
    "Diff",
    "Drift",
    "Dropped",
    "DroppedCommit",
    "ExportPlan",
    "Exported",
    "Filter",
    "GcOutcome",
    "Ingested",
    "IntegrityError",
    "Internal",
    "InvalidInput",
    "JobLost",
    "Judged",
    "Keep",
    "Latest",
    "LayerChoice",
    "LayerLine",
    "LayerstoreError",
    "LayoutMismatch",
    "Locked",
    "LogEntry",
    "LogPage",
    "NoStore",
    "NotFound",
    "Overtaken",
    "ParametersDiff",
    "Parity",
    "Pin",
    "Policy",
    "Progress",
    "Pulled",
    "Pushed",
    "Remotes",
    "Repaired",
    "Resumed",
    "RunLine",
    "Save",
    "SaveTiming",
    "Saved",
    "Saver",
    "SaverOptions",
    "SourceCheckpoint",
    "Staleness",
    "Stats",
    "Status",
    "StorageIO",
    "Store",
    "Survey",
    "Table",
    "Tensors",
    "Unsupported",
    "Verdict",
    "Written",
    "apply",
    "attach",
    "clone",
    "doctor",
    "errors",
    "find_checkpoints",
    "init",
    "open",
    "resume",
]
__version__ = "0.2.0"

# Loaded on first use, so that ``layerstore --help`` does not wait for lmdb, which the store imports, or for numpy.
_ROOMS = {
    "arrays": "Tensors",
    "assemble": "ExportPlan Exported",
    "bisect": "Bisected Judged",
    "check": "Diagnosis Repaired Verdict",
    "composite": "Composite LayerChoice",
    "delta": "Applied DeltaWritten",
    "gc": "Dropped DroppedCommit GcOutcome",
    "history": "Staleness",
    "ingest": "Ingested",
    "inspect": "CommitView Diff LayerLine LogEntry LogPage ParametersDiff RunLine Stats",
    "live": "Resumed Saved Saver SaverOptions Status attach resume",
    "model": "Commit Pin",
    "policy": "Best Drift Filter Keep Latest Parity Policy Save",
    "progress": "Progress",
    "publish": "SaveTiming",
    "remote": "Pulled Pushed Remotes",
    "shards": "Written",
    "store": "Store apply clone doctor find_checkpoints init open",
    "tables": "Table",
    "zero3": "Survey",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        from layerstore.host import check_host

        check_host()  # before loading anything that might read or write a store
        home = import_module(f"layerstore.{_HOMES[name]}")
        value = getattr(home, "open_store" if name == "open" else name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
