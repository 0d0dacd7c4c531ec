"""Read files that other programs wrote, and that may change or be truncated while we read them."""

from layerstore.source.gathered import (
    GatheredFileSource,
    GatheredSource,
    read_gathered,
    read_header,
    supplier_of,
    suppliers_of,
    tensors_in,
)
from layerstore.source.sourcefile import (
    OpenedSource,
    damaged,
    list_folder,
    open_source,
    read_source_file,
    real_path,
    stat_source,
    truncated,
    untrusted,
)
