"""Pickles that want more than to describe a tree, each with what it tries."""

import struct
from collections.abc import Callable
from pathlib import Path


def text(value: str) -> bytes:
    """Return the opcode that pushes *value*."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def shell(canary: Path) -> bytes:
    """Return the opcodes that push the arguments of a shell command which makes the canary."""
    return text(f"touch {canary}") + b"\x85"


def _pickle(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def system_call(canary: Path) -> bytes:
    """Run a command with os.system."""
    return _pickle(b"cos\nsystem\n" + shell(canary) + b"R")


def fetched_attribute(canary: Path) -> bytes:
    """Reach os.system with getattr on an imported module: a reduce inside a reduce."""
    imported = b"c__builtin__\n__import__\n" + text("os") + b"\x85R"
    return _pickle(b"c__builtin__\ngetattr\n" + imported + text("system") + b"\x86R" + shell(canary) + b"R")


def fetched_from_allowed_class(canary: Path) -> bytes:
    """Climb from an allowed enum to its module's globals with getattr."""
    function = b"c__builtin__\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    return _pickle(function + text("__init__") + b"\x86R" + shell(canary) + b"R")


def hidden_in_state(canary: Path) -> bytes:
    """Hide os.system in the state of an allowed class."""
    made = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81"
    return _pickle(made + b"}" + text("x") + b"cos\nsystem\n" + shell(canary) + b"Rsb")


def hidden_storage_class(canary: Path) -> bytes:
    """Name a class of its own as the type of a storage."""
    storage = b"(" + text("storage") + b"cevil\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    return _pickle(b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00))\x89ccollections\nOrderedDict\n)RtR")


