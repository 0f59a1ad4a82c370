"""Imports: the bulk loads of a store at the time of the page, and the undoing of one."""

from __future__ import annotations

from heapq import nlargest
from typing import Final

from kvstore.errors import UsageError
from kvstore.imports import ImportRecord
from kvstore.limits import BROWSE_ROWS_MAX
from kvstore.server.access import ADMIN
from kvstore.server.page.blocks import Button, Cell, Grid, PageView, Text
from kvstore.server.page.call import PageRequest
from kvstore.server.page.notation import moment, size
from kvstore.server.page.section import Section


def imports(call: PageRequest) -> PageView:
    """The newest imports that have rows of their own."""
    as_of = int(call.as_of)
    known = call.store.imports.every()
    newest = nlargest(BROWSE_ROWS_MAX, known, key=lambda each: each.added or each.prepared or 0)
    rows = [_row(call, record, as_of) for record in newest]
    grid = Grid(
        f"The newest of {len(known):,} imports" if len(known) > len(rows) else "Imports",
        ("Import", "State", "Added at (UTC)", "Reverted at (UTC)", "Rows", "Bytes", "Undo"),
        rows,
        empty="No import has rows of its own. Small ones become plain versions at a collection.",
        numbers=frozenset({4, 5}),
    )
    return PageView("Imports", [grid])


def _row(call: PageRequest, record: ImportRecord, as_of: int) -> list[Cell | Button]:
    name = f"{record.import_id:016x}"
    undo: Cell | Button = Cell("")
    if record.state == "added":
        if ADMIN in call.access.rights:
            undo = Cell("Revert", call.link("revert", import_id=name))
        else:
            undo = Cell("", note="needs an admin token")
    added = Cell(moment(record.added))
    if record.added is not None:
        added = Cell(added.text, call.link("keys", at=str(record.added)))
    return [
        Cell(name, is_code=True),
        Cell(_state(record, as_of)),
        added,
        Cell(moment(record.reverted)),
        Cell(f"{record.rows:,}"),
        Cell(size(record.size_bytes)),
        undo,
    ]


def _state(record: ImportRecord, as_of: int) -> str:
    """The state of an import at a time."""
    if record.added is None:
        return "being added"
    if record.added > as_of:
        return "not yet added"
    if record.reverted is None or record.reverted > as_of:
        return "visible"
    return "reverted"


def confirm(call: PageRequest) -> PageView:
    """The question before an import is reverted."""
    record = _record(call)
    name = f"{record.import_id:016x}"
    return PageView(
        f"Revert import {name}",
        [
            Text(
                f"It was added at {moment(record.added)} with {record.rows:,} rows. A revert hides "
                "them from now on, and each key shows again the value that it would have without "
                "them. Reads of earlier times still see the import. It cannot be added again under "
                "this id."
            ),
            Button("revert", "Revert it now", {"import_id": name}, is_danger=True),
        ],
        is_timed=False,
    )


def revert(call: PageRequest) -> PageView:
    """Revert an import, and say at which time."""
    record = _record(call)
    with call.owned() as store:
        at = store.revert_import(record.import_id)
    text = f"Import {record.import_id:016x} is reverted as of {moment(at)}."
    return PageView("Import reverted", [Text(text)], is_timed=False)


def _record(call: PageRequest) -> ImportRecord:
    text = call.text("import_id")
    try:
        found = call.store.imports.get(int(text, 16))
    except ValueError:
        raise UsageError(f"import_id={text[:100]!r}", "pass 16 hex digits") from None
    if found is None or found.added is None:
        raise UsageError(f"import {text[:100]!r} is not one of the store", "choose one of the list")
    return found


IMPORTS: Final = Section("imports", "Imports", imports)
REVERT: Final = Section(
    "revert",
    "Revert",
    confirm,
    act=revert,
    right=ADMIN,
    act_right=ADMIN,
    in_navigation=False,
)
