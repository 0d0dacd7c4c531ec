"""
Chromium without a window, driven through its own protocol over a pair of pipes: no library, no port, no network.

One browser serves a module of tests; each page is a tab of its own, closed afterwards.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_SECONDS_MAX = 30.0


def program() -> str | None:
    """Return the browser that is installed, if one is."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Navigated(Exception):
    """The page was loaded anew before it could answer."""


class Browser:
    """A running browser."""

    def __init__(self, path: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser wants the pipes as its descriptors 3 and 4, so they are moved out of the way of these first.
        ends = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (to_browser, from_browser)]
        nowhere = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, end, descriptor) for end, descriptor in zip(ends, (3, 4), strict=True)]
        words = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(path, words, os.environ, file_actions=[*nowhere, *pipes])
        for descriptor in (to_browser, from_browser, *ends):
            os.close(descriptor)
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError):
            self.call("Browser.close")
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        deadline = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._process, signal.SIGKILL)
            time.sleep(0.02)

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Have the browser do *method*; return what it answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(time.monotonic() + _SECONDS_MAX)
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def wait_for(self, method: str, *, session: str) -> dict[str, Any]:
        """Return the next event *method* of *session*, or the one that came already."""
        deadline = time.monotonic() + _SECONDS_MAX
        while True:
            for event in self.events:
                if event["method"] == method and event.get("sessionId") == session:
                    self.events.remove(event)
                    return event
            self._next(deadline)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise OSError("the browser says nothing any more")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message


@dataclass
class Page:
    """A tab."""

    browser: Browser
    session: str
    target: str
    complaints: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have the tab do *method*."""
        return self.browser.call(method, session=self.session, **parameters)

    def load(self, path: Path | str, *, fragment: str = "") -> None:
        """Show the file *path*, or a URL, by an address that ends in *fragment*."""
        self.call("Page.navigate", url=(path if isinstance(path, str) else path.resolve().as_uri()) + fragment)
        self.browser.wait_for("Page.loadEventFired", session=self.session)

    def look(self, expression: str) -> Any:
        """Return the value of a JavaScript *expression*."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of the first element of *selector*."""
        return str(self.look(f"document.querySelector({json.dumps(selector)}).innerText"))

    def mouse(self, kind: str, x: float, y: float, *, shift: bool = False) -> None:
        """Let the mouse move, press or release at a place of the window."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, modifiers=8 * shift, **button)

    def click(self, x: float, y: float, *, shift: bool = False) -> None:
        """Click at a place of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, shift=shift)

    def click_on(self, selector: str, *, text: str = "") -> None:
        """Click the first element of *selector* that is shown and whose text begins with *text*."""
        box = self.look(
            f"""(() => {{
                const found = [...document.querySelectorAll({json.dumps(selector)})]
                    .find((each) => each.innerText.startsWith({json.dumps(text)}) && each.getClientRects().length);
                found.scrollIntoView({{block: "center"}});
                const box = found.getBoundingClientRect();
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        self.click(*box)

    def choose(self, selector: str, value: str) -> None:
        """Choose the option *value* of a list."""
        self.look(
            f"""(() => {{
                const node = document.querySelector({json.dumps(selector)});
                node.value = {json.dumps(value)};
                node.dispatchEvent(new Event("change"));
            }})()"""
        )

    def press(self, key: str) -> None:
        """Press and release a key that makes no sign."""
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        code = codes | {"ArrowDown": 40, "PageUp": 33, "PageDown": 34, "Escape": 27}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code[key])

    def emulate(self, **features: str) -> None:
        """Show the page as on a device with these media features."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def printed(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def said(self) -> list[str]:
        """Return all that was written to the console, thrown, refused or asked of a network since the tab opened."""
        self.look("0")  # what came before this answer has arrived
        for event in self.browser.events:
            if event.get("sessionId") == self.session:
                self.complaints += _complaint(event)
        self.browser.events = [event for event in self.browser.events if event.get("sessionId") != self.session]
        return self.complaints


def _complaint(event: dict[str, Any]) -> list[str]:
    parameters = event["params"]
    match event["method"]:
        case "Runtime.consoleAPICalled":
            return [f"console: {parameters['args']}"]
        case "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            return [f"thrown: {details.get('exception', {}).get('description', details['text'])}"]
        case "Log.entryAdded":
            return [f"log: {parameters['entry']['text']}"]
        case "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            return [] if url.startswith(("file:", "data:")) else [f"asked for: {url}"]
        case "Page.javascriptDialogOpening":
            return [f"dialog: {parameters['message']}"]
    return []


@contextlib.contextmanager
def opened(
    browser: Browser, path: Path | str, *, fragment: str = "", width: int = 1280, height: int = 900
) -> Iterator[Page]:
    """Yield a new tab that shows the file *path*, or a URL."""
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page = Page(browser, session, target)
    for domain in ("Page", "Runtime", "Log", "Network"):
        page.call(f"{domain}.enable")
    page.resize(width, height)
    try:
        page.load(path, fragment=fragment)
        yield page
    finally:
        browser.call("Target.closeTarget", targetId=target)
