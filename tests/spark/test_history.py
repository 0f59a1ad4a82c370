"""The history of a store is a frame for people to look at, and an error of a read is one line."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.base.timestamp import microseconds_of
from kvstore.errors import NotAStoreError
from kvstore.spark import history, read_where
from kvstore.spark.read import STATE
from kvstore.spark.streaming import StagingWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_history_tells_commits_imports_reverts_and_backups(
    spark: SparkSession, tmp_path: Path
) -> None:
    collection, wanted = Collection(tmp_path / "collection"), []
    with kvstore.open(tmp_path / "store") as store:
        with store.batch() as batch:
            batch.put(b"a", b"1")
            batch.delete(b"b")
        wanted.append((batch.timestamp, "commit", None, 2))
        built = bulk.Import.create(tmp_path / "staging", import_id=7)
        with built.writer() as writer:
            for key in (b"x", b"y", b"z"):
                writer.put(key, b"v")
        built.seal()
        wanted.append((bulk.ingest(store, built.staging), "import", "7", 3))
        table = store.table("trips", pa.schema([("id", pa.int64())]), "id")
        made = {change.timestamp for change in store.changes(int(wanted[-1][0]), start=b"\xff" * 9)}
        wanted += [(stamp, "commit", None, 1) for stamp in made]
        wanted.append((table.put({"id": 1}), "commit", None, 1))
        wanted.append((store.revert_import(7), "revert", "7", 3))
        collection.backup(store)
        upper = collection.list()[-1].upper
        store.checkpoint(tmp_path / "copy")
    wanted.sort(reverse=True)
    found = history(spark, tmp_path / "copy")
    assert found.columns == ["version", "timestamp", "operation", "id", "rows", "bytes"]
    rows = [(row.version, row.operation, row.id, row.rows) for row in found.collect()]
    assert rows == wanted
    micros = found.selectExpr("unix_micros(timestamp) AS t").collect()
    assert [row.t for row in micros] == [microseconds_of(version) for version, *_ in wanted]
    backed = history(spark, tmp_path / "collection").collect()
    assert [row.version for row in backed if row.operation == "commit"] == [w[0] for w in wanted]
    [last] = [row for row in backed if row.operation == "backup"]
    assert (last.version, last.id) == (upper - 1, None)
    assert last.rows > 0
    assert last.bytes > 0
    with pytest.raises(NotAStoreError, match="neither a store, a checkpoint nor a collection"):
        history(spark, tmp_path / "nothing")


def test_an_error_of_a_read_has_no_stack(spark: SparkSession, store: Any, tmp_path: Path) -> None:
    store.put(b"k", b"v")
    store.checkpoint(tmp_path / "copy")
    planned: list[Any] = [
        lambda: spark.read.format("kvstore").load(str(tmp_path / "nothing")).collect(),
        lambda: read_where(spark, tmp_path / "copy", [("id", "=", 1)], table="t").collect(),
    ]
    for work in planned:
        with pytest.raises(Exception, match=r"kvstore\.errors") as found:
            work()
        told, *more = str(found.value).strip().splitlines()
        assert "kvstore.errors." in told
        assert not more or more == [" SQLSTATE: 38000"]


WORKER = """
import os, traceback
{step}
try:
    raise {error}
except BaseException:
    traceback.print_exc()
    os._exit(7)
"""


SOURCE = """
from kvstore.spark.read import CHANGES
from kvstore.spark.source import KVStoreSource
source = KVStoreSource({'path': '/nowhere', 'readChangeFeed': 'true'})
"""


WRITE = """
from kvstore.spark.read import STATE
from kvstore.spark.source import KVStoreSource
KVStoreSource({'path': 'staging'}).writer(STATE, overwrite=False)
"""


COMMIT = """
import pickle
from pathlib import Path
pickle.loads(Path('writer').read_bytes()).commit([])
"""


@pytest.mark.parametrize(
    "step",
    [
        "import pyspark_kvstore",
        f"{SOURCE}source.schema()",
        f"{SOURCE}source.streamReader(CHANGES)",
        WRITE,
        COMMIT,
    ],
    ids=["search", "schema", "stream", "write", "commit"],
)
def test_a_worker_whose_socket_spark_has_closed_shows_nothing(step: str, tmp_path: Path) -> None:
    """PySpark's daemon prints the error of a worker in this way."""
    writer = StagingWriter(tmp_path / "committed", STATE, compression="lz4")
    (tmp_path / "writer").write_bytes(pickle.dumps(writer))
    for error, is_shown in (("BrokenPipeError(32)", False), ("ValueError('other')", True)):
        shutil.rmtree(tmp_path / "staging", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-c", WORKER.format(step=step, error=error)],
            env={**os.environ, "PYTHON_UNIX_DOMAIN_ENABLED": "True"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 7
        assert ("Traceback" in done.stderr) == is_shown, done.stderr
