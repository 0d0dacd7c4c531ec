"""
Results as tables, for notebooks and pandas: lists of dataclasses, under the names of ``--json``.

pandas is imported only when a frame is asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from layerstore.errors import Unsupported
from layerstore.json_fields import json_fields
from layerstore.units import size

if TYPE_CHECKING:
    from pandas import DataFrame

Row = TypeVar("Row")

_SHOWN_ROWS_MAX = 100


class Table(list[Row]):
    """A list of results that a notebook draws as a table; if it is empty, it says why."""

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

    def _repr_html_(self) -> str:
        return html_table(map(self._fields, self), caption="" if self else self.if_empty)

    def to_pandas(self) -> "DataFrame":
        """
        Return a frame with a line for each result; its columns are the fields of ``--json``, times are times.

        Raises:
            Unsupported: pandas is not installed.
        """
        return frame(map(self._fields, self))


def frame(rows: Iterable[Mapping[str, object]]) -> "DataFrame":
    """Return *rows* as a frame: what is nested gets columns of its own, such as ``kinds.master.status``."""
    try:
        import pandas
    except ImportError as exc:
        raise Unsupported("to_pandas needs pandas", hint="pip install pandas") from exc
    made = pandas.json_normalize([dict(row) for row in rows])
    for column in {"time", "dropped"} & set(made.columns):
        made[column] = pandas.to_datetime(made[column])
    return made


def html_table(rows: Iterable[Mapping[str, object]], *, caption: str = "") -> str:
    """Return *rows* as a small HTML table, with every text escaped; of many, the first hundred."""
    rows = iter(rows)
    shown = list(islice(rows, _SHOWN_ROWS_MAX))
    left_out = sum(1 for _ in rows)
    columns = list(dict.fromkeys(name for row in shown for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(name, row.get(name)) for name in columns)}</tr>" for row in shown)
    notes = [caption, f"and {left_out} more" if left_out else ""]
    said = f"<caption>{escape('; '.join(filter(None, notes)))}</caption>"
    return f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
        return f"<td style='text-align:right'>{escape(size(value))}</td>"
    align = " style='text-align:right'" if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return f"<td{align}>{escape(_text(name, value))}</td>"


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(name, each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(name, each) for each in value)
    return size(value) if isinstance(value, int) and "bytes" in name else str(value)
