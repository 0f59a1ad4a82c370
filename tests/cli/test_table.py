"""`kvstore table` and `kvstore export`: their output, their refusals and their exit codes."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import duckdb
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import Result

import kvstore
import kvstore.bulk.loading
from kvstore.errors import TableAlteredError
from kvstore.tables import unique
from tests.cli.installed import Run, told

pytestmark = pytest.mark.usefixtures("each_engine")

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
SCHEMA = pa.schema(
    [
        ("vendor", pa.string()),
        ("trip_id", pa.int64()),
        ("zone", pa.string()),
        ("pickup", pa.timestamp("us", "UTC")),
        ("fare", pa.float64()),
    ]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a table of three rows."""
    with kvstore.open(tmp_path / "s", clock=kvstore.ManualClock(10)) as store:
        trips = store.table(
            "trips", SCHEMA, ["vendor", "trip_id"], indexes={"by_zone": ["zone", "pickup"]}
        )
        for trip, zone, fare in ((7, "JFK", 10.0), (8, "LGA", 8.0)):
            trips.put({"vendor": "A", "trip_id": trip, "zone": zone, "pickup": NOON, "fare": fare})
        trips.put({"vendor": "B", "trip_id": 1, "zone": "JFK"})
        trips.update("A", 7, fare=12.5)
    return tmp_path / "s"


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_tables_are_listed_and_shown(run: Run, path: Path) -> None:
    assert run("table", "list", path).stdout.splitlines()[1].split() == [
        *("trips", "5", "vendor,", "trip_id", "by_zone")
    ]
    shown = run("table", "show", path, "trips").stdout
    assert "pickup   timestamp[us, tz=UTC]" in shown
    assert "key: vendor, trip_id\nindex by_zone: zone, pickup\n" in shown
    facts = told(run("table", "show", path, "trips", "--json"))
    assert facts["columns"][1] == {"name": "trip_id", "type": "int64", "nullable": False}
    assert "there are trips" in run("table", "show", path, "cars", code=2).stderr


def test_a_row_is_printed_as_of_a_time(run: Run, path: Path) -> None:
    assert "fare     12.5\n" in run("table", "get", path, "trips", "A", 7).stdout
    row = told(run("table", "get", path, "trips", "A", 7, "--json"))
    assert row["pickup"] == "2026-01-31T12:00:00+00:00"
    with kvstore.open(path) as store:
        first = store.table("trips").history("A", 7)[-1].timestamp
    row = told(run("table", "get", path, "trips", "A", 7, "--as-of", int(first), "--json"))
    assert row["fare"] == 10.0
    told_row = run("table", "get", path, "trips", "A", 7, "-c", "fare", "--json").stdout
    assert told_row == '{"fare": 12.5}\n'
    run("table", "get", path, "trips", "A", 9, code=1)
    refused = run("table", "get", path, "trips", "A", "x", code=2)
    assert "table 'trips', column 'trip_id': 'x' is no int64" in refused.stderr
    run("table", "get", path, "trips", "A", code=2)


def test_rows_are_scanned_and_found(run: Run, path: Path) -> None:
    scanned = lines(run("table", "scan", path, "trips", "A", "-c", "trip_id,fare", "--json"))
    assert scanned == [{"trip_id": 7, "fare": 12.5}, {"trip_id": 8, "fare": 8.0}]
    found = lines(run("table", "find", path, "trips", "by_zone", "JFK", "--json"))
    assert [(row["vendor"], row["pickup"] is None) for row in found] == [("B", True), ("A", False)]
    people = run("table", "scan", path, "trips", "--reverse", "--limit", 1).stdout.splitlines()
    assert people[0].split() == ["vendor", "trip_id", "zone", "pickup", "fare"]
    assert people[1].split() == ["B", "1", "JFK", "null", "null"]
    assert len(people) == 2
    assert "no index 'by_fare'" in run("table", "find", path, "trips", "by_fare", code=2).stderr


