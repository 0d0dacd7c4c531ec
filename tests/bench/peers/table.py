"""
What the rows say: medians over all rounds, ratios to DeepSpeed's own save, and where another system beats layerstore.

Rows of earlier runs in the same file do not count.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from tests.bench.peers.compose import COPY, TO_UNIVERSAL
from tests.bench.peers.systems import SYSTEMS, DeepSpeed, Layerstore
from tests.bench.report import Table
from tests.bench.rows import Row

BASE = DeepSpeed.name
OURS = Layerstore.name
COMPOSE = "layerstore compose"

_TIE = 0.01
"""What differs by less is equal."""


class Findings:
    """The rows of the newest run, by what they are about."""

    def __init__(self, rows: Sequence[Row]) -> None:
        begun = max((number for number, row in enumerate(rows) if row["kind"] == "machine"), default=0)
        self._rows = rows[begun:]

    def first(self, kind: str) -> Row:
        """Return the row of a kind that there is once."""
        return self.all(kind)[0]

    def all(self, kind: str, **key: object) -> list[Row]:
        """Return the rows of a kind whose fields are those of *key*."""
        key["kind"] = kind
        return [row for row in self._rows if all(row.get(name) == value for name, value in key.items())]

    def systems(self) -> list[str]:
        """Return the systems that have saved in all rounds, in the order of the table."""
        absent = {row["system"] for row in self.all("absent")}
        return [kind.name for kind in SYSTEMS if kind.name not in absent and self.all("save", system=kind.name)]

    def tools(self) -> list[str]:
        """Return what has composed, in the order that it was first run in."""
        return list(dict.fromkeys(row["tool"] for row in self.all("compose")))

    def blocked(self, system: str) -> float:
        """Return the median of the seconds that a save holds training up."""
        return median(float(row["blocked"]) for row in self.all("save", system=system))

    def durable(self, system: str) -> float:
        """Return the median of the seconds until a save is on disk."""
        return median(float(row["durable"]) for row in self.all("save", system=system))

    def memory(self, system: str) -> float:
        """Return the most bytes of memory that a system took beyond the training's own, over all rounds."""
        return float(max(row["bytes"] for row in self.all("memory", system=system)))

    def sizes(self, system: str) -> list[int]:
        """Return the bytes on disk after each save of the longest round."""
        last = max(row["round"] for row in self.all("save", system=system))
        return [row["bytes"] for row in self.all("save", system=system, round=last)]

    def load(self, system: str, *, is_elsewhere: bool = False) -> Row | None:
        """Return the row of a load by as many ranks as saved, or by another number."""
        ranks = self.first("state")["ranks"]
        found = [row for row in self.all("load", system=system) if (row["ranks"] != ranks) == is_elsewhere]
        return found[0] if found else None

    def resume(self, system: str) -> float | None:
        """Return the seconds of a load by as many ranks as saved."""
        return (self.load(system) or {}).get("seconds")

    def resume_elsewhere(self, system: str) -> float | None:
        """Return the seconds of a load by another number of ranks; DeepSpeed has to convert first."""
        seconds: float | None = (self.load(system, is_elsewhere=True) or {}).get("seconds")
        if seconds is None or system != BASE:
            return seconds
        return seconds + self.composing(TO_UNIVERSAL)

    def composing(self, tool: str) -> float:
        """Return the median of the seconds that *tool* takes."""
        return median(float(row["seconds"]) for row in self.all("compose", tool=tool))

    def composing_memory(self, tool: str) -> float:
        """Return the most memory that *tool* held."""
        return float(max(row["memory"] for row in self.all("compose", tool=tool)))

    def flip(self, system: str) -> str:
        """Say what came of a flipped bit."""
        return "".join(row["outcome"] for row in self.all("flip", system=system))


Measure = Callable[[str], float | None]


def lines(found: Findings) -> Iterator[str]:
    """Yield the whole report as plain text."""
    if not found.all("save"):
        yield "nothing was saved"
        return
    yield from about(found)
    for table in tables(found):
        yield from ["", *table.text()]
    yield ""
    yield from absent(found)
    yield from losses(found)


def about(found: Findings) -> Iterator[str]:
    """Yield what was measured, and where."""
    machine, state = found.first("machine"), found.first("state")
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    yield (
        f"{state['bytes'] / 1e9:.2f} GB of masters and moments ({state['parameters'] / 1e6:.1f} million parameters) on "
        f"{state['ranks']} CPU ranks; {machine['rounds']} rounds, {machine['saves']} saves of each system in the last"
    )
    yield (
        f"{machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB of memory, {machine['filesystem']}, "
        f"{machine['platform']}; Python {machine['python']}, {versions}"
    )


def tables(found: Findings) -> list[Table]:
    """Return the tables."""
    return [_saving(found), _resuming(found), *([_composing(found)] if found.tools() else [])]


def absent(found: Findings) -> Iterator[str]:
    """Yield what was not run, and why."""
    for row in found.all("absent"):
        yield f"not run: {row['system']} ({row['reason']})"


