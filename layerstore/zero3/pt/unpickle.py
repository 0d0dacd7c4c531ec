"""
Read the pickle inside a ``.pt`` file as an inert tree. Nothing is imported, looked up or called.

A small stack machine with one handler per opcode that ``torch.save`` can emit with protocols 2 to 5;
every other opcode is refused. Globals become names, calls become nodes (`layerstore.zero3.pt.picklecalls`).
Every count is bounded before memory is spent on it, and there is no fallback to a general unpickler:
neither ``pickle`` nor ``pickletools``, which imports it, is used.
"""

import struct
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.limits import (
    PICKLE_BYTES_MAX,
    PICKLE_DEPTH_MAX,
    PICKLE_INT_BYTES_MAX,
    PICKLE_NAME_BYTES_MAX,
    PICKLE_OBJECTS_MAX,
    PICKLE_OPCODES_MAX,
)
from layerstore.tree import Global, Inert, Located, OrderedMap, Storage, Tree
from layerstore.zero3.pt import picklenames
from layerstore.zero3.pt.picklecalls import Calls
from layerstore.zero3.pt.treecheck import TreeReport, Unreadable, UnsafeTreeError, check_key, check_tree
from layerstore.zero3.sourcefile import damaged, untrusted

# How many names one message lists; all of them are in the error's facts.
_NAMES_SHOWN_MAX = 20

_UINT16 = struct.Struct("<H")
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
_INT32 = struct.Struct("<i")
_FLOAT64 = struct.Struct(">d")


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTree:
    """The tree that a pickle describes, and its storages."""

    tree: Tree
    """Inert."""
    storages: tuple[Storage, ...]
    """Every storage that a tensor of the tree views, in order of first use."""


class MalformedPickleError(Exception):
    """The bytes are not what ``torch.save`` writes."""


def read_pickle(
    payload: bytes,
    *,
    path: Path,
    records: Mapping[str, Located],
    allowed_globals: frozenset[str] = frozenset(),
) -> PickledTree:
    """
    Return the tree that *payload* describes.

    *records* holds the archive's storages by key, and *path* names the file in errors.
    A global in *allowed_globals* becomes an inert object, unless the allow-list treats it otherwise.

    Raises:
        SourceCheckpoint: Damaged, or untrusted: all unknown globals at once, each with its key path.
        Unsupported: A tensor of a kind or element type that is not supported.
    """
    trusted = picklenames.KNOWN | set(map(_one_spelling, allowed_globals))
    machine = _Machine(payload, Calls(records))
    try:
        tree = machine.run()
        found = check_tree(tree)
    except (MalformedPickleError, UnsafeTreeError) as exc:
        # An unknown global is reported first: it matters more than a malformed pickle.
        _refuse_globals(path, machine.globals_named.keys() - trusted, places={})
        raise untrusted(path, f"its pickle is not one that torch.save writes: {exc}") from exc
    _refuse_globals(path, machine.globals_named.keys() - trusted, places=found.names)
    _refuse_unreadable(path, found)
    _refuse_bare_names(path, found)
    return PickledTree(tree=cast(Tree, tree), storages=tuple(machine.calls.storages.values()))


def _one_spelling(name: str) -> str:
    return picklenames.dotted(*picklenames.module_and_name(name)) or name


