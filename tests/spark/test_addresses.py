"""Addresses and times that Spark users write: each works from every directory, or is refused at
once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore import Clock, Store, Timestamp, bulk
from kvstore.backup import Collection
from kvstore.errors import NotYetWrittenError, UsageError
from kvstore.spark import bulk_import, stage_import
from kvstore.spark.access import Access, staging_at
from kvstore.spark.format_options import read_options
from kvstore.spark.read import STATE, QueryReader, ReadPartition, StreamReader
from kvstore.spark.source import KVStoreSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

URLS = ("s3://bucket/staging", "s3a://bucket/a", "hdfs://host/a", "gs://b/c", "abfss://c@a/b")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with one row, in the working directory."""
    monkeypatch.chdir(tmp_path)
    with kvstore.open("store") as store:
        store.put(b"k", b"v")
        store.checkpoint("copy")
    return tmp_path / "copy"


def reader(path: str, **options: str) -> QueryReader:
    return QueryReader(read_options({"path": path, **options}, "state"), STATE, changes=False)


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_refused_as_a_directory_and_nothing_is_created(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (url, Path(url) if url.startswith("s3") else url):
        with pytest.raises(UsageError, match="is a URL, and a directory"):
            kvstore.open(place)
    assert not list(tmp_path.glob("*:*"))


@pytest.mark.parametrize("url", [Path("s3://bucket/a"), "hdfs://host/a", "ftp://host/a"])
def test_a_staging_url_of_no_object_store_is_refused(
    url: str, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="URL"):
        bulk.Import.create(url)
    with pytest.raises(UsageError, match="URL"):
        bulk.ingest(store, url)
    with pytest.raises(UsageError, match="URL"):
        KVStoreSource({"path": str(url)}).writer(STATE, overwrite=False)
    assert not list(tmp_path.glob("*:*"))


@pytest.mark.parametrize("url", ["dbfs:/host/a", "hdfs:/a", "s3a:/bucket/a", "viewfs:/a"])
def test_a_url_with_one_slash_is_refused_and_nothing_is_created(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (bulk.Import.create, Collection, Access.of, staging_at, kvstore.open, bulk.Pushes):
        with pytest.raises(UsageError, match=f"{url}.* URL"):
            call(url)
    with pytest.raises(UsageError, match=f"neither a URL nor a path.* ./{url}"):
        reader(url)
    assert not list(tmp_path.iterdir())


def test_a_directory_with_a_colon_in_its_name_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2026:11/a", "./dbfs:/a"):
        with kvstore.open(name) as store:
            assert store.path == tmp_path / name
        assert read_options({"path": name}, "state").access == Access(str(tmp_path / name))


@pytest.mark.spark
def test_staging_in_no_bucket_is_refused_before_a_row_is_read(
    spark: SparkSession, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    df = spark.sql("SELECT CAST(id AS STRING) AS k FROM range(3)")
    for url in ("memory://here/a", "hdfs://host/a"):
        with pytest.raises(UsageError, match=url):
            stage_import(df, url, "k", "k")
        with pytest.raises(UsageError, match=url):
            bulk_import(df, store, "k", "k", staging=url)
    assert not list(tmp_path.glob("*:*"))
    stage_import(df, f"file://{tmp_path}/staging", "k", "k")
    assert (tmp_path / "staging" / "import.json").exists()


def test_a_read_planned_of_a_relative_path_is_read_in_another_directory(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = reader("copy")
    tasks = pickle.dumps((planned, planned.partitions()))
    monkeypatch.chdir("/")
    there, partitions = pickle.loads(tasks)
    assert [type(each) for each in partitions] == [ReadPartition]
    (batch,) = there.read(partitions[0])
    assert batch.to_pylist() == [{"key": b"k", "value": b"v"}]


def test_a_stream_planned_of_a_relative_path_is_read_in_another_directory(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = StreamReader(
        read_options({"path": "copy", "readChangeFeed": "true"}, "stream"), STATE
    )
    start = planned.initialOffset()
    end = planned.latestOffset(start, planned.getDefaultReadLimit())
    tasks = pickle.dumps((planned, planned.partitions(start, end)))
    monkeypatch.chdir("/")
    there, partitions = pickle.loads(tasks)
    (batch,) = there.read(partitions[0])
    assert batch.to_pylist() == [{"key": b"k", "value": b"v"}]


def test_options_name_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"path": "a/../b", "keyFile": "key"}
    assert read_options(given, "state").access == Access(
        str(tmp_path / "b"), key_file=str(tmp_path / "key")
    )
    for url in ("s3://bucket/a", "http://localhost:1"):
        for given in (url, f"{url}/"):
            assert read_options({"path": given}, "state").access == Access(url)
    for staging in ("staging", Path("staging"), Access("a/../staging")):
        assert staging_at(staging) == tmp_path / "staging"


@pytest.mark.parametrize("number", ["0", "5", "1000000"])
def test_a_version_that_counts_commits_is_refused(copy: Path, number: str) -> None:
    for name in ("versionAsOf", "timestampAsOf"):
        with pytest.raises(UsageError, match=rf"{name}={number} is 1970-.*nanoseconds since 1970"):
            reader(str(copy), **{name: number}).partitions()
    windows: list[dict[str, str]] = [{"startingTimestamp": "0", "endingTimestamp": number}]
    if number != "0":
        windows.append({"startingTimestamp": number})
    for window in windows:
        options = read_options({"path": str(copy), "readChangeFeed": "true", **window}, "changes")
        if window.get("endingTimestamp") != "0":
            with pytest.raises(UsageError, match="nanoseconds since 1970"):
                QueryReader(options, STATE, changes=True).partitions()


def test_a_stream_from_a_version_that_counts_commits_is_refused(copy: Path) -> None:
    given = {"path": str(copy), "readChangeFeed": "true", "startingTimestamp": "5"}
    with pytest.raises(UsageError, match=r"startingTimestamp=5 is 1970-.*nanoseconds since 1970"):
        StreamReader(read_options(given, "stream"), STATE).initialOffset()


def test_small_numbers_are_times_of_a_store_with_a_clock_of_its_own(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", clock=kvstore.ManualClock(1_000)) as store:
        store.put(b"k", b"v")
        store.checkpoint(tmp_path / "copy")
    assert len(reader(str(tmp_path / "copy"), versionAsOf="5").partitions()) == 1


@pytest.mark.parametrize("size", [1, 10**3, 10**6])
def test_seconds_and_milliseconds_and_microseconds_are_refused(copy: Path, size: int) -> None:
    number = str(Clock().wall_ns() // 10**9 * size)
    for name in ("versionAsOf", "timestampAsOf"):
        with pytest.raises(UsageError, match=rf"^{name}={number} .* looks like .* ISO-8601"):
            reader(str(copy), **{name: number})


def test_dates_with_a_zone_and_now_are_times(copy: Path) -> None:
    day = read_options({"path": "p", "timestampAsOf": "2026-01-01Z"}, "state").as_of
    assert day == Timestamp.parse("2026-01-01T00:00:00Z")
    before = Clock().wall_ns()
    now = read_options({"path": "p", "timestampAsOf": "now"}, "state").as_of
    assert now is not None
    assert before <= now <= Clock().wall_ns()


def test_a_time_behind_the_end_of_a_copy_names_its_end(copy: Path) -> None:
    with kvstore.open_read_only(copy) as store:
        upper = store.upper
    for time in ("now", str(upper), str(int(upper)), "2100-01-01Z"):
        with pytest.raises(NotYetWrittenError, match="ends at its last commit or backup") as found:
            reader(str(copy), timestampAsOf=time).partitions()
        assert found.value.upper == upper
        assert str(upper) in str(found.value)
    last: Any = reader(str(copy), timestampAsOf=str(int(upper) - 1)).partitions()
    assert [each.upto for each in last] == [upper - 1]
