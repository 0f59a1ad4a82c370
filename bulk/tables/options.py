"""Arguments of the commands of tables, and a definition as these commands print it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvstore.tables import Table
from kvstore.tables.definition import Definition

NameArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table's name.", show_default=False)
]
ColumnsOption = Annotated[
    str | None,
    typer.Option("--columns", "-c", metavar="NAMES", help="Only these columns: a,b,c."),
]


def names_of(text: str | None) -> list[str] | None:
    """The names of `--columns`."""
    return None if text is None else [name.strip() for name in text.split(",")]


def facts_of(table: Table) -> dict[str, Any]:
    """The definition of a table, for JSON."""
    definition = table.codec().definition
    return {
        "table": table.name,
        "columns": [
            {"name": column.name, "type": str(column.type), "nullable": column.is_nullable}
            for column in definition.columns
        ],
        "key": _columns_of(definition, definition.key),
        "event_time": table.event_time,
        "indexes": [
            {
                "name": index.name,
                "columns": _columns_of(definition, index.parts),
                "unique": index.is_unique,
                "whole": index.is_whole,
            }
            for index in definition.indexes
        ],
    }


def _columns_of(definition: Definition, parts: Any) -> list[str]:
    """The columns of a key or an index; a falling one begins with `-`."""
    names = definition.parts_named(parts)
    return [
        f"-{name}" if part.is_falling else name for name, part in zip(names, parts, strict=True)
    ]