@pytest.mark.parametrize(
    ("conditions", "trips"),
    [
        (["fare >= 10"], [7]),
        (["fare>8", "vendor = A"], [7]),
        (["zone is null"], []),
        (["fare is null"], [1]),
        (["fare is not null", "zone begins with L"], [8]),
        (["zone contains F"], [7, 1]),
        (["zone != JFK"], [8]),
        (["pickup <= 2026-01-31T12:00:00Z"], [7, 8]),
        (["trip_id=7"], [7]),
        (['zone = "JFK"'], [7, 1]),
        (["zone ="], []),
    ],
)
def test_rows_are_those_that_meet_conditions(
    run: Run, path: Path, conditions: list[str], trips: list[int]
) -> None:
    where = [word for condition in conditions for word in ("--where", condition)]
    found = lines(run("table", "scan", path, "trips", *where, "-c", "trip_id", "--json"))
    assert [row["trip_id"] for row in found] == trips
    assert run("table", "count", path, "trips", *where).stdout == f"{len(trips)}\n"


TYPED = {
    "uuid": (pa.uuid(), UUID(int=7), str(UUID(int=7))),
    "binary": (pa.binary(), b"\x01\x02", "0102"),
    "fixed": (pa.binary(2), b"\x01\x02", "0102"),
    "large": (pa.large_string(), "ab", "ab"),
    "decimal": (pa.decimal128(9, 2), Decimal("1.50"), "1.5"),
    "day": (pa.date32(), date(2026, 1, 2), "2026-01-02"),
    "duration": (pa.duration("s"), timedelta(seconds=5), "5"),
    "flag": (pa.bool_(), True, "true"),
    "naive": (pa.timestamp("us"), datetime(2026, 1, 2), "2026-01-02T00:00:00"),  # noqa: DTZ001
    "short": (pa.float32(), 0.5, "0.5"),
    "unsigned": (pa.uint64(), 2**64 - 1, str(2**64 - 1)),
}


