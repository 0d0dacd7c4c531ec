"""Pickles that want more than to describe a tree. Each generator's first line says what it tries."""

import struct
from collections.abc import Callable
from pathlib import Path

HOSTILE_PICKLES: list[Callable[[Path], bytes]] = []
"""Each takes the path of a canary file, which comes to life when the pickle's code runs."""


def _hostile(make: Callable[[Path], bytes]) -> Callable[[Path], bytes]:
    HOSTILE_PICKLES.append(make)
    return make


def text(value: str) -> bytes:
    """Return the opcode that pushes *value*."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def shell(canary: Path) -> bytes:
    """Return the opcodes that push the arguments of a shell command which makes the canary."""
    return text(f"touch {canary}") + b"\x85"


def _pickle(body: bytes, *, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


@_hostile
def system_call(canary: Path) -> bytes:
    """Run a command with os.system."""
    return _pickle(b"cos\nsystem\n" + shell(canary) + b"R")


@_hostile
def posix_system_call(canary: Path) -> bytes:
    """Run a command with posix.system, where os.system really lives."""
    return _pickle(b"cposix\nsystem\n" + shell(canary) + b"R")


@_hostile
def subprocess_call(canary: Path) -> bytes:
    """Run a command by making a subprocess.Popen with NEWOBJ."""
    return _pickle(b"csubprocess\nPopen\n" + shell(canary) + b"\x81")


@_hostile
def evaluated_code(canary: Path) -> bytes:
    """Evaluate an expression with the builtin eval, under its name in Python 2."""
    return _pickle(b"c__builtin__\neval\n" + text(f"open({str(canary)!r}, 'w')") + b"\x85R")


@_hostile
def stack_global_call(canary: Path) -> bytes:
    """Name os.system by STACK_GLOBAL, which protocol 4 has beside GLOBAL."""
    return _pickle(text("os") + text("system") + b"\x93" + shell(canary) + b"R", protocol=4)


@_hostile
def dotted_attribute(canary: Path) -> bytes:
    """Reach os.system as an attribute of an allowed module, by a dotted name."""
    return _pickle(text("torch") + text("os.system") + b"\x93" + shell(canary) + b"R", protocol=4)


@_hostile
def fetched_attribute(canary: Path) -> bytes:
    """Reach os.system with getattr on an imported module: a reduce inside a reduce."""
    imported = b"c__builtin__\n__import__\n" + text("os") + b"\x85R"
    return _pickle(b"c__builtin__\ngetattr\n" + imported + text("system") + b"\x86R" + shell(canary) + b"R")


@_hostile
def fetched_from_allowed_class(canary: Path) -> bytes:
    """Climb from an allowed enum to its module's globals with getattr."""
    function = b"c__builtin__\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    return _pickle(function + text("__init__") + b"\x86R" + shell(canary) + b"R")


@_hostile
def called_result(canary: Path) -> bytes:
    """Call the result of a harmless call."""
    return _pickle(b"ccollections\nOrderedDict\n)R" + shell(canary) + b"R")


@_hostile
def hidden_in_arguments(canary: Path) -> bytes:
    """Hide os.system among the arguments of an allowed call of numpy."""
    return _pickle(b"cnumpy._core.multiarray\n_reconstruct\n(cos\nsystem\nK\x00\x85" + shell(canary) + b"tR")


@_hostile
def hidden_in_state(canary: Path) -> bytes:
    """Hide os.system in the state of an allowed class."""
    made = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81"
    return _pickle(made + b"}" + text("x") + b"cos\nsystem\n" + shell(canary) + b"Rsb")


@_hostile
def hidden_by_pop(canary: Path) -> bytes:
    """Run a command and pop its result, so that the tree shows nothing."""
    return _pickle(b"cos\nsystem\n" + shell(canary) + b"R0N")


@_hostile
def hidden_as_key(canary: Path) -> bytes:
    """Use the result of a command as the key of a dict."""
    return _pickle(b"}cos\nsystem\n" + shell(canary) + b"RNs")


@_hostile
def hidden_tensor_class(canary: Path) -> bytes:
    """Name a class of its own as the type of a tensor with attributes."""
    return _pickle(b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\ncevil\nTensor\n)}tR")


@_hostile
def hidden_storage_class(canary: Path) -> bytes:
    """Name a class of its own as the type of a storage."""
    storage = b"(" + text("storage") + b"cevil\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    return _pickle(b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00))\x89ccollections\nOrderedDict\n)RtR")


