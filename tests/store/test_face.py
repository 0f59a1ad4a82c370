"""The face of a store: a short list of verbs and objects, and parts without a reference to the
store."""

from __future__ import annotations

import gc
import pydoc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import kvstore
from kvstore import Store
from kvstore.backup import Collection
from kvstore.errors import ClosedError, UsageError
from tests.harness.parts import parts_of

FRONTIERS = {
    "path",
    "store_id",
    "since",
    "whole_since",
    "indexed_since",
    "upper",
    "durable",
    "now",
    "to_time",
}
LIFE = {"now", "to_time", "sync", "close"}
READS = {
    "get",
    "get_many",
    "floor",
    "floor_many",
    "join",
    "join_side",
    "keys",
    "count",
    "mapping",
    "scan",
    "scan_batches",
    "history",
    "snapshot",
}
WRITES = {"put", "delete", "delete_range", "put_if", "delete_if", "pop", "batch"}.union(
    {"update", "increment", "put_many", "ttl", "persist", "trim"}
)
TRANSACTIONS = {"transaction", "transact"}
CHANGES = {"changes", "events", "changes_batches", "feed", "wait_beyond"}
CAPTURE = {"changeset", "epochs", "force_quiescence", "generations", "reshard"}
UNDOING = {"revert_range", "revert_import"}
KEEPING = {"hold", "drop_hold", "gc", "clear_range", "checkpoint", "verify", "stats"}.union(
    {"metrics"}
)
TABLES = {"table", "tables"}
OBJECTS = {
    *("imports", "holds", "feeds", "replication", "layout", "browsing", "positions", "requests"),
    *("upkeep", "tasks"),
}

FACE = FRONTIERS.union(
    LIFE, READS, WRITES, TRANSACTIONS, CHANGES, CAPTURE, UNDOING, KEEPING, TABLES, OBJECTS
)
"""The reviewed public members. A verb is added here only if users should call it on the store
itself."""


def public(each: object) -> set[str]:
    return {name for name in dir(each) if not name.startswith("_")}


def test_the_face_has_the_reviewed_members_and_no_others() -> None:
    with kvstore.open(None, engine="memory") as store:
        assert public(store) == FACE


def reaches(start: object, goal: object) -> bool:
    """Whether references lead from `start` to `goal`.

    Types, modules and the globals of functions are left out: they lead to everything.
    """
    waiting, seen = [start], {id(start)}
    while waiting:
        each = waiting.pop()
        if each is goal:
            return True
        found: list[Any] = gc.get_referents(each)
        if isinstance(each, FunctionType):
            found = [each.__closure__, each.__defaults__, each.__kwdefaults__]
        for further in found:
            if id(further) not in seen and not isinstance(further, type | ModuleType):
                seen.add(id(further))
                waiting.append(further)
    return False


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_no_object_refers_to_the_store(name: str) -> None:
    with kvstore.open(None, engine="memory") as store:
        assert not reaches(getattr(store, name), store)


def test_a_path_to_the_store_is_found_where_there_is_one() -> None:
    with kvstore.open(None, engine="memory") as store, store.snapshot() as snapshot:
        assert reaches(snapshot, store)
        assert reaches(lambda: store, store)


HOUR = timedelta(hours=1)

CALLS: dict[str, Callable[[Store], object]] = {
    "imports": lambda s: s.imports.alone(1).__enter__(),
    "holds": lambda s: s.holds.take("h"),
    "feeds": lambda s: s.feeds.open("f", 0),
    "follow": lambda s: next(s.feeds.follow(0)),
    "replication": lambda s: s.replication.export(since=None, upto=0),
    "replica": lambda s: s.replication.replica(),
    "layout": lambda s: s.layout.splits(2),
    "upkeep": lambda s: s.upkeep.compact(),
    "gc in the background": lambda s: s.upkeep.start_gc(kvstore.GcPolicy(keep=HOUR)),
    "tasks": lambda s: s.tasks,
    "stats": lambda s: s.stats(),
    "metrics": lambda s: s.metrics(),
    "epochs": lambda s: s.epochs(),
    "generations": lambda s: s.generations(),
    "changeset": lambda s: s.changeset(),
    "batch": lambda s: s.batch(),
    "transaction": lambda s: s.transaction(),
    "put": lambda s: s.put(b"k", b"v"),
    "get": lambda s: s.get(b"k"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_store_refuses_the_calls_of_its_objects_too(
    call: Callable[[Store], object],
) -> None:
    store = kvstore.open(None, engine="memory")
    store.close()
    with pytest.raises(ClosedError):
        call(store)


def test_each_part_is_ended_although_another_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the committer does not end")

    store = kvstore.open(None, engine="memory")
    monkeypatch.setattr(parts_of(store).committer, "finish", fail)
    with pytest.raises(OSError, match="does not end"):
        store.close()
    with pytest.raises(ClosedError):
        parts_of(store).engine.stats()


def test_a_handle_prints_what_it_is_for(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db") as store:
        times = f"since {store.since}, upper {store.upper}"
        assert repr(store) == f"<kvstore.Store {tmp_path / 'db'} (RocksEngine), {times}>"
        assert repr(store.hold("audit")) == "<kvstore.Hold 'audit'>"
        assert repr(store.feed("cache", start="now")) == "<kvstore.Feed 'cache'>"
        at = store.put(b"k", b"v")
        with store.snapshot(at) as snapshot:
            assert repr(snapshot) == f"<kvstore.Snapshot as of {at}>"
    assert repr(store).endswith(", closed>")
    with kvstore.open(None, engine="memory") as store:
        assert repr(store).startswith(
            "<kvstore.Store in memory (MemoryEngine), since 1970-01-01T00:00:00"
        )
    assert repr(Collection(tmp_path / "kept")) == f"<kvstore.backup.Collection {tmp_path / 'kept'}>"


def test_a_path_of_another_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r'kvstore.open\(None, engine="memory"\)'):
        kvstore.open(":memory:")
    assert not list(tmp_path.iterdir())


def test_names_are_there_for_type_checkers_and_help() -> None:
    assert {"errors", "codec", "__version__"} <= set(kvstore.__all__)
    assert kvstore.errors.UsageError is UsageError
    shown = pydoc.plain(pydoc.render_doc(kvstore.codec))
    assert "encode_tuple(" in shown
    assert "decode_tuple(" in shown
