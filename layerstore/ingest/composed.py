"""What ``layerstore.json`` says of a folder that compose wrote, if it is ingested again."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstore.errors import LayerstoreError
from layerstore.filenames import SUMMARY
from layerstore.json_text import parse_json
from layerstore.limits import OWN_JSON_BYTES_MAX
from layerstore.storage import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A folder that compose wrote."""

    summary: dict[str, Any]
    """The summary; empty if it cannot be read."""

    @property
    def is_mixture(self) -> bool:
        """Whether its layers may be from several saves."""
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # it may be anybody's
            return "mean" in self.summary or any(
                age["steps"] != 0 for age in self.summary["staleness"]["layers"].values()
            )
        return True

    def note(self, step: int) -> str | None:
        """Return a note for an ingest of *step*; None if something else was saved there since."""
        with contextlib.suppress(KeyError, TypeError):  # it may be anybody's
            count, layers = len(self.summary["compact"]), len(self.summary["layers"])
            if count and self.summary["step"] == step:
                return (
                    f"{count} of {layers} layers were composed from a save that was not kept bit for bit "
                    f"({self.summary['run']}@{step}): they are stored as they are here, not as training had them"
                )
        return None


def composed(repo: Repository, folder: Path) -> Composed | None:
    """Return what the summary in *folder* says; None if it has none."""
    summary = None
    # A summary that cannot be read is still one: then its layers may be from several saves.
    with contextlib.suppress(LayerstoreError, ValueError):
        data = repo.files.read_if_there(folder / SUMMARY, size_bytes_max=OWN_JSON_BYTES_MAX)
        if data is None:
            return None
        summary = parse_json(data)
    return Composed(summary=summary if isinstance(summary, dict) else {})