@_hostile
def build_on_class(canary: Path) -> bytes:
    """Overwrite attributes of a class itself with BUILD."""
    return _pickle(b"ctorch\nTensor\n}" + text("__setstate__") + b"cos\nsystem\nsb")


@_hostile
def build_on_known_class(canary: Path) -> bytes:
    """Overwrite attributes of an allowed class with harmless values."""
    return _pickle(b"ccollections\nOrderedDict\n}" + text("a") + b"K\x01sb")


@_hostile
def build_on_dict(canary: Path) -> bytes:
    """Give a plain dict a state."""
    return _pickle(b"}}b")


@_hostile
def build_twice(canary: Path) -> bytes:
    """Give one object two states."""
    return _pickle(b"ctorch\ndevice\n)R}b}b")


@_hostile
def new_tensor(canary: Path) -> bytes:
    """Make a tensor with NEWOBJ instead of through its rebuild function."""
    return _pickle(b"ctorch\nTensor\n)\x81")


@_hostile
def new_ordered_dict(canary: Path) -> bytes:
    """Make an OrderedDict with NEWOBJ, which torch.save never does."""
    return _pickle(b"ccollections\nOrderedDict\n)\x81")


@_hostile
def bare_function(canary: Path) -> bytes:
    """Leave a rebuild function in the tree as a value."""
    return _pickle(b"]ctorch._utils\n_rebuild_tensor_v2\na")


@_hostile
def instance_opcode(canary: Path) -> bytes:
    """Call by INST, an opcode of protocol 0."""
    return _pickle(b"(" + text(f"touch {canary}") + b"ios\nsystem\n")


@_hostile
def object_opcode(canary: Path) -> bytes:
    """Call by OBJ, an opcode of protocol 1."""
    return _pickle(b"(cos\nsystem\n" + text(f"touch {canary}") + b"o")


@_hostile
def extension_opcode(canary: Path) -> bytes:
    """Call what is registered under an extension code."""
    return _pickle(b"\x82\x01)R")


@_hostile
def new_with_keywords(canary: Path) -> bytes:
    """Make an object with NEWOBJ_EX."""
    return _pickle(b"ctorch\ndevice\n)}\x92", protocol=4)


@_hostile
def text_persistent_id(canary: Path) -> bytes:
    """Use the persistent id of protocol 0."""
    return _pickle(b"P../../etc/passwd\n")


@_hostile
def module_persistent_id(canary: Path) -> bytes:
    """Use the persistent id by which old torch loaded the source code of a module."""
    return _pickle(b"(" + text("module") + b"cos\nsystem\n" + text("os.py") + text("") + b"tQ")


@_hostile
def storage_outside(canary: Path) -> bytes:
    """Name a storage record outside the archive's folder."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("../../0") + text("cpu") + b"K\x01tQ"
    return _pickle(
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )


@_hostile
def other_codec(canary: Path) -> bytes:
    """Have bytes made by another codec."""
    return _pickle(b"c_codecs\nencode\n" + text("x") + text("uu") + b"\x86R")


@_hostile
def crooked_name(canary: Path) -> bytes:
    """Name a global whose module is not a name."""
    return _pickle(b"cos; import evil\nsystem\n)R")


@_hostile
def endless_name(canary: Path) -> bytes:
    """Name a global of a million characters."""
    return _pickle(b"c" + b"a" * 1_000_000 + b"\nb\n)R")


@_hostile
def repeated_parts(canary: Path) -> bytes:
    """Expand to 10**30 elements: thirty lists, each of ten times the one before."""
    body = b"(]q\x00"
    for level in range(30):
        body += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return _pickle(body + b"t")


@_hostile
def repeated_text(canary: Path) -> bytes:
    """Expand to gigabytes: one megabyte of text, named ten thousand times."""
    return _pickle(b"](" + text("x" * 1_000_000) + b"q\x00" + b"h\x00" * 10_000 + b"e")


@_hostile
def deep_lists(canary: Path) -> bytes:
    """Exhaust the stack with nested lists."""
    return _pickle(b"]" * 100_000 + b"a" * 99_999)


@_hostile
def deep_marks(canary: Path) -> bytes:
    """Exhaust memory with open marks."""
    return _pickle(b"(" * 1_900_000)


@_hostile
def deep_tuples(canary: Path) -> bytes:
    """Exhaust the C stack with nested tuples, which need no marks."""
    return _pickle(b")" + b"\x85" * 300_000)


@_hostile
def deep_key(canary: Path) -> bytes:
    """Exhaust the C stack by hashing a deeply nested tuple."""
    return _pickle(b"})" + b"\x85" * 300_000 + b"Ns")


@_hostile
def deep_set_element(canary: Path) -> bytes:
    """Exhaust the C stack by hashing a set's element."""
    return _pickle(b"\x8f()" + b"\x85" * 300_000 + b"\x90", protocol=4)


