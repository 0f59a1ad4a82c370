"""`kvstore import` and `kvstore table import` of files in buckets."""

from __future__ import annotations

import errno
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import ObjectStore

import kvstore
import kvstore.bulk
from tests.cli.installed import Run
from tests.harness.proxy import Answer, Proxy, Request
from tests.shard.conftest import s3_bucket, s3_server

__all__ = ["s3_bucket", "s3_server"]

CSV = 'key,value\na,"1\r\n2"\nb,""\n'
ROWS = [(b"a", b"1\r\n2"), (b"b", b"")]


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3_server) as made:
        monkeypatch.setenv("AWS_ENDPOINT", made.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        yield made


@pytest.fixture
def bucket(s3_bucket: Callable[[], ObjectStore], proxy: Proxy) -> ObjectStore:
    return s3_bucket()


def url_of(bucket: ObjectStore, name: str) -> str:
    return f"s3://{bucket.config['bucket']}/{name}"  # type: ignore[attr-defined]


def rows_of(path: Path) -> list[tuple[bytes, bytes]]:
    with kvstore.open(path) as store:
        return list(store.scan())


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("in/rows.csv", "in/rows.csv"),
        ("rows.csv.gz", "rows.csv.gz"),
        ("rows.parquet", "rows.parquet"),
        ("a folder/täglich #1.csv", "a%20folder/t%C3%A4glich%20%231.csv"),
        ("rows.csv", "rows%2Ecsv"),
    ],
)
def test_a_file_of_a_bucket_is_read_as_a_file_of_the_disk(
    run: Run, tmp_path: Path, bucket: ObjectStore, name: str, named: str
) -> None:
    local = tmp_path / f"rows{''.join(Path(name).suffixes[-2:])}"
    if local.suffix == ".parquet":
        pq.write_table(pa.table(list(map(list, zip(*ROWS, strict=True))), ["key", "value"]), local)
    else:
        local.write_bytes(gzip.compress(CSV.encode()) if local.suffix == ".gz" else CSV.encode())
    obstore.put(bucket, name, local)
    run("import", tmp_path / "s", url_of(bucket, named), "--create")
    run("import", tmp_path / "file", local.as_uri(), "--create")
    run("import", tmp_path / "disk", local, "--create")
    assert rows_of(tmp_path / "s") == rows_of(tmp_path / "disk") == rows_of(tmp_path / "file")
    assert rows_of(tmp_path / "s") == ROWS


def test_a_table_takes_files_of_a_bucket(run: Run, tmp_path: Path, bucket: ObjectStore) -> None:
    for number in (1, 2):
        obstore.put(bucket, f"{number}.csv", f"id,name\n{number},n\n".encode())
    with kvstore.open(tmp_path / "s") as store:
        store.table("t", pa.schema([("id", pa.int64()), ("name", pa.string())]), key=["id"])
    urls = [url_of(bucket, f"{number}.csv") for number in (1, 2)]
    run("table", "import", tmp_path / "s", "t", *urls)
    with kvstore.open(tmp_path / "s") as store:
        assert list(store.table("t").rows()) == [{"id": n, "name": "n"} for n in (1, 2)]
    wrong = url_of(bucket, "wrong.csv")
    obstore.put(bucket, "wrong.csv", b"id,name\nx,n\n")
    assert f"{wrong}: row 2" in run("table", "import", tmp_path / "s", "t", wrong, code=2).stderr


def test_a_staging_may_have_the_name_of_a_file(
    run: Run, tmp_path: Path, bucket: ObjectStore
) -> None:
    for number, place in enumerate([url_of(bucket, "run.parquet"), tmp_path / "run.csv"]):
        made = kvstore.bulk.Import.create(place)
        with made.writer() as writer:
            for key, value in ROWS:
                writer.put(key, value)
        made.seal()
        named = place.as_uri() if isinstance(place, Path) else place
        run("import", tmp_path / f"{number}", named, "--create")
        assert rows_of(tmp_path / f"{number}") == ROWS


def test_a_disk_that_is_full_while_a_file_is_fetched_is_told(
    run: Run, tmp_path: Path, bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore.put(bucket, "rows.csv", CSV.encode())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvstore.bulk.cli.fetch_object", full)
    said = run("import", tmp_path / "s", url_of(bucket, "rows.csv"), "--create", code=5).stderr
    assert "kvstore-import-" in said
    assert "space" in said
    assert not (tmp_path / "s").exists()


def test_a_file_that_cannot_be_fetched_leaves_no_store(
    run: Run, tmp_path: Path, bucket: ObjectStore
) -> None:
    missing = url_of(bucket, "missing.csv")
    cases = [
        (missing, 2, f"{missing} is not there; check the URL"),
        ("s3://there-is-no-such-bucket/a.csv", 2, "is not there; check the URL"),
        ((tmp_path / "missing.csv").as_uri(), 2, "missing.csv is not there; check the path"),
        (f"{missing}.gz", 2, "missing.csv.gz is not there; check the URL"),
        ("memory://x/rows.csv", 2, "memory of a process"),
        (url_of(bucket, "a.csv?x=1.csv"), 2, "has a # or a ?"),
    ]
    for url, code, said in cases:
        assert said in run("import", tmp_path / "s", url, "--create", code=code).stderr
        assert not (tmp_path / "s").exists()


def test_a_file_that_is_replaced_while_it_is_fetched_is_refused(
    run: Run, tmp_path: Path, bucket: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched in pieces, and pieces of two files would be a third one."""
    monkeypatch.setattr("kvstore.storage.object_store.OBJECT_PIECE_BYTES", 10)
    obstore.put(bucket, "rows.csv", CSV.encode())
    url = url_of(bucket, "rows.csv")
    pieces = 0

    def weather(request: Request) -> Answer:
        nonlocal pieces
        pieces += request.method == "GET"
        if pieces == 2 and request.method == "GET":
            obstore.put(bucket, "rows.csv", CSV.upper().encode())
        return Answer.WHOLE

    proxy.weather = weather
    refused = run("import", tmp_path / "s", url, "--create", code=5)
    assert f"{url} was replaced or deleted while it was read" in refused.stderr
    assert not (tmp_path / "s").exists()
    proxy.weather = lambda _: Answer.WHOLE
    obstore.put(bucket, "rows.csv", CSV.encode())
    run("import", tmp_path / "s", url, "--create")
    assert rows_of(tmp_path / "s") == ROWS
