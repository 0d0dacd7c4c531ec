"""How far a verb is: in a log a line now and then, for who does not want it nothing."""

import io
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from layerstore.cli import progress
from layerstore.cli.progress import LINE_SECONDS, Phase, bar_line, progress_line, shown_progress, shown_steps
from layerstore.cli.render import output


def _worked(*, as_json: bool = False, seconds: float) -> None:
    """Do a fifth of something, slowly, telling of it every twentieth of a second."""
    with shown_progress(as_json=as_json, every_seconds=0.05) as told:
        told.start("ingest", 10**9)
        told.advance(2 * 10**8)
        time.sleep(seconds)


def test_a_log_is_told_every_half_minute() -> None:
    """As the documentation says."""
    assert LINE_SECONDS == 30


def test_a_log_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Phase, share, amount, rate and the time left, on stderr, without colour; and nothing once the work is done."""
    out, err = "", ""
    with shown_progress(as_json=False, every_seconds=0.05) as told:
        told.start("ingest", 10**9)
        told.advance(2 * 10**8)
        while err.count("\n") < 2:
            time.sleep(0.01)
            said = capsys.readouterr()
            out, err = out + said.out, err + said.err
    capsys.readouterr()
    time.sleep(0.1)

    assert out == ""
    assert re.fullmatch(r"ingest: 20%, 200\.0 MB of 1\.0 GB, [\d.]+ [MG]B/s, \d+ s left", err.splitlines()[0])
    assert err.splitlines()[1] == "ingest: 20%, 200.0 MB of 1.0 GB, 0 B/s"
    assert capsys.readouterr().err == ""
    assert [thread.name for thread in threading.enumerate() if "speak" in thread.name] == []


def test_what_takes_no_half_minute_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A log of quick commands stays as it was."""
    with shown_progress(as_json=False) as told:
        told.start("ingest", 10**9)
        told.advance(10**9)

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("why", ["--json", "--quiet", "LAYERSTORE_NO_PROGRESS"])
def test_who_does_not_want_it_gets_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Programs, who asked for quiet, and who has switched it off."""
    if why == "LAYERSTORE_NO_PROGRESS":
        monkeypatch.setenv(why, "1")
    if why == "--quiet":
        output.is_quiet = True
    try:
        _worked(as_json=why == "--json", seconds=0.15)
    finally:
        output.is_quiet = output.answers = False

    assert capsys.readouterr().err == ""


def test_a_log_that_nobody_reads_any_more_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is closed: the lines end, the verb goes on."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())

    _worked(seconds=0.15)


class Terminal(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_steps_are_folded_on_a_terminal_and_whole_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No word is broken, not even at its hyphen; what follows is indented under it."""
    line = f"  removing what is neither of the newest 3 nor of every 10th step; {'demo-filter ' * 5}stays"
    with shown_steps(as_json=False) as print_line:
        print_line(line)
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown_steps(as_json=False) as print_line:
        print_line(line)

    assert capsys.readouterr().err == f"{line}\n"
    shown = [text for text in terminal.getvalue().splitlines() if text.strip()]
    assert len(shown) == 2
    assert all(len(text) <= 80 for text in shown)
    assert " ".join(" ".join(shown).split()) == " ".join(line.split())
    assert shown[1].startswith("    ")


def test_while_a_step_lasts_its_seconds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one place on a terminal, where the next line takes their place; in a log by a line now and then."""
    now = [0.0]  # not the machine's clock: a busy one may skip a second
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stderr", log)
    with shown_steps(as_json=False, every_seconds=0.05) as print_line:
        print_line("starting")
        now[0] += 60
        _wait_for("  … 60 s\n", log)
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown_steps(as_json=False) as print_line:
        print_line("starting")
        now[0] += 1
        _wait_for("\r  … 1 s", terminal)
        print_line("done")

    assert log.getvalue().startswith("starting\n  … 60 s\n")
    assert re.search(r"\r {20,}\rdone\n$", terminal.getvalue())


def _wait_for(text: str, stream: io.StringIO) -> None:
    """Return as soon as *text* has been written to *stream*."""
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, f"not written: {text!r}"
        time.sleep(0.01)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_bar_names_its_phase_and_fits(width: int) -> None:
    """It is left out where there is no room, and where nobody knows the end."""
    half, unknown = Phase("ingest", 10**9, 5 * 10**8, 60), Phase("records of sft", 0, 1200, 30)

    line = bar_line(half, width=width)
    assert line.startswith("ingest")
    assert len(line) < width
    assert ("[##########----------]" in line) == (width > 60)
    assert bar_line(unknown, width=width) == progress_line(unknown, None)


def test_a_phase_that_has_begun_since_has_a_rate_of_its_own() -> None:
    """Not one of bytes that belong to the phase before, nor a negative one."""
    before = Phase("verify", 10**9, 10**9, 300)

    assert progress_line(Phase("verify", 10**9, 10**8, 10), before).endswith("10.0 MB/s, 90 s left")
    assert progress_line(Phase("remove", 10**9, 10**8, 400), before).endswith("250.0 kB/s, 60 min left")
