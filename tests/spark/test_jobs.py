"""Jobs over a collection do what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from backup import Collection
from kvstore import Store
from kvstore.errors import CorruptionError
from spark_connector.jobs import restore, verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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


@pytest.mark.parametrize("job", [verify, restore])
def test_jobs_explain_themselves(job: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        job.main(["--help"])  # type: ignore[attr-defined]
    assert ended.value.code == 0
    assert "collection" in capsys.readouterr().out
