"""Rows as a table of HTML, which a notebook shows for an object: a table, a scan, changes.

Values come from anybody, so each is escaped, and cut. The size of the whole is bounded by the
constants below, whatever the rows hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain, islice
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa

from kvstore.errors import KVStoreError

T = TypeVar("T")

ROWS_SHOWN: Final = 20
ROWS: Final = ("key", "value")
"""The columns of a scan."""
_COLUMNS_SHOWN: Final = 30
_CHARACTERS_SHOWN: Final = 100
"""Of a value, a name or a type."""


class ShownRows(Generic[T]):
    """An iterator of rows whose first rows a notebook shows. They can still be taken afterwards."""

    __slots__ = ("_as_row", "_columns", "_found", "_title")

    def __init__(
        self,
        title: str,
        columns: pa.Schema | Sequence[str],
        found: Iterator[T],
        as_row: Callable[[T], Mapping[str, Any]] | None = None,
    ) -> None:
        """`as_row` gives the columns of a row; by default a row is a tuple of them."""
        self._title, self._columns, self._found, self._as_row = title, columns, found, as_row

    def __iter__(self) -> Iterator[T]:
        return self._found  # a loop runs as fast as over the rows themselves

    def __next__(self) -> T:
        return next(self._found)

    def __repr__(self) -> str:
        return f"<kvstore {self._title}>"

    def _repr_html_(self) -> str:
        first: list[T] = []
        title, columns = self._title, self._columns
        try:
            first.extend(islice(self._found, ROWS_SHOWN + 1))
        except KVStoreError as error:  # such as a row that cannot be read, behind others
            title = f"{title}: {error}"
        self._found = chain(first, self._found)
        names = columns.names if isinstance(columns, pa.Schema) else columns
        as_row = self._as_row

        def named(row: Any) -> Mapping[str, Any]:
            return dict(zip(names, row, strict=True)) if as_row is None else as_row(row)

        return html_of(title, columns, map(named, first))


def html_of(
    title: str, columns: pa.Schema | Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> str:
    """The first `ROWS_SHOWN` rows under the names of their columns, and under their types where a
    schema tells them. A last line tells that there are more rows or columns."""
    types = columns.types if isinstance(columns, pa.Schema) else [""] * len(columns)
    every = columns.names if isinstance(columns, pa.Schema) else columns
    names = every[:_COLUMNS_SHOWN]
    found = list(islice(rows, ROWS_SHOWN + 1))
    heads = [(_cell(name), _cell(str(type_))) for name, type_ in zip(names, types, strict=False)]
    lines = [
        f"<p><code>{_cell(title)}</code></p>",
        "<table><thead><tr>",
        *(f"<th>{name}<br><small>{type_}</small></th>" for name, type_ in heads),
        "</tr></thead><tbody>",
        *(_row(row, names) for row in found[:ROWS_SHOWN]),
        "</tbody></table>",
    ]
    more = ["more rows"] if len(found) > ROWS_SHOWN else []
    if len(every) > len(names):
        more.append(f"{len(every) - len(names)} more columns")
    return "".join(lines) + (f"<p><small>and {', '.join(more)}</small></p>" if more else "")


def _row(row: Mapping[str, Any], names: Sequence[str]) -> str:
    cells = (row.get(name) for name in names)
    shown = ("<i>null</i>" if each is None else _cell(each) for each in cells)
    return f"<tr>{''.join(f'<td>{each}</td>' for each in shown)}</tr>"


def _cell(value: object) -> str:
    if isinstance(value, str | bytes):
        is_cut = len(value) > _CHARACTERS_SHOWN
        value = value[:_CHARACTERS_SHOWN]
        text = value if isinstance(value, str) else repr(value)
    else:
        text = str(value)
        is_cut = len(text) > _CHARACTERS_SHOWN
    text = text[: 4 * _CHARACTERS_SHOWN] + ("…" if is_cut else "")
    return escape(text.encode(errors="replace").decode())
