"""Feast over one store: both halves agree, and Feast's own universal suites pass.

The suites of Feast lie in its repository alone: `FEAST_CHECKOUT` names a checkout of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import xml.etree.ElementTree as Xml
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from feast import Entity, FeatureStore, FeatureView, Field, ValueType
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import RepeatedValue, Value
from feast.types import (
    Array,
    Bool,
    Bytes,
    Float32,
    Float64,
    Int32,
    Int64,
    String,
    Struct,
    UnixTimestamp,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import backup, bulk, feast
from kvstore.errors import UsageError
from kvstore.feast.handles import close_all, opened
from kvstore.feast.online import HEAD, ViewKeys

YAML = """
project: p
provider: local
registry: registry.db
online_store:
  type: kvstore.feast.OnlineStore
  path: features.db
offline_store:
  type: kvstore.feast.OfflineStore
  path: features.db
entity_key_serialization_version: 3
"""
SCHEMA = pa.schema(
    [
        ("driver_id", pa.int64()),
        ("event_timestamp", pa.timestamp("us", "UTC")),
        ("rate", pa.float64()),
        ("trips", pa.int64()),
        ("car", pa.string()),
    ]
)
NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
FEATURES = ["stats:rate", "stats:trips", "stats:car"]
TTL = timedelta(hours=3)


IMPORTING = """
batch_engine:
  type: kvstore.feast.ComputeEngine
  import_rows_min: 1
"""


@pytest.fixture(params=["", IMPORTING], ids=["commits", "imports"])
def repo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    (tmp_path / "feature_store.yaml").write_text(YAML + request.param)
    yield tmp_path
    close_all()


@pytest.fixture
def importing(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "feature_store.yaml").write_text(YAML + IMPORTING)
    yield tmp_path
    close_all()


def features_of(repo: Path, *, ttl: timedelta = TTL) -> tuple[FeatureStore, Any]:
    """A feature store with the view `stats` over the table `stats`."""
    store = opened(str(repo / "features.db"), None)
    table = store.table("stats", SCHEMA, "driver_id", event_time="event_timestamp")
    features = FeatureStore(str(repo))
    driver = Entity(name="driver", join_keys=["driver_id"], value_type=ValueType.INT64)
    schema = [Field(name="rate", dtype=Float64), Field(name="trips", dtype=Int64)]
    view = FeatureView(
        name="stats",
        entities=[driver],
        ttl=ttl,
        schema=[*schema, Field(name="car", dtype=String)],
        source=feast.TableSource(table="stats", timestamp_field="event_timestamp"),
    )
    features.apply([driver, view])
    return features, table


def row(driver: int, at: datetime, trips: int | None) -> dict[str, Any]:
    return {"driver_id": driver, "event_timestamp": at, "rate": 0.5, "trips": trips, "car": "é\0"}


def served(features: FeatureStore, drivers: list[int]) -> list[Any]:
    rows = [{"driver_id": driver} for driver in drivers]
    return features.get_online_features(FEATURES, rows).to_dict()["trips"]


def joined(features: FeatureStore, asked: list[tuple[Any, Any]], **how: Any) -> list[Any]:
    labels = pa.table(
        {
            "driver_id": pa.array([driver for driver, _ in asked], pa.int64()),
            "event_timestamp": pa.array([at for _, at in asked], pa.timestamp("us", "UTC")),
        }
    )
    job = features.get_historical_features(entity_df=labels, features=FEATURES, **how)
    return job.to_arrow()["trips"].to_pylist()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_what_was_served_is_what_the_join_gives(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Late rows, restated rows, rows beyond their TTL, several commits: at each moment, and for the
    past too."""
    chance, repo = random.Random(seed), tmp_path_factory.mktemp("repo")
    (repo / "feature_store.yaml").write_text(YAML)
    features, table = features_of(repo, ttl=chance.choice([TTL, timedelta(0)]))
    moments = []
    now = datetime.now(timezone.utc).replace(microsecond=0)
    for number in range(chance.randint(1, 6)):
        rows = [
            row(chance.randint(0, 3), now - timedelta(minutes=chance.randint(0, 300)), number)
            for _ in range(chance.randint(1, 5))
        ]
        rows = list({(each["driver_id"], each["event_timestamp"]): each for each in rows}.values())
        chance.shuffle(rows)
        table.put_batch(rows)
        frame = pd.DataFrame(rows)
        frame["event_timestamp"] = pd.to_datetime(frame["event_timestamp"], utc=True)
        features.write_to_online_store("stats", frame)
        store = opened(str(repo / "features.db"), None)
        at = datetime.now(timezone.utc)
        answer = served(features, [0, 1, 2, 3])
        assert answer == joined(features, [(driver, at) for driver in range(4)])
        moments.append((store.now(), at, answer))
    for known, at, answer in moments:
        online, offline = features.config.online_store, features.config.offline_store
        online.as_of = offline.as_of = str(known)
        assert served(features, [0, 1, 2, 3]) == answer
        assert joined(features, [(driver, at) for driver in range(4)]) == answer
        online.as_of = offline.as_of = None
    close_all()


