"""
Compose: from a query to a composite, as pure data. Nothing is read but records, and nothing written.

A policy, a recipe or a mean decides which version of each layer is taken. The rooms of formats write it.
"""

from layerstore.compose.choose import (
    Composition,
    as_newest_exact,
    cautions,
    check_splittable,
    compose_by_policy,
    compose_exact,
    compose_latest,
    load_versions,
    mismatch,
    naming_damage,
)
from layerstore.compose.means import average, base_of_mean
from layerstore.compose.recipes import compose_by_recipe
from layerstore.compose.sound_layers import without_damaged

__all__ = [
    "Composition",
    "as_newest_exact",
    "average",
    "base_of_mean",
    "cautions",
    "check_splittable",
    "compose_by_policy",
    "compose_by_recipe",
    "compose_exact",
    "compose_latest",
    "load_versions",
    "mismatch",
    "naming_damage",
    "without_damaged",
]