@pytest.mark.parametrize("served", [False, True], ids=["path", "beside its owner"])
def test_a_condition_compares_values_of_each_type(run: Run, tmp_path: Path, served: bool) -> None:
    schema = pa.schema([("id", pa.int64()), *((name, each[0]) for name, each in TYPED.items())])
    with kvstore.open(tmp_path / "s", control=served) as store:
        table = store.table("t", schema, key="id")
        table.put({"id": 1, **{name: each[1] for name, each in TYPED.items()}})
        table.put({"id": 2})
        if not served:
            store.close()
        for name, (_, _, word) in TYPED.items():
            for condition, count in ((f"= {word}", 1), (f"!= {word}", 0), (f"<= {word}", 1)):
                where = ("--where", f"{name} {condition}")
                assert run("table", "count", tmp_path / "s", "t", *where).stdout == f"{count}\n"
        for name, start in (("binary", "01"), ("fixed", "01"), ("large", "a")):
            where = ("--where", f"{name} begins with {start}")
            assert run("table", "count", tmp_path / "s", "t", *where).stdout == "1\n"


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("fares > 1", "the columns are vendor, trip_id, zone, pickup, fare"),
        ("fare", "is no condition"),
        ("fare > much", "much"),
        ("trip_id > 1.5", "1.5"),
        ("fare contains 1", "fare"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(
    run: Run, path: Path, condition: str, told: str
) -> None:
    for command in ("scan", "count"):
        assert told in run("table", command, path, "trips", "-w", condition, code=2).stderr


def test_changes_of_rows_are_printed_in_time_order(run: Run, path: Path) -> None:
    found = lines(run("table", "changes", path, "trips", "--since", 0, "-c", "trip_id,fare"))
    assert [(each["change"], each["row"]) for each in found] == [
        ("insert", {"trip_id": 7, "fare": 10.0}),
        ("insert", {"trip_id": 8, "fare": 8.0}),
        ("insert", {"trip_id": 1, "fare": None}),
        ("update_preimage", {"trip_id": 7, "fare": 10.0}),
        ("update_postimage", {"trip_id": 7, "fare": 12.5}),
    ]
    times = [str(each["timestamp"]) for each in found]
    assert times == sorted(times)
    late = ("table", "changes", path, "trips", "--since", times[2])
    assert len(lines(run(*late))) == 2
    (post,) = lines(run(*late, "--images", "post"))
    assert post["change"] == "update_postimage"
    assert lines(run(*late, "--limit", 1)) == [*lines(run(*late))][:1]
    (first,) = lines(run("table", "changes", path, "trips", "--since", 0, "--upto", times[0]))
    assert first["timestamp"] == times[0]
    assert "images" in run(*late, "--images", "all", code=2).stderr


def test_people_see_a_hundred_rows_and_are_told_so(run: Run, path: Path) -> None:
    with kvstore.open(path) as store:
        store.table("trips").put_batch(
            pa.table({"vendor": ["C"] * 200, "trip_id": list(range(200))})
        )
    result = run("table", "scan", path, "trips")
    assert len(result.stdout.splitlines()) == 101
    assert "the first 100 rows" in result.stderr
    assert len(lines(run("table", "scan", path, "trips", "--json"))) == 203
    assert "first 100" not in run("table", "scan", path, "trips", "--limit", 150).stderr


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_files_are_imported_with_their_entries_at_one_time(
    run: Run, path: Path, tmp_path: Path, suffix: str
) -> None:
    source = tmp_path / f"rows{suffix}"
    if suffix == ".csv":
        source.write_text("trip_id,vendor,zone,fare\n7,A,EWR,1.5\n9,Ä,JFK,\n")
    elif suffix == ".jsonl":
        source.write_text(
            '{"trip_id": 7, "vendor": "A", "zone": "EWR", "fare": 1.5}\n'
            '{"vendor": "Ä", "zone": "JFK", "trip_id": 9}\n'
        )
    else:
        pq.write_table(
            pa.table(
                {
                    "trip_id": pa.array([7, 9], pa.int32()),
                    "vendor": ["A", "Ä"],
                    "zone": ["EWR", "JFK"],
                    "fare": [1.5, None],
                }
            ),
            source,
        )
    done = told(run("table", "import", path, "trips", source, "--json"))
    assert (done["rows"], done["rows_and_entries"]) == (2, 4)
    with kvstore.open(path) as store:
        trips = store.table("trips")
        assert trips.get("A", 7) == {
            **{"vendor": "A", "trip_id": 7, "zone": "EWR", "pickup": None, "fare": 1.5}
        }
        assert [row["vendor"] for row in trips.find("by_zone", "EWR")] == ["A"]
        assert [row["vendor"] for row in trips.find("by_zone", "JFK")] == ["B", "Ä"]
        assert str(trips.history("Ä", 9)[0].timestamp) == done["timestamp"]
        assert trips.get("A", 7, as_of=trips.history("A", 7)[1].timestamp)["zone"] == "JFK"  # type: ignore[index]
    refused = run("table", "import", path, "trips", source, "--on-conflict", "error", code=2)
    assert "live" in refused.stderr or "key" in refused.stderr


def test_an_import_tells_its_table_and_counts_rows_apart_from_entries(
    run: Run, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("id,zone\n1,x\n2,y\n3,z\n")
    (tmp_path / "plain.csv").write_text("key,value\na,1\n")
    schema = pa.schema([("id", pa.int64()), ("zone", pa.string())])
    with kvstore.open(path) as store:
        store.table("zones", schema, key="id", indexes={"by_zone": "zone"})
    run("table", "import", path, "zones", tmp_path / "rows.csv")
    run("import", path, tmp_path / "plain.csv")
    found = lines(run("imports", "list", path, "--json"))
    told = [(each["table"], each["rows"], each["rows_and_entries"]) for each in found]
    assert told == [(None, 1, 1), ("zones", 3, 6)]
    shown = lines(run("imports", "show", path, str(found[1]["id"]), "--json"))[0]
    assert (shown["table"], shown["rows"]) == ("zones", 3)
    assert "these are 1 of 2" in run("imports", "list", path, "--limit", "1").stderr


def test_bad_files_are_refused_by_column_and_row_and_add_nothing(
    run: Run, path: Path, tmp_path: Path
) -> None:
    def refusal(table: pa.Table, *more: object) -> str:
        pq.write_table(table, tmp_path / "f.parquet")
        return run("table", "import", path, "trips", tmp_path / "f.parquet", *more, code=2).stderr

    with kvstore.open(path) as store:
        before = store.upper
    null = refusal(pa.table({"vendor": ["C", None], "trip_id": [1, 2]}))
    assert "f.parquet: table 'trips', column 'vendor' is null in row 2" in null
    assert "'cost'" in refusal(pa.table({"vendor": ["C"], "trip_id": [1], "cost": [1]}))
    assert "column 'trip_id' is int64, not string" in refusal(
        pa.table({"vendor": ["C"], "trip_id": ["x"]})
    )
    twice = pa.table({"vendor": ["C", "C"], "trip_id": [1, 1]})
    assert "key vendor='C', trip_id=1 of table 'trips' came twice" in refusal(twice)
    rows = pandas.DataFrame({"vendor": ["C", "D"], "trip_id": [1, 2]})
    rows[rows.trip_id > 1].to_parquet(tmp_path / "f.parquet")
    index = run("table", "import", path, "trips", tmp_path / "f.parquet", code=2).stderr
    assert "'__index_level_0__' is the index of a pandas frame; write the frame with" in index
    fare = "f.csv: row 3, column 'fare': double does not hold '9007199254740993' exactly"
    (tmp_path / "f.csv").write_text("vendor,trip_id,fare\nC,1,1e23\nC,2,9007199254740993\n")
    assert fare in run("table", "import", path, "trips", tmp_path / "f.csv", code=2).stderr
    (tmp_path / "f.csv").write_text("vendor,trip_id\nC,1\nC,one\n")
    word = run("table", "import", path, "trips", tmp_path / "f.csv", code=2).stderr
    assert "f.csv: row 3, column 'trip_id': " in word
    assert "correct the row; the header is row 1" in word
    with kvstore.open(path) as store:
        assert store.upper == before
        assert store.imports.all() == []
        store.table("users", pa.schema([("mail", pa.string())]), "mail", {"m": unique("mail")})
    pq.write_table(pa.table({"mail": ["a"]}), tmp_path / "u.parquet")
    run("table", "import", path, "users", tmp_path / "u.parquet")
    pq.write_table(pa.table({"mail": ["b"], "nick": ["x"]}), tmp_path / "u.parquet")
    run("table", "alter", path, "users", "--add", "nick:string", "--unique-index", "n=nick")
    run("table", "import", path, "users", tmp_path / "u.parquet")
    pq.write_table(pa.table({"mail": ["c"], "nick": ["x"]}), tmp_path / "u.parquet")
    refused = run("table", "import", path, "users", tmp_path / "u.parquet", code=2).stderr
    assert "index 'n': nick='x' is taken by the row mail='b'" in refused


def test_an_import_meets_an_alteration_and_adds_nothing(path: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"vendor": ["C"], "trip_id": [1]}), tmp_path / "f.parquet")
    with kvstore.open(path) as store:
        trips = store.table("trips")

        def altered(rows: object) -> object:
            trips.alter(add_index={"by_fare": "fare"})
            return rows

        with pytest.raises(TableAlteredError):
            kvstore.bulk.loading.import_files(
                trips,
                [tmp_path / "f.parquet"],
                "overwrite",
                "error",
                progress=altered,  # type: ignore[arg-type]  # it hands the rows on
            )
        assert trips.get("C", 1) is None
        assert store.imports.all() == []
        kvstore.bulk.loading.import_files(trips, [tmp_path / "f.parquet"], "overwrite", "error")
        assert trips.get("C", 1) is not None


