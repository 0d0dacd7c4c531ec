"""
What a resume takes, until the next step is trained: from memory that the processes have outlived, and from a bucket.

The bucket is a real server (SeaweedFS) behind a link that carries 100 MB/s each way; that wants root.
"""

import os
import statistics
import tempfile
from pathlib import Path

from tests.bench.levels_job import Result
from tests.bench.loop import MEMORY
from tests.bench.ranked import RANKS, result_of
from tests.bench.remote import LINK_BYTES_PER_SECOND, slow_link
from tests.bench.report import Bar
from tests.remote.servers import KEY, SECRET, seaweedfs

MOST = 0.33
"""Of the time that a resume from the bucket takes, for one from memory."""


def run(folder: Path, *, gb: float, rounds: int, tokens: int) -> None:
    """Print what both take, in turns, each from when the processes are ready."""
    (folder / "server").mkdir()
    with (
        slow_link() as (inside, address),
        seaweedfs(folder / "server", address=address, inside=inside) as endpoint,
        tempfile.TemporaryDirectory(prefix="layerstore-bench-", dir=MEMORY) as memory,
    ):
        os.environ.update(
            AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_ENDPOINT_URL=endpoint, AWS_REGION="us-east-1"
        )
        found = result_of(
            "tests.bench.levels_job",
            folder,
            gb=gb,
            rounds=rounds,
            tokens=tokens,
            memory=f"{memory}/store",
            url="s3://first-bucket/store",
            cache=folder / "cache",
        )
    result = Result(**found)
    near, far = (statistics.median(seconds) for seconds in (result.memory, result.bucket))
    rate = LINK_BYTES_PER_SECOND / 1e6
    print(f"{RANKS} CPU ranks, state {result.state_bytes / 1e9:.2f} GB over all ranks, a link of {rate:.0f} MB/s")
    print(f"a save holds training up for {result.blocked:.2f} s; the bucket has it after {result.sent:.1f} s")
    print(f"resume and one step, median of {rounds}: from memory {near:.1f} s, from the bucket {far:.1f} s")
    print(Bar(what="from memory, of the time from the bucket", value=near / far, most=MOST).text(), flush=True)