def test_a_materialisation_is_one_commit_and_is_undone_by_one(repo: Path) -> None:
    features, table = features_of(repo)
    now = datetime.now(timezone.utc)
    table.put_batch([row(driver, now - timedelta(minutes=5), driver) for driver in range(9)])
    store = opened(str(repo / "features.db"), None)
    before = store.now()
    features.materialize(now - timedelta(hours=1), now)
    assert served(features, [1, 8, 77]) == [1, 8, None]
    times = {
        version.timestamp for key in store.keys(prefix=b"feast/r") for version in store.history(key)
    }
    assert len(times) == 1
    features.config.online_store.as_of = str(before)
    with pytest.raises(UsageError, match="only reads"):
        features.materialize(now - timedelta(hours=1), now)
    assert served(features, [1]) == [None]


def test_rows_expire_exactly_and_older_rows_do_not_come_back(repo: Path) -> None:
    features, _ = features_of(repo)
    now = datetime.now(timezone.utc)

    def write(at: datetime, trips: int) -> None:
        frame = pd.DataFrame([row(1, at, trips)])
        features.write_to_online_store("stats", frame)

    write(now - timedelta(hours=1), 1)
    write(now - timedelta(hours=2), 2)
    assert served(features, [1]) == [1]
    write(now - TTL - timedelta(hours=1), 3)
    assert served(features, [1]) == [1]
    write(now - timedelta(minutes=1), 4)
    assert served(features, [1]) == [4]
    (key,) = opened(str(repo / "features.db"), None).keys(prefix=b"feast/r")
    due = opened(str(repo / "features.db"), None).ttl(key)
    assert timedelta(hours=2, minutes=58) < due < timedelta(hours=3)


def test_entity_rows_keep_their_order_whatever_they_are(repo: Path) -> None:
    features, table = features_of(repo)
    now = datetime.now(timezone.utc)
    table.put_batch([row(1, now - timedelta(hours=hours), hours) for hours in range(1, 4)])
    asked = [(1, now), (None, now), (2, now), (1, None), (1, now - timedelta(hours=2)), (1, now)]
    assert joined(features, asked) == [1, None, None, None, 2, 1]
    assert joined(features, []) == []
    # Feast itself makes the times of a pandas frame UTC.
    naive = pa.table({"driver_id": [1], "event_timestamp": [now.replace(tzinfo=None)]})
    with pytest.raises(UsageError, match="no zone"):
        features.get_historical_features(entity_df=naive, features=FEATURES)
    features.config.offline_store.naive = "utc"
    job = features.get_historical_features(entity_df=naive, features=FEATURES)
    assert job.to_arrow()["trips"].to_pylist() == [1]
    with pytest.raises(UsageError, match="query of SQL"):
        features.get_historical_features(entity_df="SELECT 1", features=FEATURES)


