"""What objects print of themselves, in a shell of Python and in a notebook."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.errors import ConflictError

_TAGS = ("p", "code", "table", "thead", "tbody", "tr", "th", "td", "br", "small", "i")
HOSTILE = '<script>alert("1")</script>&\ud83d\u202e'.encode(errors="replace").decode()


def test_an_object_tells_what_it_is_and_how_far_it_has_come(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            batch.put(b"k", b"v" * 9)
            batch.delete_range(b"a", b"b")
            assert repr(batch) == "<kvstore.Batch of 2 writes, 12 bytes>"
        assert repr(batch) == f"<kvstore.Batch, committed at {batch.timestamp}>"
        with pytest.raises(ZeroDivisionError), store.batch() as dropped:
            _ = 1 / 0
        assert repr(dropped) == "<kvstore.Batch, ended without a commit>"
        transaction = store.transaction()
        transaction.get(b"k")
        transaction.put(b"k", b"w")
        assert repr(transaction) == (
            f"<kvstore.Transaction at {transaction.read_at}, 1 write, 2 bytes>"
        )
        store.put(b"k", b"x")
        with pytest.raises(ConflictError):
            transaction.commit()
        assert repr(transaction) == "<kvstore.Transaction, ended without a commit>"
        load = bulk.Import.create(tmp_path / "staging", import_id=10)
        with load.writer() as writer:
            writer.put(b"a", b"1")
            assert re.fullmatch(r"<kvstore\.bulk\.PartWriter part-\w+\.sst, 1 rows>", repr(writer))
        assert repr(load) == (
            f"<kvstore.bulk.Import 000000000000000a in {tmp_path / 'staging'}, "
            "1 part with 1 rows written here>"
        )
        load.seal()
        bulk.ingest(store, tmp_path / "staging")
        assert repr(store.imports) == "<kvstore.Imports: 1 added, 0 being added, 0 reverted>"
        assert repr(store.feeds) == "<kvstore.Feeds: none>"
        for name in [f"feed {number:02}" for number in range(12)]:
            store.feed(name, "now").close()
        assert repr(store.feeds).startswith("<kvstore.Feeds: 'feed 00', 'feed 01',")
        assert repr(store.feeds).endswith("'feed 09' and 2 more>")
        with kvstore.follow(tmp_path / "store") as live:
            assert repr(live).startswith(f"<kvstore.LiveReader {tmp_path / 'store'} (")
            assert f"upper {live.upper}" in repr(live)
        assert repr(live) == f"<kvstore.LiveReader {tmp_path / 'store'}, closed>"
        collection = backup.Collection(tmp_path / "backups", passphrase="secret")
        collection.backup(store)
    with collection.open() as reader:
        assert f"as of {reader.as_of}, since {reader.since}, upper {reader.upper}" in repr(reader)
        assert str(tmp_path / "backups") in repr(reader)
    assert repr(reader).endswith(", closed>")
    assert "secret" not in repr(reader) + repr(collection)


def test_a_notebook_shows_rows_that_cannot_run_and_are_few(store: kvstore.Store) -> None:
    names = ["id", HOSTILE, *(f"column {number}" for number in range(40))]
    schema = pa.schema([(name, pa.int64() if name == "id" else pa.string()) for name in names])
    table = store.table("<b>t</b>", schema, "id", indexes={"by_text": [HOSTILE]})
    table.put_batch([{"id": n, HOSTILE: HOSTILE + "x" * 10**4} for n in range(50)])
    found = table.find("by_text")
    for shown in (table, found):
        html = shown._repr_html_()
        assert len(html) < 100_000
        tags = set(re.findall(r"</?(\w+)", html))
        assert tags == {*_TAGS}
        assert html.count("<tr>") == 21
        assert "more rows, 12 more columns" in html
        assert "<i>null</i>" in html
    assert found.read_all().num_rows == 50
    one_by_one = table.find("by_text")
    assert next(one_by_one)["id"] == 0
    one_by_one._repr_html_()
    assert [row["id"] for row in one_by_one] == list(range(1, 50))


def test_a_notebook_shows_scans_and_changes_which_can_be_taken_afterwards(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), (HOSTILE, pa.string())])
    with ExitStack() as stack:
        store = stack.enter_context(kvstore.open(tmp_path / "store", control=True))
        keys = [b"%03d" % number + HOSTILE.encode() for number in range(50)]
        store.put_many(dict.fromkeys(keys, b"\xff" * 200))
        store.delete(keys[0])
        store.table("t", schema, "id").put_batch([{"id": n, HOSTILE: HOSTILE} for n in range(50)])
        collection = backup.Collection(tmp_path / "backups")
        collection.backup(store)
        sources = [
            store,
            stack.enter_context(kvstore.connect(store.path)),
            stack.enter_context(kvstore.follow(tmp_path / "store")),
            stack.enter_context(collection.open()),
        ]
        for source in [*sources, stack.enter_context(store.snapshot())]:
            shown = [source.scan(), source.scan(limit=30), source.table("t").rows()]
            if source in sources:
                shown += [source.changes(0), source.changes(0, order="time")]
            for each in shown:
                html = each._repr_html_()
                assert {*re.findall(r"</?(\w+)", html)} <= {*_TAGS}
                assert html.count("<tr>") == 21
                assert "and more rows" in html
                assert html == each._repr_html_()
            assert [key for key, _ in shown[0]] == keys[1:]
            assert len(list(shown[1])) == 30
            first = next(shown[2])
            assert [first["id"], *(row["id"] for row in shown[2])] == [*range(50)]
            assert [len(list(each)) for each in shown[3:]] == [51] * len(shown[3:])
        assert "<th>end_key" in store.changes(0)._repr_html_()
