"""What a save writes before its record: objects, plain or compact, version blobs and ranks' states."""

from layerstore.staging.encode import NONE_COMPACT, Compact, CompactLayers, can_refer, referable
from layerstore.staging.stage import (
    Checksums,
    Content,
    KeptFile,
    Reader,
    SourceReader,
    Staging,
    Witness,
    crc32_of,
)
from layerstore.staging.version import coding_losses, join_version, layer_part, stage_version
