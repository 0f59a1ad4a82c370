"""Time `get_historical_features` of one view by one store: `history.py STORE VERSIONS HOME`.

    duckdb        a Parquet file, by Feast's DuckDB offline store
    kvstore       a typed table, by `kvstore.feast.OfflineStore`

Labels are a hundredth and a tenth of as many as versions, and as many; users and times in no order,
ten versions a user. It runs in an environment that has Feast and what this library needs, with this
project on `PYTHONPATH`. Prints as JSON the seconds and the processor seconds for each number of
labels, and the sum of a feature, which is the same by both stores.
"""

import contextlib
import datetime as dt
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
from feast.types import Float64, Int64, String

DAY = dt.timedelta(days=1)
DAY_US = 86_400_000_000
START_US = int(dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc).timestamp()) * 1_000_000
FLOATS = [f"f{number}" for number in range(5)]


def main(way: str, versions: int, home: Path) -> None:
    """Prepare a feature store of the versions, and time its joins."""
    home.mkdir(parents=True)
    chance = np.random.default_rng(1)
    source, settings = sources(way, made(versions, chance), home)
    user = Entity(name="user", join_keys=["user"], value_type=ValueType.INT64)
    fields = [Field(name=name, dtype=Float64) for name in FLOATS]
    view = FeatureView(
        name="rows",
        entities=[user],
        ttl=30 * DAY,
        schema=[*fields, Field(name="count", dtype=Int64), Field(name="city", dtype=String)],
        source=source,
    )
    store = FeatureStore(
        config=RepoConfig(
            project="bench",
            registry=str(home / "registry.db"),
            provider="local",
            entity_key_serialization_version=3,
            **settings,
        )
    )
    wanted = [f"rows:{name}" for name in (*FLOATS, "count", "city")]
    figures = {}
    with contextlib.redirect_stdout(sys.stderr):
        store.apply([user, view])
        for count in (versions // 100, versions // 10, versions):
            at = START_US + chance.integers(20 * DAY_US, 100 * DAY_US, count)
            labels = pd.DataFrame(
                {
                    "user": chance.integers(0, versions // 10, count),
                    "event_timestamp": pd.to_datetime(at, unit="us", utc=True),
                }
            )
            rounds = []
            for _ in range(3):
                began, cpu_began = time.perf_counter(), time.process_time()
                found = store.get_historical_features(labels, wanted).to_arrow()
                rounds.append((time.perf_counter() - began, time.process_time() - cpu_began))
            figures[count] = (*sorted(rounds)[1], pc.sum(found["f0"]).as_py())
    print(json.dumps(figures))


def made(versions: int, chance: np.random.Generator) -> pa.Table:
    """Versions of users at times in no order, with seven features each."""
    at = START_US + chance.integers(0, 100 * DAY_US, versions)
    return pa.table(
        {
            "user": chance.integers(0, versions // 10, versions),
            "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
            **{name: chance.random(versions) for name in FLOATS},
            "count": chance.integers(0, 1000, versions),
            "city": [f"city-{number % 1000}" for number in range(versions)],
        }
    )


def sources(way: str, table: pa.Table, home: Path) -> tuple[Any, dict[str, Any]]:
    """The source of the view, and the stores of the configuration."""
    if way == "duckdb":
        path = str(home / "source.parquet")
        pq.write_table(table, path)
        online = {"type": "sqlite", "path": str(home / "online.db")}
        settings = {"offline_store": {"type": "duckdb"}, "online_store": online}
        return FileSource(path=path, timestamp_field="at"), settings
    from kvstore import bulk
    from kvstore.feast import TableSource
    from kvstore.feast.handles import opened

    path = str(home / "features.db")
    typed = opened(path, None).table("source", table.schema, "user", event_time="at")
    bulk.import_table(typed, table, duplicates="last")
    return TableSource(table="source", timestamp_field="at"), {
        "online_store": {"type": "kvstore.feast.OnlineStore", "path": path},
        "offline_store": {"type": "kvstore.feast.OfflineStore", "path": path},
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
