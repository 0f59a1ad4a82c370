"""The contract of engines, as suites that the tests of an engine inherit.

    class TestMyEngine(DurableEngineContract):
        def open(self, path: Path) -> MyEngine:
            return MyEngine(path)

pytest then runs every rule of `kvstore.engine.api` on `MyEngine`. An engine that keeps nothing on
disk inherits `EngineContract`. Needs pytest and hypothesis: `pip install 'kvstore-mvcc[testing]'`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codec.keys import (
    TERMINATOR,
    TOMBSTONE,
    UNLIMITED,
    encode_suffix,
    escape,
    frame,
    require_entry,
)
from kvstore.engine import CHANGES, DATA, FAMILIES, META, RANGES, Engine
from kvstore.errors import ClosedError, CorruptionError, LockedError
from kvstore.loops.lookup import find_many
from kvstore.loops.shapes import ABSENT
from kvstore.loops.writes import put_all
from kvstore.testing.strategies import bounds, keys, spans, values

Writes = list[tuple[str, bytes, bytes]]
"""Writes of one batch: `put`, `delete` or `delete_range`, a key, and a value or an end key."""

_batches = st.lists(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), keys, values),
            st.tuples(st.just("delete"), keys, st.just(b"")),
            spans.map(lambda span: ("delete_range", *span)),
        ),
        max_size=6,
    ),
    max_size=5,
)

_untimed = settings(
    deadline=None,  # the contract promises no speed, and the machine may be busy
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,  # inherited by each implementation
        HealthCheck.too_slow,
    ],
)


def write(engine: Engine, writes: Writes, family: str = DATA) -> None:
    """Write one batch to a family."""
    batch = engine.batch()
    for op, *arguments in writes:
        used = arguments[:1] if op == "delete" else arguments
        getattr(batch, op)(*used, engine.families[family])
    engine.write(batch)


def fill(engine: Engine, pairs: dict[bytes, bytes], family: str = DATA) -> None:
    """Put all pairs in one batch."""
    write(engine, [("put", key, value) for key, value in pairs.items()], family)


def read(
    engine: Engine,
    family: str = DATA,
    start: bytes = b"",
    end: bytes | None = None,
    *,
    reverse: bool = False,
    take: int = 3,
) -> list[tuple[bytes, bytes]]:
    """All entries of a span, read in chunks of at most `take`."""
    cursor = engine.cursor(family, start, end, reverse=reverse)
    rows: list[tuple[bytes, bytes]] = []
    while True:
        found_keys, found_values = cursor.take(take)
        assert len(found_keys) == len(found_values) <= take
        if not found_keys:
            cursor.close()
            return rows
        rows += zip(found_keys, found_values, strict=True)


def _found(engine: Engine, key: bytes, rest: bytes, limit: bytes) -> object:
    """The answer of `find`, or the class of its error."""
    try:
        return engine.find(key, rest, limit)
    except CorruptionError:
        return CorruptionError


def _expected(rows: list[tuple[bytes, bytes]], escaped: bytes) -> object:
    """The answer of `find` in a stretch that holds `rows`, or the class of its error."""
    if not rows:
        return ABSENT
    stored, value = rows[0]
    try:
        require_entry(stored, escaped)
    except CorruptionError:
        return CorruptionError
    return None if stored[-1:] == TOMBSTONE else value


def _apply(state: dict[bytes, bytes], writes: Writes) -> None:
    """Apply the writes to a state that stands for the engine."""
    for op, key, other in writes:
        if op == "put":
            state[key] = other
        elif op == "delete":
            state.pop(key, None)
        else:
            for covered in [k for k in state if key <= k < other]:
                del state[covered]


class EngineContract:
    """The rules of every engine."""

    def open(self, path: Path) -> Engine:
        """Open an engine at `path`; it is new where nothing is yet. Subclasses implement this."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        """A new engine."""
        engine = self.open(tmp_path / "engine")
        yield engine
        engine.close()

    # -- maps ---------------------------------------------------------------------------------

    @_untimed
    @given(written=_batches, bound=bounds, take=st.integers(1, 4))
    def test_every_pass_shows_what_was_written_in_order(
        self, engine: Engine, written: list[Writes], bound: Any, take: int
    ) -> None:
        write(engine, [("delete_range", b"", b"\xff\xff\xff")])
        state: dict[bytes, bytes] = {}
        for writes in written:
            write(engine, writes)
            _apply(state, writes)
        start, end = bound
        inside = sorted(
            row for row in state.items() if start <= row[0] and (end is None or row[0] < end)
        )
        assert read(engine, DATA, start, end, take=take) == inside
        assert read(engine, DATA, start, end, take=take, reverse=True) == inside[::-1]
        for key in state:
            assert engine.get(DATA, key) == state[key]

    def test_families_do_not_mix(self, engine: Engine) -> None:
        for family in FAMILIES:
            fill(engine, {b"key": family.encode()}, family)
        assert [engine.get(family, b"key") for family in FAMILIES] == [
            family.encode() for family in FAMILIES
        ]
        assert engine.get(DATA, b"other") is None

    def test_a_descending_pass_that_begins_with_its_excluded_end_is_not_empty(
        self, engine: Engine
    ) -> None:
        fill(engine, {b"a": b"", b"b": b"", b"c": b""})
        assert [key for key, _ in read(engine, end=b"c", reverse=True, take=1)] == [b"b", b"a"]

    @pytest.mark.parametrize("reverse", [False, True])
    def test_a_pass_of_keys_alone_has_the_keys_of_each_pass(
        self, engine: Engine, reverse: bool
    ) -> None:
        fill(engine, {b"%04d" % number: b"v" * number for number in range(500)})
        bounds_ = b"0100", b"0400"
        found: list[bytes] = []
        with closing(engine.cursor(DATA, *bounds_, reverse=reverse, keys_only=True)) as cursor:
            while taken := cursor.take(90)[0]:
                found += taken
        assert found == [key for key, _ in read(engine, DATA, *bounds_, reverse=reverse)]

    def test_a_pass_of_many_chunks_is_whole_both_ways(self, engine: Engine) -> None:
        pairs = {b"%06d" % number: b"v" for number in range(5_000)}
        fill(engine, pairs)
        assert read(engine, take=999) == sorted(pairs.items())
        assert read(engine, take=999, reverse=True) == sorted(pairs.items(), reverse=True)

    # -- batches ------------------------------------------------------------------------------

    def test_a_batch_spans_families_and_is_seen_whole(self, engine: Engine) -> None:
        """Another thread never sees a batch in one family and not yet in the other."""
        stop = threading.Event()
        seen: set[bytes] = set()
        broken: list[tuple[bytes, bytes]] = []

        def watch() -> None:
            while not stop.is_set():
                change = engine.get(CHANGES, b"n") or b"0"
                seen.add(change)
                data = engine.get(DATA, b"n") or b"0"
                if int(data) < int(change):  # read later, so at least as new
                    broken.append((data, change))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for number in range(100_000):
            batch = engine.batch()
            batch.put(b"n", b"%d" % number, engine.families[DATA])
            batch.put(b"n", b"%d" % number, engine.families[CHANGES])
            engine.write(batch)
            if number >= 500 and len(seen) >= 20:
                break
        stop.set()
        watcher.join()
        assert len(seen) >= 20, "the other thread did not run"
        assert not broken

    def test_an_empty_batch_is_legal(self, engine: Engine) -> None:
        engine.write(engine.batch())
        assert read(engine) == []

    # -- views --------------------------------------------------------------------------------

    def test_a_cursor_does_not_see_later_writes(self, engine: Engine) -> None:
        pairs = {b"%04d" % number: b"old" for number in range(100)}
        fill(engine, pairs)
        forward, backward = engine.cursor(DATA), engine.cursor(DATA, reverse=True)
        forward.take(10)
        backward.take(10)
        write(engine, [("delete_range", b"0020", b"0060")])
        fill(engine, {b"0070": b"new", b"00705": b"new"})
        assert forward.take(1000) == ([b"%04d" % n for n in range(10, 100)], [b"old"] * 90)
        assert backward.take(1000) == ([b"%04d" % n for n in range(89, -1, -1)], [b"old"] * 90)

    def test_cursors_keep_their_own_bounds(self, engine: Engine) -> None:
        fill(engine, {b"%04d" % number: b"" for number in range(100)})
        spans = [(10, 90), (20, 30), (40, 95), (0, 5)]
        ends = [(b"%04d" % start, b"%04d" % end) for start, end in spans]
        forward = [engine.cursor(DATA, *span) for span in ends]
        backward = [engine.cursor(DATA, *span, reverse=True) for span in ends]
        expected = [[b"%04d" % number for number in range(*span)] for span in spans]
        assert [cursor.take(1000)[0] for cursor in forward] == expected
        assert [cursor.take(1000)[0][::-1] for cursor in backward] == expected

    def test_a_reader_moves_both_ways(self, engine: Engine) -> None:
        keys = [b"%04d" % number for number in range(0, 200, 2)]
        fill(engine, dict.fromkeys(keys, b"v"))
        ticket, reader = engine.borrow()
        for at in (0, 1, 42, 43, 196, 197, 198, 199):
            reader.seek_for_prev(b"%04d" % at)
            assert reader.key() == b"%04d" % (at - at % 2)
        reader.seek_for_prev(b"9999")
        for key in reversed(keys):
            assert (reader.key(), reader.value()) == (key, b"v")
            reader.prev()
        assert reader.key() is None
        engine.check(reader)
        reader.seek_for_prev(b"")
        assert reader.key() is None
        reader.seek(b"0100")
        reader.prev()
        assert reader.key() == b"0098"
        reader.next()
        assert reader.key() == b"0100"
        engine.give_back(ticket, reader)

    def test_a_borrowed_reader_sees_all_writes_so_far_and_none_later(self, engine: Engine) -> None:
        fill(engine, {b"a": b"1"})
        ticket, reader = engine.borrow()
        fill(engine, {b"b": b"2"})
        reader.seek(b"")
        assert (reader.key(), reader.value()) == (b"a", b"1")
        reader.next()
        assert reader.key() is None
        engine.check(reader)
        engine.give_back(ticket, reader)
        ticket, reader = engine.borrow()
        reader.seek(b"b")
        assert (reader.key(), reader.value()) == (b"b", b"2")
        engine.give_back(ticket, reader)

    @_untimed
    @given(_batches, st.lists(st.tuples(keys, keys, keys), max_size=5))
    def test_find_is_the_first_entry_of_a_stretch(
        self, engine: Engine, drawn: list[Writes], stretches: list[tuple[bytes, bytes, bytes]]
    ) -> None:
        write(engine, [("delete_range", b"", b"\xff" * 20)])
        for writes in drawn:
            write(engine, writes)
            for key, rest, limit in stretches:
                start, end = escape(key) + rest, escape(key) + limit
                rows = read(engine, DATA, start, end) if start < end else []
                assert _found(engine, key, rest, limit) == _expected(rows, escape(key))

    @_untimed
    @given(
        st.lists(
            st.tuples(
                st.dictionaries(keys, st.none() | values, max_size=3),
                st.lists(keys, max_size=3),
                st.booleans(),
            ),
            max_size=8,
        )
    )
    def test_find_sees_each_write_that_names_its_points(
        self, engine: Engine, steps: list[tuple[dict[bytes, bytes | None], list[bytes], bool]]
    ) -> None:
        write(engine, [("delete_range", b"", b"\xff" * 20)])
        newest: dict[bytes, bytes | None] = {}
        for time, (points, asked, is_borrowed) in enumerate(steps):
            batch = engine.batch()
            put_all(batch.put, points, encode_suffix(time), engine.families[DATA])
            engine.write(batch, points)
            newest |= points
            rest = TERMINATOR + encode_suffix(time)
            for key in asked:
                assert engine.find(key, rest, UNLIMITED) == newest.get(key, ABSENT)
            if is_borrowed:
                ticket, reader = engine.borrow()
                found = find_many(
                    reader, engine.check, [*newest], rest, ([], [UNLIMITED]), 0, ABSENT
                )
                engine.give_back(ticket, reader)
                assert found == [*newest.values()]

    @pytest.mark.parametrize("tail", [b"\xff" * 8 + b"\x07", b"\xff" * 7 + b"\x01", b"\xff" * 10])
    def test_find_refuses_an_entry_that_no_store_writes(self, engine: Engine, tail: bytes) -> None:
        fill(engine, {frame(b"k") + tail: b"v"})
        with pytest.raises(CorruptionError):
            engine.find(b"k", TERMINATOR, UNLIMITED)

    # -- closing ------------------------------------------------------------------------------

    def test_after_close_every_call_raises(self, engine: Engine) -> None:
        fill(engine, {b"%03d" % number: b"" for number in range(100)})
        running = engine.cursor(DATA)
        running.take(5)
        engine.close()
        engine.close()
        for call in (
            lambda: running.take(5),
            lambda: engine.cursor(META),
            lambda: engine.get(DATA, b"001"),
            lambda: engine.borrow(),
            lambda: engine.find(b"", b"", b"z"),
            lambda: engine.sync(),
            lambda: engine.stats(),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_a_closed_cursor_raises_and_closes_again(self, engine: Engine) -> None:
        fill(engine, {b"a": b""})
        cursor = engine.cursor(DATA)
        cursor.close()
        cursor.close()
        with pytest.raises(ClosedError):
            cursor.take(1)

    def test_a_cursor_at_its_end_stays_there(self, engine: Engine) -> None:
        fill(engine, {b"a": b""})
        cursor = engine.cursor(DATA)
        assert cursor.take(5)[0] == [b"a"]
        assert cursor.take(5) == cursor.take(5) == ([], [])

    def test_stats_name_sizes(self, engine: Engine) -> None:
        fill(engine, {b"a": b"value"})
        figures = engine.stats()
        assert len(figures) > 0
        assert all(figure >= 0 for figure in figures.values())

    def test_a_flush_keeps_all_entries(self, engine: Engine) -> None:
        engine.flush()
        fill(engine, {b"a": b"1", b"b": b"2"})
        engine.flush()
        fill(engine, {b"c": b"3"})
        assert read(engine) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]

    def test_compaction_keeps_all_entries(self, engine: Engine) -> None:
        fill(engine, {b"%04d" % number: b"v" * 50 for number in range(500)})
        write(engine, [("delete_range", b"0100", b"0400")])
        before = read(engine, take=100)
        engine.compact(DATA)
        assert read(engine, take=100) == before


class DurableEngineContract(EngineContract):
    """The rules of every engine, and of engines that keep their bytes on disk."""

    def test_reopening_finds_everything(self, tmp_path: Path) -> None:
        engine = self.open(tmp_path / "engine")
        for family in FAMILIES:
            fill(engine, {b"a": b"1", b"": b"2", b"\xff": b""}, family)
        engine.sync()
        engine.close()
        engine = self.open(tmp_path / "engine")
        for family in FAMILIES:
            assert read(engine, family) == [(b"", b"2"), (b"a", b"1"), (b"\xff", b"")]
        engine.close()

    def test_a_batch_that_is_not_logged_is_visible_and_loses_no_other(self, tmp_path: Path) -> None:
        engine = self.open(tmp_path / "engine")
        fill(engine, {b"a": b"1", b"b": b"1"})
        batch = engine.batch()
        batch.put(b"b", b"2", engine.families[DATA])
        engine.write(batch, logged=False)
        assert read(engine) == [(b"a", b"1"), (b"b", b"2")]
        fill(engine, {b"c": b"3"})
        engine.sync()
        left = tmp_path / "left"  # the files that a kill would leave
        shutil.copytree(tmp_path / "engine", left, ignore=shutil.ignore_patterns("lock", "LOCK"))
        engine.close()
        again = self.open(left)
        assert read(again) in (
            [(b"a", b"1"), (b"b", b"1"), (b"c", b"3")],
            [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")],
        )
        again.close()

    def test_a_second_opening_is_refused_until_the_first_is_closed(self, tmp_path: Path) -> None:
        engine = self.open(tmp_path / "engine")
        fill(engine, {b"%03d" % n: b"" for n in range(100)})
        held = [engine.cursor(DATA), engine.cursor(RANGES, reverse=True)]
        held[0].take(3)
        with pytest.raises(LockedError) as refused:
            self.open(tmp_path / "engine")
        assert refused.value.path == str(tmp_path / "engine")
        engine.close()
        self.open(tmp_path / "engine").close()  # although cursors are still held
        held.clear()

    def test_a_checkpoint_is_independent(self, tmp_path: Path) -> None:
        engine = self.open(tmp_path / "engine")
        fill(engine, {b"a": b"1"})
        engine.sync()
        engine.checkpoint(tmp_path / "copy")
        fill(engine, {b"a": b"2"})
        copy = self.open(tmp_path / "copy")
        assert copy.get(DATA, b"a") == b"1"
        fill(copy, {b"b": b""})
        copy.close()
        assert read(engine) == [(b"a", b"2")]
        engine.close()
