"""
The tables of docs/operating/sizing.md, from the library's own estimate.

    python -m tests.docs.sizing

writes them anew between the page's marks; a test compares them. Models are those of ``estimate --params``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from layerstore import Drift, Filter, Latest, Parity
from layerstore.inspect import Model, Prices, Training, estimate_saves, made_up
from layerstore.inspect.estimate import cycle_of, due_sets
from layerstore.policy import Policy
from layerstore.units import size
from tests.bench.totals import FileTotals, kept_on_disk, trained_files
from tests.docs.pages import DOCS

PAGE = DOCS / "operating" / "sizing.md"
COMMAND = "python -m tests.docs.sizing"

POLICIES: Mapping[str, Policy] = {"full": Latest(), "parity": Parity(), "filter": Filter(), "drift": Drift()}

TRAINING = Training(
    world_size=8,
    steps=10_000,
    every=100,
    step_seconds=10.0,
    bytes_per_second=2e9,
    copy_bytes_per_second=10e9,
    disk_bytes=10**13,
    movement=0.004,
)
"""As ``layerstore estimate`` assumes it; layers move as in its guide."""

LAST, EVERY = 3, 1000
Rules = tuple[int | None, int | None]
RULES: tuple[Rules, ...] = ((LAST, None), (LAST, EVERY), (None, None))
"""What is kept: the newest, these and one of each thousand steps, everything."""


@dataclass(frozen=True)
class Size:
    """A model of so many parameters and blocks, and the GPUs that train it."""

    name: str
    parameters: int
    blocks: int
    ranks: int

    @cached_property
    def model(self) -> Model:
        """Its layers, as ``--params`` makes them up."""
        return made_up(self.parameters, self.blocks)

    @cached_property
    def training(self) -> Training:
        """How it is trained, when everything is kept."""
        return replace(TRAINING, world_size=self.ranks)

    @cached_property
    def files(self) -> dict[str, FileTotals]:
        """The objects of each layer."""
        return trained_files(self.model, self.training)

    @cached_property
    def lines(self) -> dict[str, dict[str, Any]]:
        """The lines of its estimate, by policy; a bucket is collected, as prices are of one."""
        training = replace(self.training, keep_last=LAST, keep_every=EVERY, prices=Prices(gb_month=0, gpu_hour=0))
        lines = estimate_saves(self.model, training, POLICIES)["lines"]
        return {line["policy"]: line for line in lines if line["policy"]}

    @property
    def title(self) -> str:
        """What the rows call it."""
        return f"{self.name}, {self.ranks} GPUs"

    @cache  # noqa: B019  # there are three, for ever
    def due(self, policy: str) -> list[frozenset[str]]:
        """Return the layers that *policy* stores, in a cycle."""
        sizes = {layer: files.size_bytes for layer, files in self.files.items()}
        movement = TRAINING.movement if getattr(POLICIES[policy], "measures", False) else None
        found = due_sets(POLICIES[policy], tuple(sizes), movement=movement, sizes=sizes)
        return found[: cycle_of(found)]

    def kept(self, policy: str, rules: Rules) -> tuple[int, int]:
        """Return the bytes and files that a disk has when the run ends, records and states of ranks among the files."""
        training = replace(self.training, keep_last=rules[0], keep_every=rules[1])
        return kept_on_disk(self.files, self.due(policy), training)

    def files_a_save(self, policy: str) -> float:
        """Return how many files a save adds: objects, versions, a state of each rank, and a record."""
        cycle = self.due(policy)
        return sum(self.files[layer].count + 1 for due in cycle for layer in due) / len(cycle) + self.ranks + 1


SIZES = (Size("7B", 7 * 10**9, 32, 8), Size("13B", 13 * 10**9, 40, 16), Size("70B", 70 * 10**9, 80, 64))


# -- tables --------------------------------------------------------------------------------------------------------


def on_a_disk() -> Iterator[str]:
    """Yield what the saves of a run take, by model, policy and retention."""
    yield from _head("", "a save", "largest", "newest 3", "and one in 1,000 steps", "all 100 saves")
    for of in SIZES:
        for policy, line in of.lines.items():
            kept = [size(of.kept(policy, rules)[0]) for rules in RULES]
            yield _row(f"{of.title}: {policy}", size(line["average_bytes"]), size(line["largest_bytes"]), *kept)


def files_and_traffic() -> Iterator[str]:
    """Yield how many files that is, and what a bucket holds and is sent."""
    yield from _head("", "files a save", "files kept", "to write", "in a bucket")
    for of in SIZES:
        for policy, line in of.lines.items():
            rate = line["average_bytes"] / of.training.interval_seconds
            yield _row(
                f"{of.title}: {policy}",
                f"{of.files_a_save(policy):,.0f}",
                f"{of.kept(policy, RULES[1])[1]:,}",
                f"{size(round(rate))}/s",
                size(line["held_bytes"]),
            )


def memory_and_time() -> Iterator[str]:
    """Yield what each rank reserves, and how long a full save or a composite is on its way to a disk."""
    yield from _head("", "a full save", "memory of a rank", "of a host with 8", "at 2 GB/s")
    for of in SIZES:
        full = of.lines["full"]["first_bytes"]
        seconds = f"{full / TRAINING.bytes_per_second:,.0f} s"
        yield _row(of.title, size(full), size(full // of.ranks), size(8 * full // of.ranks), seconds)


TABLES = {"on a disk": on_a_disk, "files and traffic": files_and_traffic, "memory and time": memory_and_time}


def written(text: str) -> str:
    """Return the page *text* with its tables written anew."""
    for name, table in TABLES.items():
        mark = f"<!-- {name}: written by {COMMAND} -->"
        assert text.count(mark) == 1, mark
        lines = "\n".join(table())
        text = re.sub(rf"({re.escape(mark)}\n).*?(\n<!-- end -->)", rf"\1\n{lines}\n\2", text, flags=re.DOTALL)
    return text


def _head(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|---|{'---:|' * (len(names) - 1)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
