"""
The allow-list: every global that a checkpoint's pickle may name, and how it is read.

These are only names; nothing is imported or called. Globals that are not on a list are refused.
The names come from DeepSpeed's loss scalers, stages and addresses of fragments, torch's functions that rebuild
tensors, the containers of learning-rate schedulers, and numpy, whose generator states DeepSpeed's data sampler keeps.
"""

import re
from typing import Final

from layerstore.dtypes import DTYPES

TENSOR = "torch.Tensor"
PARAMETER = "torch.nn.parameter.Parameter"
UNTYPED_STORAGE = "torch.storage.UntypedStorage"

ORDERED_DICT = "collections.OrderedDict"
SIZE = "torch.Size"
SET = "builtins.set"
BYTES = "builtins.bytes"
ENCODE = "_codecs.encode"
GETATTR = "builtins.getattr"
REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
REBUILD_TENSOR_UNTYPED = "torch._utils._rebuild_tensor_v3"
REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
REBUILD_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"

ZERO_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
MEMORY_FORMAT = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
FRAGMENT_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"

# These rebuild a tensor.
REBUILDS: Final = frozenset(
    {
        REBUILD_TENSOR,
        REBUILD_TENSOR_UNTYPED,
        REBUILD_PARAMETER,
        REBUILD_PARAMETER_WITH_STATE,
        REBUILD_FROM_TYPE,
    }
)

# Calls to these become tree nodes; on their own, they are refused.
CALLED: Final = REBUILDS | {ORDERED_DICT, SIZE, SET, BYTES, ENCODE, GETATTR}

# collections.defaultdict is left out: it carries a function to call, and no known writer uses it.
INERT: Final = frozenset(
    {
        ZERO_STAGE,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        FRAGMENT_ADDRESS,
        "collections.Counter",  # the milestones of torch's MultiStepLR
        "builtins.complex",
        "torch.device",
        "numpy.dtype",
        *(
            f"numpy.{room}.multiarray.{function}"
            for room in ("core", "_core")  # numpy 1 and 2
            for function in ("_reconstruct", "scalar")
        ),
    }
)

STORAGE_CLASSES: Final = frozenset(
    {*(f"torch.{row.storage_class}" for row in DTYPES if row.storage_class), UNTYPED_STORAGE}
)

# Element types that are not supported here.
_OTHER_DTYPES = (
    *("complex128", "complex32", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)

# Call arguments that may also stand alone, such as a dtype in a loss scaler.
VALUES: Final = frozenset(
    {
        *(TENSOR, PARAMETER, "numpy.ndarray", *STORAGE_CLASSES),
        *(f"torch.{name}" for name in (*(row.torch_name for row in DTYPES), *_OTHER_DTYPES)),
    }
)

KNOWN: Final = CALLED | INERT | VALUES

# torch's names that occur only for tensors: element types, storages, quantization schemes, rebuild functions.
_OF_TENSORS = re.compile(
    r"torch\.((complex|float|q?u?int)[0-9]\w*|per_\w+|\w+Storage|_utils\._rebuild_\w+|serialization\._get_layout)"
)

# Pickle protocol 2 uses the names that modules had in Python 2.
_RENAMED_MODULES = {"__builtin__": "builtins"}


def dotted(module: str, name: str) -> str | None:
    """Return a global's canonical name; None if its two parts cannot be names."""
    module = _RENAMED_MODULES.get(module, module)
    parts = (*module.split("."), name)
    return f"{module}.{name}" if all(part.isidentifier() for part in parts) else None


def is_unsupported(name: str) -> bool:
    """Whether *name* is harmless but has no node, because it makes an unsupported kind of tensor."""
    return name not in KNOWN and _OF_TENSORS.fullmatch(name) is not None


def module_and_name(dotted_name: str) -> tuple[str, str]:
    """Split *dotted_name* as a pickle spells it."""
    module, _, name = dotted_name.rpartition(".")
    return module, name
