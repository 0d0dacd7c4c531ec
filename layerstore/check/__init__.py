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
