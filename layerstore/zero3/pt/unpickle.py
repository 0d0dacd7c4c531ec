"""
Read the pickle inside a ``.pt`` file as an inert tree. Nothing is imported, looked up or called.

This is a small stack machine with one handler for each opcode that ``torch.save`` emits with protocol 2; it refuses
every other opcode. A distributed checkpoint's ``.metadata`` (protocol 4) adds four opcodes. Globals become names,
calls become nodes (`layerstore.zero3.pt.picklecalls`). Every count is bounded before memory is spent on it. Neither
``pickle`` nor ``pickletools``, which imports it, is used.
"""

import struct
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.hashing import digest
from layerstore.limits import (
    DCP_METADATA_BYTES_MAX,
    DCP_METADATA_OBJECTS_MAX,
    DCP_METADATA_OPCODES_MAX,
    PICKLE_BYTES_MAX,
    PICKLE_DEPTH_MAX,
    PICKLE_EXPANDED_BYTES_MAX,
    PICKLE_INT_BYTES_MAX,
    PICKLE_NAME_BYTES_MAX,
    PICKLE_OBJECTS_MAX,
    PICKLE_OPCODES_MAX,
)
from layerstore.source import damaged, untrusted
from layerstore.tree import Global, Inert, Located, OrderedMap, Storage, Template, Tree
from layerstore.zero3.pt import allowlist
from layerstore.zero3.pt.allowlist import MalformedPickleError, Unreadable, check_key, check_tree
from layerstore.zero3.pt.picklecalls import Calls, DamagedPickleError

# How many names a message lists; the error's facts have all of them.
_NAMES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleForm:
    """What one writer's pickles look like, and how large they may be."""

    writer: str
    protocol: int
    bytes_max: int
    opcodes_max: int
    objects_max: int
    expanded_bytes_max: int


OF_TORCH_SAVE = PickleForm(
    writer="torch.save",
    protocol=2,
    bytes_max=PICKLE_BYTES_MAX,
    opcodes_max=PICKLE_OPCODES_MAX,
    objects_max=PICKLE_OBJECTS_MAX,
    expanded_bytes_max=PICKLE_EXPANDED_BYTES_MAX,
)
OF_DCP_METADATA = PickleForm(
    writer="torch.distributed.checkpoint",
    protocol=4,
    bytes_max=DCP_METADATA_BYTES_MAX,
    opcodes_max=DCP_METADATA_OPCODES_MAX,
    objects_max=DCP_METADATA_OBJECTS_MAX,
    expanded_bytes_max=4 * DCP_METADATA_BYTES_MAX,
)

_UINT16 = struct.Struct("<H")
_UINT32 = struct.Struct("<I")
_INT32 = struct.Struct("<i")
_UINT64 = struct.Struct("<Q")
_FLOAT64 = struct.Struct(">d")  # pickle's floats are big-endian, its integers little-endian


def read_pickle(
    payload: bytes,
    *,
    path: Path,
    records: Mapping[str, Located],
    allowed_globals: frozenset[str] = frozenset(),
    form: PickleForm = OF_TORCH_SAVE,
) -> tuple[Tree, tuple[Storage, ...]]:
    """
    Return the tree that *payload* describes, and every storage that its tensors view, in order of first use.

    *records* holds the archive's storages by key; *path* is the file's, for errors; *form* describes the writer.
    A global in *allowed_globals* becomes an inert object, unless the allow-list treats it otherwise.

    Raises:
        SourceCheckpoint: The pickle is damaged, or untrusted; the message lists unknown globals with their key paths.
        Unsupported: The pickle has a tensor of an unsupported kind or element type.
    """
    tree, storages = _read(payload, path, records, allowed_globals, form)
    return tree, tuple(storages.values())


