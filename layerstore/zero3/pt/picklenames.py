"""
The allow-list: every global that a checkpoint's pickle may name, and how it is read.

These are names; nothing is imported or called. A global that is on no list is refused.
The names come from DeepSpeed's loss scalers and stages, torch's functions that rebuild tensors, the containers
of learning-rate schedulers, and numpy, whose generator states DeepSpeed's data sampler keeps.
"""

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

# Calls of these become tree nodes; on their own they are refused.
CALLED: Final = REBUILDS | {ORDERED_DICT, SIZE, SET, BYTES, ENCODE, GETATTR}

# collections.defaultdict is left out: it carries a function to call, and no known writer puts one here.
INERT: Final = frozenset(
    {
        ZERO_STAGE,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
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

_DTYPE_NAMES = frozenset(
    {
        *(row.torch_name for row in DTYPES),
        *(
            "complex128",
            "complex32",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        ),
        *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    }
)

STORAGE_CLASSES: Final = frozenset(
    {
        *(f"torch.{row.storage_class}" for row in DTYPES if row.storage_class),
        *(f"torch.{kind}Storage" for kind in ("ComplexDouble", "QInt8", "QInt32", "QUInt8", "QUInt4x2", "QUInt2x4")),
        UNTYPED_STORAGE,
    }
)

# Arguments of calls that may also stand alone, such as a dtype in a loss scaler.
VALUES: Final = frozenset(
    {TENSOR, PARAMETER, "numpy.ndarray", *STORAGE_CLASSES, *(f"torch.{name}" for name in _DTYPE_NAMES)}
)

# Known and harmless, but without a node: refused as unsupported, by kind, rather than as an unknown name.
UNSUPPORTED: Final = {
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storages",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device without storages",
    "torch._utils._rebuild_wrapper_subclass": "a wrapper tensor",
    "torch.serialization._get_layout": "a tensor layout",
    **{
        f"torch.per_{scheme}": "a quantization scheme"
        for scheme in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")
    },
    "torch.per_channel_affine_float_qparams": "a quantization scheme",
}

KNOWN: Final = CALLED | INERT | VALUES | UNSUPPORTED.keys()

# Pickle protocol 2 uses the names that modules had in Python 2.
_RENAMED_MODULES = {"__builtin__": "builtins"}


def dotted(module: str, name: str) -> str | None:
    """Return a global's canonical spelling; None if the two parts cannot be names."""
    module = _RENAMED_MODULES.get(module, module)
    parts = (*module.split("."), name)
    return f"{module}.{name}" if all(part.isidentifier() for part in parts) else None


def module_and_name(dotted_name: str) -> tuple[str, str]:
    """Split *dotted_name* as a pickle spells it."""
    module, _, name = dotted_name.rpartition(".")
    return module, name
