"""Moved to layerstore.tree."""

from layerstore.tree import *  # noqa: F403
