"""
What a migration remembers while it is under way: enough for whoever finishes it after a crash.

It is durable before ``store.json`` is exchanged, and gone with one rename once all is done.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from layerstore.errors import IntegrityError
from layerstore.storage.files import Files
from layerstore.storage.layout import Layout

# A path takes up to 400 bytes here, and a store has at most some hundred thousand records.
_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What one step was about."""

    source: int
    """The format that it takes."""
    target: int
    """The format that it gives."""
    backup: str
    """Its folder in ``backups/``."""
    files: tuple[str, ...]
    """Every file that was made before ``store.json`` was exchanged: what is not among them came meanwhile."""


def journal_path(layout: Layout) -> Path:
    """Return where the journal is."""
    return layout.migrating / "journal.json"


def ended(layout: Layout) -> Path:
    """Return what the folder of a migration is called once it has nothing left to do but to go."""
    return layout.root / "migrating.done"


def encode_journal(journal: Journal) -> bytes:
    """Return the text of *journal*."""
    return json.dumps(asdict(journal), indent=1).encode()


def read_journal(layout: Layout, files: Files) -> Journal | None:
    """
    Return the journal of a migration that was interrupted; None where there is none.

    Raises:
        IntegrityError: It is damaged: it was whole when it got its name.
    """
    path = journal_path(layout)
    if not files.exists(path):
        return None
    try:
        fields = json.loads(files.read(path, size_bytes_max=_BYTES_MAX))
        return Journal(**fields | {"files": tuple(fields["files"])})
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise IntegrityError(
            f"{path}, which a migration that was interrupted has left, is damaged ({exc}); nothing was changed",
            hint="look into docs/operating/migrations.md: what to do with an interrupted migration",
        ) from exc
