"""
Decide which tensors an export for Transformers has, and their names.

Values always come from the chosen layers. The base's own weights files supply the names, and anything that no layer
holds. If names or shapes in these files differ from the layers', we ask Transformers, in a process of its own, how it
writes the model; if Transformers does not know, the export is refused.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from layerstore.assemble import Run, WeightTensor
from layerstore.dtypes import FLOATS, by_code
from layerstore.errors import IntegrityError, LayoutMismatch, Unsupported
from layerstore.layers import is_of_adapter, strip_wrappers
from layerstore.limits import RENAMING_SECONDS_MAX
from layerstore.model import Buffer, Parameter
from layerstore.source import supplier_of, suppliers_of, tensors_in
from layerstore.states import GatheredFile, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor as Transformers writes it."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    """Where its elements come from, in their order."""


Ask = Callable[[Mapping[str, Sequence[int]], Mapping[str, Sequence[int]]], Mapping[str, FileTensor]]
"""Returns how Transformers writes a model, given its tensors' shapes in memory and in the base's files."""


@dataclass(slots=True, kw_only=True)
class ExportTensors:
    """The tensors of an export, with tied memory only once, and notes on them for the user."""

    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    dtype: str | None
    """The code of the requested element type; None for each parameter's own."""
    is_own: Callable[[str], bool]
    """Whether the base itself saved the weights of a parameter."""
    ask: Ask
    notes: list[str] = field(default_factory=list)
    _by_name: dict[str, WeightTensor] = field(default_factory=dict)
    _covered: set[str] = field(default_factory=set)
    """Parameters and buffers that have been added."""

    @property
    def tensors(self) -> list[WeightTensor]:
        """The chosen tensors."""
        return list(self._by_name.values())

    def choose(self, saved: Iterable[WeightTensor], *, may_rename: bool = False) -> None:
        """
        Choose the tensors, given those in the base's own files.

        Transformers is asked if the names in *saved* differ from those of the layers and, with *may_rename*, also
        if nothing was saved.

        Raises:
            LayoutMismatch: The base's files contain a tensor that the chosen layers lack.
            Unsupported: Two tensors would have the same name, or Transformers does not know the names.
        """
        known = suppliers_of(self.parameters.values(), self.buffers.values())
        unlike, others = [], []
        has_saved = False
        aliases = {alias for parameter in self.parameters.values() for alias in parameter.aliases}
        for tensor in sorted(saved, key=lambda tensor: tensor.name in aliases):  # own names before aliases
            source = supplier_of(tensor.name, known)
            supplier = tensor.layer_name or (None if source is None else source.name)
            fits = self._fits(tensor, supplier)
            if not fits and not prod(tensor.shape):
                continue  # ZeRO-3 leaves empty tensors for parameters that were not gathered; ignore them
            has_saved = True
            if supplier is None or not fits:
                others.append(tensor)
            elif supplier in self.buffers and tensor.stored is not None:
                self._add(tensor)
            elif supplier not in self._covered:  # else tied in another way: the file stores one tensor under two names
                self._covered.add(supplier)
                unlike += [tensor.name] if tensor.stored is not None else []
                self._add(self._from_layer(supplier, tensor))
        if (others or (may_rename and not has_saved)) and self._plain_rest():
            self._add_renamed(others)
            others = []
        rest = [name for name in self.parameters if name not in self._covered]
        self._add_rest(rest, has_saved=has_saved)
        left_out = []
        for tensor in others:
            if rest or tensor.stored is None:  # it may be another form of an adapter
                left_out.append(tensor.name)
            else:
                self._add(tensor)
        self._note(left_out, "in the base's own weights files, but in no layer; left out, as only the base has it")
        self._note(unlike, "the base's own weights files differ from its layers in value; the layers' are written")
        if self.dtype:
            fixed = [name for name, parameter in self.parameters.items() if parameter.dtype not in FLOATS]
            self._note(fixed, "not floating point, so written unchanged")

    def _fits(self, tensor: WeightTensor, supplier: str | None) -> bool:
        """Whether *tensor* has as many elements as *supplier*; true if the supplier is unknown."""
        source = self.parameters.get(supplier or "") or self.buffers.get(supplier or "")
        return source is None or prod(source.shape) == prod(tensor.shape)

    def _plain_rest(self) -> list[str]:
        """Return the parameters that have not been added yet, except those of adapters."""
        return [name for name in self.parameters if name not in self._covered and not is_of_adapter(name)]

    # -- names that only Transformers knows ----------------------------------------------------------------------

    def _add_renamed(self, saved: list[WeightTensor]) -> None:
        """Add the tensors *saved*, whose names the layers lack; if there are none, add all that Transformers writes."""
        bare: dict[str, str] = {}
        shapes: dict[str, Sequence[int]] = {}
        for name, supplier, shape in self._names_in_memory():
            if bare.setdefault(name, supplier) != supplier:
                raise Unsupported(f"two tensors of the model are called {name!r}, wrappers aside")
            shapes[name] = shape
        written = self.ask(shapes, {tensor.name: tensor.shape for tensor in saved})
        by_name = {tensor.name: tensor for tensor in saved}
        seen: set[tuple[Run, ...]] = set()
        for name in by_name or written:
            runs = tuple(replace(run, name=bare[run.name]) for run in written[name].runs)
            if runs not in seen:  # else tied in another way
                seen.add(runs)
                self._covered |= {run.name for run in runs}
                self._add(self._from_runs(name, written[name].shape, runs, by_name.get(name)))
        if lost := self._plain_rest():
            raise Unsupported(
                "the tensor names in the base's own weights files differ from the layers', and no tensor there is "
                f"{lost[0]!r}",
                hint="compose --format shards keeps every name",
            )

    def _names_in_memory(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield the model's own names, each with its parameter or buffer and the shape."""
        for parameter in self.parameters.values():
            if not is_of_adapter(parameter.name):
                for name in (parameter.name, *parameter.aliases):
                    yield strip_wrappers(name), parameter.name, parameter.shape
        for buffer in self.buffers.values():
            yield strip_wrappers(buffer.name), buffer.name, buffer.shape

    def _from_runs(
        self, name: str, shape: tuple[int, ...], runs: tuple[Run, ...], tensor: WeightTensor | None
    ) -> WeightTensor:
        suppliers = list(dict.fromkeys(run.name for run in runs))
        parts = [self._whole(supplier, name=name) for supplier in suppliers]
        first = parts[0]
        is_whole = len(runs) == 1 and runs[0].elements == prod(first.shape)
        if any(part.dtype != first.dtype for part in parts) or (first.source is TensorSource.BUFFER and not is_whole):
            raise Unsupported(f"{name!r} consists of {suppliers[0]!r} and others in a way that cannot be written")
        # Only the base's own bytes have a known checksum.
        is_same = (
            tensor is not None and tensor.dtype == first.dtype and len(suppliers) == 1 and self.is_own(suppliers[0])
        )
        crc32 = tensor.crc32 if tensor is not None and is_same else None
        return replace(first, shape=shape, runs=() if is_whole else runs, crc32=crc32)

    # -- names of the layers or of the base's files --------------------------------------------------------------

    def _from_layer(self, supplier: str, tensor: WeightTensor) -> WeightTensor:
        """Return what the layers supply for *tensor* of the base's own file."""
        if tensor.stored is not None:
            return self._whole(supplier, name=tensor.name)
        run = Run(name=supplier, start=0, elements=prod(tensor.shape))
        return self._from_runs(tensor.name, tensor.shape, (run,), tensor)

    def _whole(self, supplier: str, *, name: str) -> WeightTensor:
        """Return all of a parameter or buffer as the tensor *name*."""
        if (parameter := self.parameters.get(supplier)) is not None:
            dtype = self.dtype if self.dtype and parameter.dtype in FLOATS else parameter.dtype
            shape, source = parameter.shape, TensorSource.PARAMETER
        elif (buffer := self.buffers.get(supplier)) is not None:
            dtype, shape, source = buffer.dtype, buffer.shape, TensorSource.BUFFER
        else:
            raise LayoutMismatch(f"the base's weights files have {supplier!r}, which none of the chosen layers has")
        return WeightTensor(name=name, dtype=dtype, shape=shape, source=source, layer_name=supplier)

    def _add_rest(self, parameters: list[str], *, has_saved: bool) -> None:
        """Add the *parameters* that are in no weights file of the base; buffers only if the base has no such file."""
        suppliers = [*parameters, *([] if has_saved else self.buffers)]
        bare = {name: name if is_of_adapter(name) else strip_wrappers(name) for name in suppliers}
        uses = Counter(bare.values())
        for supplier, name in bare.items():
            is_free = uses[name] == 1 and name not in self._by_name
            self._add(self._whole(supplier, name=name if is_free else supplier))
        of_adapters = [name for name in parameters if is_of_adapter(name)]
        self._note(of_adapters, "of an adapter, or adapted by one; written under their own names, not merged")
        if has_saved:
            others = [name for name in parameters if not is_of_adapter(name)]
            self._note(others, "in none of the base's own weights files; written under their own names")

    def _add(self, tensor: WeightTensor) -> None:
        if self._by_name.setdefault(tensor.name, tensor) != tensor:
            raise Unsupported(
                f"two tensors would be called {tensor.name!r}",
                hint="compose --format shards keeps every name",
            )

    def _note(self, names: list[str], text: str) -> None:
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notes.append(f"{names[0]!r}{more}: {text}")


# -- the base's own weights files ----------------------------------------------------------------------------------


def saved_tensors(files: Iterable[GatheredFile]) -> Iterator[WeightTensor]:
    """Yield every tensor of *files*, the base's own weights."""
    for file in files:
        size_bytes = len(file.header) + sum(tensor.elements * by_code(tensor.dtype).bytes for tensor in file.tensors)
        shapes = {sized.name: sized.shape for sized in tensors_in(Path(file.path), file.header, size_bytes, {})}
        for tensor in file.tensors:
            if tensor.name not in shapes:
                raise IntegrityError(f"the stored header of {file.path} lacks {tensor.name!r}")
            yield WeightTensor(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=shapes[tensor.name],
                source=tensor.source,
                layer_name=tensor.layer_name,
                stored=tensor.stored,
                crc32=tensor.crc32,
            )


# -- asking Transformers -------------------------------------------------------------------------------------------

_PROGRAM = "layerstore.hf.saved_names"
_INSTEAD = "compose --format shards needs no names"
# Download nothing, and do not initialize a GPU.
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}


