"""One way to join for each library: `python -m benchmarks.asof.runners NAME PLACE ROUNDS`.

A runner is a process. It prints a line of JSON for each question and density: the least seconds of
some rounds, and the share of labels that got the exact answer. Labels are Arrow data or a frame of
the library. Peers read the history from Parquet in each join; the store is open, and was loaded
before, which is timed by itself.

The question `known` is asked with one time on both axes. So peers may answer it by an as-of join
over the time of knowledge, after they have dropped the events that were older than a known one when
they became known. No peer has a faster exact way that we know of. Feast
has a flag for this question.

Feast needs an environment of its own, with `feast[duckdb]`. So this module imports at its head only
what is there too.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.asof.data import QUESTIONS, US, answers_at, labels_at

_SECONDS_MAX: Final = 4.0
"""A join that takes longer is not repeated."""


class Runner:
    """A library that gives labels the values of their times."""

    name = ""
    package = ""
    """Must be there."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.history = place / "history.parquet"

    def ready(self) -> None:
        """Load the history, where the library has a store for it."""

    def asked(self, labels: pa.Table) -> Any:
        """The labels as the library has them in memory."""
        return labels

    def join(self, labels: Any, question: str) -> Any:
        """The labels with their values, in memory and in any order."""
        raise NotImplementedError

    def table(self, found: Any) -> pa.Table:
        """The same as Arrow data with `row` and `value`."""
        return pa.table(found)

    def close(self) -> None:
        """Let go what `ready` has opened."""


class Kvstore(Runner):
    """A typed table with an event time. Each batch of events is a commit at the time at which it
    became known."""

    name, package = "kvstore", "kvstore"

    def ready(self) -> None:
        import kvstore

        clock = kvstore.ManualClock()
        self._store = kvstore.open(self.place / "store", clock=clock)
        schema = pa.schema([("entity", pa.int64()), ("at", US), ("value", pa.int64())])
        self._table = self._store.table("events", schema, "entity", event_time="at")
        history = pq.read_table(self.history)
        known = history["known"].combine_chunks()
        batches = pc.run_end_encode(known)
        ends = batches.run_ends.to_pylist()
        times = batches.values.cast(pa.int64()).to_pylist()
        for start, end, at in zip([0, *ends], ends, times, strict=False):
            clock.set(at * 1000)
            self._table.put_batch(history.slice(start, end - start).select(schema.names))
        clock.set(clock.wall_ns() + 10**9)
        self._store.sync()

    def join(self, labels: Any, question: str) -> Any:
        when = {"known_at": "ts"} if question == "known" else {}
        return self._table.join(labels, on="entity", at="ts", columns=["value"], **when).read_all()

    def close(self) -> None:
        self._store.close()


class KvstoreKeys(Runner):
    """Plain keys, seeded with the times of the past: a store for each question, as the other one
    is not asked of it. The store of `known` has what a service has put: no event that was older
    than a known one."""

    name, package = "kvstore-keys", "kvstore"

    def ready(self) -> None:
        import kvstore
        from kvstore import bulk

        events = pq.read_table(self.history)
        entity = _text(events["entity"])
        self._stores = {}
        for question, axis in (("event", "at"), ("known", "known")):
            rows = pa.table({"id": entity, "at": events[axis], "value": _text(events["value"])})
            if question == "known":
                rows = rows.take(_news(events))
            place = self.place / f"keys-{question}"
            bulk.seed(place, rows, key="id", value="value", at="at", duplicates="last")
            self._stores[question] = kvstore.open(place)

    def asked(self, labels: pa.Table) -> Any:
        return labels.set_column(1, "id", _text(labels["entity"]))

    def join(self, labels: Any, question: str) -> Any:
        found = self._stores[question].join(labels, on_future="newest").read_all()
        value = found["value"].cast(pa.string()).cast(pa.int64())
        return found.set_column(found.schema.get_field_index("value"), "value", value)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


