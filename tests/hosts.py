"""
Two hosts on one machine: each has a network namespace, a name, a disk of its own, and a mount of the shared folder.

Both kinds of mounts keep for a while what they have seen, and what they have not: what one host has written, the other
may see late. JuiceFS is a real one, and bindfs one that starts at once.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

KINDS = ("bindfs", "juicefs")
LATE_SECONDS = 0.5
"""How long a mount keeps what it has seen."""
_MOUNT_SECONDS_MAX = 30
_NEW_NETWORK, _NEW_NAME = 0x40000000, 0x04000000


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two."""

    name: str
    address: str
    interface: str
    namespace: str
    """Its network namespace."""
    shared: str
    """The shared folder, as this host has it mounted."""
    own: str
    """Its own disk, with its index."""

    @property
    def facts(self) -> dict[str, str]:
        """What `enter` wants, as JSON knows it."""
        return asdict(self)

    def command(self, *words: str) -> list[str]:
        """Return what runs a command on this host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *words]

    def kill(self) -> None:
        """Kill everything that runs on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @property
    def received_bytes(self) -> int:
        """What has come over its network."""
        path = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        done = subprocess.run(["ip", "netns", "exec", self.namespace, "cat", path], check=True, capture_output=True)
        return int(done.stdout)


def enter(host: Host) -> None:
    """Let this process, which has no threads yet, be on *host*."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{host.namespace}").open("rb") as namespace:
        _done(libc.setns(namespace.fileno(), _NEW_NETWORK))
    _done(libc.unshare(_NEW_NAME))
    socket.sethostname(host.name)
    settle(host)
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface


def settle(host: Host, *, setenv: Callable[[str, str], None] = os.environ.__setitem__) -> None:
    """Keep the index of this process, and the user's cache, on the disk of *host*."""
    setenv("LAYERSTORE_MANIFEST_DIR", f"{host.own}/index")
    setenv("XDG_CACHE_HOME", f"{host.own}/cache")


def _done(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def two_hosts(folder: Path, kind: str) -> Iterator[tuple[Host, Host]]:
    """Make two hosts below *folder*, whose shared folder is of this *kind*; skip the test where that cannot be done."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(_mounted(folder, kind, name)) for name in ("one", "two"))
        mark = secrets.token_hex(3)
        here, there = f"ls{mark}a", f"ls{mark}b"
        namespaces = [stack.enter_context(_namespace(f"layerstore-{here}")) for here in (here, there)]
        link = ["link", "add", here, "netns", namespaces[0], "type", "veth", "peer", "name", there]
        _ip(*link, "netns", namespaces[1])
        hosts = [
            Host(name, f"10.214.9.{number}", interface, namespace, str(shared), str(shared.with_name(f"disk-{name}")))
            for number, (name, interface, namespace, shared) in enumerate(
                zip(("one", "two"), (here, there), namespaces, (first, second), strict=True), 1
            )
        ]
        for host in hosts:
            Path(host.own).mkdir()
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]


@contextmanager
def hosts_apart(folder: Path, count: int) -> Iterator[tuple[list[Host], Host]]:
    """
    Make *count* hosts below *folder* that share a network and no folder; yield them, and one more, for servers.

    This process reaches them, too.
    """
    with ExitStack() as stack:
        mark = secrets.token_hex(2)
        network = f"10.214.{10 + secrets.randbelow(246)}"  # others may exist: of another worker, or of a killed run
        server = stack.enter_context(_namespace(f"layerstore-{mark}s"))
        _ip("-n", server, "link", "add", "switch", "type", "bridge")
        found = []
        for number, name in enumerate((*(f"host{number}" for number in range(count)), "server"), 1):
            near, far = f"ls{mark}n{number}", f"ls{mark}f{number}"
            namespace = server if name == "server" else stack.enter_context(_namespace(f"layerstore-{mark}{number}"))
            _ip("-n", server, "link", "add", far, "type", "veth", "peer", "name", near)
            _ip("-n", server, "link", "set", far, "master", "switch", "up")
            if namespace != server:
                _ip("-n", server, "link", "set", near, "netns", namespace)
            own = folder / f"disk-{name}"
            own.mkdir()
            host = Host(name, f"{network}.{number}", near, namespace, shared="", own=str(own))
            _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", near)
            for interface in (near, "lo"):
                _ip("-n", namespace, "link", "set", interface, "up")
            found.append(host)
        near, far = f"ls{mark}n0", f"ls{mark}f0"
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", server)
        _ip("-n", server, "link", "set", far, "master", "switch", "up")
        _ip("addr", "add", f"{network}.254/24", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", server, "link", "set", "switch", "up")
        yield found[:-1], found[-1]


@contextmanager
def two_mounts(folder: Path, kind: str, *, late_seconds: float = LATE_SECONDS) -> Iterator[tuple[Path, Path]]:
    """Mount one shared folder of this *kind* twice below *folder*; skip the test where that cannot be done."""
    with _mounted(folder, kind, "one", late_seconds) as one, _mounted(folder, kind, "two", late_seconds) as two:
        yield one, two


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    if os.getuid() or shutil.which("ip") is None or not _ip("netns", "add", name, check=False):
        pytest.skip("no network namespace can be made here")
    try:
        yield name
    finally:
        _ip("netns", "del", name)  # with it goes the link


def _ip(*words: str, check: bool = True) -> bool:
    return not subprocess.run(["ip", *words], check=check, capture_output=True).returncode


@contextmanager
def _mounted(folder: Path, kind: str, name: str, late_seconds: float = LATE_SECONDS) -> Iterator[Path]:
    """Mount the shared folder of *folder* for the host *name*."""
    place = folder / f"shared-{name}"
    place.mkdir()
    command = {"bindfs": _bindfs, "juicefs": _juicefs}[kind](folder, name, late_seconds)
    if os.getuid() or shutil.which(command[0]) is None:
        pytest.skip(f"{kind} cannot be mounted here")
    with (folder / f"{kind}-{name}.log").open("wb") as log:
        subprocess.run([*command, str(place)], check=True, stdout=log, stderr=log, timeout=_MOUNT_SECONDS_MAX)
    deadline = time.monotonic() + _MOUNT_SECONDS_MAX
    while not place.is_mount():
        assert time.monotonic() < deadline, (folder / f"{kind}-{name}.log").read_text(errors="replace")[-2000:]
        time.sleep(0.05)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _bindfs(folder: Path, _: str, late_seconds: float) -> list[str]:
    (folder / "served").mkdir(exist_ok=True)
    late = ",".join(f"{what}_timeout={late_seconds}" for what in ("entry", "attr", "negative"))
    return ["bindfs", "-o", late, str(folder / "served")]


def _juicefs(folder: Path, name: str, late_seconds: float) -> list[str]:
    meta = f"sqlite3://{folder}/meta.db"
    if shutil.which("juicefs") is not None and not (folder / "meta.db").exists():
        command = ["juicefs", "format", "--storage", "file", "--bucket", f"{folder}/blocks/", meta, "volume"]
        subprocess.run(command, check=True, capture_output=True, timeout=_MOUNT_SECONDS_MAX)
    late = [f"--{what}-cache={late_seconds}s" for what in ("entry", "dir-entry", "attr", "negative-entry")]
    return ["juicefs", "mount", "-d", "--no-usage-report", f"--cache-dir={folder}/cache-{name}", *late, meta]
