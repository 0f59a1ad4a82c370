"""A gate before a load shows: checks of staged rows beside the rows that they would replace."""

from __future__ import annotations

import json
import math
import os
import random
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import bulk
from kvstore.bulk import Force, Gate
from kvstore.bulk.gate import ColumnFigures, range_checks
from kvstore.errors import ConflictError, ImportRefusedError, LoadRefusedError, UsageError
from kvstore.timeline.imports import INGEST_DIRECTORY

SCHEMA = pa.schema(
    [("id", pa.int64()), ("fare", pa.float64()), ("zone", pa.string()), ("day", pa.date32())]
)
DAY = date(2026, 1, 1)


def trips(count: int, fare: float = 10.0, zones: int = 5, *, nulls: int = 0) -> pa.Table:
    pick = random.Random(7)
    return pa.table(
        {
            "id": list(range(count)),
            "fare": [None if row < nulls else fare + pick.random() for row in range(count)],
            "zone": [f"zone {row % zones}" for row in range(count)],
            "day": [DAY + timedelta(days=row % 7) for row in range(count)],
        },
        schema=SCHEMA,
    )


@pytest.fixture
def table(tmp_path: Path) -> Any:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        made = store.table("trips", SCHEMA, key="id")
        bulk.import_table(made, trips(1000))
        yield made


def failed(table: kvstore.Table, rows: pa.Table, gate: Gate | dict[str, Any]) -> list[str]:
    """The names of the checks that a load does not pass."""
    before = table.count()
    try:
        bulk.import_table(table, rows, check=gate)
    except LoadRefusedError as error:
        refused = error
    else:
        return []
    assert table.count() == before, "nothing shows"
    assert json.loads(json.dumps(refused.report)) == refused.report
    assert all(each in str(refused) for each in refused.failed)
    return [each["check"] for each in refused.report["checks"] if not each["passed"]]


WHOLE = Gate(
    rows={"least": 10, "least_of_baseline": 0.9, "most_of_baseline": 1.5},
    no_nulls=["zone", "fare"],
    ranges={"fare": [0, 100], "day": ["2026-01-01", None]},
    distribution={"fare": {"nulls": 0.01, "quantiles": 0.2}, "zone": {"distinct": 0.1}},
)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (trips(1000), []),
        (trips(899), ["rows"]),
        (trips(1501), ["rows"]),
        (trips(1000, nulls=1), ["nulls of fare"]),
        (trips(1000, nulls=20), ["nulls of fare", "share of nulls of fare"]),
        (trips(1000, 99.5), ["greatest fare", "quantile 0.95 of fare"]),
        (trips(1000, -1), ["least fare", "quantile 0.95 of fare"]),
        (trips(1000, zones=6), ["distinct values of zone"]),
    ],
    ids=lambda each: "" if isinstance(each, pa.Table) else ",".join(each) or "passed",
)
def test_each_check_refuses_what_it_is_for(
    table: kvstore.Table, rows: pa.Table, names: list[str]
) -> None:
    found = failed(table, rows, WHOLE)
    assert [name for name in found if not name.startswith("quantile")] == [
        name for name in names if not name.startswith("quantile")
    ]
    assert any(name.startswith("quantile") for name in found) == any(
        name.startswith("quantile") for name in names
    )


