"""The offsets of a stream and its lag: the tests call the reader as Spark's planner does."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.spark.format_options import read_options
from kvstore.spark.interfaces import InputPartition, ReadMaxRows
from kvstore.spark.read import CHANGES, StreamReader
from tests.spark.test_origins import write_history

ROWS = 10


def reader_of(path: str, **more: str) -> StreamReader:
    given = {"path": path, "readchangefeed": "true", "batchrows": "3", **more}
    return StreamReader(read_options(given, "stream"), CHANGES)


def rows_of(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    """The rows of a micro-batch: the operation, the key and the value."""
    batches = [
        batch
        for part in reader.partitions(start, end)
        if type(part) is not InputPartition
        for batch in reader.read(part)
    ]
    names = ("_change_type", "key", "value")
    columns = [[each for b in batches for each in b.column(name).to_pylist()] for name in names]
    return list(zip(*columns, strict=True))


def followed(reader: StreamReader, rows: int) -> list[tuple[dict[str, Any], list[Any]]]:
    """The progress and the rows of each micro-batch of at most `rows` rows, up to the end."""
    found = []
    start = reader.initialOffset()
    while (end := reader.latestOffset(start, ReadMaxRows(rows))) != start:
        told = reader.reportLatestOffset()
        assert told is not None
        assert "lag_rows" in told or end["state"]
        found.append((told, rows_of(reader, start, end)))
        start = end
    return found


@pytest.mark.parametrize("origin", ["checkpoint", "collection", "server"])
def test_a_stream_tells_the_changes_that_it_has_left(tmp_path: Path, origin: str) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store, ExitStack() as held:
        write_history(store, tmp_path, random.Random(7), 30)
        path = str(tmp_path / origin)
        if origin == "server":
            path = held.enter_context(serving(app(store), ListenAddress("127.0.0.1", 0))).url

        first = followed(reader_of(path), 4)
        state = sorted((key, value) for _, rows in first for _, key, value in rows)
        assert state == list(store.scan())
        assert ["lag_rows" in told for told, _ in first] == [False] * (len(first) - 1) + [True]

        every = followed(reader_of(path, startingtimestamp="0"), 4)
        left = sum(len(rows) for _, rows in every)
        assert left == len(list(store.changes(0)))
        for told, rows in every:
            left -= len(rows)
            assert told["lag_rows"] == left or (
                not told["lag_is_exact"] and told["lag_rows"] > left
            )
            assert (told["lag_seconds"] == 0) == (told is every[-1][0])
        assert every[-1][0]["lag_is_exact"]


def test_a_token_of_a_prefix_is_told_the_lag_in_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "p" * 32)
    token = Token("p" * 32, ("read",), b"a")
    with (
        kvstore.open(tmp_path / "store") as store,
        serving(app(store, [token]), ListenAddress("127.0.0.1", 0)) as running,
    ):
        for key in (b"a1", b"a2", b"b"):
            store.put(key, b"")
        reader = reader_of(running.url, startingtimestamp="0", prefix="a", tokenenv="TOKEN")
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadMaxRows(1))
        told = reader.reportLatestOffset()
        assert told is not None
        assert told["lag_seconds"] > 0
        assert "lag_rows" not in told
        assert rows_of(reader, start, end) == [("put", b"a1", b"")]
