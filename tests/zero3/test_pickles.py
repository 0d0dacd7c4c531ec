"""Promises of the pickle reader and writer, checked against Python's pickle in both directions."""

import pickle
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from layerstore.dtypes import by_code
from layerstore.errors import InvalidInput, LayerstoreError, SourceCheckpoint
from layerstore.limits import PICKLE_DEPTH_MAX, PICKLE_INT_BYTES_MAX
from layerstore.tree import Global, Inert, Located, Size, Storage, Tensor, Tree
from layerstore.zero3.pt.ptwrite import WrittenPickles, write_pickle
from layerstore.zero3.pt.unpickle import Pickles, read_pickle
from tests.zero3.ptfiles import fingerprint
from tests.zero3.trees import plain_trees, trees

SOMEWHERE = Path("somewhere.pt")


def read_back(tree: Tree) -> Tree:
    """Write *tree*, read it, and give its storages their bytes back."""
    payload, written = write_pickle(tree)
    again, storages = read_pickle(
        payload,
        path=SOMEWHERE,
        records={
            str(key): Located(path=SOMEWHERE, offset_bytes=0, size_bytes=_size_bytes(storage), crc32=0)
            for key, storage in enumerate(written)
        },
        allowed_globals=frozenset({"acme.Thing"}),
    )
    for source, target in zip(written, storages, strict=True):
        target.content = source.content
    return again


def _size_bytes(storage: Storage) -> int:
    return storage.elements * by_code(storage.dtype).bytes


def records(path: Path, storages: Sequence[Storage]) -> dict[str, Located]:
    """Return the records that a file at *path* has of *storages*."""
    return {
        str(key): Located(path=path, offset_bytes=key, size_bytes=_size_bytes(storage), crc32=0)
        for key, storage in enumerate(storages)
    }


@pytest.mark.full
@given(tree=trees())
def test_equal_pickles_are_read_and_written_once(tree: Tree) -> None:
    """What the files of two ranks share is one tree: each has its own storages, and the same bytes are written."""
    payload, written = write_pickle(tree)
    here, there = Path("here.pt"), Path("there.pt")
    pickles, writing = Pickles(frozenset({"acme.Thing"})), WrittenPickles()

    first, ours = pickles.read(payload, path=here, records=records(here, written))
    second, theirs = pickles.read(payload, path=there, records=records(there, written))

    assert [storage.content for storage in theirs] == [*records(there, written).values()]
    assert not {*ours} & {*theirs}
    assert writing.write(first) == (payload, ours)
    assert writing.write(second) == (payload, theirs)
    assert writing.write([second]) == write_pickle([second])
    assert writing.write(tree) == (payload, written)
    for source, one, other in zip(written, ours, theirs, strict=True):
        one.content = other.content = source.content
    assert fingerprint(first) == fingerprint(second) == fingerprint(tree)


def test_an_equal_pickle_of_another_archive_is_held_against_its_own_records() -> None:
    """A file that lacks bytes is damaged, though its pickle is known from another."""
    storage = Storage(dtype="F32", elements=4, device="cpu")
    payload, written = write_pickle(Tensor(storage=storage, offset=0, shape=Size((4,)), stride=(1,)))
    pickles = Pickles()
    pickles.read(payload, path=SOMEWHERE, records=records(SOMEWHERE, written))
    short = {key: replace(located, size_bytes=12) for key, located in records(SOMEWHERE, written).items()}

    for found in (short, {}):
        with pytest.raises(SourceCheckpoint, match="damaged"):
            pickles.read(payload, path=SOMEWHERE, records=found)


def read_plain(payload: bytes) -> Tree:
    """Read a pickle that has no tensors."""
    return read_pickle(payload, path=SOMEWHERE, records={})[0]


def refusal(payload: bytes, **options: Any) -> LayerstoreError:
    """Return the error that *payload* is refused with."""
    with pytest.raises(LayerstoreError) as caught:
        read_pickle(payload, path=SOMEWHERE, records={}, **options)
    return caught.value


@pytest.mark.full
@given(tree=trees())
def test_every_tree_survives_the_round_trip(tree: Tree) -> None:
    """Types, order, float bits, surrogates, sharing of storages all come back, and are written to the same bytes."""
    again = read_back(tree)

    assert fingerprint(tree) == fingerprint(again)
    assert write_pickle(tree)[0] == write_pickle(again)[0]


