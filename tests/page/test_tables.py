"""Tables on the page: rows as rows, found by conditions and orders, as data, and through time."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pyarrow as pa
import pytest

import kvstore
from kvstore.remote.server.page import Page
from kvstore.remote.server.page.html import to_notation
from tests.harness.bounds import bounds
from tests.harness.seeds import seed_of
from tests.page.asking import Asking, Html, parsed

HOSTILE = ["<b>Graz</b>", "\x07\u202egnp", '"><img src=x>', "back\\slash", "", " ", "a&b=c"]
SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("<i>nr</i>", pa.int64(), nullable=False),
        ("people", pa.int64()),
        ("note", pa.binary()),
        ("open", pa.bool_()),
    ]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[kvstore.Store, Any, Asking]]:
    """A store of one table alone, whose names and values are hostile, and a visitor."""
    rng = random.Random(seed_of("TABLES"))
    with kvstore.open(tmp_path_factory.mktemp("tables") / "store", durability="async") as store:
        table = store.table(
            "ci<b>ties", SCHEMA, key=["name", "<i>nr</i>"], indexes={"by people": ["people"]}
        )
        for number in range(300):
            row = {"name": rng.choice(HOSTILE), "<i>nr</i>": number, "people": number % 7}
            table.put(row | {"open": number % 2 == 0, "note": b"\x00<script>"})
        yield store, table, Asking(Page(store, None))


def link(page: Html, text: str) -> str:
    """Where the first link with a text leads."""
    return next(each.attributes["href"] for each in page.all("a") if each.text == text)


def grid(page: Html) -> list[list[str]]:
    """The cells of the last table of a page."""
    last = max(at for at, each in enumerate(page.elements) if each.tag == "table")
    rows: list[list[str]] = []
    for each in page.elements[last:]:
        if each.tag == "tr":
            rows.append([])
        elif each.tag == "td":
            rows[-1].append(each.text)
    return rows[1:]


def through(person: Asking, target: str) -> list[list[str]]:
    """The rows of all pages from an address on."""
    found = []
    while target:
        page = person.html(target)
        found += grid(page)
        more = [each for each in page.all("a") if each.attributes.get("rel") == "next"]
        target = more[0].attributes["href"] if more else ""
    return found


def shown(text: str) -> str:
    return to_notation(text.encode(), keeps="\\")


def test_a_store_of_tables_alone_shows_them_where_it_has_no_keys(
    made: tuple[kvstore.Store, Any, Asking],
) -> None:
    store, _, person = made
    page = person.html("keys")
    assert "No key at this time" not in page.all("main")[0].text
    assert "lies in tables" in page.all("main")[0].text
    rows = grid(page)
    assert rows[0][:2] == ["ci<b>ties", "300"]
    assert link(page, "ci<b>ties") == "table?name=ci%3Cb%3Eties"
    assert "No key at this time" in person.text(f"keys?at={int(store.browsing.oldest()) - 1}")


def test_conditions_orders_and_pages_show_the_rows_that_meet_them(
    made: tuple[kvstore.Store, Any, Asking],
) -> None:
    _, table, person = made
    rows = list(table.rows())
    for fields, wanted in (
        ({}, rows),
        ({"order": "key", "falling": "1"}, rows[::-1]),
        ({"order": "index:by people"}, list(table.find("by people"))),
        (
            {"column": "people", "operator": ">=", "value": "5", "order": "key"},
            [row for row in rows if row["people"] >= 5],
        ),
        (
            {"c1": "open", "o1": "=", "v1": "true", "column": "name", "value": "<b>Graz</b>"},
            [row for row in rows if row["open"] and row["name"] == "<b>Graz</b>"],
        ),
        ({"column": "people", "operator": "is null"}, []),
    ):
        with bounds(BROWSE_ENTRIES_MAX=64, BROWSE_ROWS_CHUNK=16):  # most pages meet it
            query = {"name": "ci<b>ties", **fields}
            found = through(person, f"table?{urlencode(query)}") if wanted else []
        assert [row[:3] for row in found] == [
            [shown(row["name"]) or "null", str(row["<i>nr</i>"]), str(row["people"])]
            for row in wanted
        ]


def test_heads_sort_and_values_filter_by_links(made: tuple[kvstore.Store, Any, Asking]) -> None:
    _, table, person = made
    page = person.html("table?name=ci%3Cb%3Eties")
    by_people = person.html(link(page, "people"))
    head = next(each for each in by_people.all("th") if each.text.startswith("people"))
    assert head.attributes["aria-sort"] == "ascending"
    falling = grid(person.html(link(by_people, "people")))
    assert [row[2] for row in falling] == ["6"] * 42 + ["5"] * 43 + ["4"] * 15
    for name in HOSTILE:  # the facet of each value leads to its rows, whatever it contains
        rows = [row for row in table.rows() if row["name"] == name]
        text = shown(name) or "\u201c\u201d"
        facet = [
            each.attributes["href"]
            for each in page.all("a")
            if each.text == text and "c1=name" in each.attributes["href"]
        ]
        assert len(facet) == 1, name
        assert len(through(person, facet[0])) == len(rows)
    assert (
        "Values of name, people, open, among the rows from here on" in page.all("summary")[0].text
    )


def test_csv_and_json_have_the_rows_that_are_shown_whole(
    made: tuple[kvstore.Store, Any, Asking],
) -> None:
    _, table, person = made
    target = "table?name=ci%3Cb%3Eties&column=people&value=3"
    wanted = [row for row in table.rows() if row["people"] == 3]
    page = person.html(target)
    for text in ("CSV", "JSON"):
        answer = person.get(link(page, text))
        headers = dict(answer.headers)
        assert answer.status == 200
        assert headers[b"content-disposition"].startswith(b'attachment; filename="ci-b-ties.')
        assert headers[b"x-content-type-options"] == b"nosniff"
        if text == "CSV":
            rows = list(csv.reader(io.StringIO(answer.body.decode(), newline="")))
            assert rows[0] == ["name", "<i>nr</i>", "people", "note", "open"]
            assert [row[0] for row in rows[1:]] == [row["name"] for row in wanted]
            assert rows[1][3] == b"\x00<script>".hex()
        else:
            found = json.loads(answer.body)
            assert [(row["name"], row["<i>nr</i>"]) for row in found] == [
                (row["name"], row["<i>nr</i>"]) for row in wanted
            ]
    assert person.get("holds?as=csv").status == 400


def test_what_cannot_be_asked_is_told_beside_the_form(
    made: tuple[kvstore.Store, Any, Asking],
) -> None:
    _, _, person = made
    for fields, words in (
        ("column=people&value=many", "many"),
        ("column=open&operator=%3C&value=true", "use = or !="),
        ("column=none&value=1", "no column"),
        ("column=name&value=%5C", "backslash"),
        ("order=index:none", "no index"),
        ("column=name&operator=like&value=1", "choose one of"),
    ):
        answer = person.get("table?name=ci%3Cb%3Eties&" + fields)
        assert answer.status == 400, fields
        text = answer.body.decode()
        assert words in text.replace("&#39;", "'"), fields
        assert 'action="table"' in text


def test_a_row_shows_its_columns_and_what_each_version_changed(tmp_path: Any) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, key=["name", "<i>nr</i>"], indexes={"i": "people"})
        row = {"name": "a", "<i>nr</i>": 1, "people": 1, "note": b"\xff" * 5000, "open": True}
        first = table.put(row)
        table.put(row | {"people": 2, "open": None})
        table.alter(add={"tip": (pa.float64(), 0.5)})
        table.put(row | {"people": 2, "open": None, "tip": 0.75})
        table.delete("a", 1)
        last = table.put(row | {"people": 9})
        person = Asking(Page(store, None))
        key = table.codec().key.whole_key(["a", 1])
        page = person.html(link(person.html("table?name=t"), "a"))
        assert page.all("main")[0].text == person.text("key?key=" + quote(to_notation(key)))
        text = page.all("main")[0].text
        assert r"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" not in text  # the key of the store
        assert page.all("h1")[0].text == "Row name=a, <i>nr</i>=1"
        changes = [(cells[2], " ".join(cells[3].split())) for cells in grid(page)]
        assert changes == [
            ("", "row made"),
            ("", "row deleted"),
            ("tip", "before no such column → now 0.75"),
            ("people", "before 1 → now 2"),
            ("open", "before True → now null"),
            ("", "row made"),
        ]
        made = [each.attributes["href"] for each in page.all("a") if each.text == grid(page)[-1][0]]
        oldest = made[-1]
        assert quote(str(first), safe="") in oldest
        assert "tip" not in person.text(oldest)
        versions = json.loads(person.get(link(page, "JSON")).body)
        assert versions[0]["written_at"] == str(last)
        assert [each["row"] and each["row"]["people"] for each in versions] == [9, None, 2, 2, 1]
        entry = next(key for key in store.keys(b"\xff" * 9 + b"\x01\x01") if key)
        assert "An entry of index i" in person.text("key?key=" + quote(to_notation(entry)))


def test_lists_structs_and_maps_are_shown_as_json(tmp_path: Any) -> None:
    struct = pa.struct([("a", pa.int8()), ("<b>", pa.list_(pa.string()))])
    with kvstore.open(tmp_path / "s") as store:
        schema = pa.schema([("id", pa.int64()), ("s", struct), ("m", pa.map_(pa.string(), struct))])
        table = store.table("docs", schema, "id")
        table.put({"id": 1, "s": {"a": 1, "<b>": ["<i>", None]}, "m": {"k": None}})
        table.put({"id": 2})
        person = Asking(Page(store, None))
        page = person.html("table?name=docs")
        first = next(row for row in grid(page) if row[0].strip() == "1")
        assert '{"a": 1, "<b>": ["<i>", null]}' in first[1]
        found = json.loads(person.get(link(page, "JSON")).body)
        assert [row["m"] for row in found] == [{"k": None}, None]
        lacking = person.html("table?name=docs&column=m&operator=" + quote("is null"))
        assert [row[0].strip() for row in grid(lacking)] == ["2"]
        asked = person.get("table?name=docs&column=s&value=" + quote('{"a": 1}'))
        assert (asked.status, b"use is null or is not null" in asked.body) == (400, True)
        row = parsed(person.get(link(page, "1")).body)
        assert any('["<i>", null]' in each.text for each in row.elements)


def test_a_row_of_megabytes_is_shown_in_part(tmp_path: Any) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, key=["name", "<i>nr</i>"])
        for number in range(3):
            note = b"<b>" + bytes([number]) * (12 << 20)
            table.put({"name": "n" * 60_000, "<i>nr</i>": 1, "note": note})
        person = Asking(Page(store, None))
        assert len(person.get("table?name=t").body) < 30_000
        key = table.codec().key.whole_key(["n" * 60_000, 1])
        page = person.html("row?name=t&key=" + quote(to_notation(key)[:2000]))
        assert "no version at this time" in page.all("main")[0].text
        table.put({"name": "n", "<i>nr</i>": 1, "note": note})
        table.put({"name": "n", "<i>nr</i>": 1, "note": note[:-1]})
        answer = person.get(link(person.html("table?name=t"), "n"))
        assert len(answer.body) < 150_000
        assert "of 12.0 MiB" in answer.body.decode()
        assert "note" in grid(person.html("changed?table=t&since=oldest"))[0][3]


def test_definitions_are_told_through_time(tmp_path: Any) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, key=["name", "<i>nr</i>"])
        table.put({"name": "a", "<i>nr</i>": 1})
        before = store.upper - 1
        table.alter(add={"<b>": pa.float64()}, add_index={"by_people": "people"})
        table.build_index("by_people")
        person = Asking(Page(store, None))
        page = person.html("definition?name=t")
        lines = [line.text for line in page.all("ins") + page.all("del")]
        assert "+column <b>: double" in lines
        assert "+index by_people: people, not whole" in lines
        assert "-index by_people: people, not whole" in lines
        assert "+key name, <i>nr</i>" in lines
        assert "index by_people" in page.all("main")[0].text
        assert "by_people" not in person.text(f"definition?name=t&at={int(before)}")


def test_what_changed_between_two_times(tmp_path: Any) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, key=["name", "<i>nr</i>"])
        table.put_batch([{"name": "a", "<i>nr</i>": n, "people": 1} for n in range(3)])
        store.put_many({b"k/1": b"<old>", b"k/2": b"gone", b"other": b"x"})
        since = store.upper - 1
        table.put({"name": "a", "<i>nr</i>": 1, "people": 5})
        table.delete("a", 2)
        store.put(b"k/1", b"<new>")
        store.delete(b"k/2")
        middle = store.upper - 1
        store.put(b"k/3", b"late")
        person = Asking(Page(store, None))
        rows = grid(person.html(f"changed?table=t&since={since}&at={middle}"))
        assert [row[1:] for row in rows] == [
            ["changed", "people", "before 1 → now 5"],
            ["removed", "", "people=1, note=null, open=null"],
        ]
        page = person.html(f"changed?prefix=k/&since={since}")
        assert grid(page) == [
            ["k/1", "changed", "before <old> → now <new>"],
            ["k/2", "removed", "gone"],
            ["k/3", "added", "late"],
        ]
        assert len(grid(person.html(f"changed?prefix=k/&since={since}&at={middle}"))) == 2
        found = json.loads(person.get(link(page, "JSON")).body)
        assert found[0] == {"key": "k/1", "change": "changed", "before": "<old>", "after": "<new>"}
        assert person.get(f"changed?since={middle}&at={since}").status == 400
        assert "k/3" in person.text("changed?since=1 hour ago".replace(" ", "%20"))
