"""Labels and event times of every unit, of every century: a join answers as the numbers say."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.base.timestamp import OTHER_UNITS_MAX
from kvstore.tables.definition import kind_of

DAY_NS = 86_400 * 10**9
UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
EVENT_UNITS = {
    pa.date32(): DAY_NS,
    pa.timestamp("s", "UTC"): 10**9,
    pa.timestamp("ms", "UTC"): 10**6,
    pa.timestamp("us", "UTC"): 1000,
    pa.timestamp("ns", "UTC"): 1,
    pa.timestamp("us"): 1000,
    pa.int64(): 1,
    pa.int8(): 1,
    pa.uint64(): 1,
}
LABEL_UNITS = {
    **{pa.timestamp(unit, zone): size for unit, size in UNITS.items() for zone in ("UTC", None)},
    pa.date32(): DAY_NS,
    pa.date64(): 10**6,
    pa.int64(): 1,
    pa.int8(): 1,
    pa.uint64(): 1,
}


def compare(event: pa.DataType, label: pa.DataType) -> bool:
    """Whether labels of a type ask for event times of another."""
    if pa.types.is_date(label):
        return pa.types.is_date(event)
    if pa.types.is_timestamp(label) and label.tz is None:
        return getattr(event, "tz", None) is None
    return True


def test_an_age_of_centuries_is_a_bound() -> None:
    """The bound of versions, 292 years, was taken for no bound of events."""
    with kvstore.open(None, engine="memory") as store:
        schema = pa.schema([("k", pa.int64()), ("e", pa.date32()), ("n", pa.int64())])
        table = store.table("t", schema, key=["k"], event_time="e")
        table.put({"k": 1, "e": date(1970, 1, 1), "n": 1})
        at = pa.array([9_223_372_800_000, 9_223_372_800_001], pa.timestamp("ms"))
        labels = pa.table({"k": [1, 1], "at": at})
        age = timedelta(days=106_752)
        found = table.join(labels, "k", "at", max_age=age, columns=["n"]).read_all()
    assert found.column("n").to_pylist() == [1, None]


@given(st.data())
@settings(max_examples=150)
def test_labels_find_event_times_of_every_unit_and_century(data: st.DataObject) -> None:
    """As `latest` does: before 1970, behind 2262, dates, integers. A label asks for the newest
    event at its time, and a row too old is null."""
    event = data.draw(st.sampled_from(sorted(EVENT_UNITS, key=str)))
    labels = [each for each in sorted(LABEL_UNITS, key=str) if compare(event, each)]
    label = data.draw(st.sampled_from(labels))
    events = data.draw(st.lists(times_of(event), min_size=1, max_size=6, unique=True))
    near = [each * EVENT_UNITS[event] + more for each in events for more in (-1, 0, 1)]
    asked = data.draw(st.lists(labels_of(label, near), min_size=1, max_size=6))
    age = data.draw(ages_of(event, events, label, asked))
    with kvstore.open(None, engine="memory") as store:
        schema = pa.schema([("k", pa.int64()), ("e", event), ("n", pa.int64())])
        table = store.table("t", schema, key=["k"], event_time="e")
        stored = as_type(events, event)
        numbers = pa.array(range(len(events)))
        table.put_batch(pa.table({"k": pa.array([1] * len(events)), "e": stored, "n": numbers}))
        given_labels = pa.table({"k": pa.array([1] * len(asked)), "at": as_type(asked, label)})
        found = table.join(given_labels, "k", "at", max_age=age, columns=["n"]).read_all()
    most = nanoseconds(age)
    expected = []
    for each in asked:
        at = each * LABEL_UNITS[label]
        fitting = [
            (one * EVENT_UNITS[event], place)
            for place, one in enumerate(events)
            if one * EVENT_UNITS[event] <= at
        ]
        newest = max(fitting, default=None)
        is_young = newest is not None and (most is None or at - newest[0] <= most)
        expected.append(newest[1] if newest is not None and is_young else None)
    assert found.column("n").to_pylist() == expected


def times_of(type_: pa.DataType) -> st.SearchStrategy[int]:
    """Numbers of units that an event time takes."""
    kind = kind_of(type_)
    if kind.least is not None:
        assert kind.most is not None
        return with_ends(kind.least, kind.most) | st.integers(-10, 10)
    return whole(type_ if pa.types.is_integer(type_) else pa.int64())


def with_ends(least: int, most: int) -> st.SearchStrategy[int]:
    """Numbers from `least` to `most`, and often one beside an end."""
    return st.integers(least, most) | st.sampled_from([least, least + 1, most - 1, most])


def ages_of(event: pa.DataType, events: list[int], label: pa.DataType, asked: list[int]) -> Any:
    """Bounds of a distance: none, any, and about the distances of some labels and events."""
    apart = [
        abs(one * EVENT_UNITS[event] - at * LABEL_UNITS[label]) for one in events for at in asked
    ]
    if pa.types.is_integer(event):
        beside = [max(each + more, 0) for each in apart for more in (-1, 0, 1)]
        return st.none() | st.integers(0, 1 << 70) | st.sampled_from(beside)
    longest = timedelta.max // timedelta(microseconds=1)
    spans = [
        timedelta(microseconds=each // 1000 + more)
        for each in apart
        for more in (-1, 0, 1)
        if 0 <= each // 1000 + more <= longest
    ]
    every = st.none() | st.timedeltas(timedelta(0), timedelta(days=999_999_999))
    return every | st.sampled_from(spans) if spans else every


def nanoseconds(age: timedelta | int | None) -> int | None:
    """A bound in the units in which events and labels are compared."""
    return age // timedelta(microseconds=1) * 1000 if isinstance(age, timedelta) else age


def whole(type_: pa.DataType) -> st.SearchStrategy[int]:
    bits = type_.bit_width
    if pa.types.is_signed_integer(type_):
        return with_ends(-(1 << bits - 1), (1 << bits - 1) - 1)
    return with_ends(0, (1 << bits) - 1)


def labels_of(type_: pa.DataType, near: list[int]) -> st.SearchStrategy[int]:
    """Numbers of units of labels: any, and some beside the events."""
    unit = LABEL_UNITS[type_]
    bits = pa.int64() if not pa.types.is_integer(type_) else type_
    least, most = (-(1 << 31), (1 << 31) - 1) if type_ == pa.date32() else (None, None)
    every = whole(bits) if least is None or most is None else with_ends(least, most)
    if type_ == pa.date64():
        every = with_ends(-(1 << 31), (1 << 31) - 1).map(lambda day: day * 86_400_000)
        unit = DAY_NS
    beside = [each // unit for each in near]
    if type_ == pa.date64():
        beside = [each * 86_400_000 for each in beside if abs(each) < 1 << 31]
    elif least is not None and most is not None:
        beside = [each for each in beside if least <= each <= most]
    else:
        low = 0 if pa.types.is_unsigned_integer(bits) else -(1 << bits.bit_width - 1)
        high = low + (1 << bits.bit_width) - 1
        beside = [each for each in beside if low <= each <= high]
    # numbers that look like seconds are refused
    is_plain = pa.types.is_integer(type_)
    every = every.filter(lambda each: not is_plain or not 10**9 <= each <= OTHER_UNITS_MAX)
    beside = [each for each in beside if not is_plain or not 10**9 <= each <= OTHER_UNITS_MAX]
    return every | st.sampled_from(beside) if beside else every


def as_type(numbers: list[int], type_: pa.DataType) -> pa.Array:
    """Numbers of units as an array."""
    if pa.types.is_integer(type_):
        return pa.array(numbers, type_)
    return pa.array(numbers, pa.int32() if type_ == pa.date32() else pa.int64()).view(type_)
