"""``layerstore demo``: train through a store, prove the result bit-identical, and measure everything."""

from layerstore.demo.run import STEPS, STEPS_MIN, run_demo

__all__ = ["STEPS", "STEPS_MIN", "run_demo"]
