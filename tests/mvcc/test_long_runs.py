"""Scans of keys with many versions: each seek past a run finds the version that a look-up finds."""

from __future__ import annotations

from itertools import product

import pytest

from kvstore import Store
from kvstore.base.timestamp import Timestamp
from tests.harness.bounds import bounds

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.mark.parametrize("passed", [1, 2, 32])
def test_a_scan_as_of_any_time_is_what_look_ups_give(store: Store, passed: int) -> None:
    keys = [b"a", b"a\x00", b"b", b"c"]
    times: list[Timestamp] = []
    for row in range(240):
        key = keys[(row // 60 + row % 2) % len(keys)]
        if row % 50 == 49:
            times.append(store.delete(key))
        elif row == 120:
            stamp = store.delete_range(b"a", b"b")
            assert stamp is not None
            times.append(stamp)
        else:
            times.append(store.put(key, b"%d" % row))
    with bounds(VERSIONS_PASSED_MAX=passed):
        for at, reverse in product(times, (False, True)):
            live = [(key, value) for key in keys if (value := store.get(key, at)) is not None]
            expected = live[::-1] if reverse else live
            assert list(store.scan(as_of=at, reverse=reverse)) == expected
            part = [row for row in expected if b"a\x00" <= row[0] < b"c"]
            assert list(store.scan(b"a\x00", b"c", as_of=at, reverse=reverse)) == part
            table = store.scan_batches(as_of=at, reverse=reverse).read_all()
            assert table["key"].to_pylist() == [key for key, _ in expected]
