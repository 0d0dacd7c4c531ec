"""The command line: one file per command; installed as ``layerstore.cli``."""
