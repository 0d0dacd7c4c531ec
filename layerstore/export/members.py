"""
Which tensors an export has, under which names: decided by the layers, and by the files that the trainer wrote itself.

Values always come from the layers that the composite chose. The base's own weights files lend their names, and
whatever they hold that is in no layer. Where they have other names or other cuts than the layers, Transformers is
asked for its mapping; where it cannot tell, there is no export.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from layerstore.errors import IntegrityError, LayoutMismatch, Unsupported
from layerstore.layers import is_of_adapter, strip_wrappers
from layerstore.model import Buffer, GatheredFile, ObjectContent, Parameter, TensorSource

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types that one asks for, and is given, by rounding or widening."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements that lie together in a parameter or buffer."""

    name: str
    start: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A tensor as Transformers writes it."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    """Where its elements come from, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One tensor of an export."""

    name: str
    """In the export."""
    dtype: str
    """Of the bytes to be written."""
    shape: tuple[int, ...]
    source: TensorSource
    layer_name: str
    """The parameter or buffer that supplies it, or its first elements; empty when stored."""
    runs: tuple[Run, ...] = ()
    """Where its elements come from, if not from the whole of *layer_name*."""
    stored: ObjectContent | None = None
    crc32: int | None = None
    """Of the same tensor in the base's own file, where the layer and the element type are the very same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor of the base's own weights files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer_name: str = ""
    """The parameter or buffer that it follows from, if it does."""
    stored: ObjectContent | None = None
    crc32: int | None = None


Ask = Callable[[Mapping[str, Sequence[int]], Mapping[str, Sequence[int]]], Mapping[str, Written]]
"""Tells how Transformers writes what a model holds in memory, given those shapes, and those of tensors in its files."""


@dataclass(slots=True, kw_only=True)
class Members:
    """The tensors of an export, and what its reader should know of them."""

    tensors: list[Member]
    notes: list[str] = field(default_factory=list)


def choose_members(
    *,
    parameters: Mapping[str, Parameter],
    buffers: Mapping[str, Buffer],
    saved: Iterable[SavedTensor],
    dtype: str | None,
    is_own: Callable[[str], bool],
    ask: Ask,
    is_always_asked: bool = False,
) -> Members:
    """
    Return what to write, every piece of memory once.

    *dtype* is the code of the element type asked for, None for each parameter's own.
    *is_own* tells whether the version of a parameter's layer is the one that the base itself saved.
    *ask* is called where *saved* has other names than the layers; *is_always_asked* says that it is to be called even
    where nothing was saved.

    Raises:
        LayoutMismatch: The base's files name a tensor that the chosen layers lack.
        Unsupported: Two tensors would have one name, or *ask* cannot tell.
    """
    return _Choice(parameters, buffers, dtype, is_own, ask).made([*saved], is_always_asked=is_always_asked)


