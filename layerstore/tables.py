"""
Results as tables: lists of dataclasses that pandas can take, under the names of ``--json``.

pandas is imported only when a frame is requested.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from layerstore.errors import Unsupported
from layerstore.json_fields import json_fields

if TYPE_CHECKING:
    from pandas import DataFrame

Row = TypeVar("Row")


class Table(list[Row]):
    """A list of results, shown one per line; an empty table shows why it is empty."""

    def __init__(
        self,
        rows: Iterable[Row] = (),
        *,
        if_empty: str = "nothing was found",
        fields: Callable[[Row], Mapping[str, object]] = json_fields,
    ) -> None:
        super().__init__(rows)
        self.if_empty = if_empty
        self._fields = fields

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]" if self else f"[]  # {self.if_empty}"

    def to_pandas(self) -> "DataFrame":
        """
        Return a frame with a row for each result; its columns are the fields of ``--json``, with times as datetimes.

        Raises:
            Unsupported: pandas is not installed.
        """
        return data_frame(map(self._fields, self))


def data_frame(rows: Iterable[Mapping[str, object]]) -> "DataFrame":
    """Return *rows* as a frame: nested fields get columns of their own, such as ``kinds.master.status``."""
    try:
        import pandas
    except ImportError as exc:
        raise Unsupported("to_pandas needs pandas", hint="pip install pandas") from exc
    frame = pandas.json_normalize([dict(row) for row in rows])
    for column in {"time", "dropped"} & set(frame.columns):
        frame[column] = pandas.to_datetime(frame[column])
    return frame