def storage_outside(canary: Path) -> bytes:
    """Name a storage record outside the archive's folder."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("../../0") + text("cpu") + b"K\x01tQ"
    return _pickle(
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )


def repeated_parts(canary: Path) -> bytes:
    """Expand to 10**30 elements: thirty lists, each of ten times the one before."""
    body = b"(]q\x00"
    for level in range(30):
        body += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return _pickle(body + b"t")


def deep_key(canary: Path) -> bytes:
    """Exhaust the C stack by hashing a deeply nested tuple."""
    return _pickle(b"})" + b"\x85" * 300_000 + b"Ns")


def too_many_opcodes(canary: Path) -> bytes:
    """Fill memory with empty lists, an object of 56 bytes for each byte."""
    return _pickle(b"(" + b"]" * 5_000_000 + b"t")


def too_many_tuples(canary: Path) -> bytes:
    """Fill memory with tuples, an object of 64 bytes for each byte."""
    return _pickle(b"()" + b"\x85" * 20_000_000 + b"t")


def too_many_objects(canary: Path) -> bytes:
    """Fill memory with inert objects, of which each carries a list and a dict."""
    return _pickle(b"(ctorch\ndevice\nq\x00" + b"h\x00)R" * 1_500_000 + b"t")


SLOW_PICKLES = {too_many_opcodes, too_many_tuples, too_many_objects}
"""They reach a limit by the million."""

HOSTILE_PICKLES: dict[str, Callable[[Path], bytes]] = {
    "Run a command with os.system": system_call,
    "Run a command by making a subprocess.Popen with NEWOBJ": lambda canary: _pickle(
        b"csubprocess\nPopen\n" + shell(canary) + b"\x81"
    ),
    "Evaluate an expression with the builtin eval, under its name in Python 2": lambda canary: _pickle(
        b"c__builtin__\neval\n" + text(f"open({str(canary)!r}, 'w')") + b"\x85R"
    ),
    "Reach os.system with getattr on an imported module: a reduce inside a reduce": fetched_attribute,
    "Climb from an allowed enum to its module's globals with getattr": fetched_from_allowed_class,
    "Call the result of a harmless call": lambda canary: _pickle(
        b"ccollections\nOrderedDict\n)R" + shell(canary) + b"R"
    ),
    "Hide os.system among the arguments of an allowed call of numpy": lambda canary: _pickle(
        b"cnumpy._core.multiarray\n_reconstruct\n(cos\nsystem\nK\x00\x85" + shell(canary) + b"tR"
    ),
    "Hide os.system in the state of an allowed class": hidden_in_state,
    "Run a command and pop its result, so that the tree shows nothing": lambda canary: _pickle(
        b"cos\nsystem\n" + shell(canary) + b"R0N"
    ),
    "Use the result of a command as the key of a dict": lambda canary: _pickle(
        b"}cos\nsystem\n" + shell(canary) + b"RNs"
    ),
    "Name a class of its own as the type of a tensor with attributes": lambda canary: _pickle(
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\ncevil\nTensor\n)}tR"
    ),
    "Name a class of its own as the type of a storage": hidden_storage_class,
    "Overwrite attributes of a class itself with BUILD": lambda canary: _pickle(
        b"ctorch\nTensor\n}" + text("__setstate__") + b"cos\nsystem\nsb"
    ),
    "Give one object two states": lambda canary: _pickle(b"ctorch\ndevice\n)R}b}b"),
    "Leave a rebuild function in the tree as a value": lambda canary: _pickle(b"]ctorch._utils\n_rebuild_tensor_v2\na"),
    "Call by INST, an opcode of protocol 0": lambda canary: _pickle(b"(" + text(f"touch {canary}") + b"ios\nsystem\n"),
    "Call what is registered under an extension code": lambda canary: _pickle(b"\x82\x01)R"),
    "Use the persistent id by which old torch loaded the source code of a module": lambda canary: _pickle(
        b"(" + text("module") + b"cos\nsystem\n" + text("os.py") + text("") + b"tQ"
    ),
    "Name a storage record outside the archive's folder": storage_outside,
    "Have bytes made by another codec": lambda canary: _pickle(
        b"c_codecs\nencode\n" + text("x") + text("uu") + b"\x86R"
    ),
    "Name a global of a million characters": lambda canary: _pickle(b"c" + b"a" * 1_000_000 + b"\nb\n)R"),
    "Expand to 10**30 elements: thirty lists, each of ten times the one before": repeated_parts,
    "Expand to gigabytes: one megabyte of text, named ten thousand times": lambda canary: _pickle(
        b"](" + text("x" * 1_000_000) + b"q\x00" + b"h\x00" * 10_000 + b"e"
    ),
    "Exhaust the stack with nested lists": lambda canary: _pickle(b"]" * 100_000 + b"a" * 99_999),
    "Exhaust memory with open marks": lambda canary: _pickle(b"(" * 1_900_000),
    "Exhaust the C stack with nested tuples, which need no marks": lambda canary: _pickle(b")" + b"\x85" * 300_000),
    "Exhaust the C stack by hashing a deeply nested tuple": deep_key,
    "Put a list into itself": lambda canary: _pickle(b"]q\x00h\x00a"),
    "Put a dict into its own attributes": lambda canary: _pickle(
        b"ccollections\nOrderedDict\n)Rq\x00}" + text("_metadata") + b"h\x00sb"
    ),
    "Use a list as a key": lambda canary: _pickle(b"}]Ns"),
    "Announce an integer of two gigabytes": lambda canary: _pickle(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "Hold an integer whose decimal form takes minutes": lambda canary: _pickle(
        b"\x8b" + struct.pack("<i", 10_000_000) + b"\x7f" * 10_000_000
    ),
    "Fill memory with empty lists, an object of 56 bytes for each byte": too_many_opcodes,
    "Fill memory with tuples, an object of 64 bytes for each byte": too_many_tuples,
    "Fill memory with inert objects, of which each carries a list and a dict": too_many_objects,
    "Be larger than any description of a model": lambda canary: _pickle(text("x" * 70_000_000)),
    "Recall what was never memorised": lambda canary: _pickle(b"h\x07"),
    "Close a mark that was never opened": lambda canary: _pickle(b"t"),
    "Carry a second pickle behind the first, for readers that go on": lambda canary: (
        _pickle(b"N") + system_call(canary)
    ),
    "End without STOP": lambda canary: b"\x80\x02N",
    "Be a pickle of protocol 4, whose STACK_GLOBAL takes any text for a name": lambda canary: (
        b"\x80\x04" + text("torch") + text("os.system") + b"\x93" + shell(canary) + b"R."
    ),
    "Be a pickle of protocol 0": lambda canary: b"cos\nsystem\n(Vtouch " + str(canary).encode() + b"\ntR.",
    "Hold a text that is not UTF-8": lambda canary: _pickle(b"X" + struct.pack("<I", 2) + b"\xff\xff"),
}
"""Each takes the path of a canary file, which the pickle's code would make."""