class _Choice:
    """One choice in the making."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        buffers: Mapping[str, Buffer],
        dtype: str | None,
        is_own: Callable[[str], bool],
        ask: Ask,
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._dtype = dtype
        self._is_own = is_own
        self._ask = ask
        self._known = _by_any_name(parameters, buffers)
        self._members: dict[str, Member] = {}
        self._covered: set[str] = set()
        self._notes: list[str] = []

    def made(self, saved: list[SavedTensor], *, is_always_asked: bool) -> Members:
        # What ZeRO-3 leaves of a parameter that nobody gathered is a name without elements, which tells nothing.
        saved = [tensor for tensor in saved if prod(tensor.shape) or self._fits(tensor, self._supplier(tensor))]
        unlike, others = [], []
        for tensor in saved:
            supplier = self._supplier(tensor)
            if supplier is None or not self._fits(tensor, supplier):
                others.append(tensor)
            elif supplier in self._buffers and tensor.stored is not None:
                self._add(_stored(tensor))
            elif supplier not in self._covered:  # else tied: the file has one memory under two names
                self._covered.add(supplier)
                unlike += [tensor.name] if tensor.stored is not None else []
                self._add(self._from_layer(supplier, tensor))
        if (others or (is_always_asked and not saved)) and self._plain_rest():
            self._add_renamed(others)
            others = []
        rest = [name for name in self._parameters if name not in self._covered]
        self._add_rest(rest, has_saved=bool(saved))
        self._add_others(others, are_extras=not rest)
        self._note(unlike, "the base's own weights files have other values than its layers; the layers' are written")
        if self._dtype:
            fixed = [name for name, parameter in self._parameters.items() if parameter.dtype not in FLOATS]
            self._note(fixed, "no floating point, so written unchanged")
        return Members(tensors=list(self._members.values()), notes=self._notes)

    def _supplier(self, tensor: SavedTensor) -> str | None:
        """Return the parameter or buffer that *tensor* has the name of."""
        return tensor.layer_name or self._known.get(tensor.name) or self._known.get(strip_wrappers(tensor.name))

    def _fits(self, tensor: SavedTensor, supplier: str | None) -> bool:
        """Whether *tensor* has as many elements as *supplier*; of one that no chosen layer has, that is told later."""
        of = self._parameters.get(supplier or "") or self._buffers.get(supplier or "")
        return of is None or prod(of.shape) == prod(tensor.shape)

    def _plain_rest(self) -> list[str]:
        """Return the parameters that are in none of the base's files so far, adapters aside."""
        return [name for name in self._parameters if name not in self._covered and not is_of_adapter(name)]

    # -- what Transformers has other names for -------------------------------------------------------------------

    def _add_renamed(self, saved: list[SavedTensor]) -> None:
        """Add what the base's files call otherwise than the layers; without such a file, all that they would hold."""
        bare: dict[str, str] = {}
        shapes: dict[str, Sequence[int]] = {}
        for own_name, names, shape in self._named():
            for name in map(strip_wrappers, names):
                if bare.setdefault(name, own_name) != own_name:
                    raise Unsupported(f"two tensors of the model are called {name!r}, wrappers aside")
                shapes[name] = shape
        written = self._ask(shapes, {tensor.name: tensor.shape for tensor in saved})
        by_name = {tensor.name: tensor for tensor in saved}
        seen: set[tuple[Run, ...]] = set()
        for name in by_name or written:
            runs = tuple(replace(run, name=bare[run.name]) for run in written[name].runs)
            if runs not in seen:  # else tied
                seen.add(runs)
                self._covered |= {run.name for run in runs}
                self._add(self._from_runs(name, written[name].shape, runs, by_name.get(name)))
        if lost := self._plain_rest():
            raise Unsupported(
                f"the base's own weights files have other names than the layers, and no tensor there is {lost[0]!r}",
                hint="compose --format zero3 keeps every name",
            )

    def _named(self) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        for parameter in self._parameters.values():
            if not is_of_adapter(parameter.name):
                yield parameter.name, (parameter.name, *parameter.aliases), parameter.shape
        for buffer in self._buffers.values():
            yield buffer.name, (buffer.name,), buffer.shape

    def _from_runs(
        self, name: str, shape: tuple[int, ...], runs: tuple[Run, ...], tensor: SavedTensor | None
    ) -> Member:
        """Return the member *name* of which the elements lie in *runs* of parameters."""
        suppliers = list(dict.fromkeys(run.name for run in runs))
        members = [self._own(supplier, name=name) for supplier in suppliers]
        first = members[0]
        is_whole = len(runs) == 1 and runs[0].elements == prod(first.shape)
        if any(member.dtype != first.dtype for member in members) or (
            first.source is TensorSource.BUFFER and not is_whole
        ):
            raise Unsupported(f"{name!r} consists of {suppliers[0]!r} and others in a way that cannot be written")
        is_same = tensor is not None and tensor.dtype == first.dtype and len(suppliers) == 1
        return Member(
            name=name,
            dtype=first.dtype,
            shape=shape,
            source=first.source,
            layer_name=suppliers[0],
            runs=() if is_whole else runs,
            crc32=tensor.crc32 if tensor and is_same and self._is_own(suppliers[0]) else None,
        )

    # -- what has its own name -----------------------------------------------------------------------------------

    def _from_layer(self, supplier: str, tensor: SavedTensor) -> Member:
        """Return the member that the layers supply under the name that the base's own file has for it."""
        member = self._own(supplier, name=tensor.name)
        is_same = tensor.stored is None and tensor.dtype == member.dtype
        return Member(
            name=member.name,
            dtype=member.dtype,
            # A file may have another shape for the same elements.
            shape=tensor.shape if tensor.stored is None else member.shape,
            source=member.source,
            layer_name=supplier,
            crc32=tensor.crc32 if is_same and self._is_own(supplier) else None,
        )

    def _own(self, supplier: str, *, name: str) -> Member:
        if (parameter := self._parameters.get(supplier)) is not None:
            dtype = self._dtype if self._dtype and parameter.dtype in FLOATS else parameter.dtype
            return Member(
                name=name, dtype=dtype, shape=parameter.shape, source=TensorSource.PARAMETER, layer_name=supplier
            )
        if (buffer := self._buffers.get(supplier)) is not None:
            return Member(
                name=name, dtype=buffer.dtype, shape=buffer.shape, source=TensorSource.BUFFER, layer_name=supplier
            )
        raise LayoutMismatch(f"the base's weights files have {supplier!r}, which none of the chosen layers has")

    def _add_rest(self, parameters: list[str], *, has_saved: bool) -> None:
        """Add the *parameters* that no file of the base names; buffers only where there is no such file at all."""
        suppliers = [*parameters, *([] if has_saved else self._buffers)]
        bare = {name: name if is_of_adapter(name) else strip_wrappers(name) for name in suppliers}
        uses = Counter(bare.values())
        for supplier, name in bare.items():
            is_free = uses[name] == 1 and name not in self._members
            self._add(self._own(supplier, name=name if is_free else supplier))
        of_adapters = [name for name in parameters if is_of_adapter(name)]
        self._note(of_adapters, "of an adapter, or adapted by one; written under their own names, not merged")
        if has_saved:
            others = [name for name in parameters if not is_of_adapter(name)]
            self._note(others, "in none of the base's own weights files; written under their own names")

    def _add_others(self, others: list[SavedTensor], *, are_extras: bool) -> None:
        """Add what the base's files hold and no layer does, unless it may be another form of an adapter."""
        if are_extras:
            for tensor in others:
                self._add(_stored(tensor))
        else:
            names = [tensor.name for tensor in others]
            self._note(names, "in the base's own weights files, but in no layer; left out, being of the base alone")

    def _add(self, member: Member) -> None:
        if self._members.setdefault(member.name, member) != member:
            raise Unsupported(
                f"two tensors would be called {member.name!r}",
                hint="compose --format zero3 keeps every name",
            )

    def _note(self, names: list[str], text: str) -> None:
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._notes.append(f"{names[0]!r}{more}: {text}")


