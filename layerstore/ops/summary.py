"""A composite in words for programs: what ``--json`` prints and ``layerstore.json`` beside the shards keeps."""

import json
from collections.abc import Mapping

from layerstore.history.staleness import LayerAge, Staleness
from layerstore.ops.composition import Composition

SCHEMA = 1


def summary(composition: Composition) -> dict[str, object]:
    """Return what *composition* is made of."""
    base = composition.base
    return {
        "run": base.run,
        "step": base.step,
        "attempt": base.attempt,
        "commit": composition.commit,
        "policy": composition.policy,
        "parameters": dict(composition.parameters),
        "layers": {
            entry.layer: {
                "run": entry.origin.run,
                "attempt": entry.origin.attempt,
                "step": entry.origin.step,
                "version": entry.version.id,
            }
            for entry in composition.layers
        },
        "staleness": staleness_fields(composition.staleness),
        "older_than_due": list(composition.older_than_due),
    }


def staleness_fields(staleness: Staleness) -> dict[str, object]:
    """Return the report of what was mixed."""
    return {
        "oldest": _age_fields(staleness.oldest),
        "optimizer_steps": {str(step): count for step, count in staleness.optimizer_steps.items()},
        "layers": {age.layer: {"steps": age.steps, "saves": age.saves} for age in staleness.layers},
    }


def _age_fields(age: LayerAge) -> dict[str, object]:
    return {
        "layer": age.layer,
        "run": age.run,
        "attempt": age.attempt,
        "step": age.step,
        "steps": age.steps,
        "saves": age.saves,
    }


def summary_bytes(fields: Mapping[str, object]) -> bytes:
    """Return *fields* as the content of a file."""
    return json.dumps({"schema": SCHEMA, **fields}, indent=2, ensure_ascii=False).encode() + b"\n"