class Pickles:
    """Reads pickles; for a pickle equal to an earlier one, such as another rank's, the tree is reused."""

    def __init__(self, allowed_globals: frozenset[str] = frozenset()) -> None:
        self._allowed_globals = allowed_globals
        self._known: dict[bytes, tuple[Template, dict[str, Storage], dict[str, int]]] = {}
        """By a pickle's digest: its tree, its storages by record, and their sizes."""

    def read(self, payload: bytes, *, path: Path, records: Mapping[str, Located]) -> tuple[Tree, tuple[Storage, ...]]:
        """Return and raise what `read_pickle` does."""
        sizes = {key: located.size_bytes for key, located in records.items()}
        template, storages, wanted = self._known.get(digest(payload), (None, {}, {}))
        # A known tree fits another file only if the file's records have the sizes of the tree's storages.
        if template is None or not wanted.items() <= sizes.items():
            tree, storages = _read(payload, path, records, self._allowed_globals)
            wanted = {key: sizes[key] for key in storages}
            self._known[digest(payload)] = Template(tree, tuple(storages.values())), storages, wanted
            return tree, tuple(storages.values())
        own = tuple(
            [
                Storage(dtype=storage.dtype, elements=storage.elements, device=storage.device, content=records[key])
                for key, storage in storages.items()
            ]
        )
        return template.filled(own), own


def _read(
    payload: bytes,
    path: Path,
    records: Mapping[str, Located],
    allowed_globals: frozenset[str],
    form: PickleForm = OF_TORCH_SAVE,
) -> tuple[Tree, dict[str, Storage]]:
    """Return the tree, and its storages by record."""
    allowed = frozenset(map(_one_spelling, allowed_globals))
    trusted = allowlist.KNOWN | allowed
    machine = _Machine(payload, Calls(records, inert=allowed), form)
    try:
        tree = machine.run()
        checked = check_tree(tree, expanded_bytes_max=form.expanded_bytes_max)
    except (MalformedPickleError, DamagedPickleError) as exc:
        # Report unknown globals first: they matter more than a malformed pickle.
        _refuse_globals(path, machine.globals_named, trusted, places={})
        if isinstance(exc, DamagedPickleError):
            raise damaged(path, str(exc)) from exc
        raise untrusted(path, f"its pickle is not one that {form.writer} writes: {exc}") from exc
    _refuse_globals(path, machine.globals_named, trusted, places=checked.names)
    # The names that _refuse_globals has let through are those of unsupported kinds of tensors.
    strange = [(checked.names[name], name) for name in checked.names.keys() - trusted]
    for place, what in (*checked.unreadable, *sorted(strange)):
        raise Unsupported(
            f"{path}: at {place}: {what} is not supported",
            hint="leave it out of what is saved",
            path=str(path),
            key_path=place,
        )
    for name in sorted(checked.names.keys() & allowlist.CALLED):
        raise untrusted(path, f"its pickle names {name} at {checked.names[name]} without calling it")
    return cast(Tree, tree), machine.calls.storages


def _one_spelling(name: str) -> str:
    return allowlist.dotted(*allowlist.module_and_name(name)) or name