def test_what_was_written_later_does_not_leak(repo: Path) -> None:
    features, table = features_of(repo)
    now = datetime.now(timezone.utc)
    table.put(row(1, now - timedelta(hours=1), 1))
    told = datetime.now(timezone.utc)
    table.put(row(1, now - timedelta(minutes=30), 2))  # late
    table.put(row(1, now - timedelta(hours=1), 3))  # restated
    assert joined(features, [(1, told)]) == [2]
    assert joined(features, [(1, told)], filter_by_created_timestamp=True) == [1]
    later = datetime.now(timezone.utc) + timedelta(days=1)
    assert joined(features, [(1, told + timedelta(hours=1))]) == [2]
    assert joined(features, [(1, later)], filter_by_created_timestamp=True) == [None]  # TTL


def test_a_server_and_a_collection_answer_alike(repo: Path) -> None:
    features, table = features_of(repo)
    now = datetime.now(timezone.utc)
    table.put_batch([row(driver, now - timedelta(hours=1), driver) for driver in range(5)])
    features.materialize(now - timedelta(hours=2), now)
    asked = [(driver, now) for driver in range(6)]
    expected = joined(features, asked)
    store = opened(str(repo / "features.db"), None)
    backup.Collection(repo / "backups").backup(store)
    offline, online = features.config.offline_store, features.config.online_store
    offline.path, offline.collection = "backups", True
    assert joined(features, asked) == expected
    offline.collection = False
    close_all()
    from kvstore.remote.server.running import ListenAddress
    from kvstore.server import app, serving

    with (
        kvstore.open(repo / "features.db") as owner,
        serving(app(owner), ListenAddress("127.0.0.1", 0)) as running,
    ):
        offline.path = online.path = running.url
        assert joined(features, asked) == expected
        assert served(features, [4, 5]) == [4, None]
        close_all()


def test_a_materialisation_that_was_undone_is_made_again(repo: Path) -> None:
    features, table = features_of(repo)
    now = datetime.now(timezone.utc)
    table.put_batch([row(driver, now - timedelta(minutes=5), driver) for driver in range(3)])
    store = opened(str(repo / "features.db"), None)
    before = store.now()
    features.materialize(now - timedelta(hours=1), now)
    done = store.now()
    store.revert_range(b"feast/", b"feast0", to=before)
    assert served(features, [2]) == [None]
    again = FeatureStore(str(repo))
    again.config.online_store.as_of = str(done)
    assert served(again, [2]) == [2]
    features.materialize(now - timedelta(hours=1), now)
    assert served(FeatureStore(str(repo)), [2]) == [2]


def test_rows_close_to_their_end_stop_no_batch(repo: Path) -> None:
    features, table = features_of(repo)
    now = datetime.now(timezone.utc)
    rows = [row(at, now - TTL + timedelta(milliseconds=20 * at), at) for at in range(50)]
    table.put_batch([*rows, row(99, now, 99)])
    features.materialize(now - timedelta(hours=4), now)
    assert served(features, [0, 99]) == [None, 99]


def test_a_saved_data_set_replaces_no_other_table(repo: Path) -> None:
    features, table = features_of(repo)
    table.put(row(1, datetime.now(timezone.utc), 1))
    at = pa.array([datetime.now(timezone.utc)], pa.timestamp("us", "UTC"))
    labels = pa.table({"driver_id": [1], "row": ["x"], "event_timestamp": at})
    job = features.get_historical_features(entity_df=labels, features=FEATURES)
    with pytest.raises(UsageError, match="no saved data set"):
        job.persist(feast.SavedTable("stats"), allow_overwrite=True)
    job.persist(feast.SavedTable("kept"))
    job.persist(feast.SavedTable("kept"), allow_overwrite=True)
    store = opened(str(repo / "features.db"), None)
    assert [each["trips"] for each in store.table("kept").rows()] == [1]
    assert store.table("stats").count() == 1


