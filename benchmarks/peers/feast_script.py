"""Materialise a Parquet file into Feast's sqlite online store: `feast_script.py ROWS HOME`.

It runs in an environment of its own that has Feast, and imports nothing of this project. Prints the
seconds and the processor seconds of the materialisation as JSON.
"""

import datetime as dt
import json
import sys
import time
from pathlib import Path

import pandas as pd
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
from feast.types import Bytes, String

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
DAY = dt.timedelta(days=1)


def main(rows: str, home: Path) -> None:
    """Prepare a feature store of the rows, and time its materialisation."""
    home.mkdir()
    source = home / "source.parquet"
    frame = pd.read_parquet(rows)
    frame["key"] = frame["key"].str.decode("ascii")
    frame.assign(at=NOW).to_parquet(source)
    entity = Entity(name="key", join_keys=["key"], value_type=ValueType.STRING)
    view = FeatureView(
        name="rows",
        entities=[entity],
        ttl=10 * DAY,
        schema=[Field(name="key", dtype=String), Field(name="value", dtype=Bytes)],
        source=FileSource(path=str(source), timestamp_field="at"),
    )
    config = RepoConfig(
        project="bench",
        registry=str(home / "registry.db"),
        provider="local",
        online_store={"type": "sqlite", "path": str(home / "online.db")},
        entity_key_serialization_version=3,
    )
    store = FeatureStore(config=config)
    store.apply([entity, view])
    began, cpu_began = time.perf_counter(), time.process_time()
    store.materialize(NOW - DAY, NOW + DAY)
    took = time.perf_counter() - began, time.process_time() - cpu_began
    last = frame.iloc[-1]
    found = store.get_online_features(["rows:value"], [{"key": last["key"]}]).to_dict()
    assert found["value"] == [last["value"]]
    print(json.dumps(took))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
