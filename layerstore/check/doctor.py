"""
Doctor: can a store's promises be kept at this path?

It tries everything that the promises depend on, once; it does not test a filesystem under many concurrent writers. It
works on a store, even one that cannot be opened, and on a folder that is not a store yet.
"""

import os
import platform
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from layerstore.check import probes
from layerstore.check.probes import Finding
from layerstore.disk import Files, Mount, host_name, hosts_seen, mount_of
from layerstore.errors import FULL_DISK_ERRNOS, LayerstoreError, NoStore, StorageIO
from layerstore.layout import Layout, layout_at
from layerstore.storage import INDEX_DIR_VARIABLE, engine_version, index_directory, index_problem, open_repository

PACKAGES = ("lmdb", "xxhash", "msgpack", "isal", "numpy", "torch", "deepspeed", "transformers", "accelerate")

_PURGED = frozenset({"lustre", "gpfs", "beegfs"})
_NFS = frozenset({"nfs", "nfs4"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OPEN_FILES_MIN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The doctor's report."""

    _JSON: ClassVar = "ok path findings versions"

    path: str
    """The path as given."""
    findings: tuple[Finding, ...]
    versions: dict[str, str | None]
    """Versions of Python, the system and libraries; None for those not installed."""

    def __repr__(self) -> str:
        findings = ", ".join(
            f"{finding.check} ({finding.verdict})" for finding in self.findings if finding.verdict != "ok"
        )
        fitness = "fit" if self.ok else "not fit"
        return f"<Diagnosis of {self.path}: {fitness} for a store{f'; {findings}' * bool(findings)}>"

    @property
    def problems(self) -> list[Finding]:
        """The findings that break a promise."""
        return [finding for finding in self.findings if finding.verdict == "problem"]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def diagnose(path: Path, files: Files) -> Diagnosis:
    """
    Examine *path*, a store or a folder that may become one; trial files are removed again.

    Raises:
        InvalidInput: It is not a path.
    """
    layout = layout_at(path)
    findings = [*_store(path, layout, files), *_filesystem(layout.root), *_hosts(layout)]
    untried: list[str] = []
    findings += _findings_of("index", _index(layout, files), untried)
    findings += _findings_of("writing", _tried_out(layout, files, untried), untried)
    if untried:
        findings = [*(finding for finding in findings if finding.check != "space"), _full(layout, untried)]
    if sys.byteorder != "little":
        text = "this machine is big-endian; checkpoints and stores are little-endian"
        findings.append(Finding("host", "problem", text, "use another host"))
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_files != resource.RLIM_INFINITY and open_files < _OPEN_FILES_MIN:
        text = f"only {open_files} files may be open at once"
        findings.append(Finding("host", "note", text, f"ulimit -n {_OPEN_FILES_MIN}"))
    return Diagnosis(path=str(path), findings=tuple(findings), versions=_versions())


def _findings_of(check: str, findings: Iterable[Finding], untried: list[str]) -> list[Finding]:
    """Return *findings*; if *check* fails, return its error as a finding or, on a full disk, add it to *untried*."""
    try:
        return list(findings)
    except LayerstoreError as exc:
        if _is_full(exc):
            untried.append(check)
            return []
        return [Finding(check, "problem", str(exc), exc.hint)]


def _is_full(exc: LayerstoreError) -> bool:
    return isinstance(exc, StorageIO) and exc.errno in FULL_DISK_ERRNOS


def _full(layout: Layout, untried: list[str]) -> Finding:
    """Return the one finding for a full disk, which leaves open how the *untried* checks would have ended."""
    hint = "free some space there, or choose another disk"
    if layout.identity.exists():
        hint = "layerstore gc --dry-run shows what a gc frees; then layerstore doctor again"
    text = f"the disk is full, or a quota is used up: {', '.join(untried)} could not be tried"
    return Finding("space", "problem", text, hint)


def _below_home(path: Path) -> str:
    """Return *path* without the name of the user's home folder, because people post these reports."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        # The path is outside the home folder, or this user has none.
        return str(path)


def _store(path: Path, layout: Layout, files: Files) -> Iterator[Finding]:
    try:
        repo = open_repository(path, files)
    except NoStore:
        if files.exists(layout.root) and not files.is_directory(layout.root):
            yield Finding("store", "problem", "none, and this is not a folder", "name a folder, existing or not")
        elif files.is_directory(layout.root) and files.names(layout.root):
            hint = f"a store needs a folder of its own: layerstore init {path / 'store'}"
            yield Finding("store", "note", "none, and this is not empty", hint)
        else:
            yield Finding("store", "ok", f"none yet; layerstore init {path} makes one")
    except LayerstoreError as exc:
        yield Finding("store", "problem", f"cannot be opened: {exc}", exc.hint)
    else:
        identity = repo.identity
        repo.catalog.close()
        yield Finding("store", "ok", f"format {identity.format}, id {identity.store_id}")
        if identity.unknown_flags:
            text = f"it uses {', '.join(identity.unknown_flags)}, so it can be read, not written"
            yield Finding("store", "note", text, "use a newer layerstore")
    if Path(os.path.abspath(path)) != layout.root:  # noqa: PTH100  # resolve() would follow links
        yield Finding("store", "note", f"the path leads through a link to {_below_home(layout.root)}")


def _filesystem(root: Path) -> Iterator[Finding]:
    mount = mount_of(root)
    if mount is None:
        yield Finding("filesystem", "note", "its kind is not known: the system has no list of mounts")
        return
    mounted = f"{mount.kind}, mounted at {_below_home(mount.point)} ({','.join(mount.options)})"
    if mount.kind in _IN_MEMORY:
        text = f"{mounted}: it is memory, and lost when the power goes"
        yield Finding("filesystem", "problem", text, "keep a store that matters on a disk")
    elif mount.kind == "overlay":
        yield Finding("filesystem", "note", f"{mounted}: it may vanish with its container", "use a mounted volume")
    elif mount.is_network:
        text = f"{mounted}: a network filesystem: other hosts may see a commit late, never in part, "
        text += "and what a collection removes frees its space only at the next collection"
        yield Finding("filesystem", "note", text, "docs/internals/durability.md lists what a store needs of it")
    else:
        yield Finding("filesystem", "ok", mounted)
    if mount.kind in _PURGED:
        text = f"many sites remove files from {mount.kind} that were not read for weeks, and a layer that does not "
        text += "change is not read"
        hint = "ask for the site's rule; layerstore verify finds what is gone, ingesting the checkpoint again heals it"
        yield Finding("purging", "note", text, hint)

    if mount.kind in _NFS:
        yield from _nfs(mount)


def _nfs(mount: Mount) -> Iterator[Finding]:
    if not {"lookupcache=pos", "lookupcache=none"} & set(mount.how):
        text = "a file that was looked up before another host created it may stay missing here for a minute"
        hint = "mount with lookupcache=positive; otherwise layerstore retries for seconds, then reports it missing"
        yield Finding("mount", "note", text, hint)
    if "soft" in mount.how or "softerr" in mount.how:
        text = "mounted soft: if the server is busy for too long, reads and writes fail, and saves with them"
        yield Finding("mount", "note", text, "mount with hard")


def _hosts(layout: Layout) -> Iterator[Finding]:
    """Report which hosts have held this store's locks: any host that shares the store should appear."""
    seen = hosts_seen(layout.locks)
    mount = mount_of(layout.root)
    others = ", ".join(f"{host} ({since})" for host, since in sorted(seen.items()) if host != host_name())
    if mount is not None and not mount.is_network:
        if others:
            text = f"{others} locked this store, and this filesystem is local: it is a copy, or served by this host"
            hint = "if this host serves it, mount it here as the other hosts do; otherwise locks are not shared"
            yield Finding("hosts", "note", text, hint)
    elif others:
        yield Finding("hosts", "ok", f"seen here: {others}")
    elif layout.locks.is_dir():
        text = "no other host has locked this store yet; run layerstore reindex on one: doctor must then name it"
        yield Finding("hosts", "ok", text)


def _index(layout: Layout, files: Files) -> Iterator[Finding]:
    # There may be no store yet, and so no id.
    folder = index_directory(layout, store_id="STORE-ID")
    mount = mount_of(folder)
    where = "inside the store" if folder == layout.index else f"at {_below_home(folder)}"
    if os.environ.get(INDEX_DIR_VARIABLE):
        where += f", as {INDEX_DIR_VARIABLE} says"
    where += f", on {'an unknown filesystem' if mount is None else mount.kind}"
    nearest = next(path for path in (folder, *folder.parents) if path.is_dir())
    if nearest == layout.index:
        nearest = layout.tmp if layout.tmp.is_dir() else layout.root
    if not os.access(nearest, os.W_OK | os.X_OK):
        hint = f"set {INDEX_DIR_VARIABLE} to a folder on a disk of this node that you can write to"
        text = f"{where}; it cannot be written there, so queries work without it, more slowly"
        yield Finding("index", "note", text, hint)
        return
    with probes.scratch(files, nearest) as trial:
        problem = index_problem(trial)
    if problem is None:
        yield Finding("index", "ok", where)
    else:
        hint = f"nothing is lost without an index; set {INDEX_DIR_VARIABLE} to a folder on a disk of this node"
        yield Finding("index", "note", f"{where}; it does not work there: {problem}", hint)


def _tried_out(layout: Layout, files: Files, untried: list[str]) -> Iterator[Finding]:
    """Yield the findings of all probes, run in the store's ``tmp/`` or else in the nearest existing folder."""
    root = layout.root
    place = next(path for path in (root, *root.parents) if path.exists())
    if layout.identity.exists() and layout.tmp.is_dir():
        place = layout.tmp
    if not place.is_dir():
        yield Finding("writing", "problem", f"{_below_home(root)} is not a folder", "choose another path")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        text = "you have no permission to write here"
        if files.exists(layout.identity):
            yield Finding("writing", "note", f"{text}: queries and compose work, nothing else was tried")
        else:
            yield Finding("writing", "problem", text, "choose another path, or change its owner or mode")
        return
    with probes.scratch(files, place) as folder:
        tried = {
            "writing": probes.modes(files, folder, root=root),
            "exclusive create": probes.exclusive_create(files, folder),
            "hard links": probes.hard_links(files, folder),
            "rename": probes.renames(files, folder),
            "locks": probes.locks(folder, mount_of(root)),
            "fsync": probes.fsync(files, folder),
            "reflink": probes.reflink(files, folder),
            "names": probes.names(files, folder),
            "clock": probes.clock(files, folder),
            "space": probes.space(files, folder),
        }
        # The probes are generators, and run only here, so that a failing probe does not stop the others.
        for check, findings in tried.items():
            yield from _findings_of(check, findings, untried)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "layerstore": _installed("layerstore"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "lmdb engine": engine_version(),
    }
    return versions | {package: _installed(package) for package in PACKAGES}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
