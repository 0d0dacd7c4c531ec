"""``layerstore demo``: train through a store, prove the result bit-identical, and measure everything."""

from layerstore.demo.run import run_demo
