"""``layerstore demo``: a training goes through a store and comes out bit-identical; everything is measured."""

from layerstore.live.demo.run import STEPS, STEPS_MIN, Audience, DemoResult, StepLoss, run_demo
from layerstore.live.demo.stores import Collected, Mixture, Resized, Usage

__all__ = [
    "STEPS",
    "STEPS_MIN",
    "Audience",
    "Collected",
    "DemoResult",
    "Mixture",
    "Resized",
    "StepLoss",
    "Usage",
    "run_demo",
]
