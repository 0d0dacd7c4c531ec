"""
The remotes of a store: ``remotes.json``, which maps names to URLs. A URL never holds a key or a password.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from layerstore.arguments import checked
from layerstore.errors import AlreadyExists, IntegrityError, InvalidInput, NotFound
from layerstore.history import forget_pushed
from layerstore.json_text import parse_json
from layerstore.layers import check_name, is_name, typed
from layerstore.layout import is_url
from layerstore.limits import OWN_JSON_BYTES_MAX
from layerstore.nearest import did_you_mean, nearest
from layerstore.redact import shown_url
from layerstore.storage import Repository

SCHEMES = ("s3", "gs", "az", "file", "memory")
_CLOUD_SCHEMES = ("s3", "gs", "az")


@checked
class Remotes:
    """The remotes of one store, by name."""

    def __init__(self, repo: Repository) -> None:
        self._opened = repo

    @property
    def _repo(self) -> Repository:
        """The store's repository; raises if it was closed."""
        self._opened.check_open()
        return self._opened

    def urls(self) -> dict[str, str]:
        """
        Return all URLs, by name; a hand-edited URL that may contain a key is cut to its scheme.

        Raises:
            IntegrityError: The file is damaged.
        """
        return {name: shown_url(url) for name, url in self._recorded().items()}

    def _recorded(self) -> dict[str, str]:
        path = self._repo.layout.remotes
        data = self._repo.files.read_if_there(path, size_bytes_max=OWN_JSON_BYTES_MAX)
        if data is None:
            return {}
        try:
            urls = parse_json(data)
            if not isinstance(urls, dict) or not all(isinstance(url, str) for url in urls.values()):
                raise ValueError("it is not a map of names to URLs")
        except ValueError as exc:
            raise IntegrityError(
                f"{path} is damaged: {exc}", hint="remove it, then layerstore remote add writes it anew"
            ) from exc
        return dict(sorted(urls.items()))

    def add(self, name: str, url: str) -> str:
        """
        Add *name* for the bucket at *url*; return the URL as recorded. Sends no request.

        Raises:
            AlreadyExists: The name already has a different URL.
            InvalidInput: *url* is not a URL, or *name* is not a valid name.
        """
        check_name(name, what="the remote's name")
        url = checked_url(url)
        check_elsewhere(url, self._repo.layout.root)

        def add_url(urls: dict[str, str]) -> None:
            if urls.setdefault(name, url) != url:
                shown = shown_url(urls[name])
                raise AlreadyExists(
                    f"remote {name!r} is {shown} already", hint=f"layerstore remote remove {typed(name)}"
                )

        self._change(add_url)
        return url

    def remove(self, name: str) -> str:
        """
        Forget the remote *name* and what was pushed to it; return its URL. The bucket itself is not touched.

        *name* may be the URL of a bucket that was pushed to without a name.

        Raises:
            NotFound: There is no such remote.
            InvalidInput: The bucket at that URL has a name.
        """
        urls = self.urls()
        if name not in urls and is_url(name):
            return self._forget(checked_url(name), urls)
        removed: list[str] = []

        def remove_url(urls: dict[str, str]) -> None:
            if name not in urls:
                raise _no_remote(name, urls)
            removed.append(urls.pop(name))

        self._change(remove_url)
        url = shown_url(removed[0])
        if url not in self.urls().values():
            forget_pushed(self._repo, url)
        return url

    def _forget(self, url: str, urls: dict[str, str]) -> str:
        named = [name for name in urls if urls[name] == url]
        if named:
            raise InvalidInput(f"{url} is remote {named[0]!r}", hint=f"layerstore remote remove {typed(named[0])}")
        self._repo.prepare_writing()
        if not forget_pushed(self._repo, url):
            raise NotFound(
                f"nothing was pushed to {url}, or pulled from it", hint="layerstore remote list lists the others"
            )
        return url

    def url(self, name: str | None = None) -> str:
        """
        Return the URL of the remote *name*, which may itself be a URL; None means the only remote.

        Raises:
            NotFound: There is no remote of that name.
            InvalidInput: No name was given and there are several; or this store is itself a remote.
        """
        if name is not None and is_url(name):
            check_elsewhere(url := checked_url(name), self._repo.layout.root)
            return url
        if self._repo.remote is not None:
            raise InvalidInput(f"{self._repo.remote} is a remote itself", hint="layerstore clone makes a store of it")
        urls = self.urls()
        if name is None and len(urls) == 1:
            return next(iter(urls.values()))
        if name is None and urls:
            raise InvalidInput(f"there are several remotes: {', '.join(urls)}", hint="name one of them, or a URL")
        if name is None or name not in urls:
            raise _no_remote(name, urls)
        return urls[name]

    def _change(self, change: Callable[[dict[str, str]], None]) -> None:
        """Apply *change* to the remotes, under a lock against other processes."""

        def changed() -> bytes:
            urls = self._recorded()
            change(urls)
            return json.dumps(dict(sorted(urls.items())), indent=2).encode() + b"\n"

        self._repo.prepare_writing()
        self._repo.rewrite(self._repo.layout.remotes, changed)


