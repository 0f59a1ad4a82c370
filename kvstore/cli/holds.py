"""The command group `kvstore holds`: list, drop."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.claims import BACKUP, HoldRecord
from kvstore.cli.completion import names_of
from kvstore.cli.options import LISTED_MAX, JsonOption, ListLimitOption, StoreArgument, iso
from kvstore.cli.output import note, print_figures, print_list
from kvstore.cli.stores import open_to_write
from kvstore.cli.wording import in_shell_words
from kvstore.limits import HOLD_LOOK_S
from kvstore.opening import open_read_only
from kvstore.timestamp import NS_PER_SECOND

app = typer.Typer(
    help="List the holds that keep history in a store, or drop an abandoned one.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(name="list")
def list_holds(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the holds of a store: the purpose and place of each, and the time of its last move.

    Names each hold whose collection of backups is gone, with the command that drops it.

    \b
    Examples:
      kvstore holds list flights.db
      kvstore holds list flights.db --json | jq 'select(.kind == "backup")'
    """
    with open_read_only(store) as opened:
        found = [_hold_fields(record) for record in opened.holds.all()]
    for fields in found:
        fields["gone"] = fields["kind"] == BACKUP and _is_gone(str(fields["address"]))
    columns = ["name", "kind", "address", "timestamp", "owner", "moved_at", "max_age_seconds"]
    print_list(found, columns, limit, as_json=as_json)
    for fields in found:
        if fields["gone"]:
            note(
                f"hold {fields['name']} keeps history for backups that are gone: nothing is at "
                f"{fields['address']}; look whether its disk is mounted, or drop the hold: "
                f"kvstore holds drop {store} {fields['name']}"
            )


@app.command(name="drop")
def drop_hold(
    store: StoreArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The hold's name.",
            show_default=False,
            autocompletion=names_of(lambda store: [each.name for each in store.holds.all()]),
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Drop a hold whose owner is gone for good. The next gc removes the history that it kept.

    The command prints the consequences for an owner that comes back after all.

    \b
    Examples:
      kvstore holds drop flights.db backup-1f6a0e6fd3b4
    """
    with open_to_write(store) as opened:
        dropped = opened.drop_hold(name)
    print_figures(_hold_fields(dropped), as_json=as_json)
    note(f"dropped; {in_shell_words(dropped.cost_of_dropping)}")


def _is_gone(address: str) -> bool | None:
    from kvstore.storage.address import is_gone  # holds of backups alone need storage

    return is_gone(address, seconds=HOLD_LOOK_S)


def _hold_fields(record: HoldRecord) -> dict[str, object]:
    age_ns = record.max_age_ns
    return {
        "name": record.name,
        "kind": record.kind,
        "address": record.address,
        "timestamp": iso(record.timestamp),
        "owner": record.owner,
        "created_at": None if record.created_at is None else iso(record.created_at),
        "moved_at": None if record.moved_at is None else iso(record.moved_at),
        "max_age_seconds": None if age_ns is None else age_ns / NS_PER_SECOND,
        "lost": record.lost,
    }
