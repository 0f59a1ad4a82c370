"""Each anomaly of the literature is impossible or ends in a conflict.

The anomalies come from Berenson and others, "A Critique of ANSI SQL Isolation Levels" (1995), and
for long fork from Cerone and others. Plain snapshot isolation permits write skew and phantoms;
`snapshot_isolated` shows that these histories are such cases.
"""

from __future__ import annotations

import pytest

from kvstore import Store
from kvstore.errors import ConflictError

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def snapshot_isolated(store: Store, read_at: int, written: set[bytes]) -> bool:
    """Whether plain snapshot isolation would let a transaction commit: it looks at writes only."""
    return not any(change.key in written for change in store.changes(read_at))


def test_dirty_write_is_impossible(store: Store) -> None:
    first, second = store.transaction(), store.transaction()
    first.put(b"x", b"1")
    second.put(b"x", b"2")
    second.put(b"y", b"2")
    first.put(b"y", b"1")
    first.commit()
    second.commit()
    assert dict(store.scan()) == {b"x": b"2", b"y": b"2"}


def test_dirty_read_is_impossible(store: Store) -> None:
    with store.transaction() as writer, store.transaction() as reader:
        writer.put(b"x", b"1")
        assert reader.get(b"x") is None
        assert store.get(b"x") is None


def test_lost_update_conflicts(store: Store) -> None:
    store.put(b"n", b"1")
    first, second = store.transaction(), store.transaction()
    for txn in (first, second):
        txn.put(b"n", (txn.get(b"n") or b"") + b"1")
    first.commit()
    with pytest.raises(ConflictError) as caught:
        second.commit()
    assert caught.value.read_at == second.read_at
    assert caught.value.written_at == first.timestamp
    assert store.get(b"n") == b"11"


def test_read_skew_is_impossible(store: Store) -> None:
    with store.batch() as batch:
        batch.put(b"x", b"1")
        batch.put(b"y", b"1")
    with store.transaction() as reader:
        assert reader.get(b"x") == b"1"
        with store.transaction() as writer:
            writer.put(b"x", b"2")
            writer.put(b"y", b"2")
        assert reader.get(b"y") == b"1"
        assert list(reader.scan()) == [(b"x", b"1"), (b"y", b"1")]


def test_write_skew_conflicts_where_snapshot_isolation_would_not(store: Store) -> None:
    store.put(b"alice", b"on call")
    store.put(b"bob", b"on call")
    first, second = store.transaction(), store.transaction()
    for txn, leaving in ((first, b"alice"), (second, b"bob")):
        assert [txn.get(b"alice"), txn.get(b"bob")] == [b"on call", b"on call"]
        txn.put(leaving, b"off")
    first.commit()
    assert snapshot_isolated(store, second.read_at, {b"bob"})
    with pytest.raises(ConflictError):
        second.commit()
    assert store.get(b"bob") == b"on call"


def test_phantom_conflicts_where_snapshot_isolation_would_not(store: Store) -> None:
    first, second = store.transaction(), store.transaction()
    for txn, mine in ((first, b"shift/1"), (second, b"shift/2")):
        assert list(txn.scan(prefix=b"shift/")) == []
        txn.put(mine, b"taken")
    first.commit()
    assert snapshot_isolated(store, second.read_at, {b"shift/2"})
    with pytest.raises(ConflictError, match="shift/1"):
        second.commit()


def test_phantom_of_a_key_read_as_absent_conflicts(store: Store) -> None:
    first, second = store.transaction(), store.transaction()
    for txn in (first, second):
        assert txn.get(b"name") is None
        txn.put(b"name", b"mine")
    first.commit()
    with pytest.raises(ConflictError):
        second.commit()


def test_long_fork_is_impossible(store: Store) -> None:
    """Two readers never see two independent writes in opposite orders."""
    store.put(b"x", b"0")
    store.put(b"y", b"0")
    with store.transaction() as one, store.transaction() as other:
        one.put(b"x", b"1")
        other.put(b"y", b"1")
        one.commit()
        reader = store.transaction()
        other.commit()
        later = store.transaction()
    seen = [(t.get(b"x"), t.get(b"y")) for t in (reader, later)]
    assert seen == [(b"1", b"0"), (b"1", b"1")]
    reader.commit()
    later.commit()


def test_read_only_anomaly_is_impossible(store: Store) -> None:
    """Fekete and others (2004): a reader makes an otherwise serialisable history not
    serialisable."""
    store.put(b"checking", b"0")
    store.put(b"saving", b"0")
    withdrawal = store.transaction()
    assert (withdrawal.get(b"checking"), withdrawal.get(b"saving")) == (b"0", b"0")
    with store.transaction() as deposit:
        deposit.get(b"saving")
        deposit.put(b"saving", b"20")
    with store.transaction() as report:
        assert (report.get(b"checking"), report.get(b"saving")) == (b"0", b"20")
    withdrawal.put(b"checking", b"-11")
    with pytest.raises(ConflictError):
        withdrawal.commit()
