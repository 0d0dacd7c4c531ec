"""
Jobs that are killed while they save, and what comes back: `python -m tests.bench chaos`, with the package ckpt-chaos.

``run`` gives ckpt-chaos one job after another and prints its verdicts; ``job`` is the job under ZeRO-3.
"""

from tests.bench.chaos.run import run

__all__ = ["run"]
