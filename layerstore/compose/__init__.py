"""
Compose: turn a query into a composite, as pure data. Tensors are read only to find damage; nothing is written.

A policy, a recipe or a mean decides which version of each layer is used. The output formats write the composite.
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
