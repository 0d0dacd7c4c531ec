"""Two pictures drawn from the rows: how long a save holds training up and takes, and what stays on disk."""

from collections.abc import Callable
from pathlib import Path

from tests.bench.chart import COLOURS, WIDTH, Chart, spanning
from tests.bench.peers.table import Findings, megabytes, seconds

_LEFT, _RIGHT = 200, WIDTH - 40
_BLOCKED, _DURABLE = COLOURS[0], COLOURS[1]


def draw(found: Findings, folder: Path) -> None:
    """Write the pictures to *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Findings], str]] = {"peers-saving": saving, "peers-bytes": growth}
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture(found))


def saving(found: Findings) -> str:
    """Draw each system's seconds blocked and seconds until durable as two dots on one line."""
    names = found.systems()
    times = {name: (found.blocked(name), found.durable(name)) for name in names}
    chart = Chart(
        title="A save: seconds that training stands still, seconds until it is on disk",
        description="One line for each system, with a dot for the median seconds blocked and one for durable: "
        + "; ".join(f"{name} {seconds(blocked)} and {seconds(durable)}" for name, (blocked, durable) in times.items()),
        height=120 + 26 * len(names),
    )
    bottom = 70.0 + 26 * len(names)
    x = spanning([each for pair in times.values() for each in pair], begin=_LEFT, end=_RIGHT, is_logarithmic=True)
    chart.across(x, top=60, bottom=bottom, label="seconds, logarithmic; left is better")
    for number, (name, pair) in enumerate(times.items()):
        height = 76.0 + 26 * number
        chart.text(_LEFT - 8, height + 4, name, css="end")
        chart.line([(x.at(value), height) for value in pair], COLOURS[-1])
        for value, colour in zip(pair, (_BLOCKED, _DURABLE), strict=True):
            chart.dot(x.at(value), height, colour)
    chart.legend(["blocked", "durable"], [_BLOCKED, _DURABLE], y=46)
    return chart.svg()


def growth(found: Findings) -> str:
    """Draw what each system has on disk after one save and after all of the last round."""
    sizes = {name: found.sizes(name) for name in found.systems()}
    saves = max(len(of) for of in sizes.values())
    chart = Chart(
        title=f"On disk after 1 and after {saves} saves",
        description=f"One line for each system, with a dot for its size after one save and one after {saves}: "
        + "; ".join(f"{name} {megabytes(of[0])} and {megabytes(of[-1])}" for name, of in sizes.items()),
        height=120 + 26 * len(sizes),
    )
    bottom = 70.0 + 26 * len(sizes)
    x = spanning([of[-1] / 1e6 for of in sizes.values()], begin=_LEFT, end=_RIGHT)
    chart.across(x, top=60, bottom=bottom, label="MB; left is better")
    for number, (name, of) in enumerate(sizes.items()):
        height = 76.0 + 26 * number
        ends = (of[0] / 1e6, of[-1] / 1e6)
        chart.text(_LEFT - 8, height + 4, name, css="end")
        chart.line([(x.at(value), height) for value in ends], COLOURS[-1])
        for value, colour in zip(ends, (_BLOCKED, _DURABLE), strict=True):
            chart.dot(x.at(value), height, colour)
    chart.legend(["after 1 save", f"after {saves} saves"], [_BLOCKED, _DURABLE], y=46)
    return chart.svg()