def test_features_are_arrays_and_structs_in_both_halves(repo: Path) -> None:
    store = opened(str(repo / "features.db"), None)
    fields = {
        "vector": (pa.list_(pa.float32(), 2), Array(Float32), [0.5, 2.0]),
        "names": (pa.list_(pa.string()), Array(String), ["a", "b"]),
        "seen": (pa.list_(pa.timestamp("us", "UTC")), Array(UnixTimestamp), [NOON]),
        "car": (pa.struct([("make", pa.string())]), Struct({"make": String}), {"make": "x"}),
        "cars": (
            pa.list_(pa.struct([("make", pa.string())])),
            Array(Struct({"make": String})),
            [{"make": "x"}, {"make": "y"}],
        ),
    }
    columns = [("driver_id", pa.int64()), ("event_timestamp", pa.timestamp("us", "UTC"))]
    schema = pa.schema([*columns, *((name, kind) for name, (kind, _, _) in fields.items())])
    table = store.table("lists", schema, "driver_id", event_time="event_timestamp")
    now = datetime.now(timezone.utc)
    values = {name: value for name, (_, _, value) in fields.items()}
    table.put({"driver_id": 1, "event_timestamp": now - timedelta(minutes=1), **values})
    table.put({"driver_id": 2, "event_timestamp": now - timedelta(minutes=1), "names": []})
    features = FeatureStore(str(repo))
    driver = Entity(name="driver", join_keys=["driver_id"], value_type=ValueType.INT64)
    view = FeatureView(
        name="lists",
        entities=[driver],
        ttl=TTL,
        schema=[Field(name=name, dtype=dtype) for name, (_, dtype, _) in fields.items()],
        source=feast.TableSource(table="lists", timestamp_field="event_timestamp"),
    )
    features.apply([driver, view])
    names = [f"lists:{name}" for name in fields]
    at = pa.array([now] * 3, pa.timestamp("us", "UTC"))
    labels = pa.table({"driver_id": [1, 2, 3], "event_timestamp": at})
    found = features.get_historical_features(labels, names).to_arrow().select(list(fields))
    nothing = dict.fromkeys(fields)
    assert found.to_pylist() == [values, {**nothing, "names": []}, nothing]
    features.materialize(now - timedelta(hours=1), now)
    online = features.get_online_features(names, [{"driver_id": 1}, {"driver_id": 2}]).to_dict()
    assert {name: online[name][0] for name in fields} == values
    assert online["names"][1] == []


def test_logs_of_many_threads_are_all_there(repo: Path) -> None:
    features, _ = features_of(repo)

    class Config:
        destination = feast.LoggedTable(table="logs")

    def log(number: int) -> None:
        columns = {"number": [number] * 100, **({"more": [1] * 100} if number > 2 else {})}
        logs = pa.table(columns)
        feast.OfflineStore.write_logged_features(features.config, logs, None, Config(), None)

    log(0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, range(1, 3)))
    log(3)
    assert opened(str(repo / "features.db"), None).table("logs").count() == 400


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_sources_have_times_of_any_unit(repo: Path, unit: str) -> None:
    features, _ = features_of(repo)
    now = datetime.now(timezone.utc).replace(microsecond=0)
    store = opened(str(repo / "features.db"), None)
    times, us = pa.timestamp(unit, "UTC"), pa.timestamp("us", "UTC")
    at = pa.array([now - timedelta(seconds=5)] * 2, times)
    created = pa.array([now, None], times)
    rows = pa.table({"number": [1, 2], "driver_id": [1, 1], "at": at, "created": created})
    rows = rows.append_column("value", pa.array([2, 1]))
    store.table("by_number", rows.schema, "number").put_batch(rows)
    keyed = rows.drop_columns(["number", "created"]).slice(0, 1)
    store.table("by_key", keyed.schema, "driver_id", event_time="at").put_batch(keyed)
    views = [
        FeatureView(
            name=name,
            entities=[features.get_entity("driver")],
            ttl=TTL,
            schema=[Field(name="value", dtype=Int64)],
            source=feast.TableSource(
                table=name, timestamp_field="at", created_timestamp_column=column
            ),
        )
        for name, column in (("by_number", "created"), ("by_key", ""))
    ]
    features.apply(views)
    end = now + timedelta(microseconds=7)
    features.materialize(now - timedelta(hours=1, microseconds=3), end, ["by_number", "by_key"])
    for view in ("by_number", "by_key"):
        wanted = [f"{view}:value"]
        assert features.get_online_features(wanted, [{"driver_id": 1}]).to_dict()["value"] == [2]
        for moment, expected in ((now, 2), (now - timedelta(seconds=6), None)):
            ns = pa.array([int(moment.timestamp()) * 10**9 + 1]).cast(pa.timestamp("ns", "UTC"))
            labels = pa.table({"driver_id": [1], "event_timestamp": ns})
            job = features.get_historical_features(entity_df=labels, features=wanted)
            assert job.to_arrow()["value"].to_pylist() == [expected]
    far = [datetime(year, 1, 1, tzinfo=timezone.utc) for year in (1, 2400)]
    labels = pa.table({"driver_id": [1, 1], "event_timestamp": pa.array(far, us)})
    job = features.get_historical_features(
        entity_df=labels, features=["by_key:value"], filter_by_created_timestamp=True
    )
    assert job.to_arrow()["value"].to_pylist() == [None, None]
    labels = pa.table({"driver_id": [1], "value": [1], "event_timestamp": pa.array([now], us)})
    job = features.get_historical_features(entity_df=labels, features=["by_key:value"])
    with pytest.raises(UsageError, match="two columns value"):
        job.to_arrow()


