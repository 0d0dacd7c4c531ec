"""
How Transformers writes a model's weights: their names, and how tensors are split or joined.

    python -m layerstore.hf.saved_names <question.json >answer.json

Transformers 5 holds some models in memory differently than in files: Mixtral's experts are one tensor in memory and
many on disk. Only Transformers knows these mappings. We ask it in a separate process, so that an export does not import
torch. The model is built from its config alone, as in ``meta_model``: no tensor has elements, and no checkpoint's code
runs.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from layerstore.errors import LayerstoreError, Unsupported
from layerstore.hf.meta_model import meta_model
from layerstore.limits import RENAMED_RUNS_MAX

_TRANSFORMERS = f"Transformers {transformers.__version__}"

RunTuple = tuple[str, int, int]
"""Contiguous elements of a parameter: its name, the first element, and their number."""


def saved_as(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Sequence[int], list[RunTuple]]]:
    """
    Return what ``save_pretrained`` would write for a model: each name with its shape and the source of its elements.

    *shapes* are the shapes of the tensors in memory, by name; *expected* are the shapes in one of the model's files, if
    any: the model may have been loaded from a file whose prefixes differ from what its class would write.

    Raises:
        Unsupported: Transformers does not know the model, or would not write the expected tensors.
    """
    model = meta_model(config)
    known = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        if known.get(name) != tuple(shape):
            raise Unsupported(
                f"a {type(model).__name__} has no {name!r} of shape {tuple(shape)} by the base's config "
                f"and {_TRANSFORMERS}"
            )
    with torch.device("meta"):
        tensors = {name: torch.empty(tuple(shape)) for name, shape in shapes.items()}
    for mapping in _mappings(model):
        written = _written(model, mapping, tensors)
        if all(name in written and list(written[name][0]) == list(shape) for name, shape in expected.items()):
            return written
    missing = next(name for name, shape in expected.items() if list(written.get(name, [[]])[0]) != list(shape))
    raise Unsupported(
        f"{_TRANSFORMERS} would not write {missing!r} of shape {tuple(expected[missing])}, "
        "which the base's own weights files have"
    )


def _mappings(model: Any) -> Iterator[list[Any] | None]:
    """Yield the mappings that saving may find attached: None, so that it chooses its own, or one from loading."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as exc:
        raise Unsupported(
            f"{_TRANSFORMERS} cannot be asked how it writes weights", hint="pip install 'transformers>=5'"
        ) from exc
    yield None
    yield get_model_conversion_mapping(model)  # loading under ZeRO-3 attaches the whole mapping, used or not
    yield get_model_conversion_mapping(model, add_legacy=False)


def _written(
    model: Any, mapping: list[Any] | None, tensors: Mapping[str, Any]
) -> dict[str, tuple[Sequence[int], list[RunTuple]]]:
    from transformers.core_model_loading import revert_weight_conversion

    model._weight_conversions = mapping  # loading attaches this, and saving looks for it
    with Origins(tensors) as origins:
        saved = revert_weight_conversion(model, dict(tensors))
        return {name: (list(tensor.shape), origins.runs(tensor)) for name, tensor in saved.items()}


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not typed
    """Tracks the source of each element of tensors made from *tensors*; none of them has real elements."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._stored = {_key(tensor): [(name, 0, tensor.numel())] for name, tensor in tensors.items()}
        self._kept = [*tensors.values()]  # a freed storage's key could be reused by another

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views share the storage of what they view, so they need no note; `_blocks` refuses all other results.
        name = func.overloadpacket.__name__
        if name in {"clone", "_reshape_copy", "contiguous"}:
            self._note(result, self.runs(args[0]))
        elif name in {"cat", "stack"}:
            dimension = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            parts = [part.unsqueeze(dimension) for part in args[0]] if name == "stack" else args[0]
            self._note(result, _joined([self._blocks(part, dimension % result.dim()) for part in parts]))
        return result

    def runs(self, tensor: Any) -> list[RunTuple]:
        """Return where the elements of *tensor* come from, in the order of *tensor*."""
        return [run for block in self._blocks(tensor, 0) for run in block]

    def _note(self, made: Any, runs: list[RunTuple]) -> None:
        self._stored[_key(made)] = _merged(runs)
        self._kept.append(made)

    def _blocks(self, tensor: Any, dimension: int) -> list[list[RunTuple]]:
        """Return the runs of *tensor*, one list for each index of the dimensions before *dimension*."""
        stored = self._stored.get(_key(tensor))
        if stored is None:
            raise Unsupported(f"{_TRANSFORMERS} converts this model's weights in a way not known here")
        outer = _places(tensor.shape[:dimension], tensor.stride()[:dimension])
        shape, strides = tensor.shape[dimension:], tensor.stride()[dimension:]
        inner, length = _dense(shape, strides)
        begin = tensor.storage_offset()
        return [
            _merged(
                piece
                for place in _places(shape[:inner], strides[:inner])
                for piece in _within(stored, begin + block + place, length)
            )
            for block in outer
        ]


def _key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _joined(parts: list[list[list[RunTuple]]]) -> list[RunTuple]:
    """Interleave the blocks of all *parts*, in the order of ``cat``."""
    return [run for blocks in zip(*parts, strict=True) for block in blocks for run in block]


def _dense(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return the first dimension from which the elements are contiguous, and their number."""
    length = 1
    for dimension in reversed(range(len(shape))):
        if shape[dimension] != 1 and strides[dimension] != length:
            return dimension + 1, length
        length *= shape[dimension]
    return 0, length


def _places(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the offset of each index of *shape*; the last dimension varies fastest."""
    if prod(shape) > RENAMED_RUNS_MAX:
        raise Unsupported(f"{_TRANSFORMERS} rearranges this model's weights element by element")
    places = [0]
    for size, stride in zip(shape, strides, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    return places


def _within(runs: Sequence[RunTuple], begin: int, length: int) -> Iterator[RunTuple]:
    """Yield the parts of the concatenated *runs* that hold *length* elements from *begin*."""
    for name, start, count in runs:
        first, last = max(begin, 0), min(begin + length, count)
        if first < last:
            yield name, start + first, last - first
        begin -= count


def _merged(runs: Iterable[RunTuple]) -> list[RunTuple]:
    merged: list[RunTuple] = []
    for name, start, count in runs:
        if merged and merged[-1][0] == name and merged[-1][1] + merged[-1][2] == start:
            merged[-1] = (name, merged[-1][1], merged[-1][2] + count)
        else:
            merged.append((name, start, count))
    return merged


def main() -> None:
    """Answer one question; what Transformers prints goes to stderr."""
    question = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        tensors = saved_as(question["config"], question["shapes"], question["expected"])
        answer: dict[str, Any] = {"tensors": tensors}
    except LayerstoreError as exc:
        answer = {"error": str(exc), "hint": exc.hint}
    # On a line of its own: imports may have printed something that does not end in a line feed.
    answers.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
