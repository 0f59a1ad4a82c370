"""Spark on a live store: the server streams rows to tasks that share no file with it."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Span
from kvstore.errors import HistoryGoneError, KVStoreError, UsageError
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark import lookup_join, point_in_time_join
from kvstore.spark.access import Access
from kvstore.spark.format_options import read_options
from kvstore.spark.origins import find, open_origin
from kvstore.spark.read import STATE, QueryReader
from tests.certificates import made_certificate
from tests.harness.bounds import bounds
from tests.harness.seeds import seed_of
from tests.server.process import ServerProcess
from tests.spark.test_joins import ADDED, answers, frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOCAL = ListenAddress("127.0.0.1", 0)
SECRET = "read-flights-0123456789abcdef"
WRITER = "write-flights-0123456789abcdef"
SEED = "KVSTORE_SPARK_SERVER_SEED"


class Server:
    """A server process at one port, over restarts."""

    def __init__(self, store: Path, *options: str) -> None:
        self._store, self._options = store, options
        self._process = ServerProcess(store, "127.0.0.1:0", *options)
        self.url = self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def start(self) -> None:
        listen = self.url.partition("://")[2]
        self._process = ServerProcess(self._store, listen, *self._options)
        assert self._process.start() == self.url


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path / "store")
    yield started
    started.kill()


def fill(url: str, rows: int, value_bytes: int, **access: Any) -> kvstore.Timestamp:
    """Write rows, the last of them flushed. Returns the time of the last commit."""
    pick = random.Random(rows)
    with connect(url, **access) as client:
        for first in range(0, rows, 10_000):
            with client.batch() as batch:
                for number in range(first, min(first + 10_000, rows)):
                    batch.put(b"%06d" % number, pick.randbytes(value_bytes))
        return kvstore.Timestamp(client.upper - 1)


def pairs(df: DataFrame) -> list[tuple[bytes, bytes]]:
    return sorted((bytes(row.key), bytes(row.value)) for row in df.collect())


@pytest.mark.spark
def test_a_live_store_is_read_by_tls_and_a_token_while_it_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    cert, key = map(str, made_certificate(tmp_path))
    tokens, token_file = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text(f"read {SECRET}\nadmin {WRITER}\n")
    tokens.chmod(0o600)
    token_file.write_text(SECRET + "\n")
    options = ["--token-file", str(tokens), "--tls-cert", cert, "--tls-key", key]
    server = Server(tmp_path / "store", *options)
    access = {"tokenFile": str(token_file), "caFile": cert}
    stamp = fill(server.url, 3000, 20, token=WRITER, ca=cert)
    with connect(server.url, WRITER, ca=cert) as writer:
        list(writer.rows("checkpoint", path=str(tmp_path / "flushed")))
        expected = list(writer.scan(as_of=stamp))

        def read(**more: str) -> DataFrame:
            options = {**access, **more}
            return spark.read.format("kvstore").options(**options).load(server.url)

        df = read(timestampAsOf=str(int(stamp)), numPartitions="3")
        assert df.rdd.getNumPartitions() == 3
        writer.put(b"000007", b"new")
        writer.delete_range(b"000100", b"000200")
        assert pairs(df) == expected
        assert pairs(read()) == list(writer.scan())
        changes = read(readChangeFeed="true", startingTimestamp=str(int(stamp)))
        assert sorted(row._change_type for row in changes.collect()) == ["delete_range", "put"]
        plan = df._jdf.queryExecution().toString() + repr(Access(server.url, token_file="t"))
        assert SECRET not in plan
        labels = [(b"000007", int(stamp)), (b"000150", int(stamp)), (b"zz", int(stamp))]
        source = Access(server.url, token_file=str(token_file), ca_file=cert)
        joined = point_in_time_join(frame(spark, labels), source, "id", columns=ADDED)
        assert [value for value, _ in answers(joined, 3)] == [
            writer.get(key, as_of=stamp) for key, _ in labels
        ]
        joined = lookup_join(frame(spark, labels), source, "id", columns=ADDED)
        assert [value for value, _ in answers(joined, 3)] == [b"new", None, None]
    token_file.write_text("x" * 30)
    with pytest.raises(Exception, match=r"AccessDeniedError.*does not know the token"):
        pairs(read())
    server.kill()


@pytest.mark.spark
def test_a_server_that_is_killed_under_a_query_and_started_anew_changes_no_row(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    stamp = fill(server.url, 60_000, 400)
    df = (
        spark.read.format("kvstore")
        .option("timestampAsOf", str(int(stamp)))
        .option("batchRows", "1000")
        .load(server.url)
    )
    began, again = tmp_path / "began", tmp_path / "again"

    def waits(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            began.touch()
            while not again.exists():
                time.sleep(0.01)
            yield pa.record_batch({"key": batch.column("key")})

    def restart() -> None:
        while not began.exists():
            time.sleep(0.01)
        server.kill()
        server.start()
        with connect(server.url) as client:
            client.put(b"000000", b"later")
        again.touch()

    thread = threading.Thread(target=restart)
    thread.start()
    keys = [bytes(row.key) for row in df.mapInArrow(waits, "key binary").collect()]
    thread.join()
    assert keys == [b"%06d" % number for number in range(60_000)]


@pytest.mark.spark
def test_a_stream_of_a_live_store_sees_each_change_once_over_restarts(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    seen: list[tuple[str, bytes]] = []

    def take(batch: DataFrame, _: int) -> None:
        seen.extend((row._change_type, bytes(row.key)) for row in batch.collect())

    def run() -> None:
        (
            spark.readStream.format("kvstore")
            .option("readChangeFeed", "true")
            .option("maxRowsPerTrigger", "2")
            .load(server.url)
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "position"))
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        )

    with connect(server.url) as client:
        for key in (b"a", b"b", b"c"):
            client.put(key, b"1")
        run()
        assert seen == [("put", b"a"), ("put", b"b"), ("put", b"c")]
        client.put(b"a", b"2")
        server.kill()
        server.start()
        client.delete(b"b")
        client.put(b"d", b"1")
    run()
    assert seen[3:] == [("put", b"a"), ("delete", b"b"), ("put", b"d")]
    with connect(server.url) as client:
        # Each run of the stream has one lease, which its micro-batches have moved.
        holds = client.call("holds")["holds"]
        assert 1 <= len(holds) <= 2
        assert {hold["kind"] for hold in holds} == {"reader"}


def test_tasks_continue_a_stream_that_broke_at_any_batch(server: Server) -> None:
    pick = random.Random(seed_of(SEED, None))
    fill(server.url, 20_000, 400)
    with connect(server.url) as client:
        for number in range(0, 20_000, 1000):  # several versions of a key
            client.put(b"%06d" % number, b"again")
        whole = list(client.scan())
        upto = client.upper - 1
    columns = ["key", "timestamp", "value"]
    for name in ("state", "points"):
        kills = {pick.randrange(1, 18), pick.randrange(1, 18)}
        rows = []
        with open_origin(find(server.url)) as origin:
            origin.keep(upto)
            if name == "state":
                batches = origin.state(Span(), upto, ["key", "value"], 1000)
            else:
                window = {"since": 0, "upto": upto, "latest": False}
                batches = origin.points(Span(), **window, columns=columns, rows=1000)
            for number, batch in enumerate(batches):
                rows += list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
                if number in kills:
                    server.kill()
                    server.start()
        if name == "state":
            assert rows == whole
        else:
            assert len(set(rows)) == len(rows) == 20_020
            assert rows == sorted(rows, key=lambda row: row[:2])


def test_a_server_that_is_gone_is_an_error_of_one_line(server: Server) -> None:
    fill(server.url, 20_000, 400)
    with (
        bounds({"CLIENT_PATIENCE_S": 0, "READER_TRIES_MAX": 1}),
        open_origin(find(server.url)) as origin,
    ):
        batches = origin.state(Span(), origin.frontiers().upper - 1, ["key"], 100)
        next(batches)
        server.kill()
        with pytest.raises(KVStoreError, match=server.url) as caught:
            list(batches)
        assert "\n" not in str(caught.value)
        with pytest.raises(KVStoreError, match=server.url):
            find_and_plan(server.url)
    server.start()


def find_and_plan(url: str, **options: str) -> QueryReader:
    reader = QueryReader(read_options({"path": url, **options}, "state"), STATE, changes=False)
    reader.planned = reader.partitions()  # type: ignore[attr-defined]
    return reader


def test_a_plan_keeps_its_history_and_its_lease_ends_when_it_is_abandoned(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000_000_000)
    with (
        kvstore.open(tmp_path / "store", clock=clock) as store,
        serving(app(store), LOCAL) as running,
    ):
        first = store.put(b"a", b"1")
        clock.advance(1_000_000_000)
        options = {"timestampAsOf": str(int(first)), "leaseSeconds": "60"}
        for moment in (0, 59_000_000_000):
            reader = find_and_plan(running.url, **options)
            store.put(b"a", b"2")
            clock.advance(moment)
            store.put(b"a", b"3")
            assert store.gc(before=store.upper - 1).since <= first
            [partition] = pickle.loads(pickle.dumps(reader.planned))  # type: ignore[attr-defined]
            [batch] = pickle.loads(pickle.dumps(reader)).read(partition)
            assert batch.column("value").to_pylist() == [b"1"]
        clock.advance(50_000_000_000)  # the task took the lease again
        store.put(b"a", b"4")
        assert store.gc(before=store.upper - 1).since <= first
        clock.advance(20_000_000_000)
        store.put(b"a", b"5")
        assert store.gc(before=store.upper - 1).since > first
        with pytest.raises(HistoryGoneError):
            list(reader.read(partition))
        with pytest.raises(HistoryGoneError):
            find_and_plan(running.url, **options)
        now = {"timestampAsOf": str(clock.wall_ns() + 5)}
        clock.advance(10)  # an idle store completes its time up to the requested one
        reader = find_and_plan(running.url, **now)
        assert len(store.holds.all()) == 1  # the leases that ended were removed
        assert [len(batch) for batch in reader.read(reader.planned[0])] == [1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "given", "match"),
    [
        ("http://host:7447", {"keyfile": "k"}, "keyFile is given, and the path is a server"),
        ("/flights", {"tokenfile": "k"}, "tokenFile is given, and the path is no server"),
        ("s3://bucket/c", {"leaseseconds": "5"}, "leaseSeconds is given"),
        ("https://me:secret@host", {}, "has a password in it"),
        ("https://host", {"token": "secret"}, "option token is a secret.*tokenFile"),
        ("https://host", {"tokenenv": "T", "tokenfile": "t"}, "both given"),
        ("https://host", {"leaseseconds": "100000"}, "from 1 to 86400"),
    ],
)
def test_options_of_servers_and_of_other_places_do_not_mix(
    path: str, given: dict[str, str], match: str
) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        read_options({"path": path, **given}, "state")
    assert "secret@" not in str(caught.value)


def test_tokens_are_found_where_references_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = Access("http://127.0.0.1:1", token_env="FLIGHTS_TOKEN")
    with pytest.raises(UsageError, match="FLIGHTS_TOKEN is not set in Spark's processes"):
        access.connect()
    missing = Access("http://127.0.0.1:1", token_file=str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"token file .* cannot be read"):
        missing.connect()
    with (
        kvstore.open(None, engine="memory") as store,
        serving(app(store, [kvstore.remote.server.Token(SECRET)]), LOCAL) as running,
    ):
        monkeypatch.setenv("FLIGHTS_TOKEN", SECRET)
        access = Access.of(Access(running.url, token_env="FLIGHTS_TOKEN", lease_seconds=7))
        assert access.as_options() == {"tokenEnv": "FLIGHTS_TOKEN", "leaseSeconds": "7"}
        with access.connect() as client:
            assert client.get(b"a") is None
