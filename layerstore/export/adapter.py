"""
A folder as PEFT's ``save_pretrained`` leaves it: which adapters there are, and what their tensors are called in it.

A parameter of the adapter ``default`` is ``….lora_A.default.weight`` in the model and ``….lora_A.weight`` in its file,
since whoever loads that gives the adapter a name anew. Other adapters than ``default`` have folders of their own.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.layers import WRAPPER_COMPONENTS
from layerstore.model import Parameter

ADAPTER_CONFIG = "adapter_config.json"
DEFAULT = "default"

_LORA = re.compile(r"lora_\w+|trainable_tokens_delta")
_DORA = "lora_magnitude_vector"
_TO_SAVE = "modules_to_save"


def adapter_at(path: str) -> str | None:
    """
    Return the adapter whose file lies at *path*, None where PEFT puts none.

    >>> adapter_at("adapter_config.json"), adapter_at("reference/adapter_config.json"), adapter_at("a/b/c.json")
    ('default', 'reference', None)
    """
    folders = PurePosixPath(path).parts[:-1]
    return None if len(folders) > 1 else folders[0] if folders else DEFAULT


def name_in_file(parameter: str, adapter: str) -> str | None:
    """
    Return what PEFT calls *parameter* in the file of *adapter*, None if it is none of that adapter's.

    >>> name_in_file("base_model.model.q_proj.lora_A.default.weight", "default")
    'base_model.model.q_proj.lora_A.weight'
    >>> name_in_file("base_model.model.lm_head.modules_to_save.default.weight", "default")
    'base_model.model.lm_head.weight'
    >>> name_in_file("base_model.model.q_proj.lora_A.other.weight", "default")
    """
    *parts, last = _parts(parameter)
    if _TO_SAVE in parts and (at := parts.index(_TO_SAVE)) and parts[at + 1 : at + 2] == [adapter]:
        return ".".join([*parts[:at], *parts[at + 2 :], last])
    if parts and last == adapter:
        return ".".join(parts)
    if len(parts) > 1 and parts[-1] == adapter:
        # DoRA's vectors were parameters once, and their names in files have stayed.
        return ".".join(parts[:-1] if parts[-2] == _DORA else [*parts[:-1], last])
    return None


def names_by_rule(parameters: Mapping[str, Parameter], adapter: str, config: bytes, *, path: str) -> dict[str, str]:
    """
    Return the parameters of *adapter*, whose *config* lies at *path*, by their names in its file.

    Raises:
        Unsupported: It is no LoRA: other methods have rules of their own for what their files hold.
    """
    try:
        fields = json.loads(config)
        method, bias = fields["peft_type"], fields.get("bias", "none")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise SourceCheckpoint(f"the base's {path} is no config of an adapter ({exc})") from exc
    if method != "LORA":
        raise Unsupported(
            f"adapter {adapter!r} is of type {method}, and the base has no file of it: only LoRA's can be made",
            hint="export a commit of a Trainer's own save, which has that file",
        )
    found = {
        name: parameter
        for parameter in parameters
        if _is_lora(parameter) and (name := name_in_file(parameter, adapter)) is not None
    }
    if bias == "none":
        return found
    suffix = ".bias" if bias == "all" else ".base_layer.bias"
    return found | {plain_name(of): of for of in parameters if of.endswith(suffix) and not _is_lora(of)}


def plain_name(parameter: str) -> str:
    """Return the name that a parameter of no adapter has in an adapter's file: that of the model, unwrapped."""
    return ".".join(_parts(parameter))


def of_adapter(parameters: Iterable[str], adapter: str) -> set[str]:
    """Return those of *parameters* that PEFT takes for those of *adapter*."""
    return {name for name in parameters if adapter in name.split(".")}


def _parts(parameter: str) -> list[str]:
    return [part for part in parameter.removeprefix("module.").split(".") if part not in WRAPPER_COMPONENTS]


def _is_lora(parameter: str) -> bool:
    return any(part == _TO_SAVE or _LORA.fullmatch(part) for part in parameter.split("."))
