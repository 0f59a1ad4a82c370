"""A store whose history goes stays as large as its rows, however long it is written."""

from __future__ import annotations

from pathlib import Path

import kvstore
from kvstore.engine.api import CHANGES, DATA, FAMILIES, META
from kvstore.limits import SMALL_FILES_MAX
from tests.gc.garbage import stored

KEYS = 40
ROUNDS = 3 * SMALL_FILES_MAX


def test_a_store_collected_again_and_again_holds_its_rows(tmp_path: Path) -> None:
    records = []
    for number in range(ROUNDS):
        with kvstore.open(tmp_path / "s", durability="async") as store:
            for index in range(3 * KEYS):
                store.put(b"k%03d" % (index % KEYS), b"%d" % number)
            store.delete_range(b"gone", b"gonf")
            store.gc(before=store.now())
            assert stored(store, DATA) == KEYS
            assert stored(store, CHANGES) == 0
            records.append(stored(store, META))
            files = sum(store.stats()[f"{family}_files"] for family in FAMILIES)
            assert files <= 2 * SMALL_FILES_MAX * len(FAMILIES)
    assert len(set(records[1:])) == 1
    with kvstore.open(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"k%03d" % key: b"%d" % (ROUNDS - 1) for key in range(KEYS)}
