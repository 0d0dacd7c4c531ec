"""
One HTML file that shows some facts: page, style, script, and the facts as JSON. The file loads nothing; if it is
served, it asks its server whether the store has changed.

Names in a store are untrusted text. They appear only in the JSON, with every character special to HTML escaped, and
the script sets them as text, never as markup. A content security policy allows that one script and nothing else.
"""

import base64
import hashlib
import json
import pkgutil
import re
from collections.abc import Mapping

BEGINS = b"<!doctype html>\n<!-- layerstore report -->\n"
"""The first bytes of every report, which distinguish it from any other file."""

# Mail and ticket systems accept attachments of this size.
PAGE_BYTES_MAX = 1_000_000

# The scripts share one scope; the last script starts the page.
_SCRIPTS = (
    "words.js",
    "run.js",
    "grid.js",
    "layers.js",
    "metrics.js",
    "storage.js",
    "timing.js",
    "retention.js",
    "picked.js",
    "compared.js",
    "pins.js",
    "link.js",
    "pointer.js",
    "page.js",
)
_SERVED_SCRIPT = "served.js"

_MARK = re.compile(r"\{\{([A-Z]+)\}\}")

# Characters that could end a script element, or begin another one.
_ESCAPED = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})


def render(facts: Mapping[str, object], *, version: str | None = None) -> bytes:
    """Return the page that shows *facts*; with a *version*, it reloads once its server has another version."""
    style, scripts = _piece("page.css"), list(_SCRIPTS)
    if version is not None:
        scripts, facts = [*scripts, _SERVED_SCRIPT], {**facts, "version": version}
    script = '"use strict";\n(() => {\n' + "\n".join(map(_piece, scripts)) + "})();\n"
    parts = {
        "POLICY": _policy(style=style, script=script) + ("" if version is None else "; connect-src 'self'"),
        "STYLE": style,
        "SCRIPT": script,
        "FACTS": json_for_html(facts),
    }
    page = _MARK.sub(lambda mark: parts[mark[1]], _piece("page.html")).encode()
    assert page.startswith(BEGINS)
    return page


def json_for_html(facts: Mapping[str, object]) -> str:
    r"""
    Return *facts* as JSON that is safe inside a script element.

    >>> json_for_html({"run": "</script>&é"})
    '{"run":"\\u003c/script\\u003e\\u0026\\u00e9"}'
    """
    return json.dumps(facts, separators=(",", ":"), ensure_ascii=True, allow_nan=False).translate(_ESCAPED)


def _policy(*, style: str, script: str) -> str:
    """Return a content security policy that allows this style and this script, by their hashes, and nothing else."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _piece(name: str) -> str:
    data = pkgutil.get_data(__package__, name)
    assert data is not None, f"{name} is not installed"
    return data.decode()
