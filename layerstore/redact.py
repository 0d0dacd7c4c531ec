"""
URLs for people: how much of a URL a message, a list or a lock file may show.

A key that somebody has put into a URL, in the wrong part or with a typing error, must not reach a terminal, a log or
a file. So a URL is shown whole only if it cannot hold a key: if it is a scheme, a bucket or host, and a path.
"""

import re
from urllib.parse import unquote

_SCHEMES = ("s3", "gs", "az", "file", "memory", "http", "https", "ftp", "sftp", "ssh", "hf", "abfs", "abfss", "gcs")
"""Schemes are shown; anything else before a colon may be a key."""

_HARMLESS = re.compile(r"(?P<slashes>/*+)(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._$-]*)(:[0-9]{1,5})?(/[^@]*)?")
_URL = rf"(?:[A-Za-z][A-Za-z0-9+.-]*://|(?:{'|'.join(_SCHEMES)}):/|(?:s3|gs|az|https?):(?!/))"
_KEY_OF_A_PLACE = r"[^\s:]++:(?=\S*@)"
"""``ID:KEY@BUCKET``, whatever precedes it; ``HOST:/PATH`` does not match."""
_IN_TEXT = re.compile(rf"(?<!\S)([('\"\[{{<]*+)(?!{_URL}){_KEY_OF_A_PLACE}\S+|\b{_URL}\S+", re.IGNORECASE)
_PUNCTUATION = ":;,.)]}'\"’”…"


def shown_url(url: str) -> str:
    """
    Return *url*, whatever it was meant to be, without anything that may be a secret.

    >>> shown_url("s3://bucket/prefix"), shown_url("s3://bucket/prefix?X-Signature=abc")
    ('s3://bucket/prefix', 's3://bucket/prefix?…')
    >>> shown_url("s3://key:secret@bucket/prefix"), shown_url("s3:/key:secret@bucket"), shown_url("key:secret@bucket")
    ('s3://…', 's3://…', '…')
    """
    scheme, colon, rest = url.partition(":")
    is_known = bool(colon) and scheme.lower() in _SCHEMES
    if scheme.lower() == "file" and rest.startswith("///"):
        parts = re.split("([?#])", rest, maxsplit=1)  # all other characters are valid in a folder's name
        return f"{scheme}:{''.join(parts[:2])}…" if parts[1:] else url
    head, mark, tail = re.fullmatch(r"([^?#]*)([?#]?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]  # always
    match = _HARMLESS.fullmatch(unquote(head))
    if match is not None and "@" not in unquote(tail) and (is_known or match["slashes"].startswith("//")):
        return f"{scheme}:{head}{mark}{'…' if mark else ''}"
    return f"{scheme}://…" if is_known else "…"


def redacted(text: str) -> str:
    """
    Return *text* with `shown_url` applied to each URL in it, and to anything else that may be a URL with a key.

    >>> redacted("there is no run 's3://key:secret@bucket'; s3://bucket/prefix: no room is left")
    "there is no run 's3://…'; s3://bucket/prefix: no room is left"
    >>> redacted("there is no run 'key:secret@bucket'; cannot mount host:/export on /data/run:/x")
    "there is no run '…'; cannot mount host:/export on /data/run:/x"
    """
    return _IN_TEXT.sub(_redacted, text)


def _redacted(match: re.Match[str]) -> str:
    before = match[1] or ""
    url = match[0][len(before) :].rstrip(_PUNCTUATION)
    return before + shown_url(url) + match[0][len(before) + len(url) :]
