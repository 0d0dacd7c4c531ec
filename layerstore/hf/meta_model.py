"""
The model that a Transformers config describes, on the meta device: names and shapes without any elements.

Nothing is downloaded, and only code of Transformers and PyTorch runs: the model class must be one of Transformers' own,
and settings that would make it fetch code or kernels are removed from the config.
"""

import os
from collections.abc import Mapping
from typing import Any

from layerstore.errors import Unsupported

# Settings that make Transformers fetch code or kernels, or pack the weights.
_NOT_OF_THE_SHAPE = ("auto_map", "quantization_config", "attn_implementation", "_attn_implementation")

_INSTEAD = "--params 8B --layers 32 needs neither"


def parameter_shapes(config: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """
    Return the parameters of the model that *config* describes, in the model's order; tied parameters only once.

    Raises:
        Unsupported: Transformers or PyTorch is not installed, or Transformers cannot make a model from *config*.
    """
    # Set these before the import, which reads them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        import torch
        import transformers
    except ImportError as exc:
        raise Unsupported(
            f"only Transformers knows what a config.json describes, and it cannot be imported here: {exc}",
            hint=f"pip install 'layerstore[demo]' brings Transformers and PyTorch; {_INSTEAD}",
        ) from exc
    try:
        model = meta_model(config)
        model.tie_weights()
    except Unsupported as exc:
        raise Unsupported(exc.message, hint=_INSTEAD) from exc
    except Exception as exc:  # a config is free text: Transformers raises whatever its code runs into
        problem = " ".join(str(exc).split()) or type(exc).__name__
        raise Unsupported(
            f"Transformers {transformers.__version__} cannot make a model from the config: {problem}", hint=_INSTEAD
        ) from exc
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
    return tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def meta_model(config: Mapping[str, Any]) -> Any:
    """
    Return the model that *config* describes, on the meta device.

    Raises:
        Unsupported: The config names no model class of Transformers.
    """
    import torch
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    made: Any = getattr(transformers, name, None) if name else None
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel) and made.config_class):
        raise Unsupported(f"the config names no model class of Transformers {transformers.__version__}: {names!r}")
    build: Any = made
    with torch.device("meta"):
        return build._from_config(made.config_class.from_dict(_shape_of(config)), attn_implementation="eager")


def _shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return *config*, and the configs inside it, without the settings that do not affect shapes."""
    return {
        key: _shape_of(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _NOT_OF_THE_SHAPE
    }
