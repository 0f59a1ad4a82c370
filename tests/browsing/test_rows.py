"""Looks at the rows of a table, and at what differs between two times, against a model."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Span, desc
from kvstore.errors import NotFoundError, UsageError
from kvstore.limits import BROWSE_ENTRIES_MAX, BROWSE_ROWS_CHUNK
from kvstore.tables.looks import Condition, RowSearch, best_index
from tests.harness.bounds import bounds
from tests.harness.seeds import seed_of

SCHEMA = pa.schema(
    [
        pa.field("city", pa.string(), nullable=False),
        pa.field("number", pa.int32(), nullable=False),
        ("delay", pa.float64()),
        ("to", pa.string()),
        ("ok", pa.bool_()),
    ]
)
TEXTS = ["", "a", "ab", "b", "<b>", "\x00", "ä"]
FLOATS = [None, -1.5, -0.0, 0.0, 2.0, float("inf"), float("nan")]
MEETS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "begins with": lambda cell, value: cell.startswith(value),
    "contains": lambda cell, value: value in cell,
}


def meets(row: dict[str, Any], condition: Condition) -> bool:
    """The model of a condition."""
    cell = row[condition.column]
    if condition.operator in ("is null", "is not null"):
        return (cell is None) is (condition.operator == "is null")
    return cell is not None and MEETS[condition.operator](cell, condition.value)


def drawn(rng: random.Random) -> Condition:
    """A condition."""
    column = rng.choice(SCHEMA.names)
    values = {"number": range(9), "delay": FLOATS[1:], "ok": [True, False]}
    words = list(MEETS)
    if column == "ok":
        words = ["=", "!="]
    elif column in ("number", "delay"):
        words = words[:6]
    if rng.random() < 0.2:
        return Condition(column, rng.choice(["is null", "is not null"]))
    return Condition(column, rng.choice(words), rng.choice(values.get(column, TEXTS)))  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "rocksdb"])
def cities(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[tuple[kvstore.Store, Any]]:
    """A store with a table that has rows, deleted ones, and a history of each."""
    seed = seed_of("LOOKS")
    rng = random.Random(seed)
    path = tmp_path / "store"
    with kvstore.open(path, engine=request.param, durability="async") as store:
        table = store.table(
            "cities",
            SCHEMA,
            key=["city", desc("number")],
            indexes={"by_delay": [desc("delay"), "to"], "by_to": "to"},
        )
        for _ in range(120):
            row = {
                "city": rng.choice(TEXTS),
                "number": rng.randrange(9),
                "delay": rng.choice(FLOATS),
                "to": rng.choice([None, *TEXTS]),
                "ok": rng.choice([None, True, False]),
            }
            table.put(row)
            if rng.random() < 0.2:
                table.delete(rng.choice(TEXTS), rng.randrange(9))
        yield store, table


def pages(store: kvstore.Store, table: Any, search: RowSearch, at: Any, limit: int) -> list[Any]:
    """The rows of all pages of a search."""
    found: list[Any] = []
    after = b""
    codec = table.codec(at)
    while True:
        page = store.browsing.rows(codec, search, at, limit=limit, after=after)
        assert len(page.rows) <= limit
        assert len(page.rows) == limit or page.is_cut or page.next is None
        found += page.rows
        if page.next is None:
            return [codec.to_dict(*row) for row in found]
        assert page.next != after
        after = page.next


@pytest.mark.parametrize("tiny", [False, True])
def test_pages_lead_through_the_rows_that_meet_the_conditions_in_their_order(
    cities: tuple[kvstore.Store, Any], tiny: bool
) -> None:
    store, table = cities
    rng = random.Random(seed_of("LOOKS") + 1)
    times = [*(version.timestamp for version in store.history(table.codec().key.key(["a", 1])))]
    few = {"BROWSE_ROWS_CHUNK": 1, "BROWSE_ENTRIES_MAX": 3, "BROWSE_BYTES_MAX": 40}
    for _ in range(25):
        at = rng.choice([store.upper - 1, *times])
        conditions = [drawn(rng) for _ in range(rng.randrange(4))]
        index = rng.choice([None, "by_delay", "by_to", best_index(table.codec(), conditions)])
        search = RowSearch(conditions, index, rng.random() < 0.5)
        found = table.find(index, as_of=at) if index else table.rows(as_of=at)
        wanted = [row for row in found if all(meets(row, each) for each in conditions)]
        if search.is_falling:
            wanted.reverse()
        with bounds(**few if tiny else {}):
            got = pages(store, table, search, at, rng.choice([1, 2, 50]))
        assert repr(got) == repr(wanted), search  # repr: NaN is no NaN's equal


def test_facets_count_the_rows_that_were_found(cities: tuple[kvstore.Store, Any]) -> None:
    store, table = cities
    search = RowSearch([Condition("ok", "is not null")])
    page = store.browsing.rows(table.codec(), search, limit=1, with_facets=True)
    rows = [row for row in table.rows() if row["ok"] is not None]
    assert not page.is_cut
    assert page.met == len(rows)
    assert page.seen == table.count()
    assert {facet.column for facet in page.facets} <= {"city", "number", "to", "ok"}
    for facet in page.facets:
        cells = [row[facet.column] for row in rows]
        assert facet.distinct == len(set(cells))
        assert all(cells.count(value) == count for value, count in facet.values)


def test_a_condition_that_its_column_cannot_meet_is_refused(
    cities: tuple[kvstore.Store, Any],
) -> None:
    store, table = cities
    for condition, error in (
        (Condition("ok", "<", True), UsageError),
        (Condition("number", "contains", 1), UsageError),
        (Condition("none", "="), NotFoundError),
    ):
        with pytest.raises(error):
            store.browsing.rows(table.codec(), RowSearch([condition]))


def test_a_look_that_finds_nothing_ends_at_its_bound(tmp_path: Any) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, key="number", indexes={"by_to": "to"})
        table.put_batch([{"city": "a", "number": n, "to": "x"} for n in range(12_000)])
        for search in (
            RowSearch([Condition("city", "=", "b")]),
            RowSearch([Condition("city", "=", "b")], "by_to", is_falling=True),
        ):
            page = store.browsing.rows(table.codec(), search, with_facets=True)
            assert page.is_cut
            assert page.rows == []
            assert page.next is not None
            assert page.seen <= BROWSE_ENTRIES_MAX + BROWSE_ROWS_CHUNK
        span = Span.of_prefix(table.codec().key.prefix)
        assert store.browsing.count(span)[::3] == (12_000, True)
        assert store.browsing.count(span, most=100).rows <= 100


@pytest.mark.parametrize("tiny", [False, True])
def test_what_differs_between_two_times_is_the_difference_of_the_states(
    store: kvstore.Store, tiny: bool
) -> None:
    rng = random.Random(seed_of("DIFFER"))
    keys = [b"%d" % number for number in range(8)]
    times = [store.put(b"0", b"begin")]
    for _ in range(60):
        key = rng.choice(keys)
        deed = rng.random()
        if deed < 0.7:
            times.append(store.put(key, b"%d" % rng.randrange(3)))
        elif deed < 0.95 or not tiny:
            times.append(store.delete(key))
        else:
            times.append(store.delete_range(key, key + b"\x00") or times[-1])
    few = {"BROWSE_CHUNK": 1, "BROWSE_ENTRIES_MAX": 4, "BROWSE_BYTES_MAX": 5}
    for _ in range(30):
        since, upto = sorted(rng.sample(times, 2))
        start = rng.choice([b"", b"3"])
        before, after = (dict(store.scan(start, as_of=time)) for time in (since, upto))
        wanted = [
            (key, before.get(key), after.get(key))
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]
        got: list[Any] = []
        at: bytes | None = start
        with bounds(**few if tiny else {}):
            while at is not None:
                page = store.browsing.changed(since, upto, Span(at), limit=3)
                got += page.rows
                assert page.next is None or page.next > at
                at = page.next
        assert got == wanted
