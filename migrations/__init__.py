"""
Migrate a store from an older format to that of this layerstore, with one frozen module per step.

To add a step, see docs/adr/0024-migrations.md.
"""

from layerstore.migrations.runner import STEPS, Migration, migrate, plan_migration
from layerstore.migrations.step import Step
