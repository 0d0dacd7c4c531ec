"""
The way of a store from an older format to this layerstore's: one frozen module for each step.

How to add one: docs/adr/0024-migrations.md.
"""

from layerstore.migrations.runner import STEPS, Migration, Taken, migrate, plan_migration
from layerstore.migrations.step import NewFile, Older, Step

__all__ = ["STEPS", "Migration", "NewFile", "Older", "Step", "Taken", "migrate", "plan_migration"]