def _refuse_globals(path: Path, unknown: Set[str], *, places: Mapping[str, str]) -> None:
    if not unknown:
        return
    names = sorted(unknown)
    shown = [f"{name} (at {places[name]})" if name in places else name for name in names[:_NAMES_SHOWN_MAX]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    flags = " ".join(f"--allow-global {name}" for name in names[:_NAMES_SHOWN_MAX])
    raise SourceCheckpoint(
        f"{path}: untrusted: its pickle names globals that are on no list: {', '.join(shown)}{more}; nothing was run",
        hint=f"only if you trust them, since whoever loads a composed checkpoint runs them: {flags}",
        path=str(path),
        reason="untrusted",
        names=tuple(names),
    )


def _refuse_unreadable(path: Path, found: TreeReport) -> None:
    for place, unreadable in found.unreadable:
        if unreadable.is_damage:
            raise damaged(path, f"at {place}: {unreadable.what}")
    for place, unreadable in found.unreadable:
        raise Unsupported(f"{path}: at {place}: {unreadable.what} is not supported", path=str(path), key_path=place)


def _refuse_bare_names(path: Path, found: TreeReport) -> None:
    bare = found.names.keys() & (picklenames.CALLED | picklenames.UNSUPPORTED.keys())
    for name in sorted(bare):
        raise untrusted(path, f"its pickle names {name} at {found.names[name]} without calling it")


class _Machine:
    """The stack machine; the table below maps opcodes to its methods."""

    def __init__(self, payload: bytes, calls: Calls) -> None:
        self.calls = calls
        self.globals_named: dict[str, None] = {}
        """Every global of the pickle, known or not."""
        self._payload = payload
        self._position = 0
        self._stack: list[object] = []
        self._outer: list[list[object]] = []
        """The stacks below each open mark."""
        self._memo: dict[int, object] = {}
        self._objects_left = PICKLE_OBJECTS_MAX

    def run(self) -> object:
        """Return the one object that the pickle leaves behind."""
        payload = self._payload
        if len(payload) > PICKLE_BYTES_MAX:
            raise MalformedPickleError(f"it has {len(payload)} bytes, more than {PICKLE_BYTES_MAX}")
        if payload[:1] != b"\x80" or payload[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
            raise MalformedPickleError("its protocol is not one of 2 to 5")
        self._position = 2
        for _ in range(PICKLE_OPCODES_MAX):
            code = self._take(1)[0]
            if code == _STOP:
                return self._result()
            handler = _HANDLERS.get(code)
            if handler is None:
                raise MalformedPickleError(f"opcode 0x{code:02x} at byte {self._position - 1}")
            handler(self)
        raise MalformedPickleError(f"it has more than {PICKLE_OPCODES_MAX} opcodes")

    def _result(self) -> object:
        if self._position != len(self._payload):
            raise MalformedPickleError(f"{len(self._payload) - self._position} bytes follow its end")
        if self._outer or len(self._stack) != 1:
            raise MalformedPickleError("it does not leave exactly one object")
        return self._stack[0]

    # Bytes

    def _take(self, count: int) -> bytes:
        start = self._position
        piece = self._payload[start : start + count]
        if len(piece) != count:
            raise MalformedPickleError(f"it ends inside the opcode before byte {start}")
        self._position = start + count
        return piece

    def _take_struct(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self._take(layout.size))[0]
        return value

    def _take_line(self) -> str:
        end = self._payload.find(b"\n", self._position, self._position + PICKLE_NAME_BYTES_MAX + 1)
        if end < 0:
            raise MalformedPickleError(f"a name at byte {self._position} does not end")
        line = self._take(end + 1 - self._position)[:-1]
        return _decode(line)

    def _frame(self) -> None:
        self._take(8)  # a hint for streams, which a payload in memory does not need

    # Stack

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _push_object(self, made: object) -> None:
        """Push what takes much more memory than its opcode."""
        self._objects_left -= 1
        if self._objects_left < 0:
            raise MalformedPickleError(f"it makes more than {PICKLE_OBJECTS_MAX} objects")
        self._stack.append(made)

    def _pop(self) -> object:
        if not self._stack:
            raise MalformedPickleError(f"nothing is on the stack at byte {self._position}")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            raise MalformedPickleError(f"nothing is on the stack at byte {self._position}")
        return self._stack[-1]

    def _pop_tuple(self) -> tuple[object, ...]:
        value = self._pop()
        if type(value) is not tuple:
            raise MalformedPickleError(f"arguments before byte {self._position} are not a tuple")
        return value

    def _mark(self) -> None:
        # A tensor needs three marks, so real trees stay far below their depth in nodes.
        if len(self._outer) >= PICKLE_DEPTH_MAX:
            raise MalformedPickleError(f"it is nested more than {PICKLE_DEPTH_MAX} deep")
        self._outer.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[object]:
        if not self._outer:
            raise MalformedPickleError(f"no mark is open at byte {self._position}")
        items = self._stack
        self._stack = self._outer.pop()
        return items

    # Memo

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise MalformedPickleError(f"byte {self._position} recalls what was never memorised")
        self._push(self._memo[index])

    # Scalars

    def _long(self, size_bytes: int) -> None:
        # A negative size comes from a signed length field.
        if not 0 <= size_bytes <= PICKLE_INT_BYTES_MAX:
            raise MalformedPickleError(f"an integer of {size_bytes} bytes before byte {self._position}")
        self._push(int.from_bytes(self._take(size_bytes), "little", signed=True))

    def _float(self) -> None:
        self._push(_FLOAT64.unpack(self._take(8))[0])

    def _text(self, size_bytes: int) -> None:
        self._push(_decode(self._take(size_bytes)))

    # Containers

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _tuple_from_mark(self) -> None:
        items = self._pop_to_mark()
        self._push(tuple(items))

    def _append(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, Inert) and not target.has_state:
            # The inert object was made here and its lists are typed for those who read it.
            cast("list[object]", target.appended).extend(items)
        else:
            raise MalformedPickleError(f"elements before byte {self._position} have no list")

    def _set_items(self, items: list[object]) -> None:
        if len(items) % 2:
            raise MalformedPickleError(f"a key before byte {self._position} has no value")
        entries = self._entries_of(self._top())
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            entries[key] = value

    def _entries_of(self, target: object) -> dict[object, object]:
        # After BUILD an object is complete: torch.save adds nothing, and we could not write it back.
        if type(target) is dict or (isinstance(target, OrderedMap) and target.attributes is None):
            return cast("dict[object, object]", target)
        if isinstance(target, Inert) and not target.has_state:
            return cast("dict[object, object]", target.items)
        raise MalformedPickleError(f"entries before byte {self._position} have no dict")

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _add_elements(self) -> None:
        items = self._pop_to_mark()
        target = self._top()
        if type(target) is not set:
            raise MalformedPickleError(f"elements before byte {self._position} have no set")
        for item in items:
            check_key(item)
            target.add(item)

    # Globals and calls

    def _global(self, module: str, name: str) -> None:
        dotted = picklenames.dotted(module, name)
        if dotted is None:
            raise MalformedPickleError(f"what stands before byte {self._position} is not the name of a global")
        self.globals_named[dotted] = None
        self._push(Global(dotted))

    def _global_from_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise MalformedPickleError(f"the name of a global before byte {self._position} is not text")
        if len(module) + len(name) > PICKLE_NAME_BYTES_MAX:
            raise MalformedPickleError(f"the name of a global before byte {self._position} is too long")
        self._global(module, name)

    def _reduce(self) -> None:
        arguments = self._pop_tuple()
        self._push_object(self.calls.call(self._pop_callable(), arguments))

    def _new(self) -> None:
        arguments = self._pop_tuple()
        made = self.calls.call(self._pop_callable(), arguments)
        if not isinstance(made, Inert):
            raise MalformedPickleError(f"an object before byte {self._position} is made in a way it never is")
        made.made_by_new = True
        self._push_object(made)

    def _pop_callable(self) -> str:
        function = self._pop()
        if not isinstance(function, Global):
            raise MalformedPickleError(f"what is called before byte {self._position} is not a global")
        return function.name

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        match target:
            case OrderedMap(attributes=None) if type(state) is dict:
                target.attributes = state
            case Inert(has_state=False):
                target.state, target.has_state = cast(Tree, state), True
            case Unreadable():
                pass  # it is reported for what it is
            case _:
                raise MalformedPickleError(f"a state before byte {self._position} has no object")

    def _persistent(self) -> None:
        self._push_object(self.calls.refer(self._pop()))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as exc:
        raise MalformedPickleError("a text is not UTF-8") from exc


_Handler = Callable[[_Machine], None]

_STOP = ord(".")

# Opcodes of text protocols, extension registries, out-of-band buffers and recursive tuples are absent.
_HANDLERS: Final[dict[int, _Handler]] = {
    ord("("): _Machine._mark,
    ord("N"): lambda machine: machine._push(None),
    0x88: lambda machine: machine._push(True),
    0x89: lambda machine: machine._push(False),
    ord("J"): lambda machine: machine._push(machine._take_struct(_INT32)),
    ord("K"): lambda machine: machine._push(machine._take(1)[0]),
    ord("M"): lambda machine: machine._push(machine._take_struct(_UINT16)),
    0x8A: lambda machine: machine._long(machine._take(1)[0]),
    0x8B: lambda machine: machine._long(machine._take_struct(_INT32)),
    ord("G"): _Machine._float,
    ord("X"): lambda machine: machine._text(machine._take_struct(_UINT32)),
    0x8C: lambda machine: machine._text(machine._take(1)[0]),
    0x8D: lambda machine: machine._text(machine._take_struct(_UINT64)),
    ord("B"): lambda machine: machine._push(machine._take(machine._take_struct(_UINT32))),
    ord("C"): lambda machine: machine._push(machine._take(machine._take(1)[0])),
    0x8E: lambda machine: machine._push(machine._take(machine._take_struct(_UINT64))),
    ord(")"): lambda machine: machine._push(()),
    0x85: lambda machine: machine._tuple(1),
    0x86: lambda machine: machine._tuple(2),
    0x87: lambda machine: machine._tuple(3),
    ord("t"): _Machine._tuple_from_mark,
    ord("]"): lambda machine: machine._push_object([]),
    ord("a"): lambda machine: machine._append([machine._pop()]),
    ord("e"): lambda machine: machine._append(machine._pop_to_mark()),
    ord("}"): lambda machine: machine._push_object({}),
    ord("s"): _Machine._set_item,
    ord("u"): lambda machine: machine._set_items(machine._pop_to_mark()),
    0x8F: lambda machine: machine._push_object(set()),
    0x90: _Machine._add_elements,
    ord("q"): lambda machine: machine._put(machine._take(1)[0]),
    ord("r"): lambda machine: machine._put(machine._take_struct(_UINT32)),
    0x94: lambda machine: machine._put(len(machine._memo)),
    ord("h"): lambda machine: machine._get(machine._take(1)[0]),
    ord("j"): lambda machine: machine._get(machine._take_struct(_UINT32)),
    ord("c"): lambda machine: machine._global(machine._take_line(), machine._take_line()),
    0x93: _Machine._global_from_stack,
    ord("R"): _Machine._reduce,
    0x81: _Machine._new,
    ord("b"): _Machine._build,
    ord("Q"): _Machine._persistent,
    0x95: _Machine._frame,
}
