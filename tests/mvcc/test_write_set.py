"""Writes that a write set takes and refuses; an ended batch or transaction refuses all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import ManualClock, Store
from kvstore.errors import ClosedError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.mvcc import WriteSet
from tests.harness.parts import parts_of
from tests.mvcc.invariants import check_fragments

WRITES = [("put", b"k", b"v"), ("delete", b"k"), ("delete_range", b"k", b"l")]


@pytest.mark.parametrize(("verb", "arguments"), [(verb, rest) for verb, *rest in WRITES])
def test_a_full_set_refuses_what_comes_and_keeps_what_it_has(verb: str, arguments: Any) -> None:
    writes = WriteSet("the batch", 3)
    writes.put(b"a", b"1")
    writes.put(b"b", b"2")
    with pytest.raises(UsageError, match="the batch holds 4 bytes, at most 3 fit"):
        getattr(writes, verb)(*arguments)
    assert (writes.points, writes.ranges, writes.size) == ({b"a": b"1", b"b": b"2"}, [], 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("text", b""), (b"k", "text"), (b"k", None), (None, b""), (b"k" * (KEY_BYTES_MAX + 1), b"")],
    ids=lambda given: type(given).__name__,
)
def test_a_put_of_anything_else_than_bytes_changes_nothing(key: Any, value: Any) -> None:
    writes = WriteSet()
    with pytest.raises(UsageError):
        writes.put(key, value)
    assert not writes
    assert writes.size == 0


def test_each_way_into_a_set_counts_and_no_field_can_be_replaced() -> None:
    writes = WriteSet()
    writes.put(b"a", b"12")
    writes.put(np.bytes_(b"b"), b"3")
    writes.delete(b"cc")
    writes.delete_range_below(b"a", b"c")
    assert (writes.points, writes.ranges) == (
        {b"a": b"12", b"b": b"3", b"cc": None},
        [(b"a", b"c")],
    )
    assert writes.size == 3 + 2 + 2 + 2
    writes.delete_range(b"b", b"c")
    assert (list(writes.points), writes.size) == ([b"a", b"cc"], 11)
    for field in ("points", "ranges", "size", "size_max"):
        with pytest.raises(AttributeError):
            setattr(writes, field, getattr(writes, field))


@pytest.mark.parametrize("kind", ["batch", "transaction"])
@pytest.mark.parametrize(("verb", "arguments"), [(verb, rest) for verb, *rest in WRITES])
def test_what_has_ended_takes_no_write(store: Store, kind: str, verb: str, arguments: Any) -> None:
    with getattr(store, kind)() as ended:
        ended.put(b"a", b"1")
        # the method is bound outside the block, as for a loop over many rows
        write = getattr(ended, verb)
    with pytest.raises(ClosedError, match=f"the {kind}"):
        write(*arguments)
    with pytest.raises(ClosedError), ended:
        pass
    assert [(row.key, row.value) for row in store.changes(0)] == [(b"a", b"1")]
    with store.batch() as other:
        other.put(b"b", b"2")
    assert list(store.scan()) == [(b"a", b"1"), (b"b", b"2")]


def test_batch_of_many_range_deletes_and_deletes_is_not_quadratic(tmp_path: Path) -> None:
    writes = WriteSet()
    for number in range(3000):
        writes.delete_range(b"r%06d" % (2 * number), b"r%06d" % (2 * number + 1))
    for number in range(6000):
        writes.delete(b"r%06d" % number)
    writes.seal()
    assert (len(writes.ranges), len(writes.points)) == (3000, 3000)
    with kvstore.open(tmp_path / "db", clock=ManualClock()) as store:
        parts_of(store).committer.commit(writes)
        assert len(parts_of(store).versions.view.fragments) == 6000
        check_fragments(parts_of(store).versions.view.fragments)
        assert store.verify().problems == ()
