"""Verify, repair and doctor."""

from layerstore.check.damage import Cost, Damage, Hurt
from layerstore.check.doctor import Diagnosis, diagnose
from layerstore.check.repair import (
    Fetched,
    Repaired,
    RestoredIdentity,
    execute_repair,
    opened_sources,
    plan_repair,
    restore_identity,
)
from layerstore.check.verify import Verdict, parse_sample, verify_store

__all__ = [
    "Cost",
    "Damage",
    "Diagnosis",
    "Fetched",
    "Hurt",
    "Repaired",
    "RestoredIdentity",
    "Verdict",
    "diagnose",
    "execute_repair",
    "opened_sources",
    "parse_sample",
    "plan_repair",
    "restore_identity",
    "verify_store",
]
