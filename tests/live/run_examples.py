"""Run the examples of the documentation on CPU ranks, one after another in one launch.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.live.run_examples --out OUT --steps 4 --endpoint URL

Each leaves what it printed in ``OUT/<name>.txt``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import runpy
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import patch_environment

from tests.deepspeed.trainer import forget_state
from tests.live.cases import BUCKET, EXAMPLES, EXAMPLES_FOLDER
from tests.remote.servers import credentials


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", required=True)
    parser.add_argument("--endpoint", required=True)
    arguments = parser.parse_args()
    os.environ |= credentials(arguments.endpoint)
    deepspeed.init_distributed(dist_backend="gloo")
    for name in EXAMPLES:
        if name == "with_accelerate":
            # On CPUs it wants to be told; where there are accelerators it finds them.
            with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
                PartialState(cpu=True)
        store = "bucket-store" if name == "with_bucket" else "store"
        sys.argv = [name, "--store", str(arguments.out / store), "--steps", arguments.steps]
        sys.argv += ["--bucket", BUCKET] if name == "with_bucket" else []
        sys.argv += ["--out", str(arguments.out / name)] if name in {"with_trainer", "with_accelerate"} else []
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == 0:
                output = stack.enter_context((arguments.out / f"{name}.txt").open("a"))
                stack.enter_context(contextlib.redirect_stdout(output))
            runpy.run_path(str(EXAMPLES_FOLDER / f"{name}.py"), run_name="__main__")
        forget_state()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # taking down the threads of torch and gloo now and then aborts the process


if __name__ == "__main__":
    main()
