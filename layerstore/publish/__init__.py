"""The one transaction that makes a record visible, pins, and a commit that many ranks make together."""

from layerstore.publish.pins import check_pin_free, check_pin_name, delete_pin, make_pin, read_pins
from layerstore.publish.rank_parts import (
    Frozen,
    GivenUp,
    InheritedLayerLost,
    JointCommit,
    fail_share,
    join,
    objects_due,
    parts_of,
    write_share,
)
from layerstore.publish.staging import Checksums, KeptFile, SourceReader, Staging, Witness, crc32_of, stage_version
from layerstore.publish.transaction import Published, Transaction, republish, retire

__all__ = [
    "Checksums",
    "Frozen",
    "GivenUp",
    "InheritedLayerLost",
    "JointCommit",
    "KeptFile",
    "Published",
    "SourceReader",
    "Staging",
    "Transaction",
    "Witness",
    "check_pin_free",
    "check_pin_name",
    "crc32_of",
    "delete_pin",
    "fail_share",
    "join",
    "make_pin",
    "objects_due",
    "parts_of",
    "read_pins",
    "republish",
    "retire",
    "stage_version",
    "write_share",
]
