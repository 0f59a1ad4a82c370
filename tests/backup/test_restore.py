"""Restores: any instant comes back exactly, whole or in part, and existing files are not
touched."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup
from kvstore.base.span import RESERVED
from kvstore.errors import (
    HistoryGoneError,
    ImportRefusedError,
    LockedError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.timeline.reserved import CATALOGUE
from tests.backup.histories import (
    live_through,
    versions,
)

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


@pytest.mark.parametrize("seed", range(3))
def test_any_instant_restores_version_for_version(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path, seed: int
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=seed)
    for number, at in enumerate([*random.Random(seed).sample(instants, 4), None]):
        instant = collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert versions(restored, instant) == versions(store, instant)
            assert dict(restored.scan()) == dict(store.scan(as_of=instant))
            later = restored.put(b"new", b"life")
            assert later > instant
            assert list(restored.changes(instant)) == [
                kvstore.Change(later, "put", b"new", None, b"life")
            ]


def test_a_prefix_restores_alone_with_ranges_cut_to_it(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    live_through(store, collection, tmp_path / "staging", seed=5)
    at = collection.restore(tmp_path / "restored", prefix=b"k2")
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.changes(0, at)) == list(store.changes(0, at, prefix=b"k2"))


def test_state_only_restores_what_was_alive(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=6)
    collection.restore(tmp_path / "restored", as_of=instants[70], history=False)
    with kvstore.open(tmp_path / "restored") as restored:
        assert restored.since == instants[70]
        assert dict(restored.scan()) == dict(store.scan(as_of=instants[70]))
        with pytest.raises(HistoryGoneError):
            restored.get(b"k00", as_of=instants[69])


def test_only_the_window_can_be_restored(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no backup"):
        collection.restore(tmp_path / "restored")
    store.put(b"a", b"1")
    info = collection.backup(store)
    with pytest.raises(NotYetWrittenError):
        collection.restore(tmp_path / "restored", as_of=info.upper)
    assert not (tmp_path / "restored").exists()
    (tmp_path / "restored").mkdir()
    with pytest.raises(UsageError, match="exists"):
        collection.restore(tmp_path / "restored")


def test_two_restores_to_one_place_do_not_take_it_from_each_other(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    target = tmp_path / "restored"

    def second(_rows: int) -> None:
        with pytest.raises(LockedError, match="another restore"):
            collection.restore(target)

    collection.restore(target, progress=second)
    with kvstore.open(target) as restored:
        assert list(restored.scan()) == [(b"a", b"1")]
    assert not list(tmp_path.glob(".restored*"))


def test_a_restore_removes_what_a_killed_one_left_at_its_own_place_only(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    own, other = (tmp_path / f".{name}.building-0123" for name in ("r[1]*", "r1x"))
    for left in (own, other):
        left.mkdir()
    collection.restore(tmp_path / "r[1]*")
    assert not own.exists()
    assert other.exists()


def test_a_restore_to_what_is_there_is_refused_before_it_begins(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"")
    rows: list[int] = []
    for name in ("dangling", "empty", "file"):
        with pytest.raises(UsageError, match="exists"):
            collection.restore(tmp_path / name, progress=rows.append)
    assert rows == []

    def make(_rows: int) -> None:
        (tmp_path / "meanwhile").mkdir(exist_ok=True)

    with pytest.raises(UsageError, match="exists"):
        collection.restore(tmp_path / "meanwhile", progress=make)
    assert list((tmp_path / "meanwhile").iterdir()) == []


def test_a_live_store_takes_the_state_as_one_import(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=7)
    with kvstore.open(tmp_path / "target") as target:
        target.put(b"k00", b"before")
        target.put(b"other", b"stays")
        stamp = collection.restore_into(target, as_of=instants[100])
        expected = dict(store.scan(as_of=instants[100]))
        assert dict(target.scan(prefix=b"k")) == {b"k00": b"before"} | expected
        assert target.get(b"other") == b"stays"
        assert {change.timestamp for change in target.changes(stamp - 1)} == {stamp}
        assert not list((tmp_path / "target" / "ingest").iterdir())


def test_rows_are_read_without_restoring(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=8)
    for at in (instants[90], None):
        table = collection.scan_batches(as_of=at, prefix=b"k").read_all()
        rows = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
        assert list(rows) == list(store.scan(prefix=b"k", as_of=at or collection.upper - 1))


def test_rows_of_tables_are_restored_into_the_same_tables(
    collection: backup.Collection, tmp_path: Path
) -> None:
    schema = pa.schema([("id", pa.int64()), ("zone", pa.string())])

    def table_of(store: kvstore.Store) -> kvstore.Table:
        return store.table("t", schema, key=["id"], indexes={"by_zone": ["zone"]})

    with kvstore.open(tmp_path / "source") as source:
        source.put(b"a", b"1")
        table = table_of(source)
        made = [{"id": n, "zone": f"z{n % 3}"} for n in range(100)]
        table.put_batch(pa.Table.from_pylist(made, schema))
        collection.backup(source)
        rows = list(table.rows())
        assert collection.scan_batches().read_all().column("key").to_pylist() == [b"a"]
        assert collection.scan_batches(prefix=RESERVED).read_all().num_rows == 201
    with kvstore.open(tmp_path / "same") as target:
        restored = table_of(target)
        restored.put({"id": 1_000, "zone": "z1"})
        told: list[int] = []
        stamp = collection.restore_into(target, progress=told.append)
        assert told == sorted(told)
        assert list(target.scan()) == [(b"a", b"1")]
        assert list(restored.rows(as_of=stamp)) == [*rows, {"id": 1_000, "zone": "z1"}]
        assert [row["id"] for row in restored.find("by_zone", "z1")] == [*range(1, 100, 3), 1_000]
        assert len(told) > 1
        assert list(target.scan(prefix=CATALOGUE))
        restored.alter(add={"fare": pa.float64()})
        with pytest.raises(ImportRefusedError, match=r"the backup.*'t' is at revision 2"):
            collection.restore_into(target)
        collection.restore_into(target, prefix=b"a")
    with kvstore.open(tmp_path / "without") as target:
        with pytest.raises(ImportRefusedError, match=r"there is no table 't'.*into a new store"):
            collection.restore_into(target)
        assert list(target.scan(start=RESERVED)) == list(target.scan()) == []
        collection.restore_into(target, prefix=b"a")
        assert list(target.scan()) == [(b"a", b"1")]
