"""Random trees for hypothesis: plain ones, and ones with every type of node."""

import math

from hypothesis import strategies as st

from layerstore.dtypes import DTYPES
from layerstore.tree import Global, Inert, OrderedMap, Size, Storage, Tensor, Tree

integers = st.one_of(
    st.integers(),
    st.sampled_from([0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, -128, -32768]),
    st.integers(min_value=-(2**3000), max_value=2**3000),
)
texts = st.text(st.characters(), max_size=20)
scalars = st.one_of(st.none(), st.booleans(), integers, st.floats(), texts, st.binary(max_size=20))
keys = st.one_of(st.none(), st.booleans(), integers, texts, st.tuples(texts, integers), st.binary(max_size=5))


def _plain_containers(parts: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.lists(parts, max_size=5),
        st.lists(parts, max_size=5).map(tuple),
        st.dictionaries(keys, parts, max_size=5),
        st.sets(keys, max_size=5),
    )


plain_trees = st.recursive(scalars, _plain_containers, max_leaves=30)


attributes: st.SearchStrategy[dict[Tree, Tree] | None] = st.none() | st.dictionaries(texts, scalars, max_size=2)


@st.composite
def tensors(draw: st.DrawFn, storages: list[Storage]) -> Tensor:
    """Make a view of one of *storages*, or of a new one."""
    extents = draw(st.lists(st.integers(0, 3), max_size=3))
    if draw(st.booleans()) or not storages:
        dtype = draw(st.sampled_from(DTYPES))
        elements = math.prod(extents) + draw(st.integers(0, 3))
        storages.append(
            Storage(
                dtype=dtype.code,
                elements=elements,
                device=draw(st.sampled_from(["cpu", "cuda:3"])),
                content=draw(st.binary(min_size=elements * dtype.bytes, max_size=elements * dtype.bytes)),
            )
        )
    storage = draw(st.sampled_from(storages))
    if math.prod(extents) > storage.elements:
        extents = [0]
    stride = [math.prod(extents[place + 1 :]) for place in range(len(extents))]
    return Tensor(
        storage=storage,
        offset=draw(st.integers(0, storage.elements - math.prod(extents))),
        shape=Size(extents),
        stride=tuple(stride),
        requires_grad=draw(st.booleans()),
        attributes=draw(attributes),
        is_parameter=draw(st.booleans()),
    )


@st.composite
def inerts(draw: st.DrawFn, parts: st.SearchStrategy[Tree]) -> Inert:
    """Make an inert object that uses every field."""
    state = draw(st.none() | parts)
    return Inert(
        name=draw(st.sampled_from(["torch.device", "collections.Counter", "acme.Thing"])),
        arguments=tuple(draw(st.lists(parts, max_size=3))),
        made_by_new=draw(st.booleans()),
        state=state,
        has_state=state is not None or draw(st.booleans()),
        appended=draw(st.lists(parts, max_size=3)),
        items=draw(st.dictionaries(keys, parts, max_size=3)),
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Make a tree with every type of node, whose tensors share storages."""
    storages: list[Storage] = []
    leaves = st.one_of(
        scalars,
        st.sampled_from([Global("torch.bfloat16"), Global("numpy.ndarray"), Global("acme.Thing")]),
        st.lists(st.integers(0, 2**40), max_size=4).map(Size),
        tensors(storages),
    )

    def containers(parts: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        entries = st.dictionaries(keys, parts, max_size=3)
        maps = st.builds(OrderedMap, entries, st.none() | entries)
        return st.one_of(_plain_containers(parts), maps, inerts(parts))

    return draw(st.recursive(leaves, containers, max_leaves=20))
