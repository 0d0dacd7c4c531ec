"""The codings of compact saves: fp32 numbers as 8 or 4 bits each, with scales. Knows no storage, objects or layers."""

from layerstore.coding.codings import CODINGS, Coded, Coding
from layerstore.coding.spec import BLOCK, Error, NotCodable
