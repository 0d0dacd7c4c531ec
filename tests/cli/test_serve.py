"""``layerstore report --serve`` and ``--open``: the page of a live run at one URL, and nothing else."""

import contextlib
import http.client
import itertools
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore.cli import serve
from layerstore.cli.serve import ReportServer
from layerstore.errors import InvalidInput, NotFound
from tests.cli.conftest import Run
from tests.inspect.test_page import facts_in


@pytest.fixture(autouse=True)
def _always_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of a store is older than the request."""
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.0)
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "cache"))


@contextlib.contextmanager
def serving(store: object, *, host: str = "127.0.0.1", run: str | None = None) -> Iterator[ReportServer]:
    """Yield a server of *store* that answers."""
    with ReportServer(str(store), host=host, port=0, run=run, keep=None) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(port: int, path: str = "/", *, method: str = "GET", host: str = "localhost") -> tuple[int, bytes]:
    """Return the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host})
    with contextlib.closing(connection):
        answer = connection.getresponse()
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        return answer.status, answer.read()


def port_of(server: ReportServer) -> int:
    """Return where *server* listens."""
    return int(server.server_address[1])


def steps_in(page: bytes) -> list[int]:
    """Return the steps that *page* shows of its only run."""
    steps: list[int] = facts_in(page)["runs"][0]["saves"]["step"]
    return steps


def test_the_page_is_made_anew_only_when_the_store_has_changed(store: Path, checkpoints: Path) -> None:
    """Each commit and each pin is another version; without one, the page stays the same bytes."""
    with serving(store) as server:
        pages, versions = [], []
        with layerstore.open(store) as opened:
            for change in (None, None, lambda: opened.drop("sft@2"), lambda: opened.pin("new", "sft@4")):
                if change is not None:
                    change()
                pages.append(asked(port_of(server))[1])
                versions.append(asked(port_of(server), "/version")[1].decode())

    assert [steps_in(page) for page in pages] == [[2, 4], [2, 4], [4], [4]]
    assert [facts_in(page)["version"] for page in pages] == versions
    assert pages[0] == pages[1]
    assert [one == other for one, other in itertools.pairwise(versions)] == [True, False, False]


def test_there_is_one_page_to_read_and_nothing_else(store: Path) -> None:
    """No other path, no other method; HEAD has no body."""
    with serving(store) as server:
        port = port_of(server)
        for path in ("/report.html", "/../store.json", "/?x", "/version/", "/store.json", "/%2e%2e/", "*"):
            assert asked(port, path)[0] == 404, path
        assert asked(port, method="HEAD") == (200, b"")
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(method, "/")
            assert connection.getresponse().status == 501
            connection.close()


@pytest.mark.parametrize(
    ("host", "is_meant"),
    [
        *[("localhost", True), ("LOCALHOST:8321", True), ("127.0.0.1:9", True), ("[::1]:8321", True)],
        *[("evil.example", False), ("evil.example:8321", False), ("localhost.evil.example", False), ("", False)],
        *[("10.0.0.7", False), ("[::1", False), ("localhost@evil.example", False), ("\xe9", False)],
    ],
)
def test_only_names_of_this_machine_are_answered(pristine: Path, host: str, is_meant: bool) -> None:
    """A site that points its name here gets nothing through somebody's browser."""
    with serving(pristine) as server:
        status, body = asked(port_of(server), host=host)

    assert status == (200 if is_meant else 403)
    assert (b"<html" in body) is is_meant


def test_all_addresses_are_served_only_if_asked_for(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then this machine's own name and addresses will do, but no other name."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Gpu7")
    with serving(pristine, host="0.0.0.0") as server:
        assert (server.is_local, server.url) == (False, f"http://Gpu7:{port_of(server)}/")
        statuses = {host: asked(port_of(server), host=host)[0] for host in ("gpu7", "10.0.0.7:80", "evil.example")}

    assert statuses == {"gpu7": 200, "10.0.0.7:80": 200, "evil.example": 403}


def test_a_store_that_cannot_be_read_is_an_answer_until_it_can(store: Path) -> None:
    """The server goes on, and shows the store once it is back."""
    with serving(store) as server:
        store.rename(store.with_name("away"))
        status, body = asked(port_of(server))
        store.with_name("away").rename(store)

        assert status == 503
        assert b"no store" in body
        assert asked(port_of(server))[0] == 200


def test_a_store_in_a_bucket_is_served_too(store: Path, checkpoints: Path, tmp_path: Path) -> None:
    """What is pushed meanwhile is shown."""
    url = f"file://{tmp_path}/bucket"
    with layerstore.open(store) as opened:
        opened.drop("sft@4")
        opened.push(url)
        with serving(url) as server:
            before = asked(port_of(server))[1]
            opened.undrop("sft@4")
            opened.push(url)
            after = asked(port_of(server))[1]

    assert (steps_in(before), steps_in(after)) == ([2], [2, 4])
    assert facts_in(after)["stats"]["missing"] == facts_in(before)["stats"]["missing"]


def test_what_cannot_be_served_is_an_error_of_the_command(run: Run, store: Path) -> None:
    """A port that is taken, a run that is not there, a file to write."""
    with serving(store) as server:
        taken = run("report", "--serve", "--port", port_of(server), "--store", store)
    with pytest.raises(NotFound), serving(store, run="nope"):
        pass
    with pytest.raises(InvalidInput, match="cannot listen on nowhere"):
        ReportServer(str(store), host="nowhere.invalid", port=0, run=None, keep=None)
    file = run("report", "--serve", "-o", "report.html", "--store", store)

    assert (taken.code, "Address already in use" in taken.err, "--port" in taken.err) == (2, True, True)
    assert (file.code, "--serve neither writes a file nor prints JSON" in file.err) == (2, True)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_however_it_ends_nothing_is_left(store: Path, end: signal.Signals) -> None:
    """The store has the same files, and the next server has the same port at once."""
    with layerstore.open(store) as opened:
        opened.report()  # makes the index
    before = {path for path in store.rglob("*") if path.name != "lock.mdb"}
    port = 0
    for _ in range(2):
        words = [
            *("env", "--default-signal=INT"),  # whoever runs the tests in the background may have it ignored
            sys.executable,
            "-m",
            "layerstore.cli",
            "--store",
            str(store),
            "report",
            "--serve",
            "--port",
            str(port),
        ]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith(" until Ctrl-C\n")
        port = int(line.rpartition(":")[2].partition("/")[0])
        assert asked(port)[0] == 200
        process.send_signal(end)
        assert process.wait(30) == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[end]
        process.stdout.close()

    assert {path for path in store.rglob("*") if path.name != "lock.mdb"} == before


def test_open_shows_the_page_in_a_browser(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was named, or a temporary one; without a browser, its address is said."""
    shown: list[str] = []

    def show(url: str) -> bool:
        shown.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", show)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    named = run("report", "--open", "-o", "a page.html", "--store", store)
    other = run("report", "--open", "--store", store)
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    nowhere = run("report", "--open", "--store", store)

    assert (named.code, other.code, nowhere.code) == (0, 0, 16)
    assert shown[0] == f"file://{tmp_path}/a%20page.html"
    assert Path(shown[1].removeprefix("file://")).read_bytes().startswith(b"<!doctype html>")
    assert shown[1].startswith(f"file://{tmp_path}/layerstore-")
    assert f"no browser was found to open file://{tmp_path}/layerstore-" in nowhere.err