def test_views_that_changed_read_the_rows_from_before(repo: Path) -> None:
    features, _ = features_of(repo)
    now = datetime.now(timezone.utc)
    features.write_to_online_store("stats", pd.DataFrame([row(1, now, 1)]))
    view = features.get_feature_view("stats")
    view.schema.append(Field(name="fresh", dtype=Int64))
    view.features.append(Field(name="fresh", dtype=Int64))
    table = opened(str(repo / "features.db"), None).table("stats")
    table.alter(add={"fresh": pa.int64()})
    features.apply(view)
    got = features.get_online_features([*FEATURES, "stats:fresh"], [{"driver_id": 1}]).to_dict()
    assert (got["trips"], got["fresh"]) == ([1], [None])
    features.apply(objects=[], objects_to_delete=[view], partial=False)
    assert list(opened(str(repo / "features.db"), None).keys(prefix=b"feast/r")) == []


def test_reads_and_writes_of_coroutines(repo: Path) -> None:
    features, _ = features_of(repo)
    now = datetime.now(timezone.utc)

    async def work() -> Any:
        frame = pd.DataFrame([row(1, now, 7)])
        await features.write_to_online_store_async("stats", frame)
        return await features.get_online_features_async(FEATURES, [{"driver_id": 1}])

    assert asyncio.run(work()).to_dict()["trips"] == [7]


# -- Feast's own suites ------------------------------------------------------------------

SUITES = (
    "offline_store/test_universal_historical_retrieval.py",
    "offline_store/test_universal_materialization.py",
    "offline_store/test_universal_types.py",
    "offline_store/test_feature_logging.py",
    "offline_store/test_offline_write.py",
    "offline_store/test_persist.py",
    "offline_store/test_push_features_to_offline_store.py",
    "offline_store/test_non_entity_mode.py",
    "online_store/test_universal_online.py",
    "online_store/test_universal_e2e.py",
    "online_store/test_universal_online_types.py",
    "online_store/test_push_features_to_online_store.py",
    "materialization/test_universal_materialization.py",
)


def test_the_universal_suites_of_feast(tmp_path: Path) -> None:
    checkout = os.environ.get("FEAST_CHECKOUT")
    if checkout is None:
        pytest.skip("FEAST_CHECKOUT names no checkout of feast-dev/feast")
    tests = Path(checkout) / "sdk" / "python"
    root = Path(__file__).parents[2]
    config = tmp_path / "feast_universal.py"
    config.write_text((root / "tests" / "conformance" / "feast_universal.py").read_text())
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "--integration", "-W", "ignore"),
            *("-p", "no:cacheprovider", "--show-capture=no", "--tb=short", f"--junitxml={report}"),
            *("-p", "feast_universal"),
            *(f"tests/integration/{name}" for name in SUITES),
        ],
        cwd=tests,
        env={
            **os.environ,
            "FEAST_IS_LOCAL_TEST": "True",
            "FULL_REPO_CONFIGS_MODULE": "feast_universal",
            "PYTHONPATH": os.pathsep.join([str(root), str(tests), str(tmp_path)]),
        },
        check=False,
        capture_output=True,
        text=True,
    )
    cases = list(Xml.parse(report).iter("testcase"))
    failed = [
        c.get("name") for c in cases if c.find("failure") is not None or c.find("error") is not None
    ]
    assert cases
    assert not failed, done.stdout[-5000:]