def test_a_table_is_altered(run: Run, path: Path) -> None:
    run("table", "alter", path, "trips", "--add", "tip:double=0.5", "--add", "note:string")
    run("table", "alter", path, "trips", "--add", "at:timestamp[us, tz=UTC]=2026-01-31T12:00:00Z")
    row = told(run("table", "get", path, "trips", "A", 7, "--json"))
    assert (row["tip"], row["note"], row["at"]) == (0.5, None, "2026-01-31T12:00:00+00:00")
    run("table", "alter", path, "trips", "--add-index", "by_fare=-fare,vendor")
    found = lines(run("table", "find", path, "trips", "by_fare", 12.5, "-c", "trip_id", "--json"))
    assert found == [{"trip_id": 7}]
    with kvstore.open(path) as store:
        store.table("trips").alter(add_index={"by_note": "note"})
    shown = run("table", "show", path, "trips").stdout
    assert "by_note: note (not whole: kvstore table build)" in shown
    built = told(run("table", "build", path, "trips", "by_note", "--json"))
    assert built == {"index": "by_note", "rows": 3}
    assert len(lines(run("table", "find", path, "trips", "by_note", "--json"))) == 3
    run("table", "alter", path, "trips", "--drop-index", "by_note")
    facts = told(run("table", "alter", path, "trips", "--drop-index", "by_zone", "--json"))
    assert [(each["name"], each["columns"]) for each in facts["indexes"]] == [
        ("by_fare", ["-fare", "vendor"])
    ]
    for wrong in ("tip", "tip:number", "tip:double=x"):
        run("table", "alter", path, "trips", "--add", wrong, code=2)
    assert "pass --add, --drop," in run("table", "alter", path, "trips", code=2).stderr


