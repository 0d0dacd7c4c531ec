"""
What was found, a JSON object a line: appended as soon as it is known, so that an interrupted run goes on from there.

The last line may be torn by the interruption: it counts as not written. Of two rows of one key the later one counts.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """The rows in one file, which a single process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, *rows: Row) -> None:
        """Append *rows*; an interruption leaves the first of them, so the one that says "complete" comes last."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell() and not self._ends_whole():
                file.write(b"\n")  # what was torn is a line of its own, which is not a JSON
            file.write("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def find(self, **key: object) -> list[Row]:
        """Return the rows whose fields are those of *key*."""
        return [row for row in self._all() if all(row.get(name) == value for name, value in key.items())]

    def _all(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