def test_the_first_load_has_none_to_compare_with(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        made = store.table("trips", SCHEMA, key="id")
        assert failed(made, trips(100), WHOLE) == []
        assert made.count() == 100


def test_the_last_load_counts_and_not_all_that_is_there(table: kvstore.Table) -> None:
    gate = Gate(rows={"least_of_baseline": 0.9})
    more = trips(1000).set_column(0, "id", pa.array(range(5000, 6000)))
    assert failed(table, more, gate) == []
    assert table.count() == 2000
    assert failed(table, trips(850), gate) == ["rows"]


def test_queries_and_functions_see_both_sides(table: kvstore.Table) -> None:
    pytest.importorskip("duckdb")
    query = "SELECT (SELECT sum(fare) FROM staged) <= 1.1 * (SELECT sum(fare) FROM live)"
    twice = "SELECT count(*) = (SELECT count(DISTINCT id) FROM staged) FROM staged"

    def counted(staged: pa.RecordBatchReader, live: pa.RecordBatchReader) -> object:
        rows, before = staged.read_all().num_rows, live.read_all().num_rows
        return None if rows == before else f"{rows} rows, {before} before"

    gate = Gate(sql={"sum": query, "twice": twice}, functions={"counted": counted})
    assert failed(table, trips(1000), gate) == []
    assert failed(table, trips(1000, 20), gate) == ["sum"]
    assert failed(table, trips(900), gate) == ["counted"]
    for wrong in ("SELECT nothing", "COPY staged TO '/tmp/x'", "SELECT 1 FROM '/etc/passwd'"):
        with pytest.raises(UsageError, match="check 'wrong'"):
            failed(table, trips(10), Gate(sql={"wrong": wrong}))


def test_a_refused_quantile_tells_its_range(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        made = store.table("fares", pa.schema([("id", pa.int64()), ("fare", pa.float64())]), "id")
        made.put({"id": 1, "fare": 1.0})  # a trial: all its quantiles are 1
        rows = pa.table({"id": [1, 2], "fare": [1.0, 3.0]})
        gate = Gate(distribution={"fare": {"quantiles": 0.2}})
        with pytest.raises(LoadRefusedError, match=r"must be 1 to 1: there it is 1,"):
            bulk.import_table(made, rows, check=gate)


def test_a_refused_load_stays_and_is_forced_with_a_reason_that_stands(
    table: kvstore.Table, tmp_path: Path
) -> None:
    store = table.import_target().store
    gate = {"rows": {"least": 2000}}
    with pytest.raises(LoadRefusedError, match="rows is 1000, and must be at least 2000") as found:
        bulk.import_table(table, trips(1000, 50), check=gate)
    kept = Path(found.value.staging)
    assert kept.parent == tmp_path / "store" / INGEST_DIRECTORY
    assert bulk.read_manifest(kept).rows == 1000
    with pytest.raises(UsageError, match="reason"):
        bulk.ingest(store, kept, check=gate, force=Force(" "))
    bulk.ingest(store, kept, check=gate, force=Force("the feed is late", by="ann"))
    assert table.get(1)["fare"] >= 50  # type: ignore[index]
    newest = max(store.imports.all(), key=lambda record: record.added or 0)
    report = json.loads(newest.report)
    assert report["forced"] == {"reason": "the feed is late", "by": "ann"}
    assert not report["passed"]
    bulk.import_table(table, trips(2000), check=gate)
    newest = max(store.imports.all(), key=lambda record: record.added or 0)
    assert json.loads(newest.report)["passed"]


def test_plain_keys_have_a_gate_too(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        for number in range(10):
            store.put(b"%02d" % number, b"1")
        for rows in (5, 10):  # no load was before: the live rows among the staged keys count
            staged = bulk.Import.create(tmp_path / f"staged {rows}")
            with staged.writer() as writer:
                for number in range(rows):
                    writer.put(b"%02d" % number, b"2")
            staged.seal()
            gate = Gate(rows={"least_of_baseline": 1.5}, ranges={"value": [b"2", b"2"]})
            with pytest.raises(LoadRefusedError):
                bulk.ingest(store, staged.staging, check=gate)
            assert store.get(b"00") == b"1"
            assert bulk.read_manifest(staged.staging).rows == rows
        bulk.ingest(store, staged.staging, check=Gate(rows={"least_of_baseline": 1}))
        assert store.get(b"09") == b"2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"row": {"least": 1}},
        {"rows": {"fewest": 1}},
        {"rows": {"least": "1"}},
        {"rows": {"most": math.inf}},
        {"rows": 5},
        {"no_nulls": "fare"},
        {"no_nulls": None},
        {"no_nulls": [5]},
        {"ranges": {"fare": 5}},
        {"ranges": {"fare": [0, math.nan]}},
        {"ranges": {"fare": [5, 1]}},
        {"ranges": {"fare": [[], None]}},
        {"ranges": {5: [1, 2]}},
        {"distribution": {"fare": {"mean": 1}}},
        {"distribution": {"fare": None}},
        {"sql": {"query": 5}},
        {"functions": {"call": 5}},
        "rows",
    ],
    ids=str,
)
def test_a_gate_of_another_shape_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        Gate.of(wrong)


@pytest.mark.parametrize("force", ["", " ", 5, Force(None), Force("why", 5), Force("x" * 1001)])  # type: ignore[arg-type]
def test_a_force_that_tells_no_reason_is_refused_at_the_door(
    table: kvstore.Table, tmp_path: Path, force: Any
) -> None:
    def unread() -> Any:
        raise AssertionError("rows are read")
        yield

    rows = pa.RecordBatchReader.from_batches(SCHEMA, unread())
    for gate, given_ in ((WHOLE, force), (None, Force("why")), (None, "why")):
        with pytest.raises(UsageError, match="force"):
            bulk.import_table(table, rows, check=gate, force=given_)
        with pytest.raises(UsageError, match="force"):
            bulk.ingest(table.import_target().store, tmp_path, check=gate, force=given_)


STRANGE = pa.schema(
    [
        ("id", pa.int64()),
        ("n", pa.int64()),
        ("u", pa.uint64()),
        ("x", pa.float64()),
        ("f", pa.float32()),
        ("t", pa.timestamp("s")),
        ("z", pa.timestamp("ns", "UTC")),
        ("h", pa.duration("ns")),
        ("d", pa.decimal128(10, 2)),
        ("b", pa.bool_()),
        ("y", pa.string()),
    ]
)


def strange(count: int = 10, **columns: Any) -> pa.Table:
    plain = dict.fromkeys(("n", "u", "x", "f", "d"), 1) | {"t": 0, "z": 1, "h": 1, "b": True}
    rows = {name: [value] * count for name, value in {**plain, "y": "a"}.items()}
    rows |= {"id": list(range(count)), **columns}
    return pa.table({each.name: pa.array(rows[each.name], each.type) for each in STRANGE})


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A table of strange columns, into which a load has passed a gate."""
    with kvstore.open(tmp_path_factory.mktemp("strange") / "s", durability="async") as store:
        made = store.table("strange", STRANGE, key="id")
        every = {"nulls": 9, "distinct": 9, "quantiles": 9}
        bulk.import_table(
            made, strange(), check={"distribution": dict.fromkeys(("n", "x", "t"), every)}
        )
        yield made


NAN = math.nan


@pytest.mark.parametrize(
    ("columns", "gate", "names"),
    [
        ({"x": [1.0] + [NAN] * 9}, {"ranges": {"x": [0, 5]}}, ["NaN of x"]),
        ({"x": [NAN] * 10}, {"ranges": {"x": [0, None]}}, ["NaN of x"]),
        ({"x": [NAN] * 10}, {"no_nulls": ["x"]}, ["nulls of x"]),
        ({"x": [NAN] * 10}, {"distribution": {"x": {"nulls": 0.5}}}, ["share of nulls of x"]),
        (
            {"x": [1.0] * 3 + [NAN, math.inf, -math.inf, NAN, NAN, NAN, NAN]},
            {"distribution": {"x": {"quantiles": 0.6}}},
            ["share of values of x that are not finite"],
        ),
        (
            {"x": [NAN] * 10},
            {"distribution": {"x": {"quantiles": 1}}},
            ["quantiles of x"],
        ),
        ({"x": [math.inf] * 10}, {"ranges": {"x": [0, None]}}, []),
        ({"x": [math.inf] * 10}, {"ranges": {"x": [0, 9]}}, ["greatest x"]),
        ({"n": [0] * 10}, {"ranges": {"n": [0.5, 10]}}, ["least n"]),
        ({"n": [1, 10] * 5}, {"ranges": {"n": [0.5, 10.5]}}, []),
        ({"n": [2**53 + 1] * 10}, {"ranges": {"n": [0, 2.0**53]}}, ["greatest n"]),
        ({"f": [0.1] * 10}, {"ranges": {"f": [0.1, 0.1]}}, []),
        ({"d": [1] * 10}, {"ranges": {"d": [1.005, None]}}, ["least d"]),
        ({"t": [2 * 10**11] * 10}, {"ranges": {"t": ["2020-01-01", None]}}, []),
        ({"t": [2 * 10**11] * 10}, {"ranges": {"t": [None, "2020-01-01"]}}, ["greatest t"]),
        ({"t": [1] * 10}, {"ranges": {"t": ["1970-01-01T00:00:01.5", None]}}, ["least t"]),
        (
            {"z": [1, 2] * 5},
            {"ranges": {"z": ["1970-01-01T00:00:00.000000002Z", None]}},
            ["least z"],
        ),
        ({"n": [-1, -2] * 5}, {"distribution": {"n": {"distinct": 0.9}}}, ["distinct values of n"]),
        ({"x": [0.0, -0.0] * 5}, {"distribution": {"x": {"distinct": 0}}}, []),
        (
            {"t": [2 * 10**11, 0] * 5},
            {"distribution": {"t": {"distinct": 0.5}}},
            ["distinct values of t"],
        ),
        ({"b": [True, False] * 5}, {"ranges": {"b": [True, True]}}, ["least b"]),
    ],
    ids=str,
)
def test_strange_values_do_not_slip_through(
    beside: kvstore.Table, columns: dict[str, Any], gate: dict[str, Any], names: list[str]
) -> None:
    assert failed(beside, strange(**columns), gate) == names


@pytest.mark.parametrize(
    "gate",
    [
        {"ranges": {"n": [0, 10**30]}},
        {"ranges": {"n": ["0", None]}},
        {"ranges": {"u": [-1, None]}},
        {"ranges": {"h": [0, None]}},
        {"ranges": {"y": [5, 10]}},
        {"ranges": {"b": [0, 1]}},
        {"ranges": {"z": ["2020-01-01", None]}},
        {"distribution": {"y": {"quantiles": 1}}},
        {"distribution": {"b": {"quantiles": 1}}},
        {"no_nulls": ["zz"]},
    ],
    ids=str,
)
def test_checks_that_a_column_does_not_take_are_refused_before_a_row_is_read(
    beside: kvstore.Table, gate: dict[str, Any]
) -> None:
    def unread() -> Any:
        raise AssertionError("rows are read")
        yield

    rows = pa.RecordBatchReader.from_batches(STRANGE, unread())
    with pytest.raises(UsageError, match=r"gate|range|quantiles"):
        bulk.import_table(beside, rows, check=gate)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.floats(), min_size=1, max_size=20),
    st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1),
)
def test_a_range_passes_the_values_that_python_finds_in_it(values: list[Any], low: Any) -> None:
    is_whole = all(isinstance(each, int) for each in values)
    column = ColumnFigures(pa.int64() if is_whole else pa.float64(), {"range", "distinct"})
    given_ = values if is_whole else [float(each) for each in values]
    column.add(pa.array(given_, column.type))
    if not is_whole and not isinstance(low, float):
        low = float(low)
    if is_whole and isinstance(low, float) and not -(2.0**63) <= low < 2.0**63:
        return
    passed = all(each.passed for each in range_checks("x", column, [low, None]))
    assert passed == all(each >= low for each in given_)
    assert column.distinct == len({each for each in given_ if each == each})


def test_an_empty_load_is_compared_too(table: kvstore.Table, tmp_path: Path) -> None:
    for _ in range(2):  # with the live rows, and with the load before
        assert failed(table, trips(0), Gate(rows={"least_of_baseline": 0.9})) == ["rows"]
        assert failed(
            table, trips(0), Gate(distribution={"fare": {"nulls": 2, "quantiles": 1}})
        ) == ["quantiles of fare"]
        bulk.import_table(table, trips(1000), check=Gate(distribution={"fare": {"quantiles": 9}}))
    store = table.import_target().store
    empty = bulk.Import.create(tmp_path / "empty")
    empty.seal()
    gate = {"rows": {"least_of_baseline": 0.1}}
    bulk.ingest(store, empty.staging, check=gate)  # no plain key is alive
    store.put(b"key", b"value")
    again = bulk.Import.create(tmp_path / "again")
    again.seal()
    with pytest.raises(LoadRefusedError, match="rows is 0"):
        bulk.ingest(store, again.staging, check=gate)


def test_what_a_function_raises_is_a_failed_check_that_tells_it(table: kvstore.Table) -> None:
    def divides(staged: Any, live: Any) -> Any:
        return staged.read_all().num_rows / 0

    gate = Gate(functions={"divides": divides})
    with pytest.raises(LoadRefusedError, match="divides is ZeroDivisionError: division") as found:
        bulk.import_table(table, trips(10), check=gate)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    bulk.import_table(table, trips(10), check=gate, force="the check is wrong")


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        (None, True),
        (True, True),
        (np.bool_(True), True),
        (pa.scalar(True), True),
        (False, False),
        (np.bool_(False), False),
        (pa.scalar(False), False),
        (1, False),
        ("x" * 10**6, False),
    ],
)
def test_answers_of_functions_are_true_or_not(
    table: kvstore.Table, answer: object, passed: bool
) -> None:
    gate = Gate(functions={"f": lambda staged, live: answer})
    bulk.import_table(table, trips(5), check=gate, force="all are added")
    newest = table.import_target().store.imports.all()[-1]
    assert json.loads(newest.report)["passed"] == passed
    assert len(newest.report) < 1000


def test_queries_answer_booleans(table: kvstore.Table) -> None:
    pytest.importorskip("duckdb")
    for query in ("SELECT count(*) FROM staged", "SELECT 'false'", "SELECT true, 1"):
        with pytest.raises(UsageError, match="booleans"):
            bulk.import_table(table, trips(5), check={"sql": {"q": query}})
    rows = {"no rows": "SELECT true FROM staged WHERE id < 0", "null": "SELECT NULL::BOOLEAN"}
    assert failed(table, trips(5), {"sql": rows}) == ["no rows", "null"]
    other = table.import_target().store.table(
        "case", pa.schema([("a", pa.int64()), ("A", pa.int64())]), key="a"
    )
    with pytest.raises(UsageError, match="case alone"):
        bulk.import_table(
            other, pa.table({"a": [1], "A": [2]}), check={"sql": {"q": "SELECT true"}}
        )


def test_a_report_is_json_of_bounded_texts(beside: kvstore.Table) -> None:
    gate = Gate(
        ranges={"x": [0, None]}, functions={"n" * 999: lambda staged, live: "\ud800" * 10**6}
    )
    bulk.import_table(beside, strange(x=[math.inf] * 10), check=gate, force="why")
    newest = beside.import_target().store.imports.all()[-1]
    assert len(newest.report) < 4000

    def no_constant(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    report = json.loads(newest.report, parse_constant=no_constant)
    assert {"check", "figure", "bound", "baseline", "passed"} == set(report["checks"][0])
    assert report["checks"][1]["figure"] == "inf"


def test_an_import_that_was_begun_without_a_gate_passes_it_later(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(step: str) -> None:
        if step == "add":
            raise StopError

    with kvstore.open(tmp_path / "store") as store:
        made = bulk.Import.create(tmp_path / "staged")
        with made.writer() as writer:
            for number in range(5):
                writer.put(b"%02d" % number, b"1")
        made.seal()
        with pytest.raises(StopError):
            bulk.ingest(store, made.staging, progress=stop)
        for _ in range(2):
            with pytest.raises(LoadRefusedError, match="rows is 5, and must be at least 9"):
                bulk.ingest(store, made.staging, check={"rows": {"least": 9}})
            assert store.count() == 0
        bulk.ingest(store, made.staging, check={"rows": {"least": 5}})
        [record] = store.imports.all()
        assert json.loads(record.report)["passed"]
        assert store.count() == 5


def test_columns_and_bounds_that_do_not_fit_are_refused(table: kvstore.Table) -> None:
    for gate, told in (
        (Gate(no_nulls=["cost"]), "column 'cost'"),
        (Gate(ranges={"day": ["noon", None]}), "range of 'day'"),
    ):
        with pytest.raises(UsageError, match=told) as found:
            bulk.import_table(table, trips(10), check=gate)
        assert not isinstance(found.value, ImportRefusedError)


def test_a_script_beside_the_owner_passes_the_gate_itself(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, control=True) as store, kvstore.connect(path) as client:
        store.table("trips", SCHEMA, key="id")
        made = client.table("trips")
        gate: dict[str, Any] = {"rows": {"least": 50, "least_of_baseline": 0.5}}
        with pytest.raises(LoadRefusedError, match="at least 50") as found:
            bulk.import_table(made, trips(10), check=gate)
        assert bulk.read_manifest(Path(found.value.staging)).rows == 10
        assert store.table("trips").count() == 0
        bulk.import_table(made, trips(100), check=gate)
        bulk.import_table(made, trips(20), check=gate, force=Force("few rode", by="bo"))
        reports = [json.loads(record.report) for record in store.imports.all()]
        assert [report["passed"] for report in reports] == [True, False]
        assert reports[1]["forced"]["by"] == "bo"


def report_of(table: kvstore.Table) -> dict[str, Any]:
    """The report of the newest load."""
    return json.loads(table.import_target().store.imports.all()[-1].report)  # type: ignore[no-any-return]


def baselines(table: kvstore.Table) -> list[str | None]:
    """The baselines of the newest load."""
    return [each["baseline"] for each in report_of(table)["checks"]]


LOOSE = Gate(
    rows={"least_of_baseline": 0.9, "most_of_baseline": 1.5},
    distribution={"zone": {"distinct": 0.1}, "fare": {"quantiles": 0.1, "nulls": 0}},
)


def test_the_baseline_is_the_newest_gated_load_after_writes_corrections_and_gc(
    table: kvstore.Table,
) -> None:
    store = table.import_target().store
    bulk.import_table(table, trips(1000), check=LOOSE)
    assert set(baselines(table)) == {"live rows"}
    first = store.imports.all()[-1]
    name = f"import {first.import_id:016x} of {first.added}"
    table.put_batch(trips(900, 50.0))  # later writes, a correction without a gate, and GC
    bulk.import_table(table, trips(1, 70.0))
    for _ in range(2):
        store.gc(store.upper - 1)
    assert store.imports.every() == []
    assert failed(table, trips(1600), LOOSE) == ["rows"]
    assert failed(table, trips(800), LOOSE) == ["rows"]
    [moved] = failed(table, trips(1000, 50.0), LOOSE)
    assert moved.startswith("quantile")
    bulk.import_table(table, trips(1000), check=LOOSE)
    assert set(baselines(table)) == {name}
    bulk.import_table(table, trips(400), check=Gate(rows={"least": 1}))  # it has no zones
    bulk.import_table(table, trips(400), check=LOOSE)
    newest = store.imports.all()
    names = [f"import {each.import_id:016x} of {each.added}" for each in newest]
    assert baselines(table) == [*[names[-2]] * 2, *[names[-3]] * 4]
    store.revert_import(newest[-1].import_id)
    store.revert_import(newest[-2].import_id)
    assert failed(table, trips(400), LOOSE) == ["rows"]


def test_a_load_of_plain_keys_between_those_of_another_is_not_compared_with_it(
    tmp_path: Path,
) -> None:
    def load(keys: list[bytes], gate: dict[str, Any]) -> str | None:
        made = bulk.Import.create(tmp_path / f"staged {len(list(tmp_path.iterdir()))}")
        with made.writer() as writer:
            for key in keys:
                writer.put(key, b"v")
        made.seal()
        bulk.ingest(store, made.staging, check=gate)
        report = json.loads(store.imports.all()[-1].report)
        return report["checks"][0]["baseline"]  # type: ignore[no-any-return]

    gate = {"rows": {"least_of_baseline": 0.9}}
    middle = [b"m%03d" % number for number in range(50)]
    with kvstore.open(tmp_path / "store") as store:
        assert load(middle, gate) == "nothing"
        first = f"import {store.imports.all()[-1].import_id:016x}"
        assert load([b"a", b"z"], {"rows": {"least_of_baseline": 0}}) == (
            f"{first} of {store.imports.all()[0].added}"
        )
        with pytest.raises(LoadRefusedError, match=f"at least 45 .0.9 of 50., beside {first}"):
            load(middle[:20], gate)


def test_a_load_that_another_overtakes_passes_its_gate_again(table: kvstore.Table) -> None:
    gate, calls = Gate(rows={"least_of_baseline": 0.9}), []

    def once(staged: Any, live: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            bulk.import_table(table, trips(2000), check=gate)

    def always(staged: Any, live: Any) -> None:
        bulk.import_table(table, trips(1000), check={"rows": {"least": 1}})

    overtaken = Gate(rows=gate.rows, functions={"f": once})
    assert failed(table, trips(1000), {}) == []
    with pytest.raises(LoadRefusedError, match="at least 1800"):
        bulk.import_table(table, trips(1000), check=overtaken)
    assert len(calls) == 2
    assert table.count() == 2000
    with pytest.raises(ConflictError, match="another load came"):
        bulk.import_table(table, trips(2000), check={"functions": {"f": always}})
    assert {each.rows for each in table.import_target().store.imports.all() if each.added} == {
        1000,
        2000,
    }


def test_the_newest_refused_loads_of_a_table_stay_a_week(
    table: kvstore.Table, tmp_path: Path
) -> None:
    store = table.import_target().store
    other = store.table("other", SCHEMA, key="id")
    kept: list[Path] = []
    for made in (other, *[table] * 5):
        with pytest.raises(
            LoadRefusedError, match=f"{INGEST_DIRECTORY}/refused-.* for 7 days"
        ) as found:
            bulk.import_table(made, trips(3), check={"rows": {"least": 4}})
        kept.append(Path(found.value.staging))
        os.utime(kept[-1], ns=(len(kept), time.time_ns() - (10 - len(kept)) * 10**9))
    assert [each.exists() for each in kept] == [True, False, False, True, True, True]
    now = time.time_ns()
    for path, days in ((kept[-1], 6), (kept[-2], 8)):
        os.utime(path, ns=(now, now - days * 86_400 * 10**9))
    store.gc(store.upper - 1)
    assert [each.exists() for each in kept[-2:]] == [False, True]
    bulk.ingest(store, kept[-1], check={"rows": {"least": 4}}, force="three are enough")
