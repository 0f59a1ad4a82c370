"""Transactions: conflicts, own writes, and how long an open transaction keeps history."""

from __future__ import annotations

import gc as collector
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import ManualClock, Span, Store, bulk
from kvstore.errors import ClosedError, ConflictError, UsageError
from kvstore.timeline import recent
from kvstore.transaction import ReadSet
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_what_nobody_has_any_more_keeps_no_history(store: Store) -> None:
    store.put(b"a", b"1")
    left = store.transaction()
    assert left.get(b"a") == b"1"
    left.put(b"b", b"2")
    snapshot = store.snapshot()
    loop = [left, snapshot]
    loop.append(loop)  # only the cyclic collector finds it
    at = store.put(b"a", b"3")
    assert store.gc(before=at).since < at
    del left, snapshot, loop
    collector.collect()
    assert store.gc(before=at).since == at
    assert store.get(b"b") is None
    with store.transaction() as txn:
        assert txn.get(b"a") == b"3"
        txn.put(b"a", b"4")
    assert not parts_of(store).committer.recent.watchers


def test_a_scan_outlives_the_snapshot_it_came_from(store: Store) -> None:
    at = store.put(b"a", b"1")
    rows = store.snapshot().scan()
    store.gc(before=store.put(b"a", b"2"))
    assert list(rows) == [(b"a", b"1")]
    assert store.since > at


def test_read_only_transaction_never_fails(store: Store) -> None:
    store.put(b"x", b"1")
    with store.transaction() as reader:
        assert reader.get(b"x") == b"1"
        store.put(b"x", b"2")
        store.delete_range(b"a", b"z")
        store.gc(before=store.now())
        assert list(reader.scan()) == [(b"x", b"1")]
    assert reader.timestamp is None


def test_blind_writes_do_not_conflict(store: Store) -> None:
    with store.transaction() as txn:
        txn.put(b"x", b"mine")
        store.put(b"x", b"theirs")
    assert store.get(b"x") == b"mine"


def test_range_delete_import_and_revert_conflict_by_their_spans(
    store: Store, tmp_path: Path
) -> None:
    staged = bulk.Import.create(tmp_path / "in")
    with staged.writer() as writer:
        writer.put(b"k", b"row")
        writer.put(b"m", b"row")
    staged.seal()
    for change in (
        lambda: store.delete_range(b"j", b"n"),
        lambda: bulk.ingest(store, tmp_path / "in"),
        lambda: store.revert_import(staged.import_id),
    ):
        key_reader, span_reader, bystander = (store.transaction() for _ in range(3))
        key_reader.get(b"k")
        list(span_reader.scan(b"kk", b"l"))
        bystander.get(b"z")
        change()
        for txn in (key_reader, span_reader, bystander):
            txn.put(b"out", b"")
        for txn in (key_reader, span_reader):
            with pytest.raises(ConflictError):
                txn.commit()
        bystander.commit()


def test_scan_counts_as_read_only_as_far_as_it_came(store: Store) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        store.put(key, b"v")
    forward, backward, limited, unread = (store.transaction() for _ in range(4))
    assert next(forward.scan())[0] == b"a"
    assert next(backward.scan(reverse=True))[0] == b"d"
    assert [key for key, _ in limited.scan(limit=2)] == [b"a", b"b"]
    unread.scan()
    store.put(b"bb", b"phantom")
    for txn in (forward, backward, limited, unread):
        txn.put(b"bz", b"")
        txn.commit()


def test_conflict_is_found_in_the_change_index_when_memory_has_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "RECENT_KEYS_MAX", 3)
    store.put(b"span", b"v")
    outcomes = []
    for change in (
        lambda: store.put(b"x", b"v"),
        lambda: store.delete_range(b"w", b"y"),
        lambda: store.put(b"other", b"v"),
    ):
        by_key, by_span = store.transaction(), store.transaction()
        by_key.get(b"x")
        list(by_span.scan(b"w", b"xx"))
        change()
        for number in range(10):
            store.put(b"noise%d" % number, b"v")
        assert parts_of(store).committer.recent.since(by_key.read_at) is None
        for txn in (by_key, by_span):
            txn.put(b"out", b"")
            try:
                outcomes.append(txn.commit() is not None)
            except ConflictError:
                outcomes.append(False)
    assert outcomes == [False, False, False, False, True, True]


def test_table_of_recent_commits_is_empty_while_no_transaction_is_open(store: Store) -> None:
    table = parts_of(store).committer.recent
    store.put(b"x", b"v")
    assert not table.commits
    with store.transaction():
        store.put(b"x", b"v")
        assert len(table.commits) == 1
    assert not table.commits


