"""A look at a store costs the same whatever the store holds: entries and seeks are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvstore
from kvstore.base.span import Span
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.engine.api import Cursor
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.limits import BROWSE_ENTRIES_MAX, BROWSE_ROWS_MAX, BROWSE_VALUE_BYTES
from tests.harness.bounds import bounds

MANY, FEW = 12_000, 200
MIB = 1 << 20


class CountedCursor:
    """A pass that counts the entries that it was asked for."""

    def __init__(self, cursor: Cursor, counts: dict[str, int]) -> None:
        self._cursor, self._counts = cursor, counts

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        self._counts["entries"] += count
        return self._cursor.take(count)

    def feed(self, live: Any, count: int) -> bool:
        self._counts["entries"] += count
        return self._cursor.feed(live, count)

    def close(self) -> None:
        self._cursor.close()


class CountedReader:
    """A position that counts its moves."""

    def __init__(self, reader: Any, counts: dict[str, int]) -> None:
        self.reader, self._counts = reader, counts

    def __getattr__(self, name: str) -> Any:
        if name in ("seek", "next"):
            self._counts["entries"] += 1
        return getattr(self.reader, name)


class CountedEngine(MemoryEngine):
    """A memory engine whose passes and positions are counted."""

    def __init__(self) -> None:
        super().__init__(None)
        self.counts = {"entries": 0, "passes": 0}

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        self.counts["passes"] += 1
        return CountedCursor(super().cursor(*arguments, **options), self.counts)

    def borrow(self) -> Any:
        ticket, reader = super().borrow()
        return ticket, CountedReader(reader, self.counts)

    def give_back(self, ticket: Any, reader: Any) -> None:
        super().give_back(ticket, reader.reader)


class Counted:
    """A store whose looks are counted."""

    def __init__(self) -> None:
        self._engine = CountedEngine()
        self.clock = kvstore.ManualClock(1_700_000_000 * NS_PER_SECOND)
        self.store = kvstore.open(None, self._engine, "async", self.clock)

    def cost(self, look: Any) -> tuple[int, int]:
        """The entries and passes of one look."""
        self._engine.counts.update(entries=0, passes=0)
        look(self.store.browsing)
        return self._engine.counts["entries"], self._engine.counts["passes"]


@pytest.fixture
def counted() -> Iterator[Counted]:
    found = Counted()
    with found.store:
        yield found


def fill(counted: Counted, count: int) -> None:
    """`count` keys in one folder, as many versions of one key, and as many commits."""
    counted.store.put_many({b"in/%08d" % number: b"v" for number in range(count)})
    for number in range(count // 4):
        counted.clock.advance(NS_PER_SECOND // 10)
        counted.store.put(b"one", b"%d" % number)


@pytest.mark.parametrize(
    "look",
    [
        lambda browsing: browsing.keys(),
        lambda browsing: browsing.keys(Span(b"in/00000100")),
        lambda browsing: browsing.keys(delimiter=b"/"),
        lambda browsing: browsing.versions(b"one"),
        lambda browsing: browsing.versions(b"in/00000001"),
        lambda browsing: browsing.activity(0, count=10),
        lambda browsing: browsing.count(most=1000),
        lambda browsing: browsing.changed(1, limit=5),
    ],
    ids=[
        *("keys", "keys further on", "folders", "versions", "one version", "activity"),
        *("count", "changed"),
    ],
)
def test_a_look_costs_the_same_in_a_store_a_hundred_times_as_large(look: Any) -> None:
    costs = []
    for count in (FEW, MANY):
        counted = Counted()
        with counted.store:
            fill(counted, count)
            costs.append(counted.cost(look))
    (few, few_passes), (many, many_passes) = costs
    assert many <= max(few * 2, 2 * BROWSE_ROWS_MAX + 8 * 10 * 128)
    assert many_passes <= max(few_passes * 2, 10 * 8 + 10)


def test_a_run_of_deleted_keys_cuts_a_page_at_its_bound(counted: Counted) -> None:
    store = counted.store
    keys = [b"%08d" % number for number in range(MANY)]
    store.put_many(dict.fromkeys(keys, b"v"))
    with store.batch() as batch:
        for key in keys:
            batch.delete(key)
    store.put(b"z", b"last")
    page = store.browsing.keys()
    assert page.is_cut
    assert page.rows == []
    assert counted.cost(lambda browsing: browsing.keys())[0] <= BROWSE_ENTRIES_MAX + 128
    pages = 1
    while page.next is not None:
        page = store.browsing.keys(Span(page.next))
        pages += 1
    assert [row.key for row in page.rows] == [b"z"]
    assert pages >= 2 * MANY // BROWSE_ENTRIES_MAX


def test_a_group_whose_first_key_takes_a_whole_pass_is_one_row(store: kvstore.Store) -> None:
    store.put(b"g/a", b"0")
    store.put(b"g/b", b"v")
    as_of = store.put(b"h", b"v")
    for number in range(9):
        store.put(b"g/a", b"%d" % number)
    found: list[bytes] = []
    start: bytes | None = b""
    with bounds(BROWSE_CHUNK=1, BROWSE_ENTRIES_MAX=1):
        while start is not None:
            page = store.browsing.keys(Span(start), as_of, limit=1, delimiter=b"/")
            found += [row.key for row in page.rows]
            start = page.next
    assert found == [b"g/", b"h"]


def test_large_values_are_shown_in_part_and_cut_a_page(store: kvstore.Store) -> None:
    for number in range(6):
        store.put(b"%d" % number, bytes([65 + number]) * (10 * MIB))
    page = store.browsing.keys()
    assert page.is_cut
    assert 3 <= len(page.rows) < 6
    for row in page.rows:
        assert row.value is not None
        assert (len(row.value.head), row.value.size) == (BROWSE_VALUE_BYTES, 10 * MIB)


def test_each_version_names_the_write_that_made_it(store: kvstore.Store) -> None:
    store.put(b"k", b"1")
    store.delete(b"k")
    store.put(b"k", b"2")
    store.delete_range(b"k", b"l")
    rows = store.browsing.versions(b"k").rows
    assert [row.origin for row in rows] == ["range delete", "put", "delete", "put"]


def test_an_interval_counts_its_changes_or_says_about(counted: Counted) -> None:
    store, begins = counted.store, int(counted.store.now())
    for _ in range(30):
        counted.clock.advance(NS_PER_SECOND)
        store.put(b"k", b"v")
    for _ in range(3000):
        store.put(b"k", b"v")
    found = store.browsing.activity(begins, count=10).intervals
    assert [each.upto for each in found[:-1]] == [each.since for each in found[1:]]
    assert all(each.is_exact for each in found[:-1])
    assert sum(each.changes for each in found[:-1]) in range(25, 31)
    assert not found[-1].is_exact


def test_marks_name_range_deletes_and_clears(store: kvstore.Store) -> None:
    begins = store.put(b"a", b"v")
    deleted = store.delete_range(b"a", b"b")
    cleared = store.clear_range(b"x", b"y")
    found = store.browsing.activity(cleared - 1)
    assert [(mark.at, mark.kind) for mark in found.marks] == [
        (cleared, "history begins"),
        (cleared, "clear"),
    ]
    assert deleted is not None
    assert store.browsing.oldest() <= begins
