"""What lies beside shards while a trainer still writes there: which files are kept, and by which rank."""

from collections.abc import Iterator
from pathlib import Path

from layerstore.layers import ADAPTER_WEIGHTS
from layerstore.zero3.discover import OF_A_RANK, SHARD_STEM, belonging, flavour_of


def rank_of_file(name: str) -> int | None:
    """Return the rank whose random state the file *name* holds, None if it is no rank's own."""
    match = OF_A_RANK.fullmatch(name)
    return None if match is None else int(match["rank"])


def beside_shards(folder: Path, tag: str) -> Iterator[Path]:
    """
    Yield the files in *folder* that are kept byte for byte.

    Gathered weights are not: they follow from the masters, and a composed folder can have them made. An adapter's
    are: nothing but its file says what PEFT calls them, and of a model that is adapted it is all that is trained.
    """
    for path in belonging(folder, tag, flavour_of(folder, tag), False, []):  # no link is followed
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        is_weights = is_weights and path.name != ADAPTER_WEIGHTS
        if not SHARD_STEM.fullmatch(path.stem) and not is_weights:
            yield path
