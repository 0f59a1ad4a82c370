"""The command group `kvstore imports`: list, revert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from kvstore.cli.completion import names_of
from kvstore.cli.options import LISTED_MAX, JsonOption, ListLimitOption, StoreArgument, iso
from kvstore.cli.output import print_figures, print_list
from kvstore.cli.stores import open_to_write
from kvstore.errors import UsageError
from kvstore.imports import ImportRecord
from kvstore.opening import open_read_only
from kvstore.store import Store
from kvstore.timestamp import Timestamp

app = typer.Typer(
    help="List the imports of a store, or revert one.",
    no_args_is_help=True,
    add_completion=False,
)


def import_ids(store: Store) -> Iterator[str]:
    """The ids of the imports that can be reverted."""
    return (f"{each.import_id:016x}" for each in store.imports.all())


@app.command(name="list")
def list_imports(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the imports that a store knows, newest first, with their times, rows and bytes.

    A small import becomes plain versions when `gc` settles it, and is listed no longer.

    \b
    Examples:
      kvstore imports list flights.db
      kvstore imports list flights.db --json | jq 'select(.state == "added")'
    """
    with open_read_only(store) as opened:
        known = sorted(opened.imports.all(), key=_time, reverse=True)
    columns = ["import_id", "state", "added", "reverted", "rows", "bytes"]
    print_list([_fields(record) for record in known], columns, limit, as_json=as_json)


@app.command(name="revert")
def revert_import(
    store: StoreArgument,
    import_id: Annotated[
        str,
        typer.Argument(
            metavar="IMPORT",
            help="The id that `kvstore import` printed.",
            show_default=False,
            autocompletion=names_of(import_ids),
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Undo an import from now on. Its history stays. A repeated command prints the first timestamp.

    \b
    Examples:
      kvstore imports revert flights.db 5e0c1d2f3a4b5c6d
    """
    number = to_import_id(import_id)
    with open_to_write(store) as opened:
        print_figures({"timestamp": iso(opened.revert_import(number))}, as_json=as_json)


def to_import_id(text: str) -> int:
    """Parse the id of an import. Raises `UsageError`."""
    try:
        return int(text, 16)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is no id of an import", "pass the hex digits of `kvstore imports list`"
        ) from error


def _time(record: ImportRecord) -> Timestamp:
    return record.added or record.prepared or Timestamp(0)


def _fields(record: ImportRecord) -> dict[str, object]:
    return {
        "import_id": f"{record.import_id:016x}",
        "state": record.state,
        "added": None if record.added is None else iso(record.added),
        "reverted": None if record.reverted is None else iso(record.reverted),
        "rows": record.rows,
        "bytes": record.size_bytes,
    }