@_hostile
def list_in_itself(canary: Path) -> bytes:
    """Put a list into itself."""
    return _pickle(b"]q\x00h\x00a")


@_hostile
def dict_in_itself(canary: Path) -> bytes:
    """Put a dict into its own attributes."""
    return _pickle(b"ccollections\nOrderedDict\n)Rq\x00}" + text("_metadata") + b"h\x00sb")


@_hostile
def list_as_key(canary: Path) -> bytes:
    """Use a list as a key."""
    return _pickle(b"}]Ns")


@_hostile
def announced_integer(canary: Path) -> bytes:
    """Announce an integer of two gigabytes."""
    return _pickle(b"\x8b" + struct.pack("<i", 2**31 - 1))


@_hostile
def negative_integer_size(canary: Path) -> bytes:
    """Announce an integer of a negative size."""
    return _pickle(b"\x8b" + struct.pack("<i", -1))


@_hostile
def large_integer(canary: Path) -> bytes:
    """Hold an integer whose decimal form takes minutes."""
    return _pickle(b"\x8b" + struct.pack("<i", 10_000_000) + b"\x7f" * 10_000_000)


@_hostile
def announced_text(canary: Path) -> bytes:
    """Announce a text of an exabyte."""
    return _pickle(b"\x8d" + struct.pack("<Q", 2**60), protocol=4)


@_hostile
def too_many_opcodes(canary: Path) -> bytes:
    """Fill memory with empty sets, an object of 200 bytes for each byte."""
    return _pickle(b"(" + b"\x8f" * 5_000_000 + b"t", protocol=4)


@_hostile
def too_many_tuples(canary: Path) -> bytes:
    """Fill memory with tuples, an object of 64 bytes for each byte."""
    return _pickle(b"()" + b"\x85" * 20_000_000 + b"t")


@_hostile
def too_many_objects(canary: Path) -> bytes:
    """Fill memory with inert objects, of which each carries a list and a dict."""
    return _pickle(b"(ctorch\ndevice\nq\x00" + b"h\x00)R" * 1_500_000 + b"t")


@_hostile
def huge_payload(canary: Path) -> bytes:
    """Be larger than any description of a model."""
    return _pickle(b"B" + struct.pack("<I", 70_000_000) + bytes(70_000_000), protocol=3)


@_hostile
def unknown_memo(canary: Path) -> bytes:
    """Recall what was never memorised."""
    return _pickle(b"h\x07")


@_hostile
def empty_stack(canary: Path) -> bytes:
    """Reduce an empty stack."""
    return _pickle(b"R")


@_hostile
def no_open_mark(canary: Path) -> bytes:
    """Close a mark that was never opened."""
    return _pickle(b"t")


@_hostile
def two_results(canary: Path) -> bytes:
    """Leave two objects behind."""
    return _pickle(b"NN")


@_hostile
def key_without_value(canary: Path) -> bytes:
    """Set entries of an odd number of parts."""
    return _pickle(b"}(NNNu")


@_hostile
def entries_of_tuple(canary: Path) -> bytes:
    """Set entries of a tuple."""
    return _pickle(b")NNs")


@_hostile
def appended_to_dict(canary: Path) -> bytes:
    """Append to a dict."""
    return _pickle(b"}Na")


@_hostile
def second_pickle(canary: Path) -> bytes:
    """Carry a second pickle behind the first, for readers that go on."""
    return _pickle(b"N") + system_call(canary)


@_hostile
def without_end(canary: Path) -> bytes:
    """End without STOP."""
    return b"\x80\x02N"


@_hostile
def protocol_zero(canary: Path) -> bytes:
    """Be a pickle of protocol 0."""
    return b"cos\nsystem\n(Vtouch " + str(canary).encode() + b"\ntR."


@_hostile
def unknown_protocol(canary: Path) -> bytes:
    """Be a pickle of a protocol that does not exist."""
    return _pickle(b"N", protocol=6)


@_hostile
def empty_payload(canary: Path) -> bytes:
    """Be nothing at all."""
    return b""


@_hostile
def crooked_text(canary: Path) -> bytes:
    """Hold a text that is not UTF-8."""
    return _pickle(b"X" + struct.pack("<I", 2) + b"\xff\xff")
