"""A checkpoint on disk becomes a commit."""

from layerstore.ingest.due import is_still, sampled
from layerstore.ingest.execute import Ingested, execute_ingest
from layerstore.ingest.plan import plan_ingest

__all__ = [
    "Ingested",
    "execute_ingest",
    "is_still",
    "plan_ingest",
    "sampled",
]