def test_a_column_tells_when_rows_expire(run: Run, path: Path, tmp_path: Path) -> None:
    columns = ["id:int64", "until:timestamp[us, tz=UTC]"]
    run("table", "create", path, "codes", *columns, "--key", "id", "--expires", "until")
    assert "rows expire: until\n" in run("table", "show", path, "codes").stdout
    (tmp_path / "codes.csv").write_text("id,until\n1,2026-01-31T12:00:00Z\n2,2200-01-01T00Z\n")
    (tmp_path / "more.jsonl").write_text('{"id": 3}\n{"id": 4, "until": "2026-01-31T12:00:00Z"}\n')
    for file in ("codes.csv", "more.jsonl"):
        run("table", "import", path, "codes", tmp_path / file)
        found = lines(run("table", "scan", path, "codes", "-c", "id", "--json"))
        assert [row["id"] for row in found] == ([2] if file == "codes.csv" else [2, 3])
    run("table", "put", path, "codes", "id=5", "until=2026-01-31T12:00:00Z")
    found = lines(run("table", "scan", path, "codes", "-c", "id", "--json"))
    assert found == [{"id": 2}, {"id": 3}], "the time of the others has passed"
    refused = run("table", "put", path, "codes", "id=6", "--expires", "+1h", code=2)
    assert "set until in the row" in refused.stderr
    facts = told(run("table", "alter", path, "codes", "--no-expires", "--json"))
    assert facts["expires"] is None
    facts = told(run("table", "alter", path, "codes", "--expires", "until", "--json"))
    assert facts["expires"] == "until"
    both = run("table", "alter", path, "codes", "--expires", "until", "--no-expires", code=2)
    assert "leave one out" in both.stderr


