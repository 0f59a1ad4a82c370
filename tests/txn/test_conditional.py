"""Conditional writes: the stored version decides, and no commit comes between the look and the
write."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, Store
from kvstore.errors import (
    HistoryGoneError,
    PoisonedError,
    PreconditionError,
    StorageError,
    UsageError,
)
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_put_if_absent_writes_once(store: Store) -> None:
    store.put_if(b"k", b"1", expected=None)
    with pytest.raises(PreconditionError) as caught:
        store.put_if(b"k", b"2", expected=None)
    assert (caught.value.key, caught.value.expected, caught.value.found) == (b"k", None, b"1")
    assert store.get(b"k") == b"1"


def test_failed_condition_takes_no_time_and_writes_nothing(store: Store) -> None:
    store.put(b"k", b"1")
    upper = store.upper
    with pytest.raises(PreconditionError):
        store.put_if(b"k", b"2", expected=b"other")
    with pytest.raises(PreconditionError):
        store.delete_if(b"k", expected=b"other")
    assert store.upper == upper
    assert len(store.history(b"k")) == 1


def test_value_under_a_tombstone_of_either_kind_counts_as_absent(store: Store) -> None:
    store.put(b"k", b"1")
    store.delete_range(b"a", b"z")
    store.put_if(b"k", b"2", expected=None)
    store.delete(b"k")
    store.put_if(b"k", b"3", expected=None)
    assert store.get(b"k") == b"3"


def test_empty_value_is_not_absent(store: Store) -> None:
    store.put(b"k", b"")
    with pytest.raises(PreconditionError):
        store.put_if(b"k", b"1", expected=None)
    store.put_if(b"k", b"1", expected=b"")
    assert store.get(b"k") == b"1"


def test_unchanged_since_sees_puts_deletes_and_range_deletes(store: Store) -> None:
    for change in (
        lambda: store.put(b"k", b"v"),
        lambda: store.delete(b"k"),
        lambda: store.delete_range(b"a", b"z"),
    ):
        read_at = store.put(b"k", b"v")
        store.put(b"other", b"v")
        read_at = store.put_if(b"k", b"v", unchanged_since=read_at)
        assert store.upper == read_at + 1
        change()
        with pytest.raises(PreconditionError, match="nothing written since"):
            store.put_if(b"k", b"w", unchanged_since=read_at)


def test_a_time_up_to_which_nothing_was_written_is_complete_then(tmp_path: Path) -> None:
    """While another key waited for its expiry, the commit came at that time, below `upper`."""
    clock = ManualClock()
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        store.put(b"expiring", b"v", expires=timedelta(days=1))
        clock.advance(10)
        now = store.now()
        assert store.put_if(b"k", b"v", unchanged_since=now) > now
        assert store.get(b"k", as_of=now) is None


def test_value_is_compared_before_the_time(store: Store) -> None:
    read_at = store.put(b"k", b"1")
    store.put(b"k", b"2")
    with pytest.raises(PreconditionError) as caught:
        store.put_if(b"k", b"3", expected=b"1", unchanged_since=read_at)
    assert caught.value.found == b"2"


def test_unchanged_since_below_since_is_refused_for_it_cannot_be_known(store: Store) -> None:
    read_at = store.put(b"k", b"1")
    store.delete(b"k")
    store.gc(before=store.now())
    with pytest.raises(HistoryGoneError):
        store.put_if(b"k", b"2", unchanged_since=read_at)


def test_write_without_a_condition_is_refused(store: Store) -> None:
    with pytest.raises(UsageError):
        store.put_if(b"k", b"v")
    with pytest.raises(UsageError):
        store.delete_if(b"k")


def test_delete_if_and_pop_report_what_was_there(store: Store) -> None:
    store.put(b"k", b"1")
    assert store.pop(b"k") == b"1"
    upper = store.upper
    assert store.pop(b"k") is None
    assert store.upper == upper
    store.put(b"k", b"2")
    store.delete_if(b"k", expected=b"2")
    assert store.get(b"k") is None
    with pytest.raises(PreconditionError):
        store.delete_if(b"k", expected=b"2")


def test_idempotent_range_delete_writes_only_over_something_alive(store: Store) -> None:
    assert store.delete_range(b"a", b"z", idempotent=True) is None
    store.put(b"k", b"1")
    assert store.delete_range(b"a", b"z", idempotent=True)
    assert store.delete_range(b"a", b"z", idempotent=True) is None
    store.put(b"k", b"2")
    store.delete(b"k")
    upper = store.upper
    assert store.delete_range(b"a", b"z", idempotent=True) is None
    assert store.upper == upper


def test_threads_that_count_with_put_if_lose_no_update(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db", durability="async") as store:
        store.put(b"n", b"0")

        def add() -> None:
            done = 0
            while done < 50:
                found = store.get(b"n")
                assert found is not None
                try:
                    store.put_if(b"n", b"%d" % (int(found) + 1), expected=found)
                except PreconditionError:
                    continue
                done += 1

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.get(b"n") == b"200"


def test_of_threads_that_pop_each_value_goes_to_one(tmp_path: Path) -> None:
    jobs = [b"job%d" % number for number in range(20)]
    found: list[bytes | None] = []
    with kvstore.open(tmp_path / "db", durability="async") as store:
        for job in jobs:
            store.put(job, job)

        def work() -> None:
            found.extend(store.pop(job) for job in jobs)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(value for value in found if value) == sorted(jobs)
    assert found.count(None) == 3 * len(jobs)


def test_history_that_goes_before_the_look_refuses_a_condition_on_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GC takes the deletion that the condition asks about, right before the commit lock."""
    read_at = store.put(b"k", b"1")
    commit = parts_of(store).committer.commit

    def late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        store.delete(b"k")
        store.gc(before=store.now())
        return commit(*arguments, **options)

    monkeypatch.setattr(parts_of(store).committer, "commit", late)
    with pytest.raises(HistoryGoneError):
        store.put_if(b"k", b"2", unchanged_since=read_at)
    assert store.get(b"k") is None


def test_idempotent_range_delete_finds_what_is_alive_behind_gc(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that the look found was overwritten and collected: the key is alive."""
    store.put(b"k", b"1")
    scan = parts_of(store).versions.scan

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        store.put(b"k", b"2")
        store.gc(before=store.now())
        return scan(*arguments)

    monkeypatch.setattr(parts_of(store).versions, "scan", late)
    assert store.delete_range(b"a", b"z", idempotent=True) is not None
    assert store.get(b"k") is None


def test_an_idempotent_range_delete_after_a_clear_that_failed_is_refused_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clear has raised the floor of reads above every possible time."""
    store.put(b"a", b"1")
    announce = parts_of(store).clears.announce

    def fail(*_: object) -> None:
        raise StorageError("storage failed", "look at the disk")

    def last(clear: Any) -> None:
        announce(clear)
        monkeypatch.setattr(parts_of(store).engine, "write", fail)

    monkeypatch.setattr(parts_of(store).clears, "announce", last)
    with pytest.raises(StorageError):
        store.clear_range(b"x", b"y")
    with pytest.raises(PoisonedError):
        store.delete_range(b"a", b"b", idempotent=True)
