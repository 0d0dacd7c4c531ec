"""Read the summary, ``layerstore.json``, of a folder that compose wrote, when the folder is ingested again."""

import contextlib
from collections.abc import Iterator
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
        """Whether the folder's layers may come from several saves."""
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # anyone may have written the file
            return "mean" in self.summary or any(
                age["steps"] != 0 for age in self.summary["staleness"]["layers"].values()
            )
        return True

    def notes(self, step: int) -> Iterator[str]:
        """Yield what the commit will not show about its layers' origin; nothing if the summary's step is not *step*."""
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # anyone may have written the file
            if self.summary["step"] != step:
                return
            layers, base = len(self.summary["layers"]), f"{self.summary['run']}@{step}"
            if self.summary.get("mixture"):
                yield f"it was composed from several saves ({base} and others): log shows them as one"
            if count := len(self.summary["compact"]):
                yield (
                    f"{count} of {layers} layers were composed from a save that was not kept bit for bit "
                    f"({base}): they are stored as this folder has them, not as training had them"
                )


def composed(repo: Repository, folder: Path) -> Composed | None:
    """Return the composed *folder* with its summary; None if *folder* has no summary."""
    summary = None
    # Even if its summary cannot be read, compose wrote the folder: its layers may come from several saves.
    with contextlib.suppress(LayerstoreError, ValueError):
        data = repo.files.read_if_there(folder / SUMMARY, size_bytes_max=OWN_JSON_BYTES_MAX)
        if data is None:
            return None
        summary = parse_json(data)
    return Composed(summary=summary if isinstance(summary, dict) else {})
