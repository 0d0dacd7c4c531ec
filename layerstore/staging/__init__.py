"""What a save writes before anything names it: objects, plain or compact, version blobs and ranks' states."""

from layerstore.staging.encode import NONE_COMPACT, Compact, CompactLayers, can_refer, referable
from layerstore.staging.stage import (
    Checksums,
    Content,
    KeptFile,
    Reader,
    SourceReader,
    Staging,
    Witness,
    coding_losses,
    crc32_of,
    stage_version,
)

__all__ = [
    "NONE_COMPACT",
    "Checksums",
    "Compact",
    "CompactLayers",
    "Content",
    "KeptFile",
    "Reader",
    "SourceReader",
    "Staging",
    "Witness",
    "can_refer",
    "coding_losses",
    "crc32_of",
    "referable",
    "stage_version",
]