def test_every_type_is_printed_and_read_as_a_word(run: Run, tmp_path: Path) -> None:
    uuid = UUID(int=7)
    schema = pa.schema(
        [
            ("id", pa.uuid()),
            ("day", pa.date32()),
            ("at", pa.timestamp("ns", "UTC")),
            ("price", pa.decimal128(9, 2)),
            ("raw", pa.binary()),
            ("took", pa.duration("ms")),
            ("ok", pa.bool_()),
        ]
    )
    nanos = 1_769_860_800_000_000_001
    with kvstore.open(tmp_path / "s") as store:
        table = store.table("all", schema, ["id", "day", "at", "price", "raw", "took"])
        table.put(
            {
                **{"id": uuid, "day": date(2026, 1, 31), "at": nanos, "ok": True},
                **{"price": Decimal("1.50"), "raw": b"\xff", "took": timedelta(milliseconds=7)},
            }
        )
    words = (uuid, "2026-01-31", "2026-01-31T12:00:00.000000001Z", "1.50", "ff", "7")
    row = told(run("table", "get", tmp_path / "s", "all", *words, "--json"))
    assert row["price"] == "1.50"
    assert row["raw"] == {"base64": "/w=="}
    assert "12:00:00.000000001" in row["at"]
    run("table", "get", tmp_path / "s", "all", *words)


def test_an_export_is_typed_as_of_a_time_and_whole(run: Run, path: Path, tmp_path: Path) -> None:
    with kvstore.open(path) as store:
        first = store.table("trips").history("A", 7)[-1].timestamp
        asked = store.table("trips").scan().read_all()
    target = tmp_path / "trips.parquet"
    target.write_bytes(b"an older file")
    refused = run("export", path, "trips", target, code=2)
    assert "trips.parquet exists; name another file, or pass --overwrite" in refused.stderr
    assert target.read_bytes() == b"an older file"
    assert told(run("export", path, "trips", target, "--overwrite", "--json"))["rows"] == 3
    read = pq.read_table(target)
    assert read.schema.field("pickup").type == pa.timestamp("us", "UTC")
    assert read.replace_schema_metadata() == asked
    rows = duckdb.sql(f"SELECT vendor, sum(fare) FROM '{target}' GROUP BY 1 ORDER BY 1").fetchall()
    assert rows == [("A", 20.5), ("B", None)]
    older = tmp_path / "older.parquet"
    run("export", path, "trips", older, "--as-of", int(first), "-c", "fare")
    assert pq.read_table(older).to_pydict() == {"fare": [10.0]}
    assert pq.read_schema(older).metadata[b"kvstore.as_of"] == str(int(first)).encode()
    run("export", path, "trips", tmp_path / "trips.txt", code=2)
    run("export", path, "trips", tmp_path / "gone" / "t.parquet", code=2)
    assert sorted(each.name for each in tmp_path.glob("*.tmp")) == []


def test_entries_of_replaced_rows_count_as_live_keys_until_gc_passes_the_loads(
    run: Run, path: Path, tmp_path: Path
) -> None:
    def load(zone: str, *more: str, code: int = 0) -> None:
        source = tmp_path / "f.csv"
        source.write_text(f"vendor,trip_id,zone\nC,1,{zone}\n")
        run("table", "import", path, "trips", source, *more, code=code)

    load("EWR")
    load("LGA")
    with kvstore.open(path) as store:
        store.table("trips").delete("C", 1)
    load("EWR", "--on-conflict", "error", code=2)
    with kvstore.open(path) as store:
        assert store.table("trips").tidy() == 0  # the loads can be reverted
        assert store.gc(before=store.upper - 1).tidied == 1
    load("EWR", "--on-conflict", "error")
    load("EWR", "--on-conflict", "error", code=2)


def test_a_unique_index_that_rows_contradict_is_dropped_and_the_next_one_is_built(
    run: Run, path: Path
) -> None:
    with kvstore.open(path) as store:
        schema = pa.schema([("mail", pa.string()), ("nick", pa.string())])
        users = store.table("users", schema, "mail")
        users.put_batch([{"mail": "a", "nick": "x"}, {"mail": "b", "nick": "x"}])
    both = ("--unique-index", "one=nick", "--unique-index", "two=mail")
    refused = run("table", "alter", path, "users", *both, code=2).stderr
    assert "index 'one': nick='x' is taken by the row mail='a'" in refused
    facts = told(run("table", "show", path, "users", "--json"))
    assert [(each["name"], each["whole"]) for each in facts["indexes"]] == [("two", True)]


