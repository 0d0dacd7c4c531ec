"""Turn a checkpoint on disk into a commit."""

from layerstore.ingest.execute import ingest
from layerstore.ingest.ingested import Ingested
from layerstore.ingest.selection import is_still, layers_due, sample_weight, sampled
