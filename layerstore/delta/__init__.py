"""Deltas between two exports: what changed in each tensor, as inference servers read it, and how to apply it."""

from layerstore.delta.apply import Applied, apply_delta
from layerstore.delta.codec import ENCODINGS, Encoding
from layerstore.delta.delta_folder import is_delta
from layerstore.delta.write import DeltaWritten, write_delta
