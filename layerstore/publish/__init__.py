"""The transaction that makes a record visible, pins, and joint commits of many ranks."""

from layerstore.publish.pins import check_pin_free, check_pin_means, check_pin_name, delete_pin, make_pin
from layerstore.publish.rank_parts import (
    FrozenWeights,
    GivenUp,
    InheritedLayerLost,
    JointCommit,
    OlderVersions,
    copy_commit,
    copy_share,
    fail_share,
    join,
    joined_losses,
    objects_due,
    parts_of,
    write_share,
)
from layerstore.publish.timings import SaveTiming, note_timing, read_timings
from layerstore.publish.transaction import Published, Transaction, republish, retire
