"""Draw them: ``python -m tests.docs.drawn``, or those that are named."""

import sys
import tempfile
from pathlib import Path

from tests.docs.drawn import PICTURES, drawn
from tests.inspect.chromium import Browser, program

path = program()
if path is None:
    raise SystemExit("no Chromium is installed (Debian: chromium)")
with tempfile.TemporaryDirectory() as profile:
    browser = Browser(path, Path(profile))
    try:
        for name in sys.argv[1:] or PICTURES:
            target = drawn(name)
            target.write_text(PICTURES[name](browser))
            print(target, target.stat().st_size)
    finally:
        browser.close()
