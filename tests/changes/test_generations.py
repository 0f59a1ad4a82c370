"""Streams and generations: the stream of a change, and resharding that loses and repeats
nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import Change, ManualClock, Store
from kvstore.changes.index import PlacedRow
from kvstore.changes.streams import (
    CONTROL_STREAM,
    TOKEN_MAX,
    Generation,
    GenerationWindow,
    StreamFields,
    decode_stream,
    encode_stream,
    generation,
    new_streams,
    token_bytes,
)
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import STREAMS_MAX
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def placed(store: Store, since: int = 0) -> list[PlacedRow]:
    return list(parts_of(store).index.rows(since=since, upto=store.upper - 1))


# -- ids ------------------------------------------------------------------------------------


def test_stream_id_bytes_are_golden() -> None:
    fields = StreamFields(token=0x0123456789ABCDEF, random=0x2AAAAAAAAA, position=0x3ABCDE)
    assert encode_stream(fields).hex() == "0123456789abcdefaaaaaaaaababcde1"
    assert bytes(15) + b"\x01" == CONTROL_STREAM


@given(st.integers(0, TOKEN_MAX), st.integers(0, (1 << 38) - 1), st.integers(0, (1 << 22) - 1))
def test_stream_id_keeps_its_fields(token: int, random: int, position: int) -> None:
    fields = StreamFields(token, random, position)
    assert decode_stream(encode_stream(fields)) == fields


@given(st.integers(0, TOKEN_MAX), st.integers(0, TOKEN_MAX))
def test_stream_ids_sort_by_token(one: int, other: int) -> None:
    a, b = encode_stream(StreamFields(one, 9, 9)), encode_stream(StreamFields(other, 0, 0))
    assert one == other or (a < b) == (one < other)


def test_other_bytes_are_no_stream_id() -> None:
    for broken in (b"", bytes(16), bytes(15) + b"\x02", bytes(17)):
        with pytest.raises(CorruptionError):
            decode_stream(broken)


def test_tokens_are_part_of_the_format() -> None:
    assert [token_bytes(key).hex() for key in (b"", b"a", b"AA1/2013-01-01")] == [
        "e4a6a0577479b2b4",
        "40f89e395b66422f",
        "f4af23df47e2ac92",
    ]


@given(st.integers(1, 64), st.binary(max_size=20))
def test_streams_split_the_ring_and_each_key_belongs_to_the_first_at_or_above_its_token(
    count: int, key: bytes
) -> None:
    found = generation(5, new_streams(count, 77))
    assert len(set(found.every_stream())) == (count + 1 if count > 1 else 1)
    if count > 1:
        assert decode_stream(found.streams[-1]).token == TOKEN_MAX
        assert all(a < b for a, b in pairwise(found.streams))
        place = found.streams.index(found.stream_of(key))
        token = int.from_bytes(token_bytes(key), "big")
        assert token <= decode_stream(found.streams[place]).token
        assert place == 0 or token > decode_stream(found.streams[place - 1]).token


# -- resharding -----------------------------------------------------------------------------


def test_one_stream_takes_everything_and_hashes_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: bytes) -> bytes:
        raise AssertionError("a key was hashed")

    monkeypatch.setattr("kvstore.changes.streams.token_bytes", refuse)
    with kvstore.open(tmp_path / "s", durability="async") as store:
        store.put(b"a", b"1")
        store.delete_range(b"a", b"c")
        assert {row.stream for row in placed(store)} == {CONTROL_STREAM}
        assert [(g.opened_at, g.closed_at) for g in store.generations()] == [(0, None)]


def test_range_deletes_go_to_the_control_stream_and_keys_to_theirs(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        opened = store.reshard(streams=4)
        with store.batch() as batch:
            batch.delete_range(b"k", b"l")
            for number in range(50):
                batch.put(b"k%d" % number, b"1")
        rows = placed(store)
        assert rows[0].stream == opened.control
        assert {row.stream for row in rows[1:]} == set(opened.streams)
        assert all(row.stream == opened.stream_of(row.row.key) for row in rows[1:])
        # Reading restores the order in which the commit made its changes.
        assert [row.sequence for row in rows] == list(range(51))
        assert [row.row.key for row in rows[1:]] == [b"k%d" % number for number in range(50)]
        assert [change.op for change in store.changes(0, order="time")][:2] == [
            "delete_range",
            "put",
        ]


def test_a_generation_opens_above_upper_and_closes_where_the_next_opens(tmp_path: Path) -> None:
    clock = ManualClock()
    with kvstore.open(tmp_path / "s", durability="async", clock=clock) as store:
        before = store.put(b"a", b"1")
        upper = store.upper
        opened = store.reshard(streams=3)
        after = store.put(b"a", b"2")
        assert before < upper < opened.opened_at <= after
        again = store.reshard(streams=1)
        first, second, third = store.generations()
        assert (first.closed_at, second.closed_at) == (second.opened_at, third.opened_at)
        assert third.closed_at is None
        assert again.streams == (CONTROL_STREAM,)
        found = store.generations()
    with kvstore.open(tmp_path / "s", durability="async", clock=clock) as store:
        assert store.generations() == found
        # The first commit of a generation may have the very time at which the generation opens.
        assert store.put(b"a", b"3") == found[-1].opened_at
        assert [change.value for change in store.changes(0, order="time")] == [b"1", b"2", b"3"]


def test_the_windows_of_generations_are_found_by_search(tmp_path: Path) -> None:
    clock = ManualClock(1)
    with kvstore.open(tmp_path / "s", durability="async", clock=clock) as store:
        for time in (3, 4, 9):
            clock.set(time)
            store.reshard(streams=1)
        found = parts_of(store).index.generations
        every = found.all()
        assert len(every) == 4
        for since in range(-1, 14):
            inside = [each for each in every if each.opened_at <= since] or [every[0]]
            assert found.at(since) == inside[-1]
            for upto in range(-1, 14):
                times = range(since + 1, upto + 1)
                windows = list(found.windows(since=since, upto=upto))
                told = [(each.generation, t) for each in windows for t in times_of(each)]
                assert told == [(found.at(t), t) for t in times]
                assert all(each.since < each.upto for each in windows)


def times_of(window: GenerationWindow) -> range:
    return range(window.since + 1, window.upto + 1)


def test_new_changes_and_a_new_generation_pass_over_no_older_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    last = Generation.last

    def counted(found: Generation) -> int:
        nonlocal looks
        looks += 1
        return int(last.__get__(found))

    def replaced(found: Generation, **fields: object) -> Generation:
        nonlocal looks
        looks += 1
        return replace(found, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Generation, "last", property(counted))
    monkeypatch.setattr("kvstore.changes.streams.replace", replaced)
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for number in range(60):
            store.reshard(streams=number % 2 + 1)
        looks = 0
        store.reshard(streams=3)
        before = store.now()
        store.put(b"a", b"1")
        assert [change.key for change in store.changes(before)] == [b"a"]
        assert looks <= 10


def test_bad_stream_counts_are_refused(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        for count in (0, -1, STREAMS_MAX + 1, "2", True):
            with pytest.raises(UsageError):
                store.reshard(streams=count)  # type: ignore[arg-type]
        assert len(store.generations()) == 1


def test_opening_takes_the_newest_commit_of_all_streams(tmp_path: Path) -> None:
    """After the clock was set back, no commit may come below a commit of another stream."""
    clock = ManualClock(10**12)
    store = kvstore.open(tmp_path / "s", durability="sync", clock=clock)
    store.reshard(streams=8)
    stamps = [store.put(b"k%d" % number, b"1") for number in range(20)]
    newest = max(stamps)
    assert parts_of(store).index.last() == newest
    for before, stamp in pairwise(stamps):
        assert parts_of(store).index.last(below=stamp) == before
    assert parts_of(store).index.last(below=stamps[0]) == 0
    parts_of(store).engine.close()  # like a crash, this writes no closing records
    clock.set(5)
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        assert store.upper == newest + 1
        assert store.put(b"again", b"1") > newest


@pytest.mark.damages_store
def test_trimming_drops_generations_that_ended_and_keeps_the_open_one(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        store.put(b"a", b"1")
        store.reshard(streams=2)
        middle = store.put(b"b", b"1")
        store.reshard(streams=3)
        last = store.put(b"c", b"1")
        index = parts_of(store).index
        parts_of(store).committer.write_meta(lambda batch: index.stage_trim(batch, middle))
        index.generations.forget(middle)
        assert [len(g.streams) for g in store.generations()] == [2, 3]
        assert [row.timestamp for row in placed(store, middle)] == [last]
        parts_of(store).committer.write_meta(lambda batch: index.stage_trim(batch, last))
        index.generations.forget(last)
        assert [len(g.streams) for g in store.generations()] == [3]
    with kvstore.open(tmp_path / "s", durability="async") as store:
        assert [len(g.streams) for g in store.generations()] == [3]
        store.put(b"d", b"1")
        assert [change.key for change in store.changes(last, order="time")] == [b"d"]


def consume(
    store: Store, found: Generation, stream: bytes, upto: int
) -> list[tuple[int, int, bytes]]:
    rows = parts_of(store).index.rows(
        since=found.opened_at - 1 if found.opened_at else 0,
        upto=min(upto, found.last),
        select=lambda _: [stream],
    )
    return [(row.timestamp, row.sequence, row.row.key) for row in rows]


def test_consumers_of_streams_see_each_change_once_and_in_order(tmp_path: Path) -> None:
    """Four writers, nine reshards meanwhile; then each stream of each generation is read."""
    with kvstore.open(tmp_path / "s", durability="async") as store:
        written: list[tuple[int, bytes]] = []

        def write(worker: int) -> None:
            for number in range(60):
                with store.batch() as batch:
                    keys = [b"%d/%d/%d" % (worker, number, part) for part in range(3)]
                    for key in keys:
                        batch.put(key, b"1")
                assert batch.timestamp is not None
                written.extend((batch.timestamp, key) for key in keys)

        writers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
        for writer in writers:
            writer.start()
        for count in (2, 5, 1, 3, 8, 1, 1, 4, 2):
            store.reshard(streams=count)
        for writer in writers:
            writer.join()
        upto = store.upper - 1
        seen: Counter[tuple[int, bytes]] = Counter()
        for found in store.generations():
            for stream in found.every_stream():
                rows = consume(store, found, stream, upto)
                assert rows == sorted(rows)
                seen.update((timestamp, key) for timestamp, _, key in rows)
        assert seen == Counter(written)
        by_time = [(change.timestamp, change.key) for change in store.changes(0, order="time")]
        assert sorted(by_time) == sorted(written)
        assert [t for t, _ in by_time] == sorted(t for t, _ in written)


def test_order_time_is_the_same_whatever_the_streams(tmp_path: Path) -> None:
    def history(name: str, reshards: dict[int, int]) -> list[Change]:
        with kvstore.open(tmp_path / name, durability="async", clock=ManualClock()) as store:
            stamps = {}
            for number in range(12):
                if number in reshards:
                    store.reshard(streams=reshards[number])
                with store.batch() as batch:
                    batch.put(b"x%d" % number, b"0")
                    batch.delete_range(b"k%d" % number, b"k%dz" % number)
                    for part in range(6):
                        batch.put(b"k%d/%d" % (number, 5 - part), b"v" * part * 400)
                    batch.delete(b"y")
                stamps[batch.timestamp] = number
            return [
                change._replace(timestamp=stamps[change.timestamp])  # type: ignore[arg-type]
                for change in store.changes(0, order="time")
            ]

    plain = history("plain", {})
    assert history("split", {0: 3}) == plain
    assert history("mixed", {2: 5, 4: 1, 6: 2, 9: 16}) == plain


CHILD = """
import os, sys, threading, kvstore
store = kvstore.open(sys.argv[1], engine=os.environ["EACH_ENGINE"], durability="sync")
def write():
    number = 0
    while True:
        key = b"k%d" % number
        stamp = store.put(key, b"1")
        print(int(stamp), number, flush=True)
        number += 1
threading.Thread(target=write, daemon=True).start()
while True:
    for count in (2, 3, 1, 7):
        store.reshard(streams=count)
"""


def test_a_crash_while_resharding_loses_no_acknowledged_change(tmp_path: Path) -> None:
    acknowledged: list[tuple[int, bytes]] = []
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(15):
            stamp, number = child.stdout.readline().split()
            acknowledged.append((int(stamp), b"k%s" % number.encode()))
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        with kvstore.open(tmp_path / "s", durability="async") as store:
            seen = Counter((c.timestamp, c.key) for c in store.changes(0, order="time"))
            assert max(seen.values()) == 1
            assert set(acknowledged) <= set(seen)
            by_stream: Counter[tuple[int, bytes]] = Counter()
            for found in store.generations():
                for stream in found.every_stream():
                    rows = consume(store, found, stream, store.upper - 1)
                    by_stream.update((timestamp, key) for timestamp, _, key in rows)
            assert by_stream == seen
