"""
One frozen module per step of the store's format, in order; there is none yet.

How to add one: docs/adr/0024-migrations.md.
"""

from layerstore.migrations.step import Step

STEPS: tuple[Step, ...] = ()
"""Each leads from one format to the next, the last one to the format that this layerstore writes."""
