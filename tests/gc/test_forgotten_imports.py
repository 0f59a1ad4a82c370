"""Imports whose rows are all gone are still known: adding one again returns its first stamp."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import HistoryGoneError

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_an_import_that_was_collected_is_not_added_again(tmp_path: Path) -> None:
    made = bulk.Import.create(tmp_path / "staged", import_id=7)
    with made.writer() as writer:
        writer.put(b"a", b"imported")
    made.seal()
    with kvstore.open(tmp_path / "store", durability="async") as store:
        stamp = bulk.ingest(store, made.staging)
        store.delete(b"a")
        store.gc(before=store.put(b"z", b"later"))
        assert store.gc(before=store.put(b"z", b"later still")).imports == 0
        assert bulk.ingest(store, made.staging) == stamp
        assert store.get(b"a") is None
    with kvstore.open(tmp_path / "store") as store:
        assert bulk.ingest(store, made.staging) == stamp
        assert store.get(b"a") is None
        with pytest.raises(HistoryGoneError):
            store.revert_import(7)
