"""Point-in-time joins: labels against the same history in a store, a collection, and Parquet.

    whole     keys x 100 versions, two for each row of the run, at times in no order
    labels    a share of as many labels as there are versions; keys and times in no order
    peers     read a Parquet file of the history for each join: loading is a part of their work

All subjects of a run share the histories, and the first one makes them. Each subject is a process,
so that the memory of a join is a fact about it. The answers to some labels are compared row by row
before anything is timed.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import kvstore
from benchmarks.data import Data
from benchmarks.subject import Subject, Work
from kvstore import backup, bulk

VERSIONS_PER_KEY: Final = 100
VERSIONS_PER_ROW: Final = 2
COMPARED: Final = 50_000
"""Labels whose answers are compared."""

_SEED: Final = 20_261
_FIRST_NS: Final = 1_700_000_000_000_000_000
_SPAN_US: Final = 30_000_000_000_000
_NS: Final = pa.timestamp("ns", "UTC")
_PIECE: Final = 1 << 20


class Joins(Subject):
    """A subject that gives labels the values of their times."""

    durability = "none"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self.versions = data.rows * VERSIONS_PER_ROW
        self.place = directory.parent / "histories"

    def rest(self) -> None:
        """Give memory back: five subjects join 20 million labels with as many versions in turn."""
        pa.default_memory_pool().release_unused()
        with suppress(AttributeError):  # a C library of its own kind
            ctypes.CDLL(None).malloc_trim(0)

    def histories(self) -> Work:
        """Make the histories, unless another subject did."""

        def work() -> int:
            if not self.place.exists():
                made = self.fresh("made")
                made.mkdir()
                whole = _events(self.versions)
                _write(made / "whole", whole)
                os.rename(made, self.place)
            return self.versions

        return work

    def agree(self) -> Work:
        """Compare the answers with the answers of the first subject."""

        def work() -> int:
            labels = labels_of(COMPARED, self.versions, 0)
            found = self.answers(self.place / "whole", labels)
            expected = self.place / "answers.parquet"
            if not expected.exists():
                pq.write_table(found, expected)
            assert found.equals(pq.read_table(expected)), "an answer differs"
            return COMPARED

        return work

    def join(self, share: float, step: int) -> Work:
        """Give a share of as many labels as there are versions their values."""
        labels = labels_of(max(int(self.versions * share), 1), self.versions, step)
        return lambda: len(self.joined(self.place / "whole", labels))

    def joined(self, history: Path, labels: pa.Table) -> Any:
        """The labels with their values, in the memory of the subject's library."""
        raise NotImplementedError

    def answers(self, history: Path, labels: pa.Table) -> pa.Table:
        """The same as the columns `row`, `value` and `at`, in the order of the labels."""
        found = pa.table(self.joined(history, labels))
        columns = [found["row"], found["value"].cast(pa.string()), found["at"].cast(_NS)]
        return pa.table(columns, ["row", "value", "at"]).sort_by("row").combine_chunks()


class JoinStore(Joins):
    """The store. It is open and its cache of blocks is warm, as a service has it."""

    name = "kvstore"

    def joined(self, history: Path, labels: pa.Table) -> pa.Table:
        return _store(history).join(labels, columns=("value", "at")).read_all()

    def close(self) -> None:
        _store(self.place / "whole").close()


class JoinCollection(Joins):
    """A collection of one backup."""

    name = "kvstore, collection"

    def joined(self, history: Path, labels: pa.Table) -> pa.Table:
        collection = backup.Collection(history / "collection")
        return collection.join(labels, columns=("value", "at")).read_all()


class JoinDuckdb(Joins):
    """DuckDB's ASOF JOIN over Parquet."""

    name = "duckdb"

    def joined(self, history: Path, labels: pa.Table) -> pa.Table:
        import duckdb

        with duckdb.connect() as connection:
            connection.register("labels", labels)
            return connection.execute(
                f"""select l.*, h.value, h.at from labels l asof left join
                read_parquet('{history / "history.parquet"}') h on l.id = h.id and l.ts >= h.at"""
            ).to_arrow_table()


class JoinPolars(Joins):
    """Polars' join_asof over Parquet."""

    name = "polars"

    def joined(self, history: Path, labels: pa.Table) -> Any:
        import polars

        events: Any = polars.read_parquet(history / "history.parquet").sort("at")
        frame: Any = polars.from_arrow(labels)
        return frame.sort("ts").join_asof(
            events, left_on="ts", right_on="at", by="id", coalesce=False, check_sortedness=False
        )


class JoinPandas(Joins):
    """The merge_asof of pandas over Parquet."""

    name = "pandas"

    def joined(self, history: Path, labels: pa.Table) -> Any:
        return _as_of(pq.read_table(history / "history.parquet"), labels)

    def answers(self, history: Path, labels: pa.Table) -> pa.Table:
        found = pa.Table.from_pandas(self.joined(history, labels), preserve_index=False)
        columns = [found["row"], found["value"].cast(pa.string()), found["at"].cast(_NS)]
        return pa.table(columns, ["row", "value", "at"]).sort_by("row").combine_chunks()


@cache
def _store(history: Path) -> kvstore.Store:
    return kvstore.open(history / "store")


def _as_of(events: pa.Table, labels: pa.Table) -> Any:
    import pandas

    frame = events.to_pandas().sort_values("at", kind="stable")
    asked = labels.to_pandas().sort_values("ts")
    return pandas.merge_asof(asked, frame, left_on="ts", right_on="at", by="id").sort_values("row")


def _keys(versions: int) -> int:
    return max(versions // VERSIONS_PER_KEY, 1)


def _ids(numbers: Any) -> pa.Array:
    return pc.binary_join_element_wise(
        pa.scalar("entity/"), pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), 9, "0"), ""
    )


def _events(versions: int) -> pa.Table:
    """Events in the order of their times, each at a time of its own."""
    rng = np.random.default_rng(_SEED)
    micros = np.cumsum(rng.integers(1, 2 * _SPAN_US // versions, versions))
    values = rng.integers(10**15, 10**16, versions)
    return pa.table(
        {
            "id": _ids(rng.integers(0, _keys(versions), versions)),
            "at": pa.array(_FIRST_NS + micros * 1000).cast(_NS),
            "value": pc.cast(pa.array(values), pa.string()),
        }
    )


def _write(place: Path, events: pa.Table) -> None:
    """Write the history as Parquet for peers, and as a store and a collection."""
    place.mkdir()
    pq.write_table(events, place / "history.parquet", compression="zstd")
    batches = events.to_batches(max_chunksize=_PIECE)
    bulk.seed(place / "store", batches, key="id", value="value", at="at", duplicates="last")
    with kvstore.open(place / "store") as store:
        backup.Collection(place / "collection").backup(store)


def labels_of(count: int, versions: int, step: int) -> pa.Table:
    """Labels of random keys and times, in no order."""
    rng = np.random.default_rng((_SEED, step))
    times = _FIRST_NS + rng.integers(0, _SPAN_US, count) * 1000
    return pa.table(
        {
            "id": _ids(rng.integers(0, _keys(versions), count)),
            "ts": pa.array(times).cast(_NS),
            "row": np.arange(count),
        }
    )
