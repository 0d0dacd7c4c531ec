"""
PyTorch's own tests of torch.distributed.checkpoint, on CPU and gloo, with our writer and reader in the place of theirs.

    python -m tests.live.dcp.run_torch_tests FOLDER [FILE …] [--only PART …] [--log FILE]

FOLDER is ``test/distributed/checkpoint`` of a PyTorch checkout; ``expecttest`` must be installed. Tests that ask for
GPUs run without: in copies of the files, ``cuda`` is ``cpu``, ``nccl`` is ``gloo`` and FSDP, which needs a GPU, is
``fully_shard``; nobody counts GPUs.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import unittest
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal import common_distributed

from layerstore.dcp import StoreReader, StoreWriter
from layerstore.store import open_store

FILES = (
    "test_file_system_checkpoint_cpu",
    "test_fsspec",
    "test_checkpoint",
    "test_save_load_api",
    "test_planner",
    "test_dtensor_resharding",
    "e2e/test_e2e_save_and_load",
)
OURS = "LAYERSTORE_TORCH_TESTS_OURS"
"""Set where ours stand in: it reaches the processes that a test starts, which import this file too."""
FOR_CPU = (
    (r"\.cuda\((dist\.get_rank\(\))?\)", ""),
    (r"device=dist\.get_rank\(\)", 'device="cpu"'),
    (r"cpu:gloo,(cuda:nccl|\{self\.device_type\}:\{curr_backend\}|\{device\}:\{backend\})", "gloo"),
    (r"init_rpc=False\)", 'init_rpc=False, backend="gloo")'),
    (r"cuda(:\{[^}]*\}|:\d)?", "cpu"),
    ("nccl", "gloo"),
    ("from torch.distributed.fsdp import FullyShardedDataParallel as", "from __main__ import fully_sharded as"),
)


class PathWriter(StoreWriter):
    """Saves into the store at a path; each save is the next step of its only run."""

    def __init__(self, path: str | os.PathLike[str], *_: object, overwrite: bool = True, **__: object) -> None:
        super().__init__(path, run="run", step=1)
        self._overwrite = overwrite

    def reset(self, checkpoint_id: object = None) -> None:
        """Begin a save, elsewhere if *checkpoint_id* says so."""
        if checkpoint_id is not None:
            self._path = str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Choose the step."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not is_coordinator:
            return
        with open_store(self._path) as store:
            saved = store.log("run") if "run" in store.runs() else []
        newest = max((entry.step for entry in saved), default=0)
        self._options = replace(self._options, step=newest + 1 if self._overwrite else max(newest, 1))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether it is a path."""
        return "://" not in str(checkpoint_id)


class PathReader(StoreReader):
    """Loads the newest save of the store at a path."""

    def __init__(self, path: str | os.PathLike[str], *_: object, **__: object) -> None:
        self._path: object = path

    def reset(self, checkpoint_id: object = None) -> None:
        """Load from elsewhere, if *checkpoint_id* says so."""
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Open the store, which may not have been there before."""
        super().__init__(str(self._path), "run")
        return super().read_metadata(*args, **kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether it is a path."""
        return "://" not in str(checkpoint_id)


class UrlWriter(PathWriter):
    """Stands for what writes to URLs: which of the two is asked first, a test changes."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether it is a path."""
        return "://" not in str(checkpoint_id)


class UrlReader(PathReader):
    """Stands for what reads from URLs."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether it is a path."""
        return "://" not in str(checkpoint_id)


def fully_sharded(model: nn.Module, device_mesh: DeviceMesh | None = None, **_: object) -> nn.Module:
    """Shard *model*, as FSDP that needs no GPU does."""
    if isinstance(model, FSDPModule):
        return model
    if device_mesh is not None and device_mesh.ndim > 1:
        device_mesh = init_device_mesh("cpu", tuple(device_mesh.shape), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=device_mesh)
    return model


def _keep(*_: object, **__: object) -> Callable[[Any], Any]:
    return lambda test: test


def _fork(self: common_distributed.MultiProcessTestCase) -> None:
    """Start the ranks without importing everything again in each, which takes most of the time."""
    self._start_processes(multiprocessing.get_context("fork").Process)


