"""
The nouns for what a rank saved apart from layers: trees, small files and gathered weights, and where their bytes are.

As in ``layerstore.model``, the fields are the fields of the blobs on disk.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from layerstore.model import AS_PATH, AS_TREE, BlobRef
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectContent:
    """The content of a storage or file that is stored as a separate object: one uint8 tensor named ``bytes``."""

    object: BlobRef
    size_bytes: int
    """Size of the payload."""
    crc32: int

    @property
    def begin(self) -> int:
        """Where the payload begins in the object's file; it ends where the file ends."""
        return self.object.size_bytes - self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatContent:
    """
    The content of a flat buffer: the slices of a sub-group's parameters, in order.

    Under stages 1 and 2, it is the rank's partition of a param group.
    """

    state: str
    """The optimizer state's name; empty for the masters."""
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentContent:
    """The content of a frozen parameter's fragment; under stages 1 and 2, the weights of any whole parameter."""

    parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferContent:
    """The content of a persistent buffer."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file that is kept byte for byte."""

    path: str = field(metadata=AS_PATH)
    """Relative to the checkpoint folder, with ``/``."""
    executable: bool
    content: bytes | ObjectContent


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFile:
    """A ``.pt`` file as its tree, without the bytes of layers: each storage's content states where those bytes are."""

    path: str = field(metadata=AS_PATH)
    tree: Tree = field(metadata=AS_TREE)


class TensorSource(StrEnum):
    """Where a tensor of a gathered weights file comes from."""

    PARAMETER = "parameter"
    """The parameter's stored weights if the layer's version has them, otherwise its master, rounded."""
    BUFFER = "buffer"
    STORED = "stored"
    """A separate object, because no parameter or buffer has this name, or its bytes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTensor:
    """One tensor of a gathered weights file, in file order."""

    name: str
    dtype: str
    elements: int
    crc32: int
    """Checksum of its bytes: if they come from the master, rounding it again must reproduce them."""
    source: TensorSource
    layer_name: str
    """The parameter or buffer that supplies it; empty when stored."""
    stored: ObjectContent | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredFile:
    """A safetensors file of whole weights: its original header, and the source of each tensor."""

    path: str = field(metadata=AS_PATH)
    header: bytes
    """Length field and JSON, verbatim."""
    tensors: tuple[GatheredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Everything that one rank saved, apart from layers."""

    rank: int
    model: TreeFile
    optimizer: TreeFile
    files: tuple[SourceFile, ...]
    gathered: tuple[GatheredFile, ...]
