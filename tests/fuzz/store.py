"""The formats of `kvstore`: keys, entries, records, and a whole store over mutated entries."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise

import pyarrow as pa

from kvstore.changes import batches, epochs, index, streams
from kvstore.codec import json as json_reader
from kvstore.codec import keys, tuples
from kvstore.codec import keys as ordered
from kvstore.codec.json import read_object
from kvstore.engine.api import CHANGES, DATA, META, RANGES
from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError
from kvstore.loops.blocks import unpack_lz4
from kvstore.loops.live import LiveColumns, LiveRows
from kvstore.tables import nested
from kvstore.tables.definition import kind_of
from kvstore.tables.row_codec import nested_array
from tests.fuzz.driver import Target
from tests.harness.bounds import bounds
from tests.harness.crafted import FAMILIES, Stored, crafted_store, outcome, outcomes
from tests.harness.sound import WHOLE_ROWS, sound_entries
from tests.loops import blocks_oracle
from tests.tables.drawn import NESTED, NESTED_EXAMPLES

LATE = 1 << 62
"""The time of a read."""


@cache
def sound() -> Stored:
    """The entries of a store with one of every kind."""
    return sound_entries()


def change_entry(data: bytes) -> None:
    """An entry that opens is sound for every reader."""
    try:
        count, changeset = index.peek(data, where="fuzzed")
        opened = index.unpack(data, where="fuzzed")
    except (CorruptionError, FormatVersionError):
        return
    assert (opened.count, opened.changeset) == (count, changeset)
    rows = list(opened.rows())
    assert len(rows) == count
    assert sum(row.op == index.OP_PUT for row in rows) == opened.puts
    for offsets, items in (
        (opened.key_offsets, opened.keys),
        (opened.value_offsets, opened.values),
    ):
        batches.wrapped(offsets, items, count).validate(full=True)
    if opened.sequence is not None:
        assert all(before < after for before, after in pairwise(opened.sequence))


def data_key(data: bytes) -> None:
    """The loops of scans take each key that the check of keys takes, and make its row."""
    try:
        keys.check_data_key(data)
        is_key = True
    except CorruptionError:
        is_key = False
    rows, columns = LiveRows(LATE, {}), LiveColumns(LATE, {})
    try:
        for live in (rows, columns):
            live.pass_over(iter([(data, b"v")]), 9)
            live.end()
    except CorruptionError:
        assert not is_key
    if is_key:
        framed, suffix, kind_byte = keys.split_data_key(data)
        assert ordered.frame(ordered.unframe(framed)) == framed
        assert kind_byte in (keys.TOMBSTONE, keys.VALUE)
        is_alive = kind_byte == keys.VALUE and keys.encode_suffix(LATE) <= suffix
        is_alive = is_alive and suffix >= keys.FIRST_TIMED_SUFFIX
        expected = [(ordered.unframe(framed), b"v")] if is_alive else []
        assert list(zip(*rows.found(), strict=True)) == expected
        assert [count for count, *_ in columns.found()] == [1] * is_alive


def range_entry(data: bytes) -> None:
    """A range tombstone that decodes is the one that encodes to it."""
    size = data[0] if data else 0
    key, value = data[1 : 1 + size], data[1 + size :]
    try:
        start, end, timestamp = keys.decode_range(key, value)
    except CorruptionError:
        return
    assert start < end
    assert keys.encode_range_key(start, timestamp) == key
    assert ordered.escape(end) == value


def tuple_key(data: bytes) -> None:
    """A tuple that decodes is the one that encodes to it."""
    try:
        values = tuples.decode_tuple(data)
    except CorruptionError:
        return
    assert tuples.encode_tuple(values) == data


def framed_key(data: bytes) -> None:
    """Framed keys are distinguished from other bytes."""
    assert ordered.is_framed(ordered.frame(data))
    assert ordered.unframe(ordered.frame(data)) == data
    if ordered.is_framed(data):
        assert ordered.frame(ordered.unframe(data)) == data


def json_object(data: bytes) -> None:
    """A JSON object reads as the standard library reads it."""
    try:
        found = read_object(data, where="fuzzed")
    except CorruptionError:
        return
    assert found == json.loads(data)


def lz4_block(data: bytes) -> None:
    """A block opens at its own size only, and is whole then."""
    found = blocks_oracle.unpacked(data)
    if found is not None:
        assert unpack_lz4(data, len(found)) == found
    for wrong in {0, 1, 255, *(() if found is None else (len(found) - 1, len(found) + 1))}:
        if found is not None and wrong in (len(found), -1):
            continue
        try:
            index.unpack_block(data, wrong, where="fuzzed")
        except CorruptionError:
            continue
        raise AssertionError(f"{wrong} bytes of a block of another size")


def epochs_record(data: bytes) -> None:
    """A run of epochs that unpacks is whole."""
    try:
        fields = read_object(data, where="fuzzed")
        fields["columns"] = base64.b64encode(fields.text("columns").encode()).decode()
        found = epochs.unpack_run(fields)
    except CorruptionError:
        return
    assert len(found) == fields["count"]


def meta_record(data: bytes) -> None:
    """With a mutated record a store opens, or the error names the record."""
    names = sorted(sound()[META])
    name = names[data[0] % len(names)] if data else names[0]
    stored = {**sound(), META: {**sound()[META], name: data[1:]}}
    error = outcome(lambda: _used(stored))
    assert error is None or isinstance(error, KVStoreError)


def any_entry(data: bytes) -> None:
    """With a mutated entry, each way to read raises an error of our tree or gives an answer. A
    verification ends, and reports a problem if an answer differs."""
    family = FAMILIES[data[0] % len(FAMILIES)] if data else DATA
    places = sorted(sound()[family])
    place = places[data[1] % len(places)] if len(data) > 1 else places[0]
    body = data[3:]
    entries = dict(sound()[family])
    if data[2:3] < b"\x80":
        entries[place] = body
    else:
        entries[body] = entries.pop(place)
    with bounds(WHOLE_ROWS_MIN=WHOLE_ROWS):
        error = outcome(lambda: _used({**sound(), family: entries}))
    assert error is None or isinstance(error, KVStoreError)


def _used(stored: Stored) -> None:
    with crafted_store(stored) as store:
        outcomes(store, [b"a", b"b\x00c", b"i", b"large"])
        store.verify()


def _values(family: str) -> Sequence[bytes]:
    return list(sound()[family].values())


def _places() -> Sequence[bytes]:
    """Each entry of the store as `any_entry` takes it: its value, and its key."""
    seeds = []
    for number, family in enumerate(FAMILIES):
        for place, (key, value) in enumerate(sorted(sound()[family].items())):
            seeds.append(bytes([number, place % 256, 0]) + value)
            seeds.append(bytes([number, place % 256, 0x80]) + key)
    return seeds


def _records() -> Sequence[bytes]:
    return [bytes([n]) + value for n, (_, value) in enumerate(sorted(sound()[META].items()))]


def _epochs() -> Sequence[bytes]:
    found = [value for name, value in sound()[META].items() if name.startswith(b"epochs/")]
    return [value.replace(b'"v": 1', b'"w": 1') for value in found]


def _blocks() -> Sequence[bytes]:
    texts = [b"", b"a", b"ab" * 500, bytes(range(256)) * 3, bytes(100_000)]
    return [pa.compress(text, codec="lz4_raw", asbytes=True) for text in texts]


def _ranges() -> Sequence[bytes]:
    return [bytes([len(key)]) + key + value for key, value in sound()[RANGES].items()]


def _tuples() -> Sequence[bytes]:
    return [
        tuples.encode_tuple(values)
        for values in ((None, True, 1), (1.5, b"a\x00b"), ("text", -1), (b"",), (float("nan"),))
    ]


def nested_value(data: bytes) -> None:
    """Bytes that are no list, struct or map of a column are refused alone wherever a column of them
    is; values that were read have bytes that give them again."""
    for type_, _ in NESTED.values():
        kind = kind_of(type_)
        assert kind.value is not None
        assert kind.node is not None
        found = None
        with suppress(CorruptionError, OverflowError):
            found = kind.value(data)
        if found is not None:
            with suppress(ValueError):  # a decimal with more digits than its column has
                assert repr(kind.value(kind.stored(found))) == repr(found)
        try:
            made = nested_array(kind.node, pa.array([data], pa.binary()), "fuzzed")
        except CorruptionError:
            assert found is None
            continue
        made.validate()


def _nested() -> list[bytes]:
    examples = ((kind_of(NESTED[name][0]), value) for name, value in NESTED_EXAMPLES.items())
    return [kind.stored(value) for kind, value in examples]


TARGETS = [
    Target("nested-value", nested_value, _nested, (nested,)),
    Target("change-entry", change_entry, lambda: _values(CHANGES), (index,)),
    Target("data-key", data_key, lambda: list(sound()[DATA]), (keys, ordered)),
    Target("range", range_entry, _ranges, (keys, ordered)),
    Target("tuple", tuple_key, _tuples, (tuples, ordered)),
    Target("framed", framed_key, lambda: [b"a\x00b", b"\x00\xff\x00\x01"], (ordered,)),
    Target("json", json_object, lambda: _values(META), (json_reader,)),
    Target("lz4", lz4_block, _blocks, (index,)),
    Target("epochs", epochs_record, _epochs, (epochs, json_reader)),
    Target("meta", meta_record, _records, (json_reader, epochs, streams), rounds=100),
    Target("store", any_entry, _places, (index, keys, ordered, json_reader), rounds=60),
]
