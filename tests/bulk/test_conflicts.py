"""`on_conflict="error"` refuses an import if one of its keys is live when it is added."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.loading import stored_batches
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import KeyConflictError
from tests.bulk.staged import stage

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_on_conflict_error_names_the_live_keys_and_adds_nothing(
    store: kvstore.Store, tmp_path: Path
) -> None:
    store.put(b"b", b"live")
    store.put(b"c", b"dead")
    store.delete(b"c")
    stage(tmp_path / "staged", {b"a": b"1", b"b": b"1", b"c": b"1"})
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert caught.value.keys == (b"b",)
    assert list(store.scan()) == [(b"b", b"live")]
    assert store.imports.all() == []
    store.delete(b"b")
    bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert len(list(store.scan())) == 3


def test_a_key_written_between_check_and_commit_is_a_conflict(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tmp_path / "staged", {b"a": b"1", b"b": b"1"})
    prepare = store.imports.prepare

    def write_first(record: kvstore.ImportRecord, keys: set[bytes]) -> None:
        store.put(b"b", b"sneaked in")
        prepare(record, keys)

    monkeypatch.setattr(store.imports, "prepare", write_first)
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert caught.value.keys == (b"b",)
    assert list(store.scan()) == [(b"b", b"sneaked in")]


def test_a_row_that_deletes_a_live_key_is_a_conflict_at_a_second_try_too(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
        writer.delete(b"b")
    staged.seal()

    def killed(step: str) -> None:
        if step == "add":
            raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        bulk.ingest(store, tmp_path / "staged", on_conflict="error", progress=killed)
    store.put(b"b", b"came meanwhile")
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert caught.value.keys == (b"b",)
    store.delete(b"b")
    bulk.ingest(store, tmp_path / "staged", on_conflict="error")
    assert dict(store.scan()) == {b"a": b"1"}


@pytest.mark.parametrize("op", ["put", "delete"])
@pytest.mark.parametrize("came_by", ["put", "import", "revert"])
def test_a_key_that_comes_alive_between_check_and_commit_is_a_conflict(
    store: kvstore.Store, tmp_path: Path, op: str, came_by: str
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
        writer.put(b"k", b"1") if op == "put" else writer.delete(b"k")
    staged.seal()
    if came_by == "revert":
        store.put(b"k", b"below")
        made = bulk.Import.create(tmp_path / "covers")
        with made.writer() as writer:
            writer.delete(b"k")
        made.seal()
        bulk.ingest(store, tmp_path / "covers")

    def interfere(step: str) -> None:
        if step == "link" and came_by == "put":
            store.put(b"k", b"sneaked in")
        elif step == "link" and came_by == "import":
            stage(tmp_path / "other", {b"k": b"other"})
            bulk.ingest(store, tmp_path / "other")
        elif step == "link":
            store.revert_import(made.import_id)

    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "staged", on_conflict="error", progress=interfere)
    assert caught.value.keys == (b"k",)
    assert [key for key, _ in store.scan()] == [b"k"]
    store.verify().require_ok()


def test_gc_beside_a_check_for_conflicts_does_not_refuse_the_import(
    store: kvstore.Store, tmp_path: Path
) -> None:
    stage(tmp_path / "staged", {b"a": b"1"})

    def collect(step: str) -> None:
        store.put(b"other", b"v")
        store.gc(before=store.now())

    bulk.ingest(store, tmp_path / "staged", on_conflict="error", progress=collect)
    assert store.get(b"a") == b"1"


def test_a_row_of_a_table_that_is_written_between_check_and_commit_is_a_conflict(
    store: kvstore.Store, tmp_path: Path
) -> None:
    schema = pa.schema([("id", pa.int64()), ("zone", pa.string())])
    table = store.table("trips", schema, key=["id"])
    codec = table.codec()
    load = bulk.Import.create(tmp_path / "staged")
    rows = pa.record_batch({"id": [1, 2], "zone": ["JFK", "LGA"]}, schema)
    with load.writer() as writer:
        for batch in stored_batches(codec, rows):
            writer.write(batch)
    load.seal(tables=[EncodedBy.of(codec)])

    def write_first(step: str) -> None:
        if step == "add":
            table.put({"id": 2, "zone": "EWR"})

    with pytest.raises(KeyConflictError):
        bulk.ingest(store, load.staging, on_conflict="error", progress=write_first)
    assert list(table.rows()) == [{"id": 2, "zone": "EWR"}]


def test_none_since_refuses_a_key_that_was_put_since(store: kvstore.Store, tmp_path: Path) -> None:
    store.put(b"b", b"before")
    looked = store.now()
    store.put(b"z", b"no key of the import")
    staged = {b"a": b"1", b"b": b"1"}
    stage(tmp_path / "first", staged)
    bulk.ingest(store, tmp_path / "first", none_since=looked)
    assert store.get(b"b") == b"1"
    store.put(b"a", b"pushed")
    stage(tmp_path / "second", staged)
    with pytest.raises(KeyConflictError) as caught:
        bulk.ingest(store, tmp_path / "second", none_since=looked)
    assert caught.value.keys == (b"a", b"b")  # the first import has put both
    assert store.get(b"a") == b"pushed"
