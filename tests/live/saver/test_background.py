"""How rank 0 waits for the other ranks' parts, and what a failed share leaves behind."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from layerstore.errors import Overtaken
from layerstore.live.saver import background
from layerstore.live.saver.background import Background
from layerstore.publish import GivenUp


@pytest.mark.fault(130)
def test_missing_parts_are_looked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank costs training a hundred looks a minute, not three thousand; what comes is seen a tenth later."""
    now, pauses, looks = 0.0, list[tuple[float, float]](), list[float]()

    class Stop:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            pauses.append((now, seconds))
            now += seconds
            return now > 60

    def looked(*_: object) -> None:
        looks.append(now)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(background, "parts_of", looked)
    waiting: Any = SimpleNamespace(_repo=None, _stop=Stop())
    job: Any = SimpleNamespace(joint=SimpleNamespace(step=4), is_given_up=False, failure="")

    with pytest.raises(GivenUp, match="before all ranks had written"):
        Background._joined(waiting, job)

    assert len(looks) < 120
    assert all(seconds <= max(0.02, waited / 10 + 1e-9) for waited, seconds in pauses)
    assert max(seconds for _, seconds in pauses) == 1.0


def test_what_a_failed_share_referred_to_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, for the next share was planned before anybody knew: what it cannot refer to it keeps exactly."""

    def overtaken(*_: object, older: dict[str, int], **__: object) -> None:
        older["head"] = 2
        raise Overtaken("gone")

    monkeypatch.setattr(background, "write_share", overtaken)
    failing: Any = SimpleNamespace(_repo=None, _frozen={}, _older={"embed": 1}, _lose=print, _report_failure=print)
    job: Any = SimpleNamespace(
        joint=SimpleNamespace(step=4),
        snapshot=SimpleNamespace(discard=lambda: None),
        begun=0.0,
        is_written=threading.Event(),
    )

    Background._write(failing, job)

    assert job.is_written.is_set()
    assert not failing._older
