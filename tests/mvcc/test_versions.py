"""Reads at any time against the model, and the one form of a sealed write set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.engine import Engine
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.engine.rocks import RocksEngine
from kvstore.mvcc import RangeTombstone, Versions, WriteSet, passes
from kvstore.testing.model import Model
from kvstore.testing.strategies import KEYS, bounds, keys, ops, spans
from tests.harness.timed import TimedVersions
from tests.mvcc.invariants import check_fragments

lenient = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[RocksEngine, MemoryEngine])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = request.param(tmp_path / "engine")
    yield engine
    engine.close()


def emptied(engine: Engine) -> TimedVersions:
    batch = engine.batch()
    for family in ("data", "ranges"):
        batch.delete_range(b"", b"\xff\xff\xff", engine.families[family])
    engine.write(batch)
    return TimedVersions(engine)


def write_set(writes: list[Any]) -> WriteSet:
    made = WriteSet()
    for op, *args in writes:
        getattr(made, op)(*(arg for arg in args if arg is not None))
    return made


def rows(versions: Versions, span: Span, as_of: int, *, reverse: bool = False) -> list[Any]:
    chunks = versions.scan(span, as_of, reverse=reverse)
    return [row for chunk in chunks for row in zip(*chunk, strict=True)]


@lenient
@given(st.lists(ops, max_size=8), st.data())
def test_reads_and_differences_are_the_models(
    engine: Engine, history: list[list[Any]], data: st.DataObject
) -> None:
    versions, model = emptied(engine), Model()
    for index, writes in enumerate(history):
        versions.apply(write_set(writes), at=2 * index + 2)
        model.batch(2 * index + 2, writes)
    check_fragments(versions.view.fragments)
    assert Versions(engine).view == versions.view  # a loaded view equals the published one
    newest = 2 * len(history) + 1
    as_of = data.draw(st.integers(0, newest))
    start, end = data.draw(bounds)
    span = Span(start, end)
    state = sorted(row for row in model.state(as_of).items() if row[0] in span)
    assert rows(versions, span, as_of) == state
    assert rows(versions, span, as_of, reverse=True) == state[::-1]
    for key in KEYS:
        assert versions.get(key, as_of) == model.get(key, as_of)
        assert [v[1:] for v in versions.history(key)] == [e[:2] for e in model.events(key)]
    since, latest = data.draw(st.integers(0, as_of)), data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        # A key with more entries than a chunk comes in pieces.
        patch.setattr(passes, "SCAN_CHUNK", data.draw(st.sampled_from([1, 2, 4096])))
        found = list(versions.diff(span, since=since, upto=as_of, latest=latest))
    expected = model.changes(since, as_of, start, end, latest=latest)
    expected.sort(key=lambda row: (row[2], row[1] != "delete_range", row[0]))
    assert found == [
        RangeTombstone(key, last, t) if op == "delete_range" else (key, t, value)
        for t, op, key, last, value in expected
    ]


def test_the_last_time_there_is_can_be_written_and_read(engine: Engine) -> None:
    versions = TimedVersions(engine)
    versions.put(b"k", b"v", at=TIMESTAMP_MAX)
    versions.delete_range(b"x", b"z", at=TIMESTAMP_MAX)
    assert versions.get(b"k", TIMESTAMP_MAX) == b"v"
    assert versions.get(b"k", TIMESTAMP_MAX - 1) is None
    assert [d[-1] for d in versions.diff(Span(), since=1)] == [b"v", TIMESTAMP_MAX]


@given(keys, spans, ops)
def test_sealing_twice_is_sealing_once(key: bytes, span: list[bytes], writes: list[Any]) -> None:
    made = write_set(writes)
    made.seal()
    points, ranges = dict(made.points), list(made.ranges)
    made.seal()
    assert (made.points, made.ranges) == (points, ranges)
    for low, high in pairwise(ranges):
        assert low[1] < high[0]
