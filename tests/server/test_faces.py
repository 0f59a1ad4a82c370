"""A client has the names and the parameters of `Store`; the exceptions are listed with reasons."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pytest

import kvstore
from kvstore.remote.client import AsyncClient, Client
from kvstore.remote.client.asynchronous import AsyncSnapshot, AsyncTable
from kvstore.remote.client.client import ClientSnapshot
from kvstore.remote.client.tables import ClientTable
from kvstore.snapshot import Snapshot
from kvstore.store import Store
from kvstore.tables.table import Table
from kvstore.transaction import Transaction

_PART = "a part of the owner's process; the client has calls for its work"
_ITS_OWN = "the client has this beside the names of `Store`"

STORE_ALONE = {
    "browsing": _PART,
    "positions": _PART,
    "feeds": _PART,
    "holds": _PART,
    "imports": _PART,
    "layout": _PART,
    "replication": _PART,
    "requests": _PART,
    "upkeep": _PART,
}
CLIENT_ALONE = {
    "call": _ITS_OWN,
    "drop_feed": "`Store.feeds.drop`",
    "lease": _ITS_OWN,
    "release_lease": _ITS_OWN,
    "rows": _ITS_OWN,
    "table_rows": _ITS_OWN,
    "times_still": _ITS_OWN,
    "versions_batches": _ITS_OWN,
    "work": _ITS_OWN,
}
NOT_AWAITED = {
    "call": "for programs of this project",
    "join_side": "joins of several sources read in the process of the caller",
    "lease": "for programs of this project",
    "mapping": "a mapping of Python cannot be awaited",
    "release_lease": "for programs of this project",
    "rows": "for programs of this project",
    "table_rows": "for programs of this project",
    "tasks": "the queue of tasks has a client without asyncio",
    "times_still": "for programs of this project",
    "transaction": "`transact` runs the body in a thread: each read would be awaited otherwise",
    "versions_batches": "for programs of this project",
    "work": "for programs of this project",
}
_OF_THE_OWNER = "the table of a client refuses it"
TABLE_NOT_AWAITED = {
    "codec": "for programs of this project",
    "feed": _OF_THE_OWNER,
    "import_target": "loads run in a thread of the caller: asyncio.to_thread(bulk.ingest, ...)",
    "join_side": "joins of several sources read in the process of the caller",
    "tidy": _OF_THE_OWNER,
}
PARAMETERS_LEFT_OUT = {
    ("hold", "address"): "tells what a hold of a backup or a copy is for",
    ("hold", "durable"): "a hold that is answered for is durable",
    ("hold", "kind"): "a client takes holds of users",
    ("scan_batches", "workers"): "processes of the server's machine",
    ("snapshot_scan_batches", "workers"): "processes of the server's machine",
}


@pytest.mark.parametrize(
    ("kind", "other", "missing"),
    [
        pytest.param(Store, Client, STORE_ALONE, id="Store"),
        pytest.param(Client, Store, CLIENT_ALONE, id="Client"),
        pytest.param(Client, AsyncClient, NOT_AWAITED, id="AsyncClient"),
        pytest.param(AsyncClient, Client, {}, id="AsyncClient alone"),
        pytest.param(Table, ClientTable, {}, id="Table"),
        pytest.param(ClientTable, AsyncTable, TABLE_NOT_AWAITED, id="AsyncTable"),
        pytest.param(
            ClientSnapshot, AsyncSnapshot, {"join_side": "", "open_at": ""}, id="AsyncSnapshot"
        ),
        pytest.param(Snapshot, ClientSnapshot, {}, id="ClientSnapshot"),
    ],
)
def test_names_that_one_has_and_the_other_has_not_are_listed(
    kind: type, other: type, missing: Mapping[str, str], store: kvstore.Store
) -> None:
    def names(of: type) -> set[str]:
        found = {*dir(of), *(vars(store) if of is Store else ())}
        return {name for name in found if not name.startswith("_")}

    assert names(kind) - names(other) == set(missing)


def test_a_method_of_a_client_takes_the_parameters_of_the_method_of_a_store() -> None:
    def left_out(name: str, of: object, mine: object) -> set[tuple[str, str]]:
        return {(name, each) for each in set(parameters(of)) - set(parameters(mine))}

    found = set()
    for name in sorted(set(dir(Store)) & set(dir(Client))):
        if not name.startswith("_") and callable(getattr(Store, name)):
            found |= left_out(name, getattr(Store, name), getattr(Client, name))
    for name in ("get", "get_many", "floor", "floor_many", "scan", "scan_batches", "join"):
        both = (getattr(Snapshot, name), getattr(ClientSnapshot, name))
        found |= left_out(f"snapshot_{name}", *both)
    assert found == set(PARAMETERS_LEFT_OUT)


def test_a_scan_takes_the_same_options_wherever_it_reads() -> None:
    of_a_store = set(parameters(Store.scan)) - {"as_of"}
    for kind in (Snapshot, ClientSnapshot, Transaction):
        assert set(parameters(kind.scan)) == of_a_store, kind
    for kind in (Client, ClientSnapshot):  # the asynchronous `scan` hands its options on
        assert set(parameters(kind.scan)) <= set(parameters(kind.scan_batches)), kind


@pytest.mark.parametrize(
    ("kind", "other"),
    [(Client, AsyncClient), (ClientTable, AsyncTable), (ClientSnapshot, AsyncSnapshot)],
)
def test_a_coroutine_takes_the_parameters_of_the_method(kind: type, other: type) -> None:
    for name in sorted(set(dir(kind)) & set(dir(other))):
        if name.startswith("_") or not callable(getattr(kind, name)):
            continue
        mine = parameters(getattr(other, name))
        if "options" not in mine and "made" not in mine:  # they are handed on
            left_out = set(parameters(getattr(kind, name))) - set(mine)
            assert left_out == ({"stop"} if name == "wait_beyond" else set()), name


def parameters(of: object) -> list[str]:
    _itself, *others = inspect.signature(of).parameters  # type: ignore[arg-type]  # callable
    return others