def _text(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    return numbers.cast(pa.string())


def _news(events: pa.Table) -> pa.Array:
    """The places of the events that were the newest known ones of their entity when they became
    known. Of those of one batch the newest comes last."""
    at, known = (events[name].cast(pa.int64()).to_numpy() for name in ("at", "known"))
    entity = events["entity"].to_numpy()
    order = np.lexsort((at, known, entity))
    # Each entity's times lie above those of the one before: one running maximum does for all.
    times = (entity * (at.max() - at.min() + 1) + at - at.min())[order]
    return pa.array(order[np.maximum.accumulate(times) == times])


class Duckdb(Runner):
    """ASOF JOIN. It has no order among events of one time."""

    name, package = "duckdb", "duckdb"
    _KNOWN: Final = """(
        select entity, known as "at", value from (
            select *, max(event) over (partition by entity order by known) as newest from (
                select entity, known, max("at") as event, arg_max(value, "at") as value
                from read_parquet('{history}') group by entity, known))
        where event >= newest)"""

    def join(self, labels: Any, question: str) -> Any:
        duckdb = importlib.import_module("duckdb")
        source = self._KNOWN if question == "known" else "read_parquet('{history}')"
        with duckdb.connect() as connection:
            connection.register("labels", labels)
            return connection.sql(
                f"""select l.row, h.value from labels l
                asof left join {source.format(history=self.history)} h
                on l.entity = h.entity and l.ts >= h."at" """
            ).to_arrow_table()


class Polars(Runner):
    """`join_asof`. Of events of one time it takes the last one."""

    name, package = "polars", "polars"

    def asked(self, labels: pa.Table) -> Any:
        return importlib.import_module("polars").from_arrow(labels)

    def join(self, labels: Any, question: str) -> Any:
        pl = importlib.import_module("polars")
        events = pl.read_parquet(self.history)
        if question == "known":
            events = events.sort("known", "at", maintain_order=True)
            events = events.filter(pl.col("at") >= pl.col("at").cum_max().over("entity"))
            events = events.unique(["entity", "known"], keep="last", maintain_order=True)
            events = events.with_columns(at="known")
        else:
            events = events.sort("at", maintain_order=True)
        return labels.sort("ts").join_asof(
            events, left_on="ts", right_on="at", by="entity", check_sortedness=False
        )

    def table(self, found: Any) -> pa.Table:
        return found.select("row", "value").to_arrow()


class Pandas(Runner):
    """`merge_asof`. Of events of one time it takes the last one."""

    name, package = "pandas", "pandas"

    def asked(self, labels: pa.Table) -> Any:
        return labels.to_pandas()

    def join(self, labels: Any, question: str) -> Any:
        pd = importlib.import_module("pandas")
        events = pd.read_parquet(self.history)
        if question == "known":
            events = events.sort_values(["known", "at"], kind="stable")
            events = events[events["at"] >= events.groupby("entity")["at"].cummax()]
            events = events.drop_duplicates(["entity", "known"], keep="last").drop(columns="at")
            events = events.rename(columns={"known": "at"})
        else:
            events = events.sort_values("at", kind="stable")
        asked = labels.sort_values("ts")
        return pd.merge_asof(asked, events, left_on="ts", right_on="at", by="entity")

    def table(self, found: Any) -> pa.Table:
        value = pa.array(found["value"], pa.float64(), from_pandas=True)
        return pa.table({"row": found["row"].to_numpy(), "value": value.cast(pa.int64())})


class Spark(Runner):
    """Spark's own ASOF JOIN, from Parquet into memory. It has no order among events of one time."""

    name, package = "spark", "pyspark"

    def ready(self) -> None:
        from kvstore.spark import session

        self._session = session("asof", **{"spark.sql.join.asofJoin.enabled": "true"})
        first = pq.read_table(self.history, columns=["entity", "at"]).slice(0, 1)
        first = first.rename_columns(["entity", "ts"]).append_column("row", pa.array([0]))
        for question in QUESTIONS:  # the JVM becomes warm
            self.join(self.asked(first), question)

    def asked(self, labels: pa.Table) -> Any:
        target = self.place / "spark" / f"{labels.num_rows}.parquet"
        target.parent.mkdir(exist_ok=True)
        pq.write_table(labels, target)
        return self._session.read.parquet(str(target))

    def join(self, labels: Any, question: str) -> Any:
        history = self._session.read.parquet(str(self.history))
        if question == "known":
            history = self._session.sql(
                """SELECT entity, known AS at, value FROM (
                    SELECT *, max(event) OVER (PARTITION BY entity ORDER BY known) AS newest FROM (
                        SELECT entity, known, max(at) AS event, max_by(value, at) AS value
                        FROM {history} GROUP BY entity, known))
                WHERE event >= newest""",
                history=history,
            )
        return self._session.sql(
            """SELECT l.row, h.value FROM {labels} l LEFT ASOF JOIN {history} h
            MATCH_CONDITION (l.ts >= h.at) ON l.entity = h.entity""",
            labels=labels,
            history=history,
        ).toArrow()

    def close(self) -> None:
        self._session.stop()


class Feast(Runner):
    """An offline store of Feast over the file."""

    package, kind = "feast", ""

    def ready(self) -> None:
        feast = importlib.import_module("feast")
        types = importlib.import_module("feast.types")
        home = self.place / self.name
        home.mkdir(exist_ok=True)
        source = feast.FileSource(
            path=str(self.history), timestamp_field="at", created_timestamp_column="known"
        )
        entity = feast.Entity(name="entity", join_keys=["entity"], value_type=feast.ValueType.INT64)
        view = feast.FeatureView(
            name="events",
            entities=[entity],
            ttl=dt.timedelta(0),
            schema=[
                feast.Field(name="entity", dtype=types.Int64),
                feast.Field(name="value", dtype=types.Int64),
            ],
            source=source,
        )
        config = feast.RepoConfig(
            project="asof",
            registry=str(home / "registry.db"),
            provider="local",
            offline_store={"type": self.kind},
            online_store={"type": "sqlite", "path": str(home / "online.db")},
            entity_key_serialization_version=3,
        )
        self._features = feast.FeatureStore(config=config)
        self._features.apply([entity, view])

    def asked(self, labels: pa.Table) -> Any:
        return labels.to_pandas().rename(columns={"ts": "event_timestamp"})

    def join(self, labels: Any, question: str) -> Any:
        how = {"filter_by_created_timestamp": True} if question == "known" else {}
        job = self._features.get_historical_features(
            entity_df=labels, features=["events:value"], **how
        )
        return job.to_arrow()

    def table(self, found: Any) -> pa.Table:
        value = found["value"]
        if pa.types.is_floating(value.type):  # a frame of pandas was on the way
            value = pa.chunked_array([pa.array(value.to_pandas(), from_pandas=True)])
        return pa.table({"row": found["row"], "value": value.cast(pa.int64())})


class FeastFile(Feast):
    """Feast's file store, by Dask."""

    name, kind = "feast-file", "file"


class FeastDuckdb(Feast):
    """Feast's DuckDB store."""

    name, kind = "feast-duckdb", "duckdb"


RUNNERS: Final[Sequence[type[Runner]]] = (
    Kvstore, KvstoreKeys, Duckdb, Polars, Pandas, Spark, FeastFile, FeastDuckdb,
)  # fmt: skip


def measured(
    kind: type[Runner], place: Path, densities: Sequence[float], rounds: int
) -> list[dict[str, Any]]:
    """A fact for each question and density, after one for `ready`. A question that the library
    cannot answer has a `problem`."""
    runner = kind(place)
    facts: list[dict[str, Any]] = []
    began = time.perf_counter()
    runner.ready()
    facts.append({"question": "ready", "seconds": time.perf_counter() - began})
    try:
        for density in densities:
            asked = runner.asked(pq.read_table(labels_at(place, density)))
            for question in QUESTIONS:
                fact: dict[str, Any] = {"question": question, "density": density}
                try:
                    seconds, found = _least(lambda: runner.join(asked, question), rounds)  # noqa: B023
                    exact = pq.read_table(answers_at(place, question, density))["value"]
                    fact |= {"seconds": seconds, "right": right(runner.table(found), exact)}
                except Exception as error:  # noqa: BLE001  # of any library
                    fact["problem"] = f"{type(error).__name__}: {error}"[:300]
                facts.append(fact)
    finally:
        runner.close()
    return facts


def _least(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The least seconds of some rounds, and the answer of the last one."""
    least = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        found = work()
        least = min(least, time.perf_counter() - began)
        if least > _SECONDS_MAX:
            break
    return least, found


def right(found: pa.Table, exact: pa.ChunkedArray) -> float:
    """The share of labels that got the exact answer. One without a row did not."""
    values, exact = found["value"].combine_chunks(), exact.combine_chunks()
    wanted = exact.take(found["row"].combine_chunks())
    is_same = pc.fill_null(pc.equal(values, wanted), False)
    is_same = pc.or_(is_same, pc.and_(values.is_null(), wanted.is_null()))
    same = len(pc.unique(found["row"].filter(is_same)))
    return same / len(exact)


def main(name: str, place: str, rounds: str, *densities: str) -> None:
    """Measure one runner and print its facts."""
    [kind] = [each for each in RUNNERS if each.name == name]
    for fact in measured(kind, Path(place), [*map(float, densities)], int(rounds)):
        print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
