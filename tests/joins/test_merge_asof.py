"""A join and pandas' `merge_asof` give the same rows: ties, ages, deletions, absent keys."""

from __future__ import annotations

from datetime import timedelta

import pandas as pd
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import kvstore

BASE = 1_700_000_000 * 10**9
STEP = 1000
"""Nanoseconds between two times of the test: a `timedelta` counts in microseconds."""
KEYS = st.sampled_from(["a", "b", "c"])


@given(
    st.lists(st.tuples(st.integers(0, 20), KEYS, st.booleans()), max_size=30),
    st.lists(st.tuples(st.integers(0, 21), KEYS), min_size=1, max_size=30),
    st.none() | st.integers(0, 6),
)
def test_a_join_is_pandas_merge_asof(
    writes: list[tuple[int, str, bool]], asked: list[tuple[int, str]], age: int | None
) -> None:
    clock = kvstore.ManualClock(BASE)
    rows = []
    with kvstore.open(None, engine="memory", clock=clock) as store:
        for number, (at, key, is_put) in enumerate(sorted(writes)):
            clock.set(BASE + at * STEP)
            value = b"%d" % number
            stamp = store.put(key.encode(), value) if is_put else store.delete(key.encode())
            rows.append((key, int(stamp), value if is_put else None))
        clock.set(BASE + 100 * STEP)
        # A tie with each version too: exactly its time, and the nanosecond before.
        labels = [(key, BASE + at * STEP) for at, key in asked]
        labels += [(key, time - less) for key, time, _ in rows for less in (0, 1)]
        table = pa.table({"id": [key for key, _ in labels], "ts": [time for _, time in labels]})
        max_age = None if age is None else timedelta(microseconds=age)
        found = store.join(table, max_age=max_age).read_all()

    left = pd.DataFrame(labels, columns=["id", "ts"]).reset_index().sort_values("ts", kind="stable")
    right = pd.DataFrame(rows, columns=["id", "ts", "value"]).astype({"ts": "int64"})
    right["value_timestamp"] = right["ts"].astype("Int64")
    tolerance = None if age is None else age * STEP
    merged = pd.merge_asof(
        left, right.sort_values("ts", kind="stable"), on="ts", by="id", tolerance=tolerance
    ).sort_values("index")
    expected = [
        (None, None) if pd.isna(value) else (value, int(time))
        for value, time in zip(merged["value"], merged["value_timestamp"], strict=True)
    ]
    times = found["value_timestamp"].cast(pa.int64()).to_pylist()
    assert list(zip(found["value"].to_pylist(), times, strict=True)) == expected
