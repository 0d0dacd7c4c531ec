"""
Doctor: can a store's promises be kept at this place?

Tries out what they rest on, with several processes where that matters. Works on a store, on one that cannot be opened,
and on a folder that is not a store yet.
"""

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from layerstore.check import probes
from layerstore.check.probes import Race, race
from layerstore.errors import LayerstoreError, NoStore
from layerstore.layout import Layout, layout_at
from layerstore.storage import (
    MANIFEST_DIR_VARIABLE,
    Files,
    Mount,
    engine_version,
    index_problem,
    manifest_directory,
    mount_of,
    open_repository,
)

Verdict = Literal["ok", "note", "problem"]

PACKAGES = ("lmdb", "xxhash", "msgpack", "isal", "numpy", "torch", "deepspeed", "transformers", "accelerate")

_PURGED = frozenset({"lustre", "gpfs", "beegfs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_SKEW_SECONDS_MAX = 5 * 60.0
_FREE_BYTES_MIN = 1 << 30
_FREE_FILES_MIN = 100_000
_OPEN_FILES_MIN = 1024
# How long the catalog waits before it trusts a folder's times.
_GRANULARITY_NS_MAX = 2 * 10**9
_ELSEWHERE = "choose another filesystem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    """A *problem* breaks a promise; a *note* does not."""
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The doctor's report."""

    path: str
    """As it was given."""
    findings: tuple[Finding, ...]
    versions: dict[str, str | None]
    """Of Python, the system and libraries; None for those not installed."""

    @property
    def problems(self) -> list[Finding]:
        """The findings that break a promise."""
        return [finding for finding in self.findings if finding.verdict == "problem"]

    @property
    def ok(self) -> bool:
        """Whether there are none."""
        return not self.problems


def diagnose(path: Path, files: Files) -> Diagnosis:
    """
    Examine *path*, a store or a folder that may become one; trial files are removed again.

    Raises:
        InvalidInput: It is not a path.
    """
    layout = layout_at(path)
    findings = [*_store(path, layout, files), *_filesystem(layout.root)]
    findings += _asked("index", lambda: _index(layout, files))
    place = _place(layout)
    if place is None:
        findings.append(_problem("writing", f"{_shown(layout.root)} is not a folder", hint="choose another path"))
    elif os.access(place, os.W_OK | os.X_OK):
        findings += _tried_out(layout, place, files)
    else:
        findings.append(_unwritable(layout, files))
    findings += _surroundings()
    return Diagnosis(path=str(path), findings=tuple(findings), versions=_versions())


def _ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict="ok", text=text)


def _note(check: str, text: str, *, hint: str | None = None) -> Finding:
    return Finding(check=check, verdict="note", text=text, hint=hint)


def _problem(check: str, text: str, *, hint: str | None = None) -> Finding:
    return Finding(check=check, verdict="problem", text=text, hint=hint)


def _shown(path: Path) -> str:
    """Return *path* without the name of the user's home folder: reports are posted."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


# -- what is there -------------------------------------------------------------------------------------------------


def _store(path: Path, layout: Layout, files: Files) -> Iterator[Finding]:
    try:
        repo = open_repository(path, files)
    except NoStore:
        if files.exists(layout.root) and not files.is_directory(layout.root):
            yield _problem("store", "none, and this is no folder", hint="name a folder, there already or not")
        elif files.is_directory(layout.root) and files.names(layout.root):
            hint = f"a store wants a folder of its own: layerstore init {path / 'store'}"
            yield _note("store", "none, and this is not empty", hint=hint)
        else:
            yield _ok("store", f"none yet; layerstore init {path} makes one")
    except LayerstoreError as exc:
        yield _problem("store", f"cannot be opened: {exc}", hint=exc.hint)
    else:
        identity = repo.identity
        repo.catalog.close()
        yield _ok("store", f"format {identity.format}, id {identity.store_id}")
        if identity.unknown_flags:
            flags = ", ".join(identity.unknown_flags)
            yield _note("store", f"it uses {flags}, so it can be read, not written", hint="use a newer layerstore")
    if Path(os.path.abspath(path)) != layout.root:  # noqa: PTH100  # resolve() would follow links
        yield _note("store", f"the path leads through a link to {_shown(layout.root)}")


def _place(layout: Layout) -> Path | None:
    """Return the folder for trials: the store's ``tmp/``, else the nearest existing folder."""
    if layout.identity.exists() and layout.tmp.is_dir():
        return layout.tmp
    nearest = next(folder for folder in (layout.root, *layout.root.parents) if folder.exists())
    return nearest if nearest.is_dir() else None


def _filesystem(root: Path) -> Iterator[Finding]:
    mount = mount_of(root)
    if mount is None:
        yield _note("filesystem", "its kind is not known: the system has no list of mounts")
        return
    where = f"{mount.kind}, mounted at {_shown(mount.point)} ({','.join(mount.options)})"
    if mount.kind in _IN_MEMORY:
        yield _problem(
            "filesystem", f"{where}: it is memory, and gone with the power", hint="keep a store that matters on a disk"
        )
    elif mount.kind == "overlay":
        yield _note("filesystem", f"{where}: it may go with its container", hint="use a mounted volume")
    elif mount.is_network:
        yield _note(
            "filesystem",
            f"{where}: a network filesystem: other hosts may see a commit late, never in part; locks are leases, "
            "and a collection frees space one collection later",
            hint="docs/internals/durability.md says what is asked of it",
        )
    else:
        yield _ok("filesystem", where)
    if mount.kind in _PURGED:
        yield _note(
            "purging",
            f"many sites remove files from {mount.kind} that were not read for weeks, and a layer that does not change "
            "is not read",
            hint="ask for the site's rule; layerstore verify finds what is gone, ingesting the checkpoint again heals",
        )


def _index(layout: Layout, files: Files) -> Iterator[Finding]:
    try:
        folder = manifest_directory(layout, store_id="STORE-ID")
    except LayerstoreError as exc:
        yield _problem("index", str(exc), hint=exc.hint)
        return
    mount = mount_of(folder)
    where = "inside the store" if folder == layout.manifest else f"at {_shown(folder)}"
    if os.environ.get(MANIFEST_DIR_VARIABLE):
        where += f", as {MANIFEST_DIR_VARIABLE} says"
    where += f", on {'an unknown filesystem' if mount is None else mount.kind}"
    nearest = next(each for each in (folder, *folder.parents) if each.is_dir())
    if nearest == layout.manifest:
        nearest = layout.tmp if layout.tmp.is_dir() else layout.root
    if not os.access(nearest, os.W_OK | os.X_OK):
        hint = f"set {MANIFEST_DIR_VARIABLE} to a folder on a disk of this node that you can write to"
        yield _note("index", f"{where}; it cannot be written there, so answers come without it, slower", hint=hint)
        return
    with probes.scratch(files, nearest) as trial:
        problem = index_problem(trial)
    if problem is None:
        yield _ok("index", where)
    else:
        hint = f"nothing is lost without an index; set {MANIFEST_DIR_VARIABLE} to a folder on a disk of this node"
        yield _note("index", f"{where}; it does not work there: {problem}", hint=hint)


def _unwritable(layout: Layout, files: Files) -> Finding:
    if files.exists(layout.identity):
        return _note("writing", "you may not write here: questions and compose work, nothing else was tried")
    return _problem("writing", "you may not write here", hint="choose another path, or change its owner or mode")


# -- what is tried out ---------------------------------------------------------------------------------------------


def _tried_out(layout: Layout, place: Path, files: Files) -> list[Finding]:
    whole = layout.root if layout.root.is_dir() else None
    try:
        with probes.scratch(files, place) as folder:
            return [
                *_asked("writing", lambda: [_modes(probes.modes(files, folder, of=whole))]),
                *_asked("exclusive create", lambda: [_creates(probes.creates_exclusively(files, folder))]),
                *_asked("hard links", lambda: [_links(probes.links_exclusively(files, folder))]),
                *_asked("rename", lambda: [_renames(probes.renames_over(files, folder))]),
                *_asked("race", lambda: _raced(race(folder), mount_of(layout.root))),
                *_asked("fsync", lambda: [_synced(probes.syncs(files, folder))]),
                *_asked("reflink", lambda: [_shares(probes.shares_blocks(files, folder))]),
                *_asked("names", lambda: _named(probes.names(files, folder))),
                *_asked("clock", lambda: [_clocked(probes.clock(files, folder))]),
                *_asked("space", lambda: [_room(files, place)]),
            ]
    except LayerstoreError as exc:
        return [_problem("writing", str(exc), hint=exc.hint)]


def _asked(check: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return what *ask* finds; that it failed is a finding too."""
    try:
        return list(ask())
    except LayerstoreError as exc:
        return [_problem(check, f"could not be tried: {exc}", hint=exc.hint)]


def _modes(found: probes.Modes) -> Finding:
    text = f"possible; new files have the mode {found.new_file:04o}, new folders {found.new_folder:04o}"
    if found.is_open_to_all:
        hint = "checksums find accidents, not whoever changes a store on purpose: make a folder of your own in it"
        return _note("writing", f"{text}; but anybody may write here", hint=hint)
    if found.is_of_another:
        hint = "a store that several share needs a common group, the setgid bit on its folders and umask 002 for all"
        return _note("writing", f"{text}; the folder is another user's", hint=hint)
    return _ok("writing", text)


def _creates(is_exclusive: bool) -> Finding:
    if is_exclusive:
        return _ok("exclusive create", "a file that is there is not created again")
    return _problem("exclusive create", "a file that is there is created again", hint=_ELSEWHERE)


def _links(is_exclusive: bool | None) -> Finding:
    if is_exclusive:
        return _ok("hard links", "a name that is taken is not given again")
    text = "a name that is taken is given again"
    if is_exclusive is None:
        text = "neither they nor renames keep a name that is taken"
    return _problem("hard links", text, hint=_ELSEWHERE)


def _renames(is_right: bool) -> Finding:
    if is_right:
        return _ok("rename", "replaces a file")
    return _problem("rename", "does not replace a file", hint=_ELSEWHERE)


def _raced(found: Race, mount: Mount | None) -> Iterator[Finding]:
    processes = f"{found.contestants} processes, {found.rounds} rounds"
    problems = [
        f"{count} rounds with not just one winner of {what}"
        for count, what in ((found.created_wrongly, "a create"), (found.linked_wrongly, "a link"))
        if count
    ]
    problems += [f"{found.torn} files seen while they were replaced were not whole"] if found.torn else []
    if problems:
        yield _problem("race", f"{processes}: {'; '.join(problems)}", hint=_ELSEWHERE)
    else:
        yield _ok("race", f"{processes}: one winner each of every create and link; no file was seen in part")
    if found.missing:
        yield _note(
            "race",
            f"a file that is replaced by renaming is missing for a moment ({found.missing} times)",
            hint="a pin that is made anew may not be found at that moment; nothing else is replaced",
        )
    is_network = mount is not None and mount.is_network
    if is_network or found.flock == "absent":
        heard = {"works": "works on this host", "absent": "is absent", "blind": "does not keep others out"}
        yield _ok("locks", f"leases; flock {heard[found.flock]}")
    elif found.flock == "works":
        yield _ok("locks", "flock keeps other processes out, and lets them in afterwards")
    else:
        yield _note("locks", "flock does not keep others out: two commands may do the same work, and harm nothing")


def _synced(found: probes.Syncs) -> Finding:
    times = f"file {found.file_seconds * 1000:.2f} ms, folder {found.folder_seconds * 1000:.2f} ms"
    if found.has_folders:
        return _ok("fsync", times)
    text = f"{times}, but folders cannot be synced: a power cut may undo what was reported as saved"
    return _problem("fsync", text, hint="choose another filesystem for what must survive a power cut")


def _shares(can_share: bool) -> Finding:
    return _ok("reflink", "works: compose shares blocks with the store" if can_share else "none: compose copies")


def _named(found: probes.Names) -> Iterator[Finding]:
    if not found.has_case:
        yield _note("names", "upper and lower case are one: runs that differ by that alone become one")
    if not found.has_long:
        yield _note("names", "long names are refused: keep those of runs and pins short")
    if found.has_case and found.has_long:
        yield _ok("names", "long ones, told apart by case")


def _clocked(found: probes.Clock) -> Finding:
    granularity = f"times are kept to {_granularity(found.granularity_ns)}"
    text = f"the filesystem's differs from this host's by {abs(found.ahead_seconds):.2f} s; {granularity}"
    if abs(found.ahead_seconds) > _SKEW_SECONDS_MAX:
        hint = "ages are told by the filesystem's clock, so nothing is lost; but the times that log shows are odd"
        return _note("clock", text, hint=hint)
    if found.granularity_ns > _GRANULARITY_NS_MAX:
        return _problem("clock", text, hint=_ELSEWHERE)
    return _ok("clock", text)


def _granularity(nanoseconds: int) -> str:
    for unit, length in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if nanoseconds >= length:
            return f"{nanoseconds // length} {unit}"
    return f"{nanoseconds} ns"


def _room(files: Files, place: Path) -> Finding:
    room = files.room(place)
    many = "any number of files" if room.free_files is None else f"{room.free_files:,} more files"
    text = f"{room.free_bytes / 1e9:,.1f} of {room.total_bytes / 1e9:,.1f} GB free, {many}; a quota may allow less"
    has_few_files = room.free_files is not None and room.free_files < _FREE_FILES_MIN
    if room.free_bytes < _FREE_BYTES_MIN or has_few_files:
        hint = "layerstore gc frees what nothing needs; layerstore stats says what is stored"
        return _note("space", text, hint=hint)
    return _ok("space", text)


# -- around it -----------------------------------------------------------------------------------------------------


def _surroundings() -> Iterator[Finding]:
    if sys.byteorder != "little":
        yield _problem("host", "its numbers are big-endian, and those of checkpoints are not", hint="use another host")
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_files != resource.RLIM_INFINITY and open_files < _OPEN_FILES_MIN:
        yield _note("host", f"only {open_files} files may be open at once", hint=f"ulimit -n {_OPEN_FILES_MIN}")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "layerstore": _installed("layerstore"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "lmdb engine": engine_version(),
    }
    return found | {package: _installed(package) for package in PACKAGES}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
