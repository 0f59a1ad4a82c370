"""Look-ups, of one key and of many, agree with the history of each key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.engine import DATA, Engine
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.engine.rocks import RocksEngine
from kvstore.mvcc import RangeTombstone, Versions
from tests.mvcc.test_scan import STAMPS, by_history, entries_of, keys, ranges, reads, stored


@pytest.fixture(scope="module", params=[RocksEngine, MemoryEngine])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("lookup")
    engine = request.param(path / "db")
    yield engine
    engine.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored, ranges, reads, st.booleans(), st.lists(keys, max_size=8))
def test_get_and_get_many_are_what_the_history_of_each_key_says(
    engine: Engine, drawn: Any, deleted: Any, as_of: int, imports: bool, absent: Any
) -> None:
    if not imports:
        drawn = [entry for entry in drawn if entry[1][0] >= 0x80]
    batch = engine.batch()
    batch.delete_range(b"", b"\xff" * 80, engine.families[DATA])
    for key, value in entries_of(drawn):
        batch.put(key, value, engine.families[DATA])
    engine.write(batch)
    versions = Versions(engine, stamps=STAMPS if imports else {})
    versions.publish_ranges([RangeTombstone(*parts) for parts in deleted])
    alive = dict(by_history(drawn, versions.view.fragments, as_of))
    asked = [*absent, *(key for key, _, _ in drawn)]
    expected = [alive.get(key) for key in asked]
    assert [versions.get(key, as_of) for key in asked] == expected
    assert versions.get_many(asked, as_of) == expected


def test_reader_given_back_after_a_write_is_not_lent_again(engine: Engine) -> None:
    ticket, reader = engine.borrow()
    batch = engine.batch()
    batch.put(b"z", b"new", engine.families[DATA])
    engine.write(batch)
    engine.give_back(ticket, reader)
    _, lent = engine.borrow()
    assert lent is not reader
    lent.seek(b"z")
    assert lent.value() == b"new"