def test_each_of_several_unique_indexes_that_rows_contradict_is_told_and_dropped(
    run: Run, path: Path
) -> None:
    with kvstore.open(path) as store:
        schema = pa.schema([("mail", pa.string()), ("nick", pa.string()), ("town", pa.string())])
        users = store.table("users", schema, "mail")
        users.put_batch([{"mail": each, "nick": "x", "town": "y"} for each in ("a", "b")])
    indexes = ("one=nick", "two=mail", "three=town")
    asked = [word for index in indexes for word in ("--unique-index", index)]
    refused = run("table", "alter", path, "users", *asked, code=2).stderr.splitlines()
    assert len(refused) == 2
    for line, taken in zip(sorted(refused), ("one': nick='x'", "three': town='y'"), strict=True):
        assert f"index '{taken} is taken by the row mail='a'" in line
    facts = told(run("table", "show", path, "users", "--json"))
    assert [(each["name"], each["whole"]) for each in facts["indexes"]] == [("two", True)]
    run("table", "alter", path, "users", "--add-index", "one=nick")  # the names are free again


def test_lists_structs_and_maps_pass_as_json(run: Run, path: Path, tmp_path: Path) -> None:
    columns = ["id:int", "v:fixed_size_list<float>[2]", "m:map<text, list<date>>"]
    run("table", "create", path, "docs", *columns, "--key", "id")
    run("table", "alter", path, "docs", "--add", "s:struct<a: int, b: decimal128(9, 2) not null>")
    shown = json.loads(run("table", "show", path, "docs", "--json").stdout)
    types = [each["type"] for each in shown["columns"]]
    assert types[2:] == [
        "map<string, list<item: date32[day]>>",
        "struct<a: int64, b: decimal128(9, 2) not null>",
    ]
    row = {"id": 1, "v": [0.5, 2.0], "m": {"x": ["2026-01-31", None]}, "s": {"a": 1, "b": "0.50"}}
    run("table", "put", path, "docs", json.dumps(row))
    run("table", "put", path, "docs", "id=2", "v=[1, 2]")
    assert lines(run("table", "get", path, "docs", "1", "--json")) == [row]
    rows = lines(run("table", "scan", path, "docs", "--json"))
    assert rows == [row, {"id": 2, "v": [1.0, 2.0], "m": None, "s": None}]
    assert '{"a": 1, "b": "0.50"}' in run("table", "scan", path, "docs").stdout
    assert lines(run("table", "scan", path, "docs", "--where", "s is null", "--json")) == rows[1:]
    assert (
        "ask whether it is null"
        in run(*("table", "scan", path, "docs", "--where", "v = [1, 2]"), code=2).stderr
    )
    refused = run("table", "put", path, "docs", "id=3", 's={"a": 1, "c": 2}', code=2).stderr
    assert "there is no field 'c', but a, b" in refused
    assert (
        "names 'v', which is"
        in run(*("table", "alter", path, "docs", "--add-index", "v=v"), code=2).stderr
    )
    for suffix in ("csv", "jsonl", "parquet", "arrow"):
        file = tmp_path / f"docs.{suffix}"
        run("export", path, "docs", file)
        run("table", "delete-range", path, "docs", "--all")
        run("table", "import", path, "docs", file)
        assert lines(run("table", "scan", path, "docs", "--json")) == rows
    run("table", "create", path, "same", tmp_path / "docs.parquet", "--key", "id")
    same = json.loads(run("table", "show", path, "same", "--json").stdout)
    assert [each["type"] for each in same["columns"]] == types
