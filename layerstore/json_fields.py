"""
The single conversion from dataclasses to JSON: the fields of a result that ``--json`` prints.

These names are documented (docs/reference/cli.md), and programs rely on them. Attributes may be renamed; these names
must not change.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path

# Class -> its fields in JSON, in order: the name of an attribute, or ``name=attribute`` if the two differ;
# ``name=#attribute`` is the length of the attribute. A dataclass that is not listed has all its fields under their own
# names.
_FIELDS = {
    "Ingested": "run step attempt commit is_new record_healed layers=#layers layers_saved=#layers_saved objects_new "
    "objects_reused bytes_new bytes_reused objects_healed reused_read bytes_derived seconds",
    "LogEntry": "run attempt step commit time=time_ns layers_saved bytes_new pins pushed has_moments",
    "SaveTiming": "blocked_seconds durable_seconds visible_seconds copied_bytes written_bytes queued",
    "LayerLine": "layer run attempt step version parameters frozen bytes=bytes_by_kind",
    "CommitView": "run step attempt fork save_number commit pin time=time_ns world_size stage flavour tag policy "
    "policy_parameters mixture=is_mixture supersedes pins layers_saved size_bytes layers files beside_bytes "
    "has_moments metrics",
    "Diff": "a b layers same_state bytes_same bytes_changed bytes_only_a bytes_only_b",
    "DiffSide": "run step commit pin world_size stage",
    "LayerDiff": "layer same=is_same status kinds bytes_changed",
    "Stats": "run commits pins logical_bytes unique_bytes physical_bytes saved_ratio unneeded missing runs kinds "
    "layers left_out",
    "Amount": "logical_bytes unique_bytes",
    "Pin": "pin=name run=record.run step=record.step commit=base time=observed.time_ns layers=#record.layers "
    "attempt=record.attempt policy=record.policy.name",
    "CommitRecord": "run attempt step",
    "DroppedCommit": "commit=commit.id time=commit.observed.time_ns dropped=dropped_ns",
    "Dropped": "run step attempt commit bytes=size_bytes inherited_by pins tip is_tip",
    "GcOutcome": "pins orphans young unfinished trash waiting unserved",
    "CommitFate": "run step attempt commit reference time=time_ns",
    "Gone": "count bytes=size_bytes",
    "Verdict": "ok damaged orphans records objects bytes_read objects_read sample hurt=standing.hurt "
    "whole=standing.whole",
    "Damage": "kind id path needed_by reason costs",
    "Cost": "commit=holder layers everything",
    "Hurt": "commit=reference layers everything stands",
    "Fetched": "kind path from=source bytes=size_bytes",
    "PinElsewhere": "pin=name reference store=source",
    "Diagnosis": "ok path findings versions",
    "Migration": "path found format unfinished=is_unfinished steps",
    "StepOutcome": "source=step.source target=step.target summary=step.summary files bytes=size_bytes backup",
    "Step": "source target summary",
    "Model": "name architecture source parameters",
    "Training": "world_size steps every saves interval_seconds bytes_per_second disk_bytes dtype movement "
    "copy_bytes_per_second keep_last keep_every prices",
}


def json_fields(result: object) -> dict[str, object]:
    """
    Return the JSON fields of the dataclass *result*, including nested ones.

    Times in nanoseconds become ISO 8601; numbers that JSON lacks (NaN and the infinities) become null.
    """
    names = _FIELDS.get(type(result).__name__)
    if names is None:
        assert is_dataclass(result), f"{type(result).__name__} is no dataclass"
        names = " ".join(field.name for field in fields(result))
    pairs = (pair.partition("=") for pair in names.split())
    return {name: _plain(result, attribute or name) for name, _, attribute in pairs}


def _plain(owner: object, attribute: str) -> object:
    value = attrgetter(attribute.removeprefix("#"))(owner)
    if attribute.startswith("#"):
        return len(value)
    return iso_time(value) if attribute.endswith("_ns") else json_value(value)


def json_value(value: object) -> object:
    """
    Return *value* in JSON's types: mappings, lists, texts, numbers and null.

    >>> json_value({"steps": (1, float("nan")), "at": Path("/store")})
    {'steps': [1, None], 'at': '/store'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [json_value(each) for each in value]
    return json_fields(value)


def iso_time(time_ns: int) -> str:
    """
    Return *time_ns* as ISO 8601, for programs.

    >>> iso_time(1_500_000)
    '1970-01-01T00:00:00.001500Z'
    """
    seconds, rest = divmod(time_ns, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"


def short_time(time_ns: int) -> str:
    """
    Return *time_ns* as ISO 8601 without the fraction of its second.

    >>> short_time(1_500_000)
    '1970-01-01T00:00:00Z'
    """
    return iso_time(time_ns).partition(".")[0] + "Z"
