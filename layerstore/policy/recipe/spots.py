"""Places in a recipe, and errors that begin with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layerstore.errors import InvalidInput, LayerstoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where something stands in a recipe."""

    file: str
    """As the user named it."""
    line: int
    """Counted from 1."""
    column: int
    """Likewise, in characters."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def error(self, message: str, *, hint: str) -> InvalidInput:
        """Return the error that something is wrong here."""
        return InvalidInput(f"{self}: {message}", hint=hint, file=self.file, line=self.line, column=self.column)

    @contextmanager
    def located(self) -> Iterator[None]:
        """
        Let errors of ours begin with this place; class, hint and facts stay as they are.

        For what only others can find out: that a step is not in the store, that a layer does not fit its base.
        """
        try:
            yield
        except LayerstoreError as problem:
            problem.locate(self)
            raise