# --------------------------------------------------------------------------------------------------
# Materialisation by imports.

US = pa.timestamp("us", "UTC")
TYPED = pa.schema(
    [
        *[("number", pa.int64()), ("who", pa.string()), ("what", pa.int32()), ("at", US)],
        *[("created", US), ("i32", pa.int32()), ("i64", pa.int64()), ("f32", pa.float32())],
        *[("f64", pa.float64()), ("flag", pa.bool_()), ("text", pa.string())],
        *[("data", pa.binary()), ("seen", US), ("vector", pa.list_(pa.float32()))],
        *[("narrow", pa.int64()), ("single", pa.float64())],
    ]
)
FEAST_TYPES = {
    **{"i32": Int32, "i64": Int64, "f32": Float32, "f64": Float64, "flag": Bool, "text": String},
    **{"data": Bytes, "seen": UnixTimestamp, "vector": Array(Float32), "narrow": Int32},
    "single": Float32,
}


def typed_row(chance: random.Random, number: int, now: datetime) -> dict[str, Any]:
    """A row with values at the edges of their types. Times keep half a minute from the ends of
    TTLs, so that both ways see the same rows expire."""

    def of(*values: Any) -> Any:
        return chance.choice([None, *values])

    moment = now - timedelta(minutes=chance.randint(0, 200), seconds=30)
    return {
        "number": number,
        "who": chance.choice(["", "a", "é\0", "x" * 200]),
        "what": chance.choice([-1, 0, 2**31 - 1]),
        "at": moment,
        "created": of(moment + timedelta(minutes=chance.randint(0, 3))),
        "i32": of(0, -1, 127, 128, -(2**31), 2**31 - 1),
        "i64": of(0, -(2**53), 2**53, 300),
        "f32": of(0.0, -0.5, float("nan"), float("inf")),
        "f64": of(0.5, -0.0, 1e300, float("nan")),
        "flag": of(True, False),
        "text": of("", "ü", "y" * 126, "y" * 127, "y" * 128, "z" * 20_000),
        "data": of(b"\0", b"d" * 129),  # empty ones: see the test below
        "seen": of(NOON, NOON - timedelta(days=30_000, microseconds=1)),
        "vector": of([], [0.5, 2.0]),
        "narrow": of(-(2**31), 7),
        "single": of(0.1, 1e300),
    }


def typed_features(repo: Path, ttl: timedelta) -> FeatureStore:
    """A feature store with the view `typed` over the table `typed`."""
    features = FeatureStore(str(repo))
    entities = [
        Entity(name="who", join_keys=["who"], value_type=ValueType.STRING),
        Entity(name="what", join_keys=["what"], value_type=ValueType.INT32),
    ]
    source = feast.TableSource(
        table="typed", timestamp_field="at", created_timestamp_column="created"
    )
    view = FeatureView(
        name="typed",
        entities=entities,
        ttl=ttl,
        schema=[Field(name=name, dtype=dtype) for name, dtype in FEAST_TYPES.items()],
        source=source,
    )
    features.apply([*entities, view])
    return features