def _stand_in() -> None:
    """Let nobody count GPUs, ranks be forked, and ours be where PyTorch's writers and readers are."""
    common_distributed.skip_if_lt_x_gpu = _keep
    common_distributed.MultiProcessTestCase._spawn_processes = _fork  # type: ignore[method-assign]
    if OURS in os.environ:
        for module in (dcp, filesystem, _storage_utils):
            module.FileSystemWriter, module.FileSystemReader = PathWriter, PathReader  # type: ignore[attr-defined]
        _fsspec_filesystem.FsspecWriter, _fsspec_filesystem.FsspecReader = UrlWriter, UrlReader  # type: ignore[misc,assignment]


_stand_in()


class _Outcomes(unittest.TestResult):
    """Prints what became of each test as a line of JSON."""

    def stopTest(self, test: unittest.TestCase) -> None:
        """Print the outcome."""
        super().stopTest(test)
        kinds = {"failed": self.failures, "error": self.errors, "skipped": self.skipped}
        said = {kind: of[-1][1] for kind, of in kinds.items() if of and of[-1][0] is test}
        outcome = next(iter(said), "passed")
        print(json.dumps({"test": test.id(), "outcome": outcome, "said": said.get(outcome, "")}), flush=True)


def _run_file(module: str, only: list[str]) -> None:
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*{part}*" for part in only]
    loader.loadTestsFromModule(import_module(module)).run(_Outcomes())


def _outcomes(path: Path, only: list[str], log: IO[str], *, ours: bool) -> dict[str, tuple[str, str]]:
    """Run the tests of the file *path* in a process of its own; return what became of each, and why."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path.parent), str(Path.cwd()), *sys.path])}
    environment |= {"OMP_NUM_THREADS": "1"} | ({OURS: "1"} if ours else {})  # threads do not survive a fork
    command = [sys.executable, "-m", "tests.live.dcp.run_torch_tests", "--file", path.stem, "--only", *only]
    found = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as running:
        assert running.stdout is not None, "it is a pipe"
        for line in running.stdout:
            log.write(line)
            if line.startswith('{"test"'):
                told = json.loads(line)
                found[told["test"]] = told["outcome"], told["said"]
    return found


def _for_cpu(file: Path, folder: Path) -> Path:
    text = file.read_text()
    for pattern, replacement in FOR_CPU:
        text = re.sub(pattern, replacement, text)
    copy = folder / file.name
    copy.write_text(text)
    return copy


def _reason(said: str) -> str:
    """Return the last error in *said*."""
    found = re.findall(r"^[\w.]*(?:Error|Exception|layerstore\.errors\.\w+): .*$", said, re.MULTILINE)
    return str((found or said.strip().splitlines() or ["no outcome"])[-1])[:200]


def _compare(path: Path, only: list[str], log: IO[str]) -> None:
    """Print a line for each test of *path* that does not pass both ways, and the sums."""
    plain = _outcomes(path, only, log, ours=False)
    ours = _outcomes(path, only, log, ours=True)
    passing = [test for test, (outcome, _) in plain.items() if outcome == "passed"]
    passed = [test for test in passing if ours.get(test, ("missing", ""))[0] == "passed"]
    print(f"{path.stem}: {len(plain)} tests; {len(passing)} pass plain, {len(passed)} of them with ours", flush=True)
    for test, (outcome, said) in plain.items():
        if outcome != "passed":
            print(f"  {outcome} plain: {test}: {_reason(said)}", flush=True)
        elif test not in passed:
            print(f"  NOT WITH OURS: {test}: {_reason(ours.get(test, ('', ''))[1])}", flush=True)


def main() -> None:
    """Compare every file, or run one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="tests whose names have one")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for everything that tests say")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        _run_file(args.file, args.only)
        return
    with TemporaryDirectory() as copies, args.log.open("a", buffering=1) as log:
        for file in args.files:
            _compare(_for_cpu(args.folder / f"{file}.py", Path(copies)), args.only, log)


if __name__ == "__main__":
    main()
