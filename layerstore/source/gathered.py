"""
Gathered weights: the headers of safetensors files that a Trainer writes next to the shards.

Headers are read strictly, and each tensor is matched by name with the parameter or buffer whose bytes it should have.
An ingest then compares the bytes of the two. docs/adr/0030-safetensors.md explains why we do not use the
safetensors package.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from layerstore.dtypes import by_code
from layerstore.errors import LayerstoreError, SourceCheckpoint, Unsupported
from layerstore.json_text import parse_json
from layerstore.layers import ADAPTER_WEIGHTS, strip_wrappers
from layerstore.limits import SAFETENSORS_HEADER_BYTES_MAX, TENSOR_DIMENSIONS_MAX
from layerstore.model import Buffer, Parameter
from layerstore.source.sourcefile import open_source

Suppliers = Mapping[str, Parameter | Buffer]
"""Parameters and buffers by every name that a tensor of a weights file may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredSource:
    """One whole tensor of a gathered weights file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    supplier: str
    """The parameter or buffer that should have the same bytes; empty if none has its name and length."""

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The tensor's size."""
        return self.elements * by_code(self.dtype).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredFileSource:
    """A safetensors file of gathered weights."""

    path: Path
    header: bytes
    """Length field and JSON, verbatim."""
    tensors: tuple[GatheredSource, ...]
    """In file order."""


def read_gathered(
    files: Iterable[Path], *, parameters: Mapping[str, Parameter], buffers: Mapping[str, Buffer]
) -> tuple[tuple[GatheredFileSource, ...], tuple[Path, ...]]:
    """Split *files* into gathered weights and files that are kept byte for byte."""
    suppliers = suppliers_of(parameters.values(), buffers.values())
    gathered, opaque = [], []
    for path in files:
        header: bytes = b""
        tensors: tuple[GatheredSource, ...] = ()
        if path.suffix == ".safetensors" and path.name != ADAPTER_WEIGHTS:  # an adapter uses PEFT's tensor names
            with open_source(path) as file, suppress(Unsupported):  # an unknown element type: kept byte for byte
                header = read_header(path, file.read_at, file.size_bytes)
                tensors = tensors_in(path, header, file.size_bytes, suppliers)
        # A file without any known name, such as another model's weights, is kept byte for byte too.
        if any(tensor.supplier for tensor in tensors):
            gathered.append(GatheredFileSource(path=path, header=header, tensors=tensors))
        else:
            opaque.append(path)
    return tuple(gathered), tuple(opaque)


def suppliers_of(parameters: Iterable[Parameter], buffers: Iterable[Buffer]) -> Suppliers:
    """Return parameters and buffers by name; unambiguous names are also accepted without their wrappers."""
    suppliers: dict[str, Parameter | Buffer] = {}
    bare: dict[str, list[Parameter | Buffer]] = {}
    items: list[Parameter | Buffer] = [*parameters, *buffers]
    for item in items:
        names = (item.name, *item.aliases) if isinstance(item, Parameter) else (item.name,)
        suppliers |= dict.fromkeys(names, item)
        for name in {strip_wrappers(name) for name in names}:
            bare.setdefault(name, []).append(item)
    # The Trainer may save names without wrappers.
    for name, candidates in bare.items():
        if len(candidates) == 1:
            suppliers.setdefault(name, candidates[0])
    return suppliers


def supplier_of(name: str, suppliers: Suppliers) -> Parameter | Buffer | None:
    """Return the supplier that the tensor *name* of a weights file should equal; None if no supplier has that name."""
    return suppliers.get(name) or suppliers.get(strip_wrappers(name))


def read_header(path: Path, read_at: Callable[[int, int], bytes], size_bytes: int) -> bytes:
    """Return the header of the safetensors file *path*, including its length field."""
    if size_bytes < 8:
        raise _damaged(path, "it is cut short")
    length = int.from_bytes(read_at(0, 8), "little")
    if not 2 <= length <= min(SAFETENSORS_HEADER_BYTES_MAX, size_bytes - 8):
        raise _damaged(path, f"its header claims {length} bytes of {size_bytes}")
    return read_at(0, 8 + length)


def tensors_in(path: Path, header: bytes, size_bytes: int, suppliers: Suppliers) -> tuple[GatheredSource, ...]:
    """Return the tensors that *header* lists, in file order."""
    tensors = _tensors(path, header, suppliers)
    end = len(header)
    for tensor in tensors:
        if tensor.offset_bytes != end:
            raise _damaged(path, f"there is a hole or an overlap before tensor {tensor.name!r}")
        end += tensor.size_bytes
    if end != size_bytes:
        raise _damaged(path, f"its tensors end at byte {end}, the file at {size_bytes}")
    return tuple(tensors)


def _tensors(path: Path, header: bytes, suppliers: Suppliers) -> list[GatheredSource]:
    try:
        entries = parse_json(header[8:])
        tensors = []
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"])):
                raise _damaged(path, f"tensor {name!r} has sizes that are not whole numbers")
            # Check before multiplying: thousands of numbers with thousands of digits would take hours.
            if len(entry["shape"]) > TENSOR_DIMENSIONS_MAX or max([end, *entry["shape"]]) >= 1 << 63:
                raise _damaged(path, f"tensor {name!r} has sizes that no tensor has")
            elements = prod(entry["shape"])
            if end - begin != elements * by_code(entry["dtype"]).bytes:
                raise _damaged(path, f"tensor {name!r} has {end - begin} bytes for shape {entry['shape']}")
            supplier = supplier_of(name, suppliers)
            tensors.append(
                GatheredSource(
                    file=path,
                    name=name,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    offset_bytes=len(header) + begin,
                    supplier=supplier.name if supplier is not None and prod(supplier.shape) == elements else "",
                )
            )
    except LayerstoreError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise _damaged(path, f"its header is not a safetensors header ({exc})") from exc
    # Ties are sorted by name: an empty tensor begins at the same offset as the next tensor.
    return sorted(tensors, key=lambda tensor: (tensor.offset_bytes, tensor.name))


def _damaged(path: Path, reason: str) -> SourceCheckpoint:
    return SourceCheckpoint(f"{path} is damaged: {reason}", hint="copy the file again, or ingest another checkpoint")
