"""
A folder as Transformers' ``save_pretrained`` leaves it: weights in safetensors files, an index, the config.

Other programs must find what they expect, so names, metadata and the order of the index are theirs.
What they leave open serves us: the header is padded, and whole pages come first, so that payloads start on pages.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput, Unsupported
from layerstore.export.members import Member
from layerstore.limits import PAGE_BYTES, SAFETENSORS_HEADER_BYTES_MAX

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
WEIGHTS_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")

MAX_SHARD_SIZE = "5GB"
"""The default: small enough for every hub and filesystem."""

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""What may be asked for, and its code."""

# What resumes training, or holds weights itself: nothing that a model is loaded with.
_TRAINING_NAMES = frozenset({"trainer_state.json", "latest", "zero_to_fp32.py", "zero_to_torch.py"})
_TRAINING_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".distcp", ".h5", ".msgpack", ".npz", ".pkl", ".pt", ".pth", ".safetensors"}
)

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One safetensors file."""

    name: str
    tensors: tuple[Member, ...]
    """In file order."""
    header: bytes
    """From the first byte of the file to the payload."""
    offsets: tuple[int, ...]
    """Where each tensor starts in the file."""
    size_bytes: int
    """Of the whole file."""

    def tensor_at(self, offset: int) -> Member:
        """Return the tensor that holds the byte at *offset*."""
        return self.tensors[bisect_right(self.offsets, offset) - 1]


def member_bytes(tensor: Member) -> int:
    """Return the size of *tensor* in the file."""
    return math.prod(tensor.shape) * by_code(tensor.dtype).bytes


# -- shards --------------------------------------------------------------------------------------------------------


def shard_files(tensors: Iterable[Member], *, shard_bytes_max: int) -> tuple[ShardFile, ...]:
    """
    Deal *tensors* out to files, in their order, as Transformers does.

    A file is closed when the next tensor would exceed *shard_bytes_max*; a tensor that does so alone has its own.
    """
    shards = list(_split(tensors, shard_bytes_max)) or [[]]
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    return tuple(_laid_out(name, shard) for name, shard in zip(names, shards, strict=True))


def single_file(name: str, tensors: Iterable[Member]) -> ShardFile:
    """Return *tensors* in one file called *name*, however large."""
    return _laid_out(name, [*tensors])


def _split(tensors: Iterable[Member], shard_bytes_max: int) -> Iterator[list[Member]]:
    current: list[Member] = []
    current_bytes = 0
    for tensor in tensors:
        size_bytes = member_bytes(tensor)
        if size_bytes > shard_bytes_max:
            yield [tensor]
            continue
        if current_bytes + size_bytes > shard_bytes_max:
            yield current
            current, current_bytes = [], 0
        current.append(tensor)
        current_bytes += size_bytes
    if current:
        yield current


def _shard_name(number: int, count: int) -> str:
    return WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _laid_out(name: str, tensors: list[Member]) -> ShardFile:
    # Whole pages first, so that all of them start on one; then the larger elements, so that all are aligned.
    ordered = sorted(
        tensors, key=lambda tensor: (member_bytes(tensor) % PAGE_BYTES != 0, -by_code(tensor.dtype).bytes, tensor.name)
    )
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin, offsets = 0, []
    for tensor in ordered:
        end = begin + member_bytes(tensor)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    if len(text) > SAFETENSORS_HEADER_BYTES_MAX:
        raise Unsupported(
            f"the header of {name} would have {len(text)} bytes", hint="choose a smaller maximum per shard"
        )
    header = len(text).to_bytes(8, "little") + text
    return ShardFile(
        name=name,
        tensors=tuple(ordered),
        header=header,
        offsets=tuple(len(header) + offset for offset in offsets),
        size_bytes=len(header) + begin,
    )


def index_of(files: Sequence[ShardFile], *, parameters: int) -> bytes:
    """Return the index of several *files*, whose *parameters* elements are trained or frozen weights."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total_bytes = sum(member_bytes(tensor) for file in files for tensor in file.tensors)
    metadata = {"total_parameters": parameters, "total_size": total_bytes}
    return _json({"metadata": metadata, "weight_map": weight_map}, sort_keys=True)


def _json(value: object, *, sort_keys: bool = False) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode()


# -- what goes beside the weights ----------------------------------------------------------------------------------


def goes_along(path: str, *, tag: str) -> bool:
    """
    Whether the base's small file *path* belongs to the model: its config, tokenizer, processor, code, card.

    Told by what does not, because tokenizers call their files what they like. *tag* is DeepSpeed's folder.
    """
    file = PurePosixPath(path)
    is_of_training = file.parts[0] == tag or file.name in _TRAINING_NAMES or file.suffix in _TRAINING_SUFFIXES
    # An adapter's config would have Transformers look for weights that are not here.
    is_other = file.name.startswith(("adapter_", "events.out.tfevents")) or file.name.endswith(".index.json")
    return not (is_of_training or is_other)


def config_with_dtype(config: bytes, dtype: str) -> bytes:
    """
    Return *config*, and the configs inside it, for weights of the type *dtype*; the very same bytes if it says so.

    Raises:
        ValueError: It is not JSON, or not an object.
    """
    try:
        fields = json.loads(config)
    except RecursionError as exc:
        raise ValueError("it is nested too deep") from exc
    if not isinstance(fields, dict):
        raise InvalidInput("it is not an object")
    name = by_code(dtype).torch_name
    is_changed = _set_dtype(fields, name)
    if not {"dtype", "torch_dtype"} & fields.keys():
        fields["torch_dtype"] = name  # the name that all versions of Transformers know
        is_changed = True
    return _json(fields) if is_changed else config


def _set_dtype(fields: dict[str, object], name: str) -> bool:
    is_changed = False
    for key, value in fields.items():
        if key in {"dtype", "torch_dtype"} and value != name:
            fields[key] = name
            is_changed = True
        elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            is_changed |= _set_dtype(value, name)
    return is_changed


# -- what is asked for ---------------------------------------------------------------------------------------------


def dtype_code(name: str | None) -> str | None:
    """Return the code of the element type *name*; None stays None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InvalidInput(f"{name!r} is no element type to export", hint=f"choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(code: str) -> str:
    """Return what a user calls the element type *code*."""
    return next((name for name, known in DTYPES.items() if known == code), by_code(code).torch_name)


def size_in_bytes(size: int | str) -> int:
    """
    Return *size*, a number of bytes or a text with a unit.

    >>> size_in_bytes("5GB"), size_in_bytes("1.5 MiB"), size_in_bytes(4096)
    (5000000000, 1572864, 4096)

    Raises:
        InvalidInput: It is no size, or less than a byte.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or (match["binary"] and not match["unit"]):
            raise InvalidInput(f"{size!r} is no size", hint="write a number of bytes, or 5GB, 500MB, 2GiB")
        base = 1024 if match["binary"] else 1000
        size = int(float(match["number"]) * base ** _POWERS[match["unit"].upper()])
    if size < 1:
        raise InvalidInput("a size needs at least one byte", hint="write a number of bytes, or 5GB, 500MB, 2GiB")
    return size