def check_elsewhere(url: str, root: Path) -> None:
    """Raise InvalidInput if *url* is the folder of the store at *root*, which would not be a second copy."""
    folder = folder_at(url)
    if folder is not None and folder.resolve() == root.resolve():
        raise InvalidInput(f"{url} is this very folder; nothing was changed", hint="name another folder")


def folder_at(url: str) -> Path | None:
    """Return the folder of a ``file`` *url*; None for any other URL."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _no_remote(name: str | None, urls: dict[str, str]) -> NotFound:
    if not urls:
        return NotFound("this store has no remote", hint="layerstore remote add NAME URL, or name a URL")
    hint = did_you_mean(nearest(name or "", urls), else_="layerstore remote list lists them")
    shown = name if name is None or is_name(name) else shown_url(name)
    return NotFound(f"there is no remote {shown!r}", hint=hint)


# -- URLs ----------------------------------------------------------------------------------------------------------


def checked_url(url: str) -> str:
    """
    Return *url* as it is recorded and shown.

    Raises:
        InvalidInput: *url* is not a URL of a bucket, or contains a password.
    """
    shown = shown_url(url)
    try:
        parts = urlsplit(url)
    except ValueError:  # not chained: its text repeats the URL, and perhaps a key
        raise InvalidInput(f"{shown!r} is not a remote", hint="s3://BUCKET/PREFIX or file:///FOLDER") from None
    if not parts.scheme:
        refuse_folder(url)
    if parts.scheme not in SCHEMES:
        raise InvalidInput(
            f"{shown!r} is not a remote", hint=f"URLs begin with {', '.join(f'{each}://' for each in SCHEMES)}"
        )
    is_cloud = parts.scheme in _CLOUD_SCHEMES
    if parts.query or parts.fragment or (parts.scheme != "file" and not _is_place(parts)):
        raise InvalidInput(
            f"{shown!r} holds more than a bucket and a prefix",
            hint=f"keys belong in the environment; {credentials_hint(url)}",
        )
    if is_cloud and not parts.netloc:
        raise InvalidInput(f"{shown!r} names no bucket", hint=f"{parts.scheme}://BUCKET/PREFIX")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise InvalidInput(f"{shown!r} names no folder", hint="file:///ABSOLUTE/PATH")
    return url.rstrip("/") if parts.path.strip("/") or parts.netloc else url


def refuse_folder(text: str) -> None:
    """Raise InvalidInput if *text* is the path of a folder: a remote is given as a URL."""
    folder = _folder_meant(text)
    if folder is not None:
        raise InvalidInput(f"the folder {text} is not a URL", hint=f"write {folder.as_uri()}")


def _folder_meant(text: str) -> Path | None:
    """Return the folder if *text* is the path of one; None if *text* may be a key, which no message may repeat."""
    try:
        path = Path(text).expanduser().resolve()
        is_new = text.startswith(("/", "./", "../", "~/")) and path.parent != Path("/") and path.parent.is_dir()
        return path if is_new or path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # a name that is too long, a NUL, a user that does not exist
        return None


def _is_place(parts: SplitResult) -> bool:
    """Whether a URL has only a bucket and a prefix, and no key, percent-encoded or not."""
    return re.fullmatch(r"[A-Za-z0-9._$-]*", parts.netloc) is not None and "@" not in unquote(parts.path)


def credentials_hint(url: str) -> str:
    """Return the hint that lists the variables with credentials for the server at *url*."""
    scheme = url.partition(":")[0].lower()
    if scheme == "s3":
        return "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or AWS_PROFILE"
    if scheme == "gs":
        return "set GOOGLE_APPLICATION_CREDENTIALS to the path of your key file"
    return "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