def _stored(tensor: SavedTensor) -> Member:
    return Member(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        source=TensorSource.STORED,
        layer_name="",
        stored=tensor.stored,
    )


def _by_any_name(parameters: Mapping[str, Parameter], buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """Return which parameter or buffer is meant by each name, wrappers left away where that fits only one."""
    found: dict[str, str] = {}
    bare: dict[str, set[str]] = {}
    named = [((item.name, *item.aliases), item.name) for item in parameters.values()]
    for names, own_name in [*named, *(((name,), name) for name in buffers)]:
        for name in names:
            found[name] = own_name
            bare.setdefault(strip_wrappers(name), set()).add(own_name)
    for name, candidates in bare.items():
        if len(candidates) == 1:
            found.setdefault(name, *candidates)
    return found


def saved_tensors(files: Iterable[GatheredFile]) -> Iterator[SavedTensor]:
    """Yield every tensor of *files*, the base's own weights."""
    for file in files:
        entries = _entries(file.header, file.path)
        for tensor in file.tensors:
            if tensor.name not in entries:
                raise IntegrityError(f"the stored header of {file.path} lacks {tensor.name!r}")
            yield SavedTensor(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=entries[tensor.name][1],
                layer_name=tensor.layer_name,
                stored=tensor.stored,
                crc32=tensor.crc32,
            )


def tensors_in(header: bytes, path: str) -> Iterator[SavedTensor]:
    """Yield what the *header* of a weights file names, of which no tensor has the name of a layer's."""
    for name, (dtype, shape) in _entries(header, path).items():
        yield SavedTensor(name=name, dtype=dtype, shape=shape)


def _entries(header: bytes, path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        entries = json.loads(header[8:])
        return {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise IntegrityError(f"the stored header of {path} is not safetensors' ({exc})") from exc
