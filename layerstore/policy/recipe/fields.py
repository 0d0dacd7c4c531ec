"""Typed looks at nodes: each says what it expected, what it found, and where."""

import re
from collections.abc import Collection

from layerstore.nearest import did_you_mean, nearest
from layerstore.policy.recipe.document import ListNode, MapNode, Node, Scalar

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_OCTAL = re.compile(r"-?0[0-9_]+")


def as_map(node: Node, *, what: str, keys: Collection[str]) -> MapNode:
    """Return *node*, a mapping with no other keys than *keys*."""
    if not isinstance(node, MapNode):
        raise _unlike(node, what=what, expected=f"a mapping with {', '.join(keys)}")
    for key, _ in node.entries:
        if key.text not in keys:
            raise key.spot.error(f"{what} has no key {key.text!r}", hint=_keys_hint(key.text, keys))
    return node


def _keys_hint(key: str, keys: Collection[str]) -> str:
    meant = nearest(key, keys)
    return did_you_mean(meant, else_="" if meant else f"keys here: {', '.join(keys)}")


def as_list(node: Node, *, what: str) -> ListNode:
    """Return *node*, a list."""
    if not isinstance(node, ListNode):
        raise _unlike(node, what=what, expected="a list")
    return node


def as_scalar(node: Node, *, what: str) -> Scalar:
    """Return *node*, a single value that is there."""
    if not isinstance(node, Scalar) or node.is_null or not node.text.strip():
        raise _unlike(node, what=what, expected="a single value")
    return node


def as_integer(node: Node, *, what: str) -> int:
    """Return the whole number that *node* is, however YAML might read it otherwise."""
    value = as_scalar(node, what=what)
    if _OCTAL.fullmatch(value.text):
        raise value.spot.error(f"{what} is {value.text!r}, which YAML may read as octal", hint="drop the leading zeros")
    if not _INTEGER.fullmatch(value.text):
        raise value.spot.error(
            f"{what} is {value.text!r}, not a whole number of at most 18 digits", hint="write it in digits: 1100"
        )
    return int(value.text)


def required(node: MapNode, key: str, *, what: str) -> Node:
    """Return the value of *key*, which must be there."""
    found = node.get(key)
    if found is None:
        raise node.key_spot(key).error(f"{what} needs a value for {key!r}", hint=f"add {key}:")
    return found


def _unlike(node: Node, *, what: str, expected: str) -> Exception:
    found = {ListNode: "a list", MapNode: "a mapping"}.get(type(node), "")
    if isinstance(node, Scalar):
        found = repr(node.text) if node.text.strip() and not node.is_null else "empty"
    return node.spot.error(f"{what} is {found}, not {expected}", hint="the guide to recipes has an example of each")