def _refuse_globals(path: Path, named: Set[str], trusted: Set[str], *, places: Mapping[str, str]) -> None:
    names = sorted(name for name in named - trusted if not allowlist.is_unsupported(name))
    if not names:
        return
    shown = [f"{name} (at {places[name]})" if name in places else name for name in names[:_NAMES_SHOWN_MAX]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    flags = " ".join(f"--allow-global {name}" for name in names[:_NAMES_SHOWN_MAX])
    raise SourceCheckpoint(
        f"{path}: untrusted: its pickle names unknown globals: {', '.join(shown)}{more}; nothing was run",
        hint=f"if you trust them (loading a composed checkpoint runs them): {flags}",
        path=str(path),
        reason="untrusted",
        names=tuple(names),
    )


class _Machine:
    """The stack machine; the table below maps opcodes to its methods."""

    def __init__(self, payload: bytes, calls: Calls, form: PickleForm) -> None:
        self.calls = calls
        self._form = form
        self.globals_named: set[str] = set()
        """Every global in the pickle, known or not."""
        self._payload = payload
        self._position = 0
        self._stack: list[object] = []
        self._outer: list[list[object]] = []
        """The stacks below each open mark."""
        self._memo: dict[int, object] = {}
        self._objects_left = form.objects_max

    def run(self) -> object:
        """Return the one object that the pickle leaves behind."""
        form = self._form
        if len(self._payload) > form.bytes_max:
            raise MalformedPickleError(f"it has {len(self._payload)} bytes, more than {form.bytes_max}")
        if self._payload[:2] != bytes([0x80, form.protocol]):
            raise MalformedPickleError(f"its protocol is not {form.protocol}, the default of {form.writer}")
        self._position = 2
        handlers = _HANDLERS if form.protocol == OF_TORCH_SAVE.protocol else _HANDLERS_4
        for _ in range(form.opcodes_max):
            try:
                code = self._payload[self._position]
            except IndexError:
                raise self._malformed("it ends inside an opcode") from None
            self._position += 1
            if code == _STOP:
                return self._result()
            handler = handlers.get(code)
            if handler is None:
                raise self._malformed(f"opcode 0x{code:02x} is not one of {form.writer}'s")
            handler(self)
        raise MalformedPickleError(f"it has more than {form.opcodes_max} opcodes")

    def _result(self) -> object:
        if self._position != len(self._payload):
            raise MalformedPickleError(f"{len(self._payload) - self._position} bytes follow its end")
        if self._outer or len(self._stack) != 1:
            raise MalformedPickleError("it does not leave exactly one object")
        return self._stack[0]

    def _malformed(self, what: str) -> MalformedPickleError:
        return MalformedPickleError(f"{what} (before byte {self._position})")

    # Bytes

    def _take(self, count: int) -> bytes:
        piece = self._payload[self._position : self._position + count]
        if len(piece) != count:
            raise self._malformed("it ends inside an opcode")
        self._position += count
        return piece

    def _take_struct(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self._take(layout.size))[0]
        return value

    def _take_text(self, size_bytes: int) -> str:
        try:
            # As pickle itself does: a file name that is not UTF-8 has lone surrogates.
            return self._take(size_bytes).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as exc:
            raise self._malformed("a text is not UTF-8") from exc

    def _take_line(self) -> str:
        end = self._payload.find(b"\n", self._position, self._position + PICKLE_NAME_BYTES_MAX + 1)
        if end < 0:
            raise self._malformed("the name of a global does not end")
        line = self._take_text(end - self._position)
        self._position += 1
        return line

    def _skip_frame(self, size_bytes: int) -> None:
        """Skip a frame's length, which only tells a reader how much to fetch at once."""
        if size_bytes > len(self._payload) - self._position:
            raise self._malformed("it ends inside a frame")

    # Stack

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _push_object(self, made: object) -> None:
        """Push an object that takes much more memory than its opcode."""
        self._objects_left -= 1
        if self._objects_left < 0:
            raise MalformedPickleError(f"it makes more than {self._form.objects_max} objects")
        self._stack.append(made)

    def _pop(self) -> object:
        if not self._stack:
            raise self._malformed("the stack is empty")
        return self._stack.pop()

    def _top(self) -> object:
        value = self._pop()
        self._stack.append(value)
        return value

    def _mark(self) -> None:
        # A container opens at most one mark, a tensor at most three. `check_tree` limits the depth in nodes.
        if len(self._outer) >= PICKLE_DEPTH_MAX:
            raise self._malformed(f"it is nested more than {PICKLE_DEPTH_MAX} deep")
        self._outer.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[object]:
        if not self._outer:
            raise self._malformed("no mark is open")
        items, self._stack = self._stack, self._outer.pop()
        return items

    # Memo

    def _put(self, index: int) -> None:
        # Only objects and their names are memorized, so a real pickle stays below this limit.
        if len(self._memo) > 3 * self._form.objects_max:
            raise MalformedPickleError(f"it memorizes more than {3 * self._form.objects_max} objects")
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._malformed("an object is recalled that was never memorised")
        self._push(self._memo[index])

    # Values and containers

    def _long(self, size_bytes: int) -> None:
        # A negative size comes from a signed length field.
        if not 0 <= size_bytes <= PICKLE_INT_BYTES_MAX:
            raise self._malformed(f"an integer has {size_bytes} bytes")
        self._push(int.from_bytes(self._take(size_bytes), "little", signed=True))

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _append(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, Inert) and not target.has_state:
            # The cast is safe: the inert object is ours, and its list is typed more narrowly only for readers.
            cast("list[object]", target.appended).extend(items)
        else:
            raise self._malformed("APPENDS on something that is not a list")

    def _set_items(self, items: list[object]) -> None:
        if len(items) % 2:
            raise self._malformed("a key has no value")
        target = self._top()
        # BUILD completes an object: torch.save adds no entries after it, and we could not write them back.
        if type(target) is dict or (isinstance(target, OrderedMap) and target.attributes is None):
            entries = cast("dict[object, object]", target)
        elif isinstance(target, Inert) and not target.has_state:
            entries = cast("dict[object, object]", target.items)
        else:
            raise self._malformed("SETITEMS on something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if self._form is OF_DCP_METADATA and isinstance(key, Inert) and type(key.state) is dict:
                key = (key.name, *key.state.items())  # noqa: PLW2901  # a node cannot be a key
            check_key(key)
            entries[key] = value

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    # Names and objects

    def _global(self) -> None:
        self._named(self._take_line(), self._take_line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._malformed("the name of a global is malformed")
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        dotted = allowlist.dotted(module, name)
        if dotted is None:
            raise self._malformed("the name of a global is malformed")
        self.globals_named.add(dotted)
        self._push(Global(dotted))

    def _call(self) -> object:
        arguments, function = self._pop(), self._pop()
        if type(arguments) is not tuple or not isinstance(function, Global):
            raise self._malformed("a call is not a global and a tuple of arguments")
        return self.calls.call(function.name, arguments)

    def _new(self) -> None:
        instance = self._call()
        if not isinstance(instance, Inert):
            raise self._malformed("NEWOBJ makes an object that torch.save makes with REDUCE")
        instance.made_by_new = True
        self._push_object(instance)

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        match target:
            # A module's state_dict() is an OrderedDict, to which torch adds the attribute `_metadata`.
            case OrderedMap(attributes=None) if type(state) is dict:
                target.attributes = state
            case Inert(has_state=False):
                target.state, target.has_state = cast(Tree, state), True
            case Unreadable():
                pass  # it is reported as unreadable
            case _:
                raise self._malformed("BUILD on something that takes no state")


_STOP = ord(".")

# The opcodes of other protocols, extension registries, out-of-band buffers and recursive tuples are left out.
_HANDLERS: Final[dict[int, Callable[[_Machine], None]]] = {
    ord("("): _Machine._mark,
    ord("N"): lambda machine: machine._push(None),
    0x88: lambda machine: machine._push(True),
    0x89: lambda machine: machine._push(False),
    ord("J"): lambda machine: machine._push(machine._take_struct(_INT32)),
    ord("K"): lambda machine: machine._push(machine._take(1)[0]),
    ord("M"): lambda machine: machine._push(machine._take_struct(_UINT16)),
    0x8A: lambda machine: machine._long(machine._take(1)[0]),
    0x8B: lambda machine: machine._long(machine._take_struct(_INT32)),
    ord("G"): lambda machine: machine._push(_FLOAT64.unpack(machine._take(8))[0]),
    ord("X"): lambda machine: machine._push(machine._take_text(machine._take_struct(_UINT32))),
    ord(")"): lambda machine: machine._push(()),
    0x85: lambda machine: machine._tuple(1),
    0x86: lambda machine: machine._tuple(2),
    0x87: lambda machine: machine._tuple(3),
    ord("t"): lambda machine: machine._push(tuple(machine._pop_to_mark())),
    ord("]"): lambda machine: machine._push_object([]),
    ord("a"): lambda machine: machine._append([machine._pop()]),
    ord("e"): lambda machine: machine._append(machine._pop_to_mark()),
    ord("}"): lambda machine: machine._push_object({}),
    ord("s"): _Machine._set_item,
    ord("u"): lambda machine: machine._set_items(machine._pop_to_mark()),
    ord("q"): lambda machine: machine._put(machine._take(1)[0]),
    ord("r"): lambda machine: machine._put(machine._take_struct(_UINT32)),
    ord("h"): lambda machine: machine._get(machine._take(1)[0]),
    ord("j"): lambda machine: machine._get(machine._take_struct(_UINT32)),
    ord("c"): _Machine._global,
    ord("R"): lambda machine: machine._push_object(machine._call()),
    0x81: _Machine._new,
    ord("b"): _Machine._build,
    ord("Q"): lambda machine: machine._push(machine.calls.refer(machine._pop())),
}
_HANDLERS_4: Final[dict[int, Callable[[_Machine], None]]] = {
    **_HANDLERS,
    0x95: lambda machine: machine._skip_frame(machine._take_struct(_UINT64)),
    0x8C: lambda machine: machine._push(machine._take_text(machine._take(1)[0])),
    0x94: lambda machine: machine._put(len(machine._memo)),
    0x93: _Machine._stack_global,
}
