"""
Which tensors an export has, under which names: decided by the layers, and by the files that the trainer wrote itself.

Values always come from the layers that the composite chose. The base's own files of gathered weights lend their
names, and whatever they hold that is in no layer.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from layerstore.errors import IntegrityError, LayoutMismatch, Unsupported
from layerstore.layers import is_of_adapter, strip_wrappers
from layerstore.model import Buffer, GatheredFile, GatheredTensor, ObjectContent, Parameter, TensorSource

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types that one asks for, and is given, by rounding or widening."""


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
    """The parameter or buffer that supplies it; empty when stored."""
    stored: ObjectContent | None = None
    crc32: int | None = None
    """Of the same tensor in the base's own file, where the layer and the element type are the very same."""


@dataclass(slots=True, kw_only=True)
class Members:
    """The tensors of an export, and what its reader should know of them."""

    tensors: list[Member]
    notes: list[str] = field(default_factory=list)


def choose_members(
    *,
    parameters: Mapping[str, Parameter],
    buffers: Mapping[str, Buffer],
    gathered: Iterable[GatheredFile],
    dtype: str | None,
    is_own: Callable[[str], bool],
) -> Members:
    """
    Return what to write, every piece of memory once.

    *dtype* is the code of the element type asked for, None for each parameter's own.
    *is_own* tells whether the version of a parameter's layer is the one that the base itself saved.

    Raises:
        LayoutMismatch: The base's files name a tensor that the chosen layers lack.
        Unsupported: Two tensors would have one name.
    """
    return _Choice(parameters, buffers, dtype, is_own).made([*_gathered_tensors(gathered)])


class _Choice:
    """One choice in the making."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        buffers: Mapping[str, Buffer],
        dtype: str | None,
        is_own: Callable[[str], bool],
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._dtype = dtype
        self._is_own = is_own
        self._known = _by_any_name(parameters, buffers)
        self._members: dict[str, Member] = {}
        self._covered: set[str] = set()
        self._notes: list[str] = []

    def made(self, gathered: list[tuple[GatheredTensor, tuple[int, ...]]]) -> Members:
        unlike, others = [], []
        for tensor, shape in gathered:
            supplier = tensor.layer_name or self._known.get(tensor.name) or self._known.get(strip_wrappers(tensor.name))
            if supplier is None:
                others.append(_stored(tensor, shape))
            elif supplier in self._buffers and tensor.stored is not None:
                self._add(_stored(tensor, shape))
            elif supplier not in self._covered:  # else tied: the file has one memory under two names
                self._covered.add(supplier)
                unlike += [tensor.name] if tensor.stored is not None else []
                self._add(self._from_layer(supplier, tensor, shape))
        rest = [name for name in self._parameters if name not in self._covered]
        self._add_rest(rest, has_gathered=bool(gathered))
        self._add_others(others, are_extras=not rest)
        self._note(unlike, "the base's own weights files have other values than its layers; the layers' are written")
        if self._dtype:
            fixed = [name for name, parameter in self._parameters.items() if parameter.dtype not in FLOATS]
            self._note(fixed, "no floating point, so written unchanged")
        return Members(tensors=list(self._members.values()), notes=self._notes)

    def _from_layer(self, supplier: str, tensor: GatheredTensor, shape: tuple[int, ...]) -> Member:
        """Return the member that the layers supply under the name that the base's own file has for it."""
        member = self._own(supplier, name=tensor.name)
        is_same = tensor.stored is None and tensor.dtype == member.dtype
        return Member(
            name=member.name,
            dtype=member.dtype,
            # A file may have another shape for the same elements.
            shape=shape if tensor.stored is None else member.shape,
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

    def _add_rest(self, parameters: list[str], *, has_gathered: bool) -> None:
        """Add the *parameters* that no file of the base names; buffers only where there is no such file at all."""
        suppliers = [*parameters, *([] if has_gathered else self._buffers)]
        bare = {name: name if is_of_adapter(name) else strip_wrappers(name) for name in suppliers}
        uses = Counter(bare.values())
        for supplier, name in bare.items():
            is_free = uses[name] == 1 and name not in self._members
            self._add(self._own(supplier, name=name if is_free else supplier))
        of_adapters = [name for name in parameters if is_of_adapter(name)]
        self._note(of_adapters, "of an adapter, or adapted by one; written under their own names, not merged")
        if has_gathered:
            others = [name for name in parameters if not is_of_adapter(name)]
            self._note(others, "in none of the base's own weights files; written under their own names")

    def _add_others(self, others: list[Member], *, are_extras: bool) -> None:
        """Add what the base's files hold and no layer does, unless it may be another form of a parameter."""
        if are_extras:
            for member in others:
                self._add(member)
        else:
            names = [member.name for member in others]
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


def _stored(tensor: GatheredTensor, shape: tuple[int, ...]) -> Member:
    return Member(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=shape,
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


def _gathered_tensors(files: Iterable[GatheredFile]) -> Iterator[tuple[GatheredTensor, tuple[int, ...]]]:
    """Yield every tensor of *files* with the shape that it has there."""
    for file in files:
        try:
            header = json.loads(file.header[8:])
            shapes = {tensor.name: tuple(map(int, header[tensor.name]["shape"])) for tensor in file.tensors}
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise IntegrityError(f"the stored header of {file.path} is not safetensors' ({exc})") from exc
        yield from ((tensor, shapes[tensor.name]) for tensor in file.tensors)
