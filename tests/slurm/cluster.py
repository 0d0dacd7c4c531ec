"""Two nodes of Slurm on one machine, each with a network, a name and a daemon of its own; they share all files."""

import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which

import pytest

NODES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare")

WAIT_SECONDS_MAX = 300

CONFIG = """\
ClusterName=two
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
NodeName=n[1-2] CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""
"""A job that is queued again waits until its credentials have expired, by default for two minutes."""


class Cluster:
    """The nodes, and where their daemons leave what they say."""

    def __init__(self, folder: Path, spaces: Mapping[str, str]) -> None:
        self.folder = folder
        self._spaces = spaces
        """The network of each node."""

    def run(self, *words: str | Path, **environment: str) -> str:
        """Run a command on the first node, where somebody has logged in; return what it prints."""
        done = subprocess.run(
            self.on("n1", *words), env=self._environment(environment), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words} ends with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def said(self) -> str:
        """Return the ends of what the daemons have said."""
        return "\n".join(f"{path}: {path.read_text()[-1000:]}" for path in self.folder.glob("*.out"))

    def on(self, node: str, *words: str | Path) -> list[str]:
        """Return the command that runs *words* on *node*."""
        named = f"hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && exec {shlex.join(map(str, words))}"
        network = f"--net=/run/netns/{self._spaces[node]}"  # "ip netns exec" would hide the cgroups, which slurmd wants
        return ["nsenter", network, "unshare", "--uts", "--mount", "sh", "-c", named]

    @contextmanager
    def daemon(self, node: str, *words: str) -> Iterator[None]:
        """Run a daemon on *node*."""
        with (self.folder / f"{words[0]}-{node}.out").open("wb") as out:
            process = subprocess.Popen(self.on(node, *words), env=self._environment({}), stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of what runs, which jobs inherit."""
        return {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", **more}


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yield two nodes that wait for jobs; skip where there is no Slurm, or nobody may make a network."""
    missing = [name for name in PROGRAMS if which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"wants root and Slurm (apt-get install slurmctld slurmd slurm-client munge): no {missing}")
    (folder / "state").mkdir()
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{NODES[node]} {node}\n" for node in NODES))
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
    with ExitStack() as stack:
        made = Cluster(folder, stack.enter_context(_networks()))
        stack.enter_context(_munge(folder))
        stack.enter_context(made.daemon("n1", "slurmctld", "-D"))
        for node in NODES:
            (folder / node).mkdir()
            stack.enter_context(made.daemon(node, "slurmd", "-D"))
        look = "sinfo --noheader --Node --format=%T || true"  # the controller may not hear yet
        until(lambda: made.run("sh", "-c", look).split() == ["idle"] * 2, told=made.said)
        try:
            yield made
        finally:
            made.run("scancel", "--full", "--user=root")
            until(lambda: not made.run("squeue", "--noheader"), told=made.said)


def until(is_so: Callable[[], bool], *, told: Callable[[], str] = str) -> None:
    """Return once *is_so*; *told* says what there is instead."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, told()
        time.sleep(0.5)


@contextmanager
def _networks() -> Iterator[dict[str, str]]:
    """Yield the name of each node's network; the two are joined by a cable."""
    mark = secrets.token_hex(4)
    spaces = {node: f"layerstore-{node}-{mark}" for node in NODES}
    first, second = spaces.values()
    with ExitStack() as stack:
        for space in spaces.values():
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for node, space in spaces.items():
            _ip("-n", space, "address", "add", f"{NODES[node]}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
        yield spaces


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def _munge(folder: Path) -> Iterator[None]:
    """Let users be known to the daemons."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    options = [f"--{name}={path}" for name, path in files.items()]
    # It goes on even where the folders above belong to others.
    with (folder / "munged.out").open("wb") as out:
        process = subprocess.Popen(["munged", "--force", "--foreground", *options], stdout=out, stderr=out)
    try:
        until(files["socket"].exists)
        yield
    finally:
        process.terminate()
        process.wait()
