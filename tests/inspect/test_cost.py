"""What saves cost: storage under retention, and GPUs that stand still."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore import Keep, Latest
from layerstore.errors import InvalidInput
from layerstore.inspect import Prices, Training, estimate_saves, made_up
from layerstore.inspect.cost import GB, MONTH_SECONDS, SaveGroup, stored
from layerstore.limits import MIB, REMOTE_PART_BYTES
from layerstore.policy import Candidate
from layerstore.remote import Bucket
from tests.bench.totals import FileTotals, saves_kept
from tests.remote.servers import KEY, SECRET

SAVES = 4
PRICES = Prices(gb_month=0.02, gpu_hour=3.0)


def training(**changed: Any) -> Training:
    """Return a training of four saves that is over after an hour, and so is collected once."""
    usual: dict[str, Any] = {
        "world_size": 2,
        "steps": SAVES,
        "every": 1,
        "step_seconds": 1000.0,
        "bytes_per_second": 1e9,
        "copy_bytes_per_second": 1e10,
        "disk_bytes": 10**13,
        "prices": PRICES,
    }
    return Training(**usual | changed)


# -- requests of an object ---------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Run an S3 server that counts requests by their method; its bucket is called ``counted``."""
    import boto3
    from moto.server import ThreadedMotoServer

    found: Counter[str] = Counter()

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := re.search(r'"(PUT|POST|GET) /counted/\S', record.getMessage()):
                found[match[1]] += 1

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="counted")
    log, handler = logging.getLogger("werkzeug"), Counting()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    server.stop()


@pytest.mark.full
@pytest.mark.parametrize("size_bytes", [0, 1, 20 * MIB, 64 * MIB, 65 * MIB])
def test_large_objects_take_a_request_for_each_part(size_bytes: int, told: Counter[str]) -> None:
    """And one to begin, and one to end."""
    bucket = Bucket("s3://counted/prefix")
    bucket._client.part_bytes = REMOTE_PART_BYTES  # as where there is memory for them
    bucket.write("name", lambda: [bytes(size_bytes)])

    assert sum(told.values()) == FileTotals.alike(1, size_bytes).puts


# -- storage -------------------------------------------------------------------------------------------------------


@given(
    saves=st.integers(1, 30),
    every=st.integers(1, 4),
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 12),
    cycle=st.integers(1, 5),
    due=st.frozensets(st.integers(0, 4)),
    lingers=st.integers(0, 3),
)
def test_a_version_is_stored_as_long_as_a_kept_save_has_it(
    saves: int,
    every: int,
    keep_last: int | None,
    keep_every: int | None,
    cycle: int,
    due: frozenset[int],
    lingers: int,
) -> None:
    """As retention itself says after each save, and a while longer."""
    group = SaveGroup(size_bytes=7, due=tuple(sorted(at for at in due if at < cycle)), cycle=cycle)
    run = training(steps=saves * every, every=every, step_seconds=1.0, keep_last=keep_last, keep_every=keep_every)
    keep = Keep(last=keep_last, every=keep_every)
    version_of: list[int] = []
    for number in range(saves):
        version_of.append(number if number in set(group.saves(saves)) else version_of[-1])
    needed: dict[int, int] = {}  # until which save each version was
    for number in range(saves):
        candidates = [
            Candidate(id=str(each), step=(each + 1) * every, time_ns=0, is_in_history=True)
            for each in range(number, -1, -1)
        ]
        reasons = keep.reasons(candidates, now_ns=0)
        for each in range(number + 1):
            if reasons[str(each)] and needed.get(version_of[each], each) >= number - 1:
                needed[version_of[each]] = number
        kept = sum(bool(each) for each in reasons.values())

    found = stored([group], run, lingers_seconds=float(lingers * every))

    # A version that is needed at one save and not at the next is stored until that, and the run ends at the last one.
    ends = {version: saves - 1 if until == saves - 1 else until + 1 + lingers for version, until in needed.items()}
    assert found.byte_seconds == 7 * every * sum(min(end, saves - 1) - version for version, end in ends.items())
    there = [version for version, end in ends.items() if needed[version] == saves - 1 or end > saves - 1]
    assert found.end_bytes == 7 * len(there)
    assert saves_kept(run) == kept


def test_full_checkpoints_cost_what_a_calculator_says() -> None:
    """Two of four are there at a time; GPUs wait for all of them."""
    found = estimate_saves(made_up(10**9, 10), training(keep_last=1), {"full": Latest()})
    deepspeed, full = found["lines"][1:]
    size_bytes, seconds = deepspeed["average_bytes"], deepspeed["average_bytes"] / 1e9

    assert deepspeed["held_bytes"] == size_bytes
    assert deepspeed["held_seconds"] == pytest.approx(4 * seconds)
    assert deepspeed["cost"] == {
        "storage": pytest.approx(3000 * size_bytes / GB / MONTH_SECONDS * 0.02),
        "held_up": pytest.approx(4 * seconds * 2 / 3600 * 3),
        "total": pytest.approx(sum(deepspeed["cost"][what] for what in ("storage", "held_up"))),
    }
    # A bucket keeps what a collection lets go for a day, so within an hour nothing has gone.
    assert full["held_bytes"] == full["run_bytes"]
    assert full["held_seconds"] == pytest.approx(full["run_bytes"] / 2 / 1e10)


def test_training_waits_where_saves_come_faster_than_they_are_written() -> None:
    """Then layerstore holds GPUs up as long as the disk needs beyond the interval."""
    found = estimate_saves(made_up(10**9, 10), training(step_seconds=2.0), {"full": Latest()})
    full = found["lines"][-1]

    late = full["save_seconds"] - 2
    assert late > 0
    assert full["held_seconds"] == pytest.approx(full["run_bytes"] / 2 / 1e10 + SAVES * late)


def test_without_prices_nothing_has_a_cost() -> None:
    """What is stored is told all the same."""
    found = estimate_saves(made_up(10**9, 10), training(prices=None), {"full": Latest()})

    assert [line["cost"] for line in found["lines"]] == [None, None, None]
    assert all(line["held_bytes"] for line in found["lines"])
    assert not any("bucket" in text for text in found["assumptions"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1 instead of two"),
        ("1,2,3", "3 instead of two"),
        ("1,$4", "not all of them are numbers"),
        ("1,-1", "cannot be -1.0"),
        ("1,inf", "cannot be inf"),
        ("nan,2", "cannot be nan"),
    ],
)
def test_what_are_no_prices_is_refused(text: str, message: str) -> None:
    """With an example of what are."""
    with pytest.raises(InvalidInput, match=re.escape(message)) as raised:
        Prices.parse(text)

    assert "--price 0.023,2.50" in str(raised.value.hint)


@pytest.mark.parametrize("changed", [{"keep_last": 0}, {"keep_every": -1}, {"copy_bytes_per_second": 0.0}])
def test_retention_and_rates_that_cannot_be_are_refused(changed: dict[str, Any]) -> None:
    """As gc refuses them."""
    with pytest.raises(InvalidInput):
        training(**changed)