@given(tree=plain_trees)
def test_python_reads_what_we_write(tree: Tree) -> None:
    """Python's own unpickler makes the same objects of our pickle."""
    assert fingerprint(tree) == fingerprint(pickle.loads(write_pickle(tree)[0]))


@given(tree=plain_trees)
def test_we_read_what_python_writes(tree: Tree) -> None:
    """Python's own pickles of plain objects are read the same in torch's protocol."""
    assert fingerprint(tree) == fingerprint(read_plain(pickle.dumps(tree, protocol=2)))


def test_the_order_of_a_set_does_not_show() -> None:
    """A set has the same bytes in every process, whatever the hash seed."""
    code = (
        "from layerstore.zero3.pt.ptwrite import write_pickle;"
        "print(write_pickle({'a', 'b', 'c', 1, ('d', 2), None})[0].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(outputs) == 1


def test_containers_of_the_standard_library_come_back_live() -> None:
    """OrderedDict with its attributes, and Counter, are live objects again for Python's unpickler."""
    metadata: OrderedDict[str, int] = OrderedDict(b=1, a=2)
    metadata.__dict__["_metadata"] = {"version": 1}
    source = {"module": metadata, "milestones": Counter({30: 1, 80: 1})}

    tree = read_plain(pickle.dumps(source, protocol=2))
    assert isinstance(tree, dict)
    read = pickle.loads(write_pickle(tree)[0])

    assert tree["milestones"] == Inert(name="collections.Counter", arguments=({30: 1, 80: 1},))
    assert source == read
    assert list(read["module"]) == ["b", "a"]
    assert read["module"].__dict__ == {"_metadata": {"version": 1}}


def test_an_enum_pickled_by_name_is_the_same_as_by_value() -> None:
    """Early releases of Python 3.11 pickle an enum by getattr and name; it is read as if by value."""
    by_name = b"\x80\x02c__builtin__\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    by_name += b"X\x07\x00\x00\x00weights\x86R."
    by_value = b"\x80\x02cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x03\x85R."

    assert read_plain(by_value) == read_plain(by_name)


def test_numpy_arrays_stay_inert() -> None:
    """An array, as numpy 1 and 2 spell it, is an inert object that is live again for those who load it."""
    import numpy as np

    source = pickle.dumps({"keys": np.arange(5, dtype=np.uint32), "last": np.float64(0.5)}, protocol=2)

    tree = read_plain(source)
    old = read_plain(source.replace(b"numpy._core", b"numpy.core"))
    read = pickle.loads(write_pickle(tree)[0])

    assert isinstance(tree, dict)
    assert isinstance(old, dict)
    assert isinstance(old["keys"], Inert)
    assert old["keys"].name == "numpy.core.multiarray._reconstruct"
    assert read["keys"].tolist() == [0, 1, 2, 3, 4]
    assert read["last"] == 0.5


class Harmless(dict[str, int]):
    """A class that is on no list; module level, so that pickle finds it."""


def test_an_unknown_global_is_kept_only_by_name() -> None:
    """The very name that the hint proposes turns the refusal into an inert object, live again on loading."""
    source = Harmless(a=1)
    source.__dict__["flag"] = True
    payload = pickle.dumps({"client": source}, protocol=2)
    name = f"{__name__}.Harmless"

    error = refusal(payload)
    tree = read_pickle(payload, path=SOMEWHERE, records={}, allowed_globals=frozenset({name}))[0]
    read = pickle.loads(write_pickle(tree)[0])

    assert isinstance(error, SourceCheckpoint)
    assert error.hint is not None
    assert f"--allow-global {name}" in error.hint
    assert f"{name} (at client)" in str(error)
    assert isinstance(tree, dict)
    assert isinstance(tree["client"], Inert)
    assert tree["client"].items == {"a": 1}
    assert read == {"client": source}
    assert read["client"].flag is True


def test_allowing_a_name_allows_no_other() -> None:
    """Every name needs its own permission; a prefix, or the module alone, permits nothing."""
    payload = b"\x80\x02](cacme.hooks\nOne\ncacme.hooks\nTwo\ne."

    error = refusal(payload, allowed_globals=frozenset({"acme.hooks.One", "acme", "acme.hooks"}))

    assert error.facts["names"] == ("acme.hooks.Two",)


def test_permission_does_not_reopen_the_closed_list() -> None:
    """Allowing a name whose call is checked anyway does not switch those checks off."""
    payload = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x02\x00\x00\x00uu\x86R."

    assert "arguments that torch.save does not" in str(refusal(payload, allowed_globals=frozenset({"_codecs.encode"})))


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(object(), id="object"),
        pytest.param({"a": [1, 2j]}, id="complex"),
        pytest.param(2 ** (8 * PICKLE_INT_BYTES_MAX), id="huge integer"),
        pytest.param(Global("not a name"), id="crooked name"),
        pytest.param(Global("noname"), id="name without module"),
        pytest.param([Storage(dtype="F32", elements=1, device="cpu")], id="storage"),
        pytest.param(
            Tensor(
                storage=Storage(dtype="F32", elements=3, device="cpu"),
                offset=1,
                shape=Size((3,)),
                stride=(1,),
            ),
            id="view beyond its storage",
        ),
    ],
)
def test_what_cannot_be_read_is_not_written(tree: Tree) -> None:
    """The writer refuses what its reader would refuse, and names the key path."""
    with pytest.raises(InvalidInput, match=r"at client\.history\[1\]|reaches beyond|holds an integer"):
        write_pickle({"client": {"history": [0, tree]}})


