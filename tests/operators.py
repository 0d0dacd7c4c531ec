"""
DeepSpeed's C++ operators: compiled once in a working copy, into a folder beside pytest's cache.

    python -m tests.operators

A test that needs one compiles it otherwise, while others wait: two of them take a minute and more on two cores.

Torch locks a folder of operators by a file, and whoever is killed while it compiles leaves that file: from then on
every process that wants the operator waits for ever. In the user's own cache that may have happened to anybody.
"""

import os

from filelock import FileLock, Timeout

from tests.environment import REPOSITORY
from tests.ranks.launch import cpu_environment

FOLDER = REPOSITORY / ".pytest_cache" / "operators"


def claim() -> FileLock | None:
    """Let this process and its children compile into the folder; None where others that live compile there, too."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(FOLDER)
    alone = FileLock(FOLDER / "claimed", blocking=False)
    try:
        alone.acquire()
    except Timeout:
        return None
    for left in FOLDER.rglob("lock"):
        left.unlink()
    return alone


def main() -> None:
    """Compile all that the tests train with."""
    os.environ |= cpu_environment()
    claimed = claim()
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder, ShareMemCommBuilder

    for builder in (ShareMemCommBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder):
        builder().load(verbose=False)
    if claimed is not None:
        claimed.release()


if __name__ == "__main__":
    main()
