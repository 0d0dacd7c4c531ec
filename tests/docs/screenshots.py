"""
The screenshots of the report, of made-up runs: ``python -m tests.docs.screenshots`` writes them to docs/pictures.

Other versions of Chromium and other fonts draw other pixels, so no test compares them.
"""

import base64
import tempfile
from pathlib import Path

import layerstore
from layerstore import Keep
from tests.docs.pages import DOCS
from tests.inspect.chromium import Browser, opened, program
from tests.inspect.made_up import History, build

SIZES = {"light": (1280, 960), "dark": (1280, 960), "phone": (390, 844)}


def main() -> None:
    """Draw them all."""
    path = program()
    if path is None:
        raise SystemExit("no Chromium is installed (Debian: chromium)")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        build(
            work / "store",
            History(run="sft", saves=28, layers=18, policy="parity", is_live=True, metrics=("eval_loss",)),
            History(run="drift", saves=28, layers=18, policy="drift", goes_back=(16,), is_live=True),
        )
        with layerstore.open(work / "store") as store:
            store.report(work / "report.html", keep=Keep(last=3, every=400))
        browser = Browser(path, work / "profile")
        try:
            for name, size in SIZES.items():
                _shoot(browser, work / "report.html", name, size)
        finally:
            browser.close()


def _shoot(browser: Browser, report: Path, name: str, size: tuple[int, int]) -> None:
    with opened(browser, report, width=size[0], height=size[1]) as page:
        page.emulate(**{"prefers-color-scheme": "dark" if name == "dark" else "light"})
        page.load(report)
        shot = page.call("Page.captureScreenshot", format="webp", quality=70)
        target = DOCS / "pictures" / f"report-{name}.webp"
        target.write_bytes(base64.b64decode(shot["data"]))
        print(target, target.stat().st_size)


if __name__ == "__main__":
    main()