def losses(found: Findings) -> Iterator[str]:
    """Yield, for each measure, which systems are better than our full asynchronous save, or than our compose."""
    measures: dict[str, tuple[Measure, Callable[[float], str]]] = {
        "seconds blocked": (found.blocked, seconds),
        "seconds until durable": (found.durable, seconds),
        "bytes after one save": (lambda name: float(found.sizes(name)[0]), megabytes),
        "bytes after all saves": (lambda name: float(found.sizes(name)[-1]), megabytes),
        "memory": (found.memory, megabytes),
        "resume, same ranks": (found.resume, seconds),
        "resume, other ranks": (found.resume_elsewhere, seconds),
    }
    for what, (measure, shown) in measures.items():
        yield from _better(what, found.systems(), measure, shown, ours=OURS)
    if COMPOSE in found.tools():
        yield from _better("composing, seconds", found.tools(), found.composing, seconds, ours=COMPOSE)
        yield from _better("composing, memory", found.tools(), found.composing_memory, megabytes, ours=COMPOSE)


def _better(
    what: str, names: Iterable[str], measure: Measure, shown: Callable[[float], str], *, ours: str
) -> Iterator[str]:
    mine = measure(ours) if ours in names else None
    others = [name for name in names if not name.startswith("layerstore")]
    values = {name: value for name in others if (value := measure(name)) is not None}
    if mine is None or not values:
        return
    better = sorted((value, name) for name, value in values.items() if value < mine * (1 - _TIE))
    others_are = ", ".join(f"{name} {shown(value)} ({ratio(value, mine)} ×)" for value, name in better)
    yield f"{what}: {ours} {shown(mine)}; {f'better: {others_are}' if better else 'nothing is better'}"


def _saving(found: Findings) -> Table:
    saves = len(found.sizes(found.systems()[0]))
    sized = [
        (name, found.blocked(name), found.durable(name), found.memory(name), found.sizes(name))
        for name in found.systems()
    ]
    base = next((each for each in sized if each[0] == BASE), sized[0])
    return Table(
        title=f"Saving; × is the ratio to {base[0]}",
        header=("", "blocked", "×", "durable", "×", "memory", "after 1 save", f"after {saves}", "×"),
        lines=tuple(
            (
                *(name, seconds(blocked), ratio(blocked, base[1]), seconds(durable), ratio(durable, base[2])),
                *(megabytes(memory), megabytes(sizes[0]), megabytes(sizes[-1]), ratio(sizes[-1], base[4][-1])),
            )
            for name, blocked, durable, memory, sizes in sized
        ),
    )


def _resuming(found: Findings) -> Table:
    base = found.resume(BASE)
    return Table(
        title="Resuming, and a bit flipped in the middle of the newest save's largest file",
        header=("", "same ranks", "×", "bit for bit", "other ranks", "bit for bit", "flipped bit"),
        lines=tuple(
            (
                *(name, _took(found.load(name)), ratio(found.resume(name), base), _same(found.load(name))),
                *(_elsewhere(found, name), _same(found.load(name, is_elsewhere=True)), found.flip(name)),
            )
            for name in found.systems()
        ),
    )


def _composing(found: Findings) -> Table:
    return Table(
        title=f"Composing: whole commands, output synced; × is the ratio to {COPY} of the same layout",
        header=("", "seconds", "×", "memory", "written"),
        lines=tuple(
            (
                tool,
                seconds(found.composing(tool)),
                ratio(found.composing(tool), found.composing(copied) if copied in found.tools() else None),
                megabytes(found.composing_memory(tool)),
                megabytes(found.all("compose", tool=tool)[-1]["bytes"]),
            )
            for tool in found.tools()
            for copied in [f"{COPY}, HF layout" if "HF" in tool or "LLMTailor" in tool else COPY]
        ),
    )


def _took(row: Row | None) -> str:
    if row is None:
        return "-"
    return "fails" if "problem" in row else seconds(row["seconds"])


def _elsewhere(found: Findings, name: str) -> str:
    took = found.resume_elsewhere(name)
    if took is None or name != BASE:
        return _took(found.load(name, is_elsewhere=True))
    return f"{seconds(took)}, {seconds(found.composing(TO_UNIVERSAL))} of it converting"


def _same(row: Row | None) -> str:
    return {True: "yes", False: "NO", None: ""}[(row or {}).get("is_same")]


def seconds(value: float) -> str:
    """
    Return a time in a handy unit.

    >>> seconds(0.0312), seconds(4.256)
    ('31 ms', '4.26 s')
    """
    return f"{value * 1e3:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def megabytes(value: float) -> str:
    """Return a size in MB (10^6 bytes)."""
    return f"{value / 1e6:,.0f} MB"


def ratio(value: float | None, base: float | None) -> str:
    """
    Return *value* as a multiple of *base*; nothing where one of them is not known.

    >>> ratio(0.03, 2.0), ratio(3.0, 2.0), ratio(None, 2.0)
    ('0.015', '1.50', '')
    """
    if value is None or not base:
        return ""
    return f"{value / base:.2f}" if value / base >= 0.1 else f"{value / base:.3f}"
