"""`format("kvstore")` in a session: state, changes, filters, refusals, staged writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import kvstore
from kvstore import Timestamp, bulk
from kvstore.backup import Collection
from kvstore.base.timestamp import microseconds_of
from kvstore.spark import bulk_import, read_where, sorted_rows
from kvstore.spark.java import java_for_spark
from tests.cluster.cluster import make_environment
from tests.harness.wheels import PACKAGES, ROOT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LARGE = "spark.sql.execution.arrow.useLargeVarTypes"


class History(NamedTuple):
    """A store that stays open, and its two readable forms."""

    store: kvstore.Store
    first: Timestamp
    second: Timestamp
    checkpoint: str
    collection: str


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    directory = tmp_path_factory.mktemp("history")
    with kvstore.open(directory / "store") as store:
        with store.batch() as batch:
            for number in range(500):
                batch.put(b"k%03d" % number, b"v%d" % number)
        assert batch.timestamp is not None
        collection = Collection(directory / "collection")
        collection.backup(store)
        store.put(b"k000", b"changed")
        store.delete(b"k001")
        second = store.delete_range(b"k1", b"k2")
        assert second is not None
        collection.backup(store)
        store.checkpoint(directory / "checkpoint")
        yield History(
            store,
            batch.timestamp,
            second,
            str(directory / "checkpoint"),
            str(directory / "collection"),
        )


def load(spark: SparkSession, path: str, **options: Any) -> DataFrame:
    return spark.read.format("kvstore").options(**options).load(path)


def rows(df: DataFrame) -> list[tuple[bytes, bytes]]:
    return sorted((bytes(row.key), bytes(row.value)) for row in df.collect())


@pytest.fixture(params=["checkpoint", "collection"])
def path(request: pytest.FixtureRequest, history: History) -> str:
    found: str = getattr(history, request.param)
    return found


def test_format_is_known_without_any_code(spark: SparkSession, history: History) -> None:
    fresh = spark.newSession()  # other tests register the format in theirs
    assert rows(load(fresh, history.checkpoint)) == list(history.store.scan())


REGISTERS = """
import sys
from pyspark.sql import SparkSession
from kvstore.spark import register

fast = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.extraJavaOptions", fast).getOrCreate()
for step in (lambda: None, lambda: register(spark)):
    step()
    try:
        print(spark.read.format("kvstore").load(sys.argv[1]).count())
    except Exception as error:
        print("[DATA_SOURCE_NOT_FOUND]" in str(error))
