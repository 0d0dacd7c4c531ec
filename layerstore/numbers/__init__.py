"""Computations on numbers: convert element types, average masters, compare layers."""

from layerstore.numbers.distance import (
    SECOND_MOMENT,
    Distance,
    Meter,
    Movements,
    Numbers,
    Weighted,
    WeightedMeter,
    can_measure,
    movement_of,
    nothing_between,
    weighted_movements,
)
from layerstore.numbers.geometry import box_runs
from layerstore.numbers.means import mean
from layerstore.numbers.rounding import can_convert, can_derive, convert, equal_bytes, newly_infinite
