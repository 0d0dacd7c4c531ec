"""``layerstore demo``: a training goes through a store and comes out bit-identical; everything is measured."""

from layerstore.live.demo.run import STEPS, STEPS_MIN, run_demo

__all__ = ["STEPS", "STEPS_MIN", "run_demo"]