def stored_rows(store: kvstore.Store, project: str) -> dict[bytes, tuple[bytes, Any]]:
    """The rows of a project by entity, with the times at which they expire."""
    prefix = f"feast/r{project}\0".encode()
    changes = store.changes(0, prefix=prefix, revisions="latest")
    return {
        change.key.removeprefix(prefix): (change.value, change.expires)
        for change in changes
        if change.op == "put"
    }


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_an_import_leaves_the_bytes_that_commits_leave(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance, home = random.Random(seed), tmp_path_factory.mktemp("home")
    store = opened(str(home / "features.db"), None)
    table = store.table("typed", TYPED, "number")
    ttl = chance.choice([timedelta(0), timedelta(hours=1), timedelta(days=200_000)])
    ways = {}
    for project, engine in (("commits", ""), ("imports", IMPORTING)):
        (home / project).mkdir()
        yaml = YAML.replace("project: p", f"project: {project}").replace(
            "path: features.db",
            f"path: {home}/features.db",  # one handle: a guest reads 50 ms later
        )
        (home / project / "feature_store.yaml").write_text(yaml + engine)
        ways[project] = typed_features(home / project, ttl)
    now, number = datetime.now(timezone.utc).replace(microsecond=0), 0
    for _ in range(chance.randint(1, 3)):
        rows = [typed_row(chance, number + at, now) for at in range(chance.randint(1, 12))]
        number += len(rows)
        # Feast takes any of the rows of one entity, one time and one time of creation.
        rows = list({tuple(each[k] for k in ("who", "what", "at")): each for each in rows}.values())
        table.put_batch(pa.Table.from_pylist(rows, TYPED))
        start = now - timedelta(minutes=chance.randint(50, 250))
        for features in ways.values():
            features.materialize(start, now + timedelta(minutes=1))
    found = stored_rows(store, "imports")
    assert found == stored_rows(store, "commits")
    assert store.imports.all() or not found or ttl == timedelta(hours=1)
    close_all()


def test_an_import_keeps_empty_bytes(importing: Path) -> None:
    """Feast's own engine makes them null where a batch has no other bytes."""
    now = datetime.now(timezone.utc).replace(microsecond=0)
    store = opened(str(importing / "features.db"), None)
    written = typed_row(random.Random(1), 0, now) | {"data": b""}
    table = store.table("typed", TYPED, "number")
    table.put_batch(pa.Table.from_pylist([written], TYPED))
    typed_features(importing, timedelta(0)).materialize(now - timedelta(hours=9), now)
    ((stored, _),) = stored_rows(store, "p").values()
    data = RepeatedValue.FromString(stored[HEAD.size :]).val[list(FEAST_TYPES).index("data")]
    assert data.WhichOneof("val") == "bytes_val"
    assert data.bytes_val == b""


def test_an_import_is_undone_by_one_call(importing: Path) -> None:
    features, table = features_of(importing, ttl=timedelta(0))
    store = opened(str(importing / "features.db"), None)
    now = datetime.now(timezone.utc)
    features.write_to_online_store("stats", pd.DataFrame([row(1, now - timedelta(hours=1), 1)]))
    features.write_to_online_store("stats", pd.DataFrame([row(2, now, 2)]))
    table.put_batch([row(driver, now - timedelta(minutes=5), 7) for driver in range(4)])
    features.materialize(now - timedelta(hours=2), now)
    (made,) = store.imports.all()
    assert made.rows == 3  # the one of driver 2 is older than its pushed row
    assert "stats" in made.origin
    assert served(features, [0, 1, 2, 3]) == [7, 7, 2, 7]
    features.write_to_online_store("stats", pd.DataFrame([row(3, now, 3)]))
    store.revert_import(made.import_id)
    assert served(FeatureStore(str(importing)), [0, 1, 2, 3]) == [None, 1, 2, 3]


def test_few_rows_are_written_by_a_commit(importing: Path) -> None:
    fewest = IMPORTING.replace("rows_min: 1", "rows_min: 5")
    (importing / "feature_store.yaml").write_text(YAML + fewest)
    features, table = features_of(importing)
    now = datetime.now(timezone.utc)
    table.put_batch([row(driver, now - timedelta(minutes=5), driver) for driver in range(4)])
    features.materialize(now - timedelta(hours=1), now)
    assert served(features, [3]) == [3]
    assert opened(str(importing / "features.db"), None).imports.all() == []


def test_pushes_beside_imports_never_lose(importing: Path) -> None:
    """Threads push rows while another one materialises: no row covers a newer one, not even for a
    while, and each newest push is served. Feast's own registry takes no threads, so the pushes go
    to the online store."""
    features, table = features_of(importing)
    view = features.get_feature_view("stats")
    now = datetime.now(timezone.utc)
    store = opened(str(importing / "features.db"), None)
    last: dict[int, int] = {}
    ended = threading.Event()

    def push(first: int) -> None:
        online, count = feast.OnlineStore(), 0
        while not ended.is_set():
            driver = first + count % 100
            values = {"rate": Value(), "trips": Value(int64_val=count), "car": Value()}
            at = now + timedelta(milliseconds=count)
            data = [(entity_of(driver), values, at, None)]
            online.online_write_batch(features.config, view, data, None)
            last[driver] = count
            count += 1

    with ThreadPoolExecutor(2) as pool:
        pushes = [pool.submit(push, first) for first in (0, 100)]
        try:
            for number in range(6):
                at = now - timedelta(minutes=60 - number)
                table.put_batch([row(driver, at, -1) for driver in range(300)])
                features.materialize(now - timedelta(hours=2), now)
        finally:
            ended.set()
        for each in pushes:
            each.result()
    assert served(features, list(range(300))) == [last.get(driver, -1) for driver in range(300)]
    place = ViewKeys.of(features.config, view)
    for driver in range(300):
        versions = store.history(place.key_of(entity_of(driver)))
        times = [HEAD.unpack_from(version.value)[0] for version in versions]
        assert times == sorted(times, reverse=True)


def entity_of(driver: int) -> EntityKey:
    return EntityKey(join_keys=["driver_id"], entity_values=[Value(int64_val=driver)])


def test_a_push_between_the_look_and_the_import_calls_it_off(
    importing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, table = features_of(importing, ttl=timedelta(0))
    store = opened(str(importing / "features.db"), None)
    now = datetime.now(timezone.utc)
    table.put_batch([row(driver, now - timedelta(hours=1), -1) for driver in range(3)])
    ingest, pushed = bulk.ingest, []

    def push_first(*args: Any, **how: Any) -> Any:
        pushed.append(row(1, now + timedelta(seconds=len(pushed)), len(pushed)))
        features.write_to_online_store("stats", pd.DataFrame(pushed[-1:]))
        return ingest(*args, **how)

    monkeypatch.setattr(bulk, "ingest", push_first)
    features.materialize(now - timedelta(hours=2), now)
    assert len(pushed) == 2  # the second import leaves driver 1 out
    assert [made.rows for made in store.imports.all()] == [2]
    assert served(features, [0, 1, 2]) == [-1, 1, -1]


def test_a_source_that_gives_an_entity_twice_covers_no_newer_row(
    importing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, table = features_of(importing, ttl=timedelta(0))
    now = datetime.now(timezone.utc)
    features.write_to_online_store("stats", pd.DataFrame([row(1, now, 5)]))
    table.put_batch([row(1, now - timedelta(hours=1), -1)])
    pull = feast.OfflineStore.pull_latest_from_table_or_query

    def pull_twice(**question: Any) -> Any:
        found = pull(**question).to_arrow()
        return SimpleNamespace(to_arrow=lambda: pa.concat_tables([found, found]))

    patched = staticmethod(pull_twice)
    monkeypatch.setattr(feast.OfflineStore, "pull_latest_from_table_or_query", patched)
    features.materialize(now - timedelta(hours=2), now)
    assert served(features, [1]) == [5]


def test_a_guest_of_the_store_imports(importing: Path) -> None:
    """The store is owned by another process, as beside a feature server."""
    _, table = features_of(importing, ttl=timedelta(0))
    now = datetime.now(timezone.utc)
    table.put_batch([row(driver, now - timedelta(hours=1), driver) for driver in range(50)])
    store = opened(str(importing / "features.db"), None)
    code = (
        "import sys, datetime as dt\n"
        "from feast import FeatureStore\n"
        "features = FeatureStore(sys.argv[1])\n"
        "now = dt.datetime.now(dt.timezone.utc)\n"
        "features.materialize(now - dt.timedelta(hours=2), now)\n"
        "from kvstore.feast.handles import opened\n"
        "assert opened(sys.argv[1] + '/features.db', None).role == 'guest'\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(importing)]
    subprocess.run(command, check=True, capture_output=True)
    assert [made.rows for made in store.imports.all()] == [50]
    assert served(FeatureStore(str(importing)), [49, 50]) == [49, None]