"""


@pytest.mark.soak
@pytest.mark.spark
def test_a_session_that_cannot_find_the_format_is_told_it(history: History, tmp_path: Path) -> None:
    """Its Python lists no `pyspark_kvstore`, as with an editable install by a finder of imports."""
    make_environment(tmp_path / "environment")
    library = tmp_path / "library"
    library.mkdir()
    for package in PACKAGES:
        if package != "pyspark_kvstore":
            (library / package).symlink_to(ROOT / package)
    python = str(tmp_path / "environment" / "bin" / "python")
    given = {"PYTHONPATH": str(library), "JAVA_HOME": str(java_for_spark().home)}
    done = subprocess.run(
        [python, "-c", REGISTERS, history.checkpoint],
        env={**os.environ, **given, "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    count = len(list(history.store.scan()))
    assert done.stdout.splitlines() == ["True", str(count)]


def test_package_that_makes_it_known_imports_nothing_of_ours() -> None:
    """Every session that uses any Python data source imports it."""
    code = "import sys, pyspark_kvstore as p; print(p.DefaultSource.name(), *sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, *modules = out.stdout.split()
    assert name == "kvstore"
    assert not {"kvstore", "spark_connector", "rocksdict"} & set(modules)


def test_a_worker_that_plans_imports_no_pandas() -> None:
    """The first read of a session waits for the imports of two workers, one after the other."""
    code = "import sys, kvstore.spark.source; print('pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_state_is_read_as_of_a_time(spark: SparkSession, history: History, path: str) -> None:
    for as_of in (history.first, history.second):
        found = rows(load(spark, path, timestampAsOf=str(as_of), numPartitions=3))
        assert found == list(history.store.scan(as_of=as_of))


def test_spans_columns_and_narrower_schemas(
    spark: SparkSession, history: History, path: str
) -> None:
    df = load(spark, path, prefix="6b3030", keyEncoding="hex")
    assert rows(df) == list(history.store.scan(prefix=b"k00"))
    df = load(spark, path, startKey="k300", endKey="k302", columns="value")
    assert [tuple(row) for row in df.collect()] == [(b"v300",), (b"v301",)]
    keys = spark.read.schema("key binary").format("kvstore").load(path)
    assert keys.count() == sum(1 for _ in history.store.scan())
    assert keys.columns == ["key"]


def test_changes_of_a_window(spark: SparkSession, history: History, path: str) -> None:
    df = load(spark, path, readChangeFeed="true", startingTimestamp=str(int(history.first)))
    found = sorted(
        (r._commit_version, r._change_type, bytes(r.key), r.end_key, r.value) for r in df.collect()
    )
    expected = [(*change[:3], *change[3:]) for change in history.store.changes(history.first)]
    assert found == sorted(expected)
    at = df.where("_change_type = 'delete_range'").first()
    assert at is not None
    rounded = f"SELECT timestamp_micros({microseconds_of(history.second)}) AS t"
    assert at._commit_timestamp == spark.sql(rounded).collect()[0].t


def test_window_excludes_its_start_and_includes_its_end(
    spark: SparkSession, history: History, path: str
) -> None:
    window = {"readChangeFeed": "true", "endingTimestamp": str(int(history.second))}
    df = load(spark, path, startingAfterTimestamp=str(int(history.second) - 1), **window)
    assert [row._change_type for row in df.collect()] == ["delete_range"]
    df = load(spark, path, startingTimestamp=str(int(history.second)), **window)
    assert df.collect() == []


def test_latest_revisions_are_one_change_a_key(
    spark: SparkSession, history: History, path: str
) -> None:
    window = {"readChangeFeed": "true", "startingTimestamp": "0", "revisions": "latest"}
    assert load(spark, path, **window).count() == sum(1 for _ in history.store.scan())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"versionOf": "1"}, "option 'versionof' is not known"),
        ({"startingTimestamp": "1"}, "startingTimestamp means nothing to a read of the state"),
        ({"readChangeFeed": "true"}, "a read of changes needs a start"),
        ({"timestampAsOf": "9000000000000000000"}, "is not complete"),
        (
            {
                "readChangeFeed": "true",
                "startingTimestamp": f"{9 * 10**17}",
                "endingTimestamp": f"{9 * 10**17 - 1}",
            },
            "ends before it starts",
        ),
        ({"columns": "nothing"}, "pass some of key, value"),
    ],
)
def test_what_cannot_be_honoured_fails_and_says_why(
    spark: SparkSession, history: History, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(Exception, match=problem):
        load(spark, history.checkpoint, **options).collect()


def test_user_schema_of_other_columns_is_refused(spark: SparkSession, history: History) -> None:
    reader = spark.read.schema("key string").format("kvstore")
    with pytest.raises(Exception, match="a read has no column key string"):
        reader.load(history.checkpoint).collect()


def test_a_schema_that_cannot_be_kept_is_refused(spark: SparkSession, history: History) -> None:
    keys = spark.read.format("kvstore").schema("key binary")
    assert keys.option("columns", "key").load(history.checkpoint).columns == ["key"]
    with pytest.raises(Exception, match="columns=value and a schema of key are both given"):
        keys.option("columns", "value").load(history.checkpoint).collect()
    window = {"readChangeFeed": "true", "startingTimestamp": "0"}
    whole = spark.read.format("kvstore").options(**window)
    with pytest.raises(Exception, match="column value has nulls; leave NOT NULL out"):
        whole.schema("value binary NOT NULL").load(history.checkpoint).collect()
    filled = whole.schema("key binary NOT NULL, _change_type string NOT NULL")
    assert filled.load(history.checkpoint).count() == 503


def test_directory_of_a_store_that_nobody_has_open_is_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
    assert rows(load(spark, str(tmp_path / "store"))) == [(b"a", b"1")]


def test_store_that_is_open_for_writing_is_refused(spark: SparkSession, history: History) -> None:
    with pytest.raises(Exception, match="is held by a process that writes"):
        load(spark, str(history.store.path)).collect()


def test_a_directory_of_checkpoints_is_read_by_the_newest_not_by_a_store_beside_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(Exception, match="is held by a process that writes"):
            load(spark, str(tmp_path)).collect()
        store.put(b"a", b"1")
        store.checkpoint(tmp_path / "copy")
        shutil.copytree(tmp_path / "copy", tmp_path / ".store.copied-1-x")  # as in a job
        store.put(b"b", b"2")
        for newer in ("store", ".store.copied-1-x"):
            os.utime(tmp_path / newer / "CURRENT", (2**31, 2**31))
        assert rows(load(spark, str(tmp_path))) == [(b"a", b"1")]


def test_history_behind_since_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        first = store.put(b"a", b"1")
        store.put(b"a", b"2")
        store.gc(before=store.upper - 1)
    old = str(int(first))
    with pytest.raises(Exception, match="is gone: it is kept from"):
        load(spark, str(tmp_path / "store"), timestampAsOf=old).collect()
    changes = {"readChangeFeed": "true", "startingTimestamp": old}
    with pytest.raises(Exception, match="read the state, then changes after its time"):
        load(spark, str(tmp_path / "store"), **changes).collect()


KEY_FILTERS: list[tuple[str, list[Any]]] = [
    ("key = X'6b323030'", [("key", "=", b"k200")]),
    (
        "key >= X'6b333030' AND key < X'6b333035'",
        [("key", ">=", "k300"), ("key", "<", b"k305")],
    ),
    ("key IN (X'6b303032', X'6b343030')", [("key", "in", {b"k002", b"k400"})]),
    ("key > X'6b343938' OR key = X'6b303030'", [[("key", ">", b"k498")], [("key", "=", "k000")]]),
    ("key < X'00'", [("key", "<", b"\0")]),
    ("value = X'7636' AND key <= X'6b'", [("value", "=", b"v6"), ("key", "<=", b"k")]),
    ("startswith(key, X'6b3439')", [("key", "startswith", b"k49")]),
    ("startswith(key, X'6b3439')", [("key", "startswith", "k49")]),
    ("false", [("key", "in", [])]),
]


def test_reads_with_filters_have_the_rows_that_spark_leaves(
    spark: SparkSession, history: History
) -> None:
    everything = spark.createDataFrame(list(history.store.scan()), "key binary, value binary")
    for where, filters in KEY_FILTERS:
        wanted = rows(everything.where(where))
        assert rows(load(spark, history.checkpoint).where(where)) == wanted, where
        assert rows(read_where(spark, history.checkpoint, filters)) == wanted, filters
    feed = {"readChangeFeed": "true", "startingTimestamp": "0"}
    found = read_where(spark, history.collection, [("key", "=", b"k000")], **feed)
    later = found.where(f"_commit_version > {int(history.first)}")
    assert [bytes(row.value) for row in later.collect()] == [b"changed"]


def test_a_view_in_sql_takes_the_same_options(spark: SparkSession, history: History) -> None:
    spark.sql(
        f"CREATE TEMPORARY VIEW few USING kvstore OPTIONS (path '{history.checkpoint}', "
        "prefix 'k00')"
    )
    try:
        assert rows(spark.table("few")) == list(history.store.scan(prefix=b"k00"))
    finally:
        spark.catalog.dropTempView("few")
    # Spark would make such a table, and pass no option to its reads.
    for clause in ("", f"OPTIONS (path '{history.checkpoint}', table 't')", "LOCATION '/nowhere'"):
        with pytest.raises(Exception, match=r"CREATE TABLE .* is not offered; .*TEMPORARY VIEW"):
            spark.sql(f"CREATE TABLE never USING kvstore {clause}")
    assert not spark.catalog.tableExists("never")
    with pytest.raises(Exception, match="no path is given"):
        spark.sql("CREATE TEMPORARY VIEW never USING kvstore")


# -- writes ---------------------------------------------------------------------------------


def test_write_stages_an_import_that_the_owner_adds(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.sql("SELECT CAST(id AS STRING) AS k, CAST(id * 2 AS STRING) AS v FROM range(300)")
    staging = tmp_path / "staging"
    staged = sorted_rows(df, "k", "v", partitions=3)
    staged.write.format("kvstore").mode("append").save(str(staging))
    assert bulk.read_manifest(staging).rows == 300
    with kvstore.open(tmp_path / "store") as store:
        bulk.ingest(store, staging)
        assert dict(store.scan()) == {b"%d" % n: b"%d" % (2 * n) for n in range(300)}


def test_unsorted_write_is_refused_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.sql(
        "SELECT CAST(CAST(99 - id AS STRING) AS BINARY) AS key, X'00' AS value "
        "FROM range(0, 9, 1, 1)"
    )
    with pytest.raises(Exception, match="sort the rows by key first"):
        df.write.format("kvstore").mode("append").save(str(tmp_path / "staging"))
    assert not (tmp_path / "staging").exists()


def test_sorted_rows_take_the_last_of_each_key(
    spark: SparkSession, store: kvstore.Store, tmp_path: Path
) -> None:
    df = spark.sql(
        "SELECT CAST(id % 5 AS STRING) AS k, CAST(id AS STRING) AS v, id, 'put' AS o FROM range(50)"
    )
    last = {b"%d" % n: b"%d" % (45 + n) for n in range(5)}
    staged = sorted_rows(df, "k", "v", op="o", duplicates="last", order_by="id")
    staged.write.format("kvstore").mode("append").save(f"file:{tmp_path}/staging")
    bulk.ingest(store, tmp_path / "staging")
    assert dict(store.scan()) == last
    spark.conf.set(LARGE, "true")
    try:
        bulk_import(df, store, "k", "v", op="o", duplicates="last", order_by="id")
    finally:
        spark.conf.set(LARGE, "false")
    assert dict(store.scan()) == last


def test_overwrite_and_other_columns_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.sql("SELECT X'00' AS key, X'00' AS value")
    with pytest.raises(Exception, match="overwrite"):
        df.write.format("kvstore").mode("overwrite").save(str(tmp_path / "s"))
    with pytest.raises(Exception, match="column id bigint cannot be imported"):
        spark.range(1).write.format("kvstore").mode("append").save(str(tmp_path / "s"))
    with pytest.raises(Exception, match="prefix means nothing to a write"):
        df.write.format("kvstore").option("prefix", "a").mode("append").save(str(tmp_path / "s"))
    with pytest.raises(Exception, match="compression='gzip'; pass one of lz4, zstd, none"):
        df.where("false").write.format("kvstore").option("compression", "gzip").mode("append").save(
            str(tmp_path / "s")
        )
    assert not (tmp_path / "s").exists()
