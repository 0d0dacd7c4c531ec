"""Inputs lie in memory: each is written before it is parsed."""

from tests.faults.conftest import fast_path

__all__ = ["fast_path"]
