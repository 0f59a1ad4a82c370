"""Jobs over a collection give the results of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark import TaskContext

import kvstore
from kvstore import ManualClock, Store, Timestamp, bulk
from kvstore.backup import Collection
from kvstore.errors import CorruptionError, UsageError
from kvstore.spark.access import asked
from kvstore.spark.jobs import backup, compact, fleet, restore, verify
from kvstore.spark.jobs.spread import run_tasks
from tests.spark.frames import FAST_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_tasks_of_jobs_and_of_plans_are_described_in_sparks_pages(spark: SparkSession) -> None:
    def described(_: object = None) -> str | None:
        context = TaskContext.get()
        return None if context is None else context.getLocalProperty("spark.job.description")

    told = run_tasks(spark, [1, 2], described, doing="backing up into c")
    assert told == ["kvstore: backing up into c"] * 2
    assert asked(spark, described, "planning a join with c") == "kvstore: planning a join with c"


def test_restore_imports_the_state_at_a_time(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    for number in range(300):
        store.put(b"%03d" % number, b"old")
    then = store.delete_range(b"1", b"2")
    store.put(b"000", b"new")
    Collection(tmp_path / "c").backup(store)
    with kvstore.open(tmp_path / "other") as other:
        report = restore.restore_into(spark, str(tmp_path / "c"), other, as_of=str(then))
        assert list(other.scan()) == list(store.scan(as_of=then))
        assert report.rows == 200
        restore.restore_into(spark, str(tmp_path / "c"), other, prefix="00")
        assert other.get(b"000") == b"new"
        assert restore.restore_into(spark, tmp_path / "c", other, prefix=b"01").rows == 10
        store.table("t", pa.schema([("id", pa.int64())]), key=["id"])
        Collection(tmp_path / "c").backup(store)
        with pytest.raises(UsageError, match="has table 't'"):
            restore.restore_into(spark, tmp_path / "c", other)
        assert restore.restore_into(spark, tmp_path / "c", other, prefix=b"01").rows == 10


def test_restored_keys_expire_at_their_times(
    spark: SparkSession, clock: ManualClock, tmp_path: Path
) -> None:
    start, hour = clock.wall_ns(), 3600 * 10**9
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        for number in range(20):
            due = Timestamp(start + (number + 1) * hour)
            store.put(b"%02d\x00\xff" % number, b"v", expires=due if number % 3 else None)
        store.put(b"04\x00\xff", b"kept")
        store.persist(b"05\x00\xff")
        store.put(b"07\x00\xff", b"longer", expires=Timestamp(start + 40 * hour))
        Collection(tmp_path / "c").backup(store)
        with kvstore.open(tmp_path / "other", durability="async", clock=clock) as other:
            restore.restore_into(spark, str(tmp_path / "c"), other)
            for _ in range(6):
                assert dict(other.scan()) == dict(store.scan())
                clock.advance(8 * hour)
            for number in range(20):
                ours, theirs = (each.history(b"%02d\x00\xff" % number) for each in (store, other))
                assert (ours[0].value is None) == (theirs[0].value is None)
                assert ours[0].value or ours[0].timestamp == theirs[0].timestamp
            assert not other.verify().problems


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000_000_000)


def test_verify_reads_every_part_and_names_the_damaged(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    url = str(tmp_path / "c")
    collection = Collection(url)
    for number in range(2):
        with store.batch() as batch:
            for key in range(2000):
                batch.put(b"%d-%04d" % (number, key), key.to_bytes(50, "big"))
        collection.backup(store)
    report = verify.verify(spark, url)
    assert report[:4] == collection.verify()[:4]
    part = max((tmp_path / "c" / "blob").rglob("*.parquet"), key=lambda file: file.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"fail the checksum"):
        verify.verify(spark, url)


def write(store: Store, first: int) -> None:
    """Rows of several sizes, a range delete over most of them, and an import over some."""
    with store.batch() as batch:
        for number in range(first, first + 3000):
            batch.put(b"%05d" % number, number.to_bytes(4, "big") * (number % 50))
    store.delete_range(b"%05d" % (first + 10), b"%05d" % (first + 2000))
    staged = bulk.Import.create(f"{store.path}-staging-{first}")
    with staged.writer() as writer:
        for number in range(first, first + 3000, 7):
            writer.put(b"%05d" % number, b"imported")
    staged.seal()
    bulk.ingest(store, staged.staging)


def test_backup_compact_and_restore_over_splits_equal_one_process(
    spark: SparkSession, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No window is too small to be shared.
    monkeypatch.setattr("kvstore.changes.batches.SORTED_CHANGES_MAX", 0)
    url = str(tmp_path / "c")
    collection = Collection(url)
    write(store, 0)
    first = backup.backup(spark, store, url, tasks=5)
    assert first.parts > 1
    write(store, 1500)
    collection.backup(store)  # each continues where the other ended
    write(store, 2500)
    last = backup.backup(spark, store, url, tasks=5, token="monday")
    assert backup.backup(spark, store, url, tasks=5, token="monday") == last
    assert [info.lower for info in collection.list()][1:] == [
        info.upper for info in collection.list()
    ][:-1]
    collection.verify("contents", store)
    compact.compact(spark, url, tasks=3)
    assert len(collection.list()) == 1
    collection.verify("contents", store)
    at = restore.restore(spark, url, tmp_path / "restored", tasks=3)
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.replication.versions(since=None, upto=at)) == list(
            store.replication.versions(since=None, upto=at)
        )
    # neither a copy of the store nor half of a restore is left
    assert not list(tmp_path.glob(".*"))


def test_errors_of_tasks_are_those_of_one_process(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    url = str(tmp_path / "c")
    write(store, 0)
    backup.backup(spark, store, url)
    part = next((tmp_path / "c" / "blob").rglob("*.parquet"))
    part.unlink()
    with pytest.raises(CorruptionError, match="its blob is gone"):
        restore.restore(spark, url, tmp_path / "restored", tasks=2)
    assert not (tmp_path / "restored").exists()
    with kvstore.open(tmp_path / "other") as other, pytest.raises(UsageError, match="of its own"):
        backup.backup(spark, other, url)


@pytest.mark.usefixtures("spark")
def test_jobs_run_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths start at the working directory of this process, not at the directory where
    Spark was started."""
    monkeypatch.chdir(tmp_path)
    store, url, restored = "s", "c", "r"
    (tmp_path / "key").write_text("0f" * 32)
    key = ["--key-file", "key"]
    with kvstore.open(store) as opened:
        write(opened, 0)
        expected = list(opened.changes(0))
    assert backup.main([store, url, "--tasks", "2", *key]) == 0
    with kvstore.open(store) as opened:
        write(opened, 4000)
    assert backup.main([store, url, *key]) == 0
    assert verify.main([url, "--contents", store, *key]) == 0
    assert compact.main([url, *key]) == 0
    assert restore.main([url, restored, *key]) == 0
    with kvstore.open(restored) as opened:
        assert (
            list(opened.changes(0, expected[0].timestamp))[:100]
            == [c for c in expected if c.timestamp == expected[0].timestamp][:100]
        )
        assert opened.get(b"04000") == b"imported"
    assert restore.main([url, "o", "--into", *key]) == 1  # a store exists at the path
    assert not (tmp_path / "o").exists()
    kvstore.open("o").close()
    assert restore.main([url, "o", "--into", "--prefix", "04", *key]) == 0
    assert "rows in 2 files" in capsys.readouterr().out
    assert restore.main([url, restored, *key]) == 1
    assert "restore to a path that does not" in capsys.readouterr().err
    assert verify.main([url]) == 1
    assert "is encrypted" in capsys.readouterr().err
    for job in (verify, compact):
        assert job.main(["nothing"]) == 1
        assert "nothing holds no backup" in capsys.readouterr().err
    for wrong, told in (
        (["nothing", "new", "--into"], "nothing holds no backup"),
        ([url, "new", "--into", "--as-of", "2099-01-01T00:00:00Z", *key], "2099-01-01T00:00:00.0"),
        ([url, "new", "--into", "--as-of", "someday", *key], "as_of='someday' is no time"),
        ([url, "new", "--tasks", "-1", *key], "tasks=-1"),
    ):
        assert restore.main(wrong) == 1
        assert told in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_a_job_runs_under_spark_submit(tmp_path: Path) -> None:
    """spark-submit decides where the job runs, and the job does not choose a master."""
    import pyspark

    from kvstore.spark.java import java_for_spark

    with kvstore.open(tmp_path / "s") as store:
        write(store, 0)
    ended = subprocess.run(
        [
            Path(pyspark.__file__).parent / "bin" / "spark-submit",
            *("--master", "local[1]", "--conf", "spark.ui.enabled=false"),
            *("--driver-memory", "512m", "--driver-java-options", FAST_START, backup.__file__),
            *(str(tmp_path / "s"), str(tmp_path / "c"), "--cores", "7"),
        ],
        env={
            **os.environ,
            "JAVA_HOME": str(java_for_spark().home),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(backup.__file__).parents[2]),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    with kvstore.open(tmp_path / "s") as store:
        Collection(tmp_path / "c").verify("contents", store)


@pytest.mark.parametrize("job", [backup, compact, verify, restore])
def test_jobs_explain_themselves(job: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        job.main(["--help"])  # type: ignore[attr-defined]
    assert ended.value.code == 0
    assert "collection" in capsys.readouterr().out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with 3.11")
def test_a_fleet_is_backed_up_by_tasks_and_a_bad_store_stops_no_other(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        with kvstore.open(tmp_path / f"{name}.db", durability="async") as store:
            store.put(b"name", name.encode())
    tables = [
        f"[stores.{name}]\npath = '{name}.db'\ncollection = 'fleet/{name}'"
        for name in ("one", "missing", "two")
    ]
    (tmp_path / "fleet").mkdir()
    config = tmp_path / "backups.toml"
    config.write_text("\n".join(["concurrency = 2", "bandwidth = '1GB'", *tables]))
    found = fleet.fleet(spark, config)
    assert [(each.name, each.info is not None) for each in found] == [
        ("one", True), ("missing", False), ("two", True),
    ]  # fmt: skip
    with Collection(tmp_path / "fleet" / "two").open() as reader:
        assert reader.get(b"name") == b"two"