def test_a_tree_within_the_depth_is_written_and_read() -> None:
    """The deepest tree that is allowed passes both ways; one level more is refused by name."""
    tree: Tree = 0
    for _ in range(PICKLE_DEPTH_MAX):
        tree = [tree]

    assert tree == read_back(tree)
    with pytest.raises(InvalidInput, match="nested more than"):
        write_pickle([tree])


def test_a_tree_that_contains_itself_is_not_written() -> None:
    """A list inside itself is found before the writer walks into it."""
    tree: list[Tree] = []
    tree.append({"again": tree})

    with pytest.raises(InvalidInput, match="contains itself"):
        write_pickle(tree)


def _tensor_payload(*, key: str = "0", numel: int = 4, view: tuple[object, ...] = (0, (2, 2), (2, 1))) -> bytes:
    """Return the pickle of one float32 tensor, with what a hand could change in it."""
    storage = Storage(dtype="F32", elements=4, device="cpu")
    payload = write_pickle(Tensor(storage=storage, offset=0, shape=Size((2, 2)), stride=(2, 1)))[0]
    payload = payload.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00" + key.encode())
    arguments = pickle.dumps(view, protocol=2)[2:-1]  # a tuple of three: its parts are wanted on their own
    assert arguments.endswith(b"\x87q" + arguments[-1:])
    replaced = payload.replace(
        b"K\x04tQK\x00K\x02K\x02\x86K\x02K\x01\x86", b"K" + bytes([numel]) + b"tQ" + arguments[:-3]
    )
    assert replaced.count(b"tQ") == 1
    return replaced


def _read_tensor(payload: bytes, *, size_bytes: int = 16) -> Tree:
    record = Located(path=SOMEWHERE, offset_bytes=0, size_bytes=size_bytes, crc32=0)
    return read_pickle(payload, path=SOMEWHERE, records={"0": record})[0]


@pytest.mark.parametrize(
    ("payload", "size_bytes", "what"),
    [
        pytest.param(_tensor_payload(key="7"), 16, "data/7 is missing", id="unknown record"),
        pytest.param(_tensor_payload(), 15, "holds 15 bytes instead of 4 elements", id="short record"),
        pytest.param(_tensor_payload(numel=5), 16, "instead of 5 elements", id="other length"),
        pytest.param(_tensor_payload(view=(1, (2, 2), (2, 1))), 16, "needs 5 elements", id="offset"),
        pytest.param(_tensor_payload(view=(-1, (2, 2), (2, 1))), 16, "malformed", id="negative offset"),
        pytest.param(_tensor_payload(view=(0, (2, 2), (2,))), 16, "malformed", id="other rank"),
        pytest.param(_tensor_payload(view=(0, (2, True), (2, 1))), 16, "malformed", id="bool shape"),
        pytest.param(_tensor_payload(view=(2**63, (2, 2), (2, 1))), 16, "malformed", id="huge offset"),
    ],
)
def test_a_tensor_outside_its_storage_is_damage(payload: bytes, size_bytes: int, what: str) -> None:
    """Offset, extent, storage length and record must fit each other, or the file is damaged."""
    assert isinstance(_read_tensor(_tensor_payload()), Tensor)

    with pytest.raises(SourceCheckpoint, match=what) as caught:
        _read_tensor(payload, size_bytes=size_bytes)

    assert caught.value.facts["reason"] == "damaged"