def test_own_writes_are_visible_to_itself_only(store: Store) -> None:
    store.put(b"a", b"1")
    store.put(b"b", b"1")
    with store.transaction() as txn:
        txn.put(b"c", b"2")
        txn.delete(b"a")
        assert (txn.get(b"a"), txn.get(b"c")) == (None, b"2")
        assert list(txn.scan()) == [(b"b", b"1"), (b"c", b"2")]
        txn.delete_range(b"a", b"d")
        txn.put(b"b", b"3")
        assert txn.get_many([b"a", b"b", b"c"]) == [None, b"3", None]
        assert list(txn.scan(reverse=True)) == [(b"b", b"3")]
        assert dict(store.scan()) == {b"a": b"1", b"b": b"1"}
    assert dict(store.scan()) == {b"b": b"3"}
    assert txn.timestamp == store.upper - 1


def test_exception_drops_the_writes_and_ended_transaction_refuses(store: Store) -> None:
    txn = store.transaction()

    def body() -> None:
        with txn:
            txn.put(b"a", b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        body()
    assert store.get(b"a") is None
    for call in (lambda: txn.get(b"a"), lambda: txn.put(b"a", b""), txn.scan, txn.commit):
        with pytest.raises(ClosedError):
            call()
    txn.rollback()


def test_a_rollback_that_is_interrupted_has_rolled_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    txn = store.transaction()
    txn.put(b"a", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(type(parts_of(store).transactions), "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            txn.rollback()
    for call in (lambda: txn.get(b"a"), lambda: txn.put(b"a", b""), txn.commit):
        with pytest.raises(ClosedError):
            call()
    assert store.get(b"a") is None


def test_open_transaction_pins_its_time_and_lets_go_at_the_end(store: Store) -> None:
    store.put(b"x", b"1")
    txn = store.transaction()
    store.put(b"x", b"2")
    store.gc(before=store.now())
    assert store.since == txn.read_at
    txn.rollback()
    store.gc(before=store.now())
    assert store.since > txn.read_at


OWN = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 7), st.binary(max_size=1)),
    st.tuples(st.just("delete"), st.integers(0, 7)),
    st.tuples(st.just("delete_range"), st.integers(0, 6), st.integers(1, 4)),
)


@given(st.lists(OWN, max_size=8), st.lists(OWN, max_size=10), st.booleans())
def test_scan_with_own_writes_equals_the_scan_after_the_commit(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple],  # type: ignore[type-arg]
    own: list[tuple],  # type: ignore[type-arg]
    reverse: bool,
) -> None:
    path = tmp_path_factory.mktemp("own") / "db"
    with kvstore.open(path, durability="async", clock=ManualClock()) as store:

        def write(target: object, ops: list[tuple]) -> None:  # type: ignore[type-arg]
            for name, key, *rest in ops:
                last = (bytes([key + rest[0]]),) if name == "delete_range" else tuple(rest)
                getattr(target, name)(bytes([key]), *last)

        write(store, before)
        txn = store.transaction()
        write(txn, own)
        keys = [bytes([key]) for key in range(8)]
        seen = list(txn.scan(b"\x01", b"\x07", reverse=reverse))
        points = txn.get_many(keys)
        txn.commit()
        assert list(store.scan(b"\x01", b"\x07", reverse=reverse)) == seen
        assert store.get_many(keys) == points


@given(
    st.lists(st.one_of(st.integers(0, 30), st.tuples(st.integers(0, 30), st.integers(1, 5)))),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_bounded_read_set_misses_no_conflict(
    reads: list[int | tuple[int, int]], at: int, width: int
) -> None:
    bounded = ReadSet(keys_max=3, spans_max=4)
    covered = set()
    for read in reads:
        if isinstance(read, int):
            bounded.add_key(bytes([read]))
            covered.add(read)
        else:
            bounded.add_span(Span(bytes([read[0]]), bytes([sum(read)])))
            covered.update(range(read[0], sum(read)))
        assert len(tuple(bounded.spans())) <= 4
    if at in covered:
        assert bounded.touched([bytes([at])], [])
    if covered.intersection(range(at, at + width)):
        assert bounded.touched([], [(bytes([at]), bytes([at + width]))])
    assert not bounded.touched([b"\xf0"], [(b"\xf0", None)])


def test_transact_retries_with_growing_bounded_waits(store: Store) -> None:
    waits: list[float] = []

    def body(txn: kvstore.Transaction) -> str:
        txn.get(b"x")
        txn.put(b"x", b"mine")
        if len(waits) < 3:
            store.put(b"x", b"theirs")
        return "done"

    assert store.transact(body, wait=waits.append) == "done"
    assert store.get(b"x") == b"mine"
    assert len(waits) == 3
    assert all(0 <= waited <= 0.5 for waited in waits)


def test_transact_gives_up_after_its_attempts(store: Store) -> None:
    runs = []

    def body(txn: kvstore.Transaction) -> None:
        runs.append(txn.get(b"x"))
        txn.put(b"y", b"")
        store.put(b"x", b"theirs")

    with pytest.raises(ConflictError):
        store.transact(body, attempts=3, wait=lambda seconds: None)
    assert len(runs) == 3
    with pytest.raises(UsageError):
        store.transact(body, attempts=0)
