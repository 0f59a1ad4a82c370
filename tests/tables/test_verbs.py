"""What is done to many rows at once, and to a table as a whole: ranges, reverts, clears, drops."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kvstore
from kvstore import bulk, unique
from kvstore.base.span import RESERVED, Span
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import (
    HistoryGoneError,
    HistoryHeldError,
    ImportRefusedError,
    NotFoundError,
    NotUniqueError,
    UsageError,
)
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

SCHEMA = pa.schema([("carrier", pa.string()), ("number", pa.int64()), ("gate", pa.string())])


@pytest.fixture
def store(tmp_path: Path, each_engine: str) -> Any:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def flights(store: kvstore.Store) -> kvstore.Table:
    table = store.table("flights", SCHEMA, ["carrier", "number"], {"by_gate": unique("gate")})
    table.put_batch([flight(c, n) for c in ("AA", "UA") for n in range(5)])
    return table


def flight(carrier: str, number: int, gate: str | None = None) -> dict[str, Any]:
    return {"carrier": carrier, "number": number, "gate": gate or f"{carrier}{number}"}


def kept(store: kvstore.Store) -> list[bytes]:
    """All live keys of tables."""
    return list(store.keys(RESERVED))


def test_a_range_of_rows_is_named_and_not_empty(flights: kvstore.Table) -> None:
    with pytest.raises(UsageError, match="prefix="):
        flights.delete_range()
    with pytest.raises(UsageError, match="no key lies from 'UA' to below 'AA'"):
        flights.delete_range("UA", "AA")
    with pytest.raises(UsageError, match="one or the other"):
        flights.delete_range("AA", prefix="UA")
    with pytest.raises(UsageError, match="column 'number'"):
        flights.delete_range(("AA", "three"))
    assert flights.count() == 10


def test_a_revert_lets_rows_exchange_their_unique_values_and_takes_none_of_another_row(
    store: kvstore.Store, flights: kvstore.Table
) -> None:
    before = store.sync() - 1
    flights.delete_range(prefix="AA")
    flights.put_batch([flight("AA", 1, "AA2"), flight("AA", 2, "AA1")])
    flights.put(flight("UA", 1, "AA3"))
    with pytest.raises(NotUniqueError, match="carrier='UA', number=1"):
        flights.revert(before, prefix="AA")
    assert flights.count("AA") == 2
    flights.revert(before)
    assert list(flights.rows()) == list(flights.rows(as_of=before))
    assert [row["number"] for row in flights.find("by_gate", "AA2")] == [2]
    assert flights.revert(before) is None


def test_a_dropped_table_is_there_at_earlier_times_alone(
    store: kvstore.Store, flights: kvstore.Table, tmp_path: Path
) -> None:
    """Its number is never given again, so no later table shows its rows."""
    rows = list(flights.rows())
    before = store.sync() - 1
    staged = bulk.Import.create(tmp_path / "staged")
    codec = flights.codec()
    with staged.writer() as writer:
        writer.put(*codec.row(flight("ZZ", 1)))
    staged.seal(tables=[EncodedBy.of(codec)])
    feed = flights.feed("f", start="now")
    flights.drop()
    assert store.tables() == []
    assert len(kept(store)) == 1  # which number it had
    for ask in (lambda: store.table("flights"), flights.scan, flights.drop):
        with pytest.raises(NotFoundError, match="no table 'flights'"):
            ask()
    with pytest.raises(NotFoundError, match="no table 'flights'"):
        flights.put(flight("UA", 9))
    with pytest.raises(ImportRefusedError):
        bulk.ingest(store, tmp_path / "staged")
    with store.snapshot(before) as then:
        assert list(then.table("flights").rows()) == rows
    other = store.table("other", SCHEMA, ["carrier", "number"])
    again = store.table("flights", pa.schema([("id", pa.int64())]), "id")
    again.put({"id": 1})
    numbers = [table.codec().definition.number for table in (flights, other)]
    assert {*numbers, codec.definition.number} == {1, 2, 3}
    assert list(other.rows(as_of=before)) == []
    assert other.history("UA", 1) == []
    with pytest.raises(UsageError, match="made anew"):
        again.revert(before)
    kinds = [kind for batch in feed for kind in batch.rows["_change_type"].to_pylist()]
    assert kinds == ["delete"] * len(rows)
    assert list(flights.rows(as_of=before)) == rows
    store.close()
    with kvstore.open(tmp_path / "store") as reopened:
        reopened.gc(before="now")
        third = reopened.table("third", SCHEMA, ["carrier", "number"])
        assert third.codec().definition.number == 4
        third.drop()
        reopened.table("other").drop()
        reopened.table("flights").drop()
        assert list(reopened.scan()) == []


def test_a_clear_leaves_no_byte_of_a_row(
    store: kvstore.Store, flights: kvstore.Table, tmp_path: Path
) -> None:
    other = store.table("other", SCHEMA, ["carrier", "number"])
    other.put(flight("UA", 1))
    flights.put(flight("UA", 77, "SECRET"))
    at = flights.put(flight("UA", 77))
    hold = store.hold("h")
    with pytest.raises(HistoryHeldError):
        flights.clear()
    assert flights.count() == 11
    hold.release()
    cleared = flights.clear()
    assert (flights.count(), list(flights.find("by_gate", "SECRET"))) == (0, [])
    for ask in (lambda: flights.get("UA", 77, as_of=at), lambda: flights.count(as_of=at)):
        with pytest.raises(HistoryGoneError):
            ask()
    assert flights.history("UA", 77) == []
    assert other.get("UA", 1, as_of=at) == flight("UA", 1)
    flights.put(flight("UA", 77))
    assert flights.count(as_of=cleared) == 0
    store.gc(before="now", compact=True)
    store.upkeep.compact_index()
    store.close()
    kvstore.open(tmp_path / "store").close()  # RocksDB's MANIFEST names the bounds of old files
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    assert not [file.name for file in files if b"SECRET" in file.read_bytes()]


def stored_under(store: kvstore.Store) -> list[bytes]:
    """All stored keys of tables, of every version."""
    versions = store.requests.parts.versions
    return [key for key, _ in versions.kept(Span(RESERVED), keys_only=True)]


@pytest.mark.parametrize("how", ["prefix", "where", "client"])
def test_a_clear_of_some_rows_leaves_no_byte_of_them_and_all_of_the_others(
    store: kvstore.Store, flights: kvstore.Table, tmp_path: Path, how: str
) -> None:
    flights.put(flight("UA", 77, "SECRET-1"))
    flights.put(flight("UA", 77, "SECRET-2"))
    flights.delete("UA", 77)
    flights.put(flight("UA", 1, "SECRET-3"))
    if how == "prefix":  # the entry of the row that an import replaces stays behind
        bulk.import_table(flights, pa.Table.from_pylist([flight("UA", 1)], SCHEMA))
    flights.alter(add_index={"by_number": ["number", "gate"]})
    flights.build_index("by_number")
    flights.alter(drop_index="by_number")
    flights.put(flight("AA", 1, "B9"))
    flights.delete_range(("AA", 3), ("UA", 1))
    at = flights.put(flight("UA", 0, "SECRET-4"))
    others = list(flights.rows("AA", as_of=at))
    hold = store.hold("h")
    with pytest.raises(HistoryHeldError):
        flights.clear(prefix="UA")
    hold.release()
    before = flights.history("AA", 1)
    if how == "where":
        cleared = flights.clear(where=pc.field("carrier") == "UA")
    elif how == "prefix":
        cleared = flights.clear(prefix="UA")
    else:
        with (
            serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
            kvstore.connect(running.url) as client,
        ):
            cleared = client.table("flights").clear(where=pc.field("carrier") == "UA")
    assert (list(flights.rows()), flights.count("UA")) == (others, 0)
    assert list(flights.rows("AA", as_of=at)) == others
    assert flights.history("AA", 1) == before
    assert flights.history("UA", 77) == []
    assert list(flights.find("by_gate", "B9", as_of=at)) == [flight("AA", 1, "B9")]
    for ask in (
        lambda: flights.get("UA", 0, as_of=at),
        lambda: flights.count(as_of=at),
        lambda: list(flights.find("by_gate", "SECRET-4", as_of=at)),
        lambda: flights.changes(at - 1, cleared - 1).read_all(),
    ):
        with pytest.raises(HistoryGoneError):
            ask()
    assert not [key for key in stored_under(store) if b"SECRET" in key or b"UA" in key]
    flights.put(flight("UA", 0, "SECRET-4"))
    flights.delete("UA", 0)
    assert not store.verify().problems
    store.gc(before="now", compact=True)
    store.upkeep.compact_index()
    store.close()
    kvstore.open(tmp_path / "store").close()  # RocksDB's MANIFEST names the bounds of old files
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    assert not [file.name for file in files if b"SECRET" in file.read_bytes()]


def test_a_clear_takes_the_rows_that_ever_passed_and_no_others(
    store: kvstore.Store, flights: kvstore.Table
) -> None:
    first = flights.put(flight("AA", 2, "X"))
    flights.put(flight("AA", 2))
    flights.delete_range("AA", "AA\x00")
    flights.put(flight("AA", 4, "X"))
    store.gc(before=first)
    flights.clear(where=pc.field("gate") == "X")
    assert [flights.history("AA", number) == [] for number in range(5)] == [
        *(False, False, True, False, True)
    ]
    assert flights.history("AA", 3)[0].row is None
    assert list(flights.rows("AA")) == []
    with pytest.raises(UsageError, match="has no column"):
        flights.clear(where=pc.field("nothing") == 1)


def test_writes_beside_a_clear_lose_no_entry(store: kvstore.Store) -> None:
    gates = store.table("gates", SCHEMA, ["carrier", "number"], {"by_gate": "gate"})
    begun, ended = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            gates.put(flight("AA", number % 7, f"n{number % 50}"))
            gates.put(flight("UA", number % 7, f"n{number % 50}"))
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        begun.wait()
        try:
            for _ in range(8):
                gates.clear(prefix="UA", compact=False)
        finally:
            ended.set()
        writing.result()
    gates.clear(prefix="UA")
    rows = list(gates.rows())
    assert {row["carrier"] for row in rows} == {"AA"}
    assert sorted(gates.find("by_gate"), key=itemgetter("number")) == rows
    assert not [key for key in stored_under(store) if b"UA" in key]


def test_a_clear_of_too_many_places_destroys_nothing(
    store: kvstore.Store, flights: kvstore.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tables.indexes.CLEAR_SPANS_MAX", 2)
    with pytest.raises(UsageError, match="are 6 spans of keys, and one clear takes 2"):
        flights.clear(where=(pc.field("number") == 0) | (pc.field("number") == 4))
    assert flights.count() == 10