def may_be_renamed(config: Mapping[str, object]) -> bool:
    """Whether names in files may differ from names in memory: true for Transformers' own models since version 5."""
    major = str(config.get("transformers_version", "")).partition(".")[0]
    return major.isdecimal() and int(major) >= 5 and "auto_map" not in config


def ask_transformers(
    config: Mapping[str, object] | None, shapes: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> dict[str, FileTensor]:
    """
    Return what ``save_pretrained`` would write for a model with *config* and tensors of these *shapes*.

    The result must include *expected*, the tensors of the base's own weights files.

    Raises:
        Unsupported: Transformers is not installed, or does not know how to write the model.
    """
    named = f" (the base's own weights files have {next(iter(expected))!r})" if expected else ""
    problem = f"the weights have other names in files than in memory{named}"
    if config is None:
        raise Unsupported(f"{problem}, and without a config.json nothing tells how", hint=_INSTEAD)
    if importlib.util.find_spec("transformers") is None:
        raise Unsupported(
            f"only Transformers knows whether a {config.get('model_type')} has other names in files than in memory"
            f"{named}, and it is not installed here",
            hint=f"pip install 'transformers>=5'; {_INSTEAD}",
        )
    answer = _answer(json.dumps({"config": config, "shapes": shapes, "expected": expected}))
    if "error" in answer:
        raise Unsupported(f"{problem}: {answer['error']}", hint=answer.get("hint") or _INSTEAD)
    return {
        name: FileTensor(
            shape=tuple(shape),
            runs=tuple(Run(name=source, start=start, elements=count) for source, start, count in runs),
        )
        for name, (shape, runs) in answer["tensors"].items()
    }


@lru_cache(maxsize=4)  # a program may export many steps of a model, and the answer takes seconds
def _answer(question: str) -> dict[str, Any]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", _PROGRAM],  # -P: import nothing from the working folder
            input=question,
            capture_output=True,
            text=True,
            env=os.environ | _QUIET | {"PYTHONPATH": paths},
            timeout=RENAMING_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise Unsupported(
            f"Transformers did not say in {RENAMING_SECONDS_MAX:.0f} s how it writes the weights", hint=_INSTEAD
        ) from exc
    if process.returncode:
        errors = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise Unsupported(f"Transformers cannot say how it writes the weights: {errors[-1]}", hint=_INSTEAD)
    # The last line, since imported libraries may have printed something before it.
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer
