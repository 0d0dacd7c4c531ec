"""Deltas between two exports: what changed in each tensor, as inference servers read it, and how it is put on."""

from layerstore.delta.apply import Applied, apply_delta
from layerstore.delta.codec import ENCODINGS, Encoding, encode
from layerstore.delta.folder import INDEX, DeltaWriter, is_delta

__all__ = ["ENCODINGS", "INDEX", "Applied", "DeltaWriter", "Encoding", "apply_delta", "encode", "is_delta"]
