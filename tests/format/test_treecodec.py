"""Promises of the tree encoding: every tree comes back with its types, its order and its shared memory."""

from typing import cast

import pytest
from hypothesis import given

from layerstore.errors import IntegrityError, InvalidInput
from layerstore.format import Plain, pack, unpack
from layerstore.format.treecodec import decode_tree, encode_tree
from layerstore.limits import PICKLE_DEPTH_MAX, PICKLE_INT_BYTES_MAX
from layerstore.tree import Tree
from tests.zero3.ptfiles import fingerprint
from tests.zero3.trees import trees


def held_to_plain(content: object) -> Plain:
    """Encode contents that are bytes."""
    return cast(bytes, content)


def held_from_plain(value: Plain, what: str) -> object:
    """Decode contents that are bytes."""
    if not isinstance(value, bytes):
        raise IntegrityError(f"{what} is not bytes")
    return value


def there_and_back(tree: Tree) -> Tree:
    """Encode *tree* to bytes and read it again."""
    data = pack(encode_tree(tree, content_to_plain=held_to_plain))
    return decode_tree(unpack(data, what="it"), content_from_plain=held_from_plain, what="it")


@pytest.mark.fault(69)
@given(trees())
def test_every_tree_comes_back(tree: Tree) -> None:
    """Types, order of keys, bits of floats, odd text and shared storages are all as they were."""
    assert fingerprint(tree) == fingerprint(there_and_back(tree))


def test_sets_have_one_encoding() -> None:
    """The order in which a set was filled makes no difference."""
    first: Tree = {"s": set(range(50))}
    second: Tree = {"s": {49 - number for number in range(50)}}

    assert encode_tree(first, content_to_plain=held_to_plain) == encode_tree(second, content_to_plain=held_to_plain)


@pytest.mark.parametrize(
    "value", [pytest.param(object(), id="an object"), 1j, bytearray(b"x"), range(3), frozenset({1})], ids=repr
)
def test_what_is_no_tree_is_refused(value: object) -> None:
    """An object of a type that trees do not have is refused, not guessed at."""
    with pytest.raises(InvalidInput, match="cannot be part of a tree"):
        encode_tree(cast(Tree, [value]), content_to_plain=held_to_plain)


NO_TREES: list[Plain] = [
    None,
    7,
    "text",
    b"bytes",
    {},
    [],
    [[]],
    [[], None, None],
    [[], {"a": 1}],
    [{}, ["l"]],
    ["", ["l"]],
    {"": 1, "d": 2},
    [[{"a": 1, "b": 2, "c": 3, "d": 4}], ["l"]],
    [[], ["?"]],
    [[], [7]],
    [[], [["l"]]],
    [[], ["l", {}]],
    [[], ["d", "key without a value"]],
    [[], ["d", ["l"], "a list as a key"]],
    [[], ["s", ["l"]]],
    [[], ["o"]],
    [[], ["o", ["l"]]],
    [[], ["z", "text"]],
    [[], ["g", 7]],
    [[], ["u", "text"]],
    [[], ["u", b"\xff"]],
    [[], ["I", "seven"]],
    [[], ["i", 7, False, ["t"], None, False, ["l"], ["d"]]],
    [[], ["i", "name", False, ["t"], None, False, ["t"], ["d"]]],
    [[], ["i", "name", False, ["t"], None, False, ["l"], ["l"]]],
    [[], ["T", 0, 0, [1], [1], False, False, None]],
    [[["U8", 1, "cpu", b"x"]], ["T", 1, 0, [1], [1], False, False, None]],
    [[["U8", 1, "cpu", b"x"]], ["T", -1, 0, [1], [1], False, False, None]],
    [[["U8", 1, "cpu", b"x"]], ["T", 0, 0, [1], ["1"], False, False, None]],
    [[["U8", 1, "cpu", b"x"]], ["T", 0, 0, [1], [1, 1], False, False, None]],
    [[["U8", 1, "cpu", b"x"]], ["T", 0, 0, [1], [1], 0, False, None]],
    [[["U8", 1, "cpu", b"x"]], ["T", 0, 0, [1], [1], False, False, ["l"]]],
    [[["U8", 1, "cpu", b"x"]], ["T", 0, 0, [1], [1], False, False]],
    [[[8, 1, "cpu", b"x"]], None],
    [[["U8", True, "cpu", b"x"]], None],
    [[["U8", 1, "cpu", 7]], None],
    [[7], None],
]


@pytest.mark.parametrize("value", NO_TREES, ids=repr)
def test_what_is_not_the_image_of_a_tree_is_damage(value: Plain) -> None:
    """A value with a wrong tag, length, type or position is refused as damage."""
    with pytest.raises(IntegrityError):
        decode_tree(value, content_from_plain=held_from_plain, what="the blob")


@pytest.mark.parametrize(
    "value",
    [
        [[], ["d", "a", 1, "a", 2]],
        [[], ["s", 2, 1]],
        [[], ["s", 1, 1]],
        [[], ["g", "torch.float32", "more"]],
        [[], ["I", "7"]],
        [[], ["I", " 18446744073709551616"]],
        [[], ["u", b"plain text"]],
        [[["U8", 1, "cpu", b"x"]], None],
        [[["U8", 1, "cpu", b"x"], ["U8", 1, "cpu", b"y"]], ["T", 1, 0, [1], [1], False, False, None]],
    ],
    ids=repr,
)
def test_a_second_spelling_of_a_tree_is_damage(value: Plain) -> None:
    """What decodes to a tree but is not what encoding it gives was not written by us."""
    with pytest.raises(IntegrityError, match="canonical form"):
        decode_tree(value, content_from_plain=held_from_plain, what="the blob")


def test_the_largest_integers_come_back() -> None:
    """An integer at the limit that the reader of pickles sets can be recorded, either sign."""
    largest = (1 << (8 * PICKLE_INT_BYTES_MAX - 1)) - 1

    assert [largest, -largest] == there_and_back([largest, -largest])


@pytest.mark.parametrize("depth", [1000, 5000])
def test_a_bomb_of_depth_is_damage(depth: int) -> None:
    """Nesting that no stack holds is an error like any other, not a crash."""
    value: Plain = None
    for _ in range(depth):
        value = ["l", value]

    with pytest.raises(IntegrityError, match="the blob"):
        decode_tree([[], value], content_from_plain=held_from_plain, what="the blob")


def test_the_deepest_tree_comes_back() -> None:
    """Nesting at the limit that the reader of pickles sets can be recorded and read."""
    tree: Tree = None
    for _ in range(PICKLE_DEPTH_MAX):
        tree = {"inner": tree}

    assert tree == there_and_back(tree)
