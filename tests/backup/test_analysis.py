"""A collection's current state as other programs read it: plain Parquet, no code of this project.

op 0 delete, 1 put, 2 delete_range       newest first for each key; at equal times a put wins
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pandas as pd
import pytest

import kvstore
from kvstore import backup
from tests.backup.histories import change
from tests.harness.seeds import seeded

CURRENT_STATE = """
    with version as (from read_parquet('{parts}')),
    newest as (
        from version where op <> 2
        qualify row_number() over (partition by key order by timestamp desc) = 1
    )
    select key, value from newest
    where op = 1 and not exists (
        from version as range
        where range.op = 2 and range.timestamp > newest.timestamp
        and range.key <= newest.key and newest.key < range.end_key
    )
    order by key
"""


@pytest.fixture(params=["increments", "compacted"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Path, dict[bytes, bytes]]]:
    """The place of a collection of random changes, and the live rows at its end."""
    pick = seeded()
    collection = backup.Collection(tmp_path / "collection")
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for _ in range(4):
            change(store, pick, 60)
            collection.backup(store)
        if request.param == "compacted":
            collection.compact()
        yield tmp_path / "collection", dict(store.scan())


def test_duckdb_reads_the_current_state(place: tuple[Path, dict[bytes, bytes]]) -> None:
    root, alive = place
    parts = root / "blob" / "*" / "part" / "*.parquet"
    assert dict(duckdb.sql(CURRENT_STATE.format(parts=parts)).fetchall()) == alive


def test_pandas_reads_the_current_state(place: tuple[Path, dict[bytes, bytes]]) -> None:
    root, alive = place
    frames = [pd.read_parquet(path) for path in root.glob("blob/*/part/*.parquet")]
    versions = pd.concat(frames)
    ranges = versions[versions["op"] == 2]
    points = versions[versions["op"] != 2].sort_values("timestamp", ascending=False)
    newest = points.drop_duplicates("key")
    state = {}
    for row in newest[newest["op"] == 1].itertuples():
        covering = (ranges["key"] <= row.key) & (ranges["timestamp"] > row.timestamp)
        if not (covering & (ranges["end_key"] > row.key)).any():
            state[row.key] = row.value
    assert state == alive
