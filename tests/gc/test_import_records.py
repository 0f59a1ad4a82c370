"""The bytes of key lists and past imports, and bytes that are refused."""

from __future__ import annotations

import pytest

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import JsonObject
from kvstore.engine import META
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.errors import CorruptionError
from kvstore.mvcc.meta import Meta
from kvstore.timeline.import_records import (
    ImportRecord,
    KeyLists,
    PastImports,
    keys_name,
    read_keys,
)

KEYS = b'{"keys": ["00", "6162"], "v": 1}'
PAST = b'{"added": 5, "bytes": 9, "digest": "d", "reverted": null, "rows": 2, "v": 1}'
TURN = b'{"count": 1, "turn": 0, "v": 1}'


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine(None)


def record(import_id: int, spans: tuple[Span, ...] = ()) -> ImportRecord:
    return ImportRecord(import_id, "d", 2, 9, spans, added=Timestamp(5))


SPANS = (Span(b"\x00", b"d"),)


def test_key_lists_are_stored_as_released(engine: MemoryEngine) -> None:
    lists = KeyLists(Meta(engine))
    batch = engine.batch()
    lists.stage(batch, record(7, SPANS), {b"ab", b"\x00"})
    engine.write(batch)
    assert engine.get(META, b"import-keys/0000000000000007") == KEYS
    assert lists.of(7) == [b"\x00", b"ab"]
    assert lists.of(8) is None


@pytest.mark.parametrize(
    "found",
    [[b"a", b"a"], [b"a", b"a", b"b"], [b"a"], [b"a", b"b", b"c"], [b"a", b"d"], [b"", b"a"]],
)
def test_keys_that_are_not_those_of_the_record_are_not_listed(
    engine: MemoryEngine, found: list[bytes]
) -> None:
    lists = KeyLists(Meta(engine))
    batch = engine.batch()
    lists.stage(batch, record(7, SPANS), found)
    engine.write(batch)
    assert lists.of(7) is None


def test_past_imports_are_stored_as_released(engine: MemoryEngine) -> None:
    past = PastImports(Meta(engine))
    batch = engine.batch()
    turn = past.next_turn(1)
    past.stage(batch, [record(7)], turn)
    engine.write(batch)
    past.take(turn)
    assert engine.get(META, b"past-import/0000000000000000/0000000000000007") == PAST
    assert engine.get(META, b"past-imports") == TURN
    for known in (past, PastImports(Meta(engine))):
        assert known.get(7) == record(7)
        assert known.get(8) is None
        assert list(known.all()) == [record(7)]


@pytest.mark.parametrize(
    "keys", [None, "00", [1], ["0"], ["AB"], ["61", "61"], ["62", "61"], [["61"]]]
)
def test_keys_that_no_list_has_are_refused(keys: object) -> None:
    with pytest.raises(CorruptionError, match="import-keys"):
        read_keys(JsonObject({"keys": keys}, where=keys_name(7)))
