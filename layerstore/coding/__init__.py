"""The codings of compact saves: fp32 numbers as 8 or 4 bits each, with scales. Knows no storage, objects or layers."""

from layerstore.coding.buffers import Coded, code, decode
from layerstore.coding.codings import CODINGS, Coding
from layerstore.coding.measure import Error, error
from layerstore.coding.spec import BLOCK, NotCodable, Part

__all__ = ["BLOCK", "CODINGS", "Coded", "Coding", "Error", "NotCodable", "Part", "code", "decode", "error"]
