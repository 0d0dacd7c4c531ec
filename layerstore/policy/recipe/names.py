"""Names of layers as people read them: runs of blocks gathered, long lists cut short."""

from collections.abc import Iterable
from itertools import pairwise

from layerstore.layers import block_index
from layerstore.nearest import did_you_mean, nearest

_SHOWN_MAX = 8


def gathered(names: Iterable[str]) -> list[str]:
    """
    Return *names* with the blocks of each stack as one pattern, as a recipe of ours would have it.

    >>> gathered(["lm_head", "model.layers.0", "model.layers.1", "model.layers.2", "model.layers.5"])
    ['lm_head', 'model.layers.[0-2,5]']
    >>> gathered(["model.layers.7"])
    ['model.layers.7']
    """
    stacks: dict[str, list[int]] = {}
    for name in names:
        index = block_index(name)
        if index is None:
            stacks[name] = []
        else:
            stacks.setdefault(stack_of(name) + "\0", []).append(index)
    return [stack.removesuffix("\0") + _brackets(sorted(indices)) for stack, indices in stacks.items()]


def stack_of(block: str) -> str:
    """Return the name of *block* without its index."""
    return block[: len(block) - len(block.rpartition(".")[2])]


def _brackets(indices: list[int]) -> str:
    if len(indices) < 2:
        return "".join(map(str, indices))
    starts = [indices[0], *(after for before, after in pairwise(indices) if after != before + 1)]
    ends = [*(before for before, after in pairwise(indices) if after != before + 1), indices[-1]]
    runs = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"[{','.join(runs)}]"


def listed(names: Iterable[str]) -> str:
    """
    Return *names* gathered, in one line.

    >>> listed(f"extra_{letter}" for letter in "abcdefghijk")
    'extra_a, extra_b, extra_c, extra_d, extra_e, extra_f, extra_g, extra_h and 3 more'
    """
    found = gathered(names)
    more = len(found) - _SHOWN_MAX
    return ", ".join(found[:_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def near(name: str, names: Iterable[str], *, what: str) -> str:
    """Return a hint: those of *names* that look like *name*, else all of them."""
    known = list(names)
    # The index of a block hides how near the rest is, so both spellings are compared.
    plain = {spelling: shown for shown in gathered(known) for spelling in (shown, shown.partition("[")[0])}
    close = dict.fromkeys(plain[spelling] for spelling in nearest(name, plain))
    return did_you_mean(close, else_="" if close else f"{what}: {listed(known)}")
