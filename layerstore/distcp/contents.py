"""
What a distributed state holds: parameters of the model, moments of the optimizer, and values.

DCP knows only keys and tensors; everything else is inferred from names and shapes. An optimizer's tensors are below
``state.`` and named after parameters; those with the same shape as their parameter are moments. Any unrecognized tensor
is kept as a parameter under its whole key, so that a wrong guess affects only the names of layers.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from layerstore.distcp.metadata import Entry
from layerstore.handover import DcpState, Held, SavedTensor, SavedValue
from layerstore.layers import unwrapped
from layerstore.model import Kind, Parameter
from layerstore.tree import Tree
from layerstore.zero3.trees import STEP

_USUAL = ("model.", "")
"""The prefixes of a model's names that are preferred if several fit."""

_OF_OPTIMIZER = re.compile(r"(?:^|\.)state\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All entries of a state, classified."""

    tensors: Mapping[str, Held]
    """The tensors that layers hold, by key."""
    parameters: Mapping[str, Parameter]
    """By name, in the model's order."""
    values: tuple[str, ...]
    """The keys of everything else: single numbers, and values that are not tensors."""
    counters: Mapping[str, str]
    """The key of the optimizer's update count, by parameter."""
    outside: frozenset[str]
    """The names of parameters that do not belong to the model but were in the state too."""

    @classmethod
    def of(
        cls,
        entries: Mapping[str, Entry],
        *,
        aliases: Mapping[str, str] | None = None,
        trained: Collection[str] = (),
        of_optimizer: Collection[str] | None = None,
    ) -> "Contents":
        """
        Classify *entries*, which are in the model's order.

        Callers that know more pass *aliases*, the keys of tied tensors; *trained*, the keys of trained parameters, even
        those without moments; and *of_optimizer*, the keys of the optimizer's tensors.
        """
        aliases = _aliases(entries) if aliases is None else aliases
        own = {key: entry for key, entry in entries.items() if key not in aliases}
        optimizer = _Moments.among(own, of_optimizer)
        prefix = optimizer.prefix if optimizer.moments else _model_prefix(own)
        names: dict[str, str] = {}  # by key
        taken: set[str] = set()
        for key, entry in own.items():
            is_of_model = key.startswith(prefix)
            # A single number is a step or a rate, unless it is surely a parameter.
            if entry.dtype is not None and key not in optimizer.owned and (entry.shape or (prefix and is_of_model)):
                name = unwrapped(key.removeprefix(prefix)) if is_of_model else key
                # Without prefix and wrappers, two keys may have the same name.
                while name in taken:
                    name = key if name != key and key not in taken else f"{name}_"
                names[key] = name
                taken.add(name)
        tied: dict[str, list[str]] = {}
        for key, first in aliases.items():
            name = unwrapped(key.removeprefix(prefix))
            if first in names and key.startswith(prefix) and name != names[first] and name not in taken:
                tied.setdefault(first, []).append(name)
        trained = {*trained, *(parameter for parameter, _ in optimizer.moments.values())}
        tensors = {
            key: Held(kind=Kind.MASTER if key in trained else Kind.WEIGHTS, name=name) for key, name in names.items()
        } | {
            key: Held(kind=Kind.OPTIMIZER, name=names[parameter], state=state)
            for key, (parameter, state) in optimizer.moments.items()
        }
        tensors |= {key: tensors[first] for key, first in aliases.items() if first in tensors}
        return cls(
            tensors=tensors,
            parameters={
                name: _parameter(name, own[key], is_frozen=key not in trained, aliases=tied.get(key, []))
                for key, name in names.items()
            },
            values=tuple(key for key in entries if key not in tensors),
            counters={names[parameter]: key for parameter, key in optimizer.counters.items() if parameter in trained},
            outside=frozenset(name for key, name in names.items() if not key.startswith(prefix)),
        )

    def state(self, entries: Mapping[str, Entry], values: Mapping[str, Tree]) -> DcpState:
        """Return the part of *entries* that a commit keeps outside its layers; *values* are by key."""
        return DcpState(
            tensors={key: SavedTensor(path=entries[key].path, held=held) for key, held in self.tensors.items()},
            values={key: SavedValue(path=entries[key].path, tree=tree) for key, tree in values.items()},
            counters=self.counters,
            outside=self.outside,
        )


def _aliases(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the keys of tensors that share another tensor's bytes, each with the other tensor's key."""
    first: dict[tuple[str, int], str] = {}
    aliases: dict[str, str] = {}
    # If several keys share bytes, prefer the key that is the tensor's path in the state.
    for key, entry in sorted(entries.items(), key=lambda item: ".".join(map(str, item[1].path)) != item[0]):
        if entry.dtype is not None and entry.chunks:
            place = entry.chunks[0].file, entry.chunks[0].offset_bytes
            if first.setdefault(place, key) != key:
                aliases[key] = first[place]
    return aliases


def _parameter(name: str, entry: Entry, *, is_frozen: bool, aliases: Iterable[str]) -> Parameter:
    assert entry.dtype is not None
    tied = tuple(sorted({*aliases}))
    return Parameter(name=name, dtype=entry.dtype, shape=entry.shape, frozen=is_frozen, aliases=tied)


@dataclass(frozen=True, slots=True)
class _Moments:
    """What optimizers keep for the parameters of one model."""

    prefix: str
    """The prefix of the names of the model's parameters."""
    moments: Mapping[str, tuple[str, str]]
    """The key of the parameter and the name of the state, by the moment's key."""
    counters: Mapping[str, str]
    """The key of the update count, by the parameter's key."""
    owned: Collection[str]
    """The keys of moments, and of single numbers next to them."""

    @classmethod
    def among(cls, entries: Mapping[str, Entry], of_optimizer: Collection[str] | None) -> "_Moments":
        tensors = {key: entry for key, entry in entries.items() if entry.dtype is not None}
        candidates = tensors if of_optimizer is None else [key for key in tensors if key in of_optimizer]
        states = {key: split for key in candidates for split in splits(key)}
        prefix = _prefix_of({name for name, _ in states.values()}, tensors.keys() - states.keys())
        moments: dict[str, tuple[str, str]] = {}
        counters, owned, assigned = dict[str, str](), set[str](), set[tuple[str, str]]()
        for key, (name, state) in states.items():
            parameter = tensors.get(prefix + name)
            if parameter is None or parameter.key in states:
                continue
            if state == STEP or not tensors[key].shape:
                owned.add(key)
                if state == STEP:
                    counters[parameter.key] = key
            elif tensors[key].shape == parameter.shape and (parameter.key, state) not in assigned:
                owned.add(key)
                assigned.add((parameter.key, state))
                moments[key] = parameter.key, state
        return cls(prefix, moments, counters, owned)


def splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield the parameter and the state in *key*, if it is a key of an optimizer's state."""
    match = _OF_OPTIMIZER.search(key)
    name, dot, state = key[match.end() :].rpartition(".") if match else ("", "", "")
    if dot:
        yield name, state


def _prefix_of(names: Collection[str], keys: Collection[str]) -> str:
    """Return the prefix that most of *names* have among *keys*."""
    counts: dict[str, int] = {}
    known = set(names)
    for key in keys:
        for prefix, name in _tails(key):
            if name in known:
                counts[prefix] = counts.get(prefix, 0) + 1
    return max(counts, key=lambda prefix: (counts[prefix], prefix in _USUAL, -len(prefix)), default="")


def _tails(key: str) -> Iterator[tuple[str, str]]:
    """Yield all ways to cut *key* into a prefix and a name."""
    yield "", key
    for match in re.finditer(r"\.", key):
        yield key[: match.end()], key[match.end() :]


def _model_prefix(entries: Mapping[str, Entry]) -> str:
    """Return the prefix of the model's names if there is no optimizer: the key under which the model was nested."""
    tops = {entry.path[0] for entry in entries.values() if entry.dtype is not None and len(entry.path) > 1}
    return next((f"{top}." for top in ("model", *_single(tops)) if top in tops), "")


def _single(tops: Iterable[object]) -> list[str]:
    names = [str(top) for top in tops]
    return names if len(names) == 1 else []
