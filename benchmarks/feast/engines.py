"""Materialise the rows of a view by one of four ways: `engines.py WAY ROWS HOME`.

    sqlite        a Parquet file into Feast's sqlite online store
    commits       a typed table into ours, by Feast's own engine
    imports       a typed table into ours, by `kvstore.feast.ComputeEngine`
    imports-ttl   the same, with rows that expire

It runs in an environment that has Feast and what this library needs, with this project on
`PYTHONPATH`. Starting Python and loading the source are not timed. Prints the seconds and the
processor seconds of the materialisation as JSON.
"""

import contextlib
import datetime as dt
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
from feast.types import Float64, Int64, String

NOW = dt.datetime.now(dt.timezone.utc).replace(microsecond=0)
DAY = dt.timedelta(days=1)
FLOATS = [f"f{number}" for number in range(5)]


def main(way: str, rows: int, home: Path) -> None:
    """Prepare a feature store of the rows, and time its materialisation."""
    home.mkdir(parents=True)
    table = made(rows)
    source, settings = sources(way, table, home)
    user = Entity(name="user", join_keys=["user"], value_type=ValueType.INT64)
    fields = [Field(name=name, dtype=Float64) for name in FLOATS]
    view = FeatureView(
        name="rows",
        entities=[user],
        ttl=10 * DAY if way == "imports-ttl" else dt.timedelta(0),
        schema=[*fields, Field(name="count", dtype=Int64), Field(name="city", dtype=String)],
        source=source,
    )
    config = RepoConfig(
        project="bench",
        registry=str(home / "registry.db"),
        provider="local",
        entity_key_serialization_version=3,
        **settings,
    )
    store = FeatureStore(config=config)
    with contextlib.redirect_stdout(sys.stderr):
        store.apply([user, view])
        began, cpu_began = time.perf_counter(), time.process_time()
        store.materialize(NOW - DAY, NOW + DAY)
        took = time.perf_counter() - began, time.process_time() - cpu_began
    last = table.slice(rows - 1).to_pylist()[0]
    wanted = ["rows:count", "rows:city"]
    found = store.get_online_features(wanted, [{"user": last["user"]}]).to_dict()
    assert (found["count"], found["city"]) == ([last["count"]], [last["city"]])
    print(json.dumps(took))


def made(rows: int) -> pa.Table:
    """Users in no order, with seven features each."""
    chance = np.random.default_rng(1)
    return pa.table(
        {
            "user": chance.permutation(rows),
            "at": pa.array([NOW] * rows, pa.timestamp("us", "UTC")),
            **{name: chance.random(rows) for name in FLOATS},
            "count": chance.integers(0, 1000, rows),
            "city": [f"city-{number % 1000}" for number in range(rows)],
        }
    )


def sources(way: str, table: pa.Table, home: Path) -> tuple[Any, dict[str, Any]]:
    """The source of the view, and the stores and the engine of the configuration."""
    if way == "sqlite":
        path = str(home / "source.parquet")
        pq.write_table(table, path)
        online = {"type": "sqlite", "path": str(home / "online.db")}
        return FileSource(path=path, timestamp_field="at"), {"online_store": online}
    from kvstore import bulk
    from kvstore.feast import TableSource
    from kvstore.feast.handles import opened

    path = str(home / "features.db")
    typed = opened(path, None).table("source", table.schema, "user", event_time="at")
    bulk.import_table(typed, table)
    settings = {
        "online_store": {"type": "kvstore.feast.OnlineStore", "path": path},
        "offline_store": {"type": "kvstore.feast.OfflineStore", "path": path},
    }
    if way != "commits":
        settings["batch_engine"] = {"type": "kvstore.feast.ComputeEngine"}
    return TableSource(table="source", timestamp_field="at"), settings


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
